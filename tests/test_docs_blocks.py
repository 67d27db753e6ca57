"""Every fenced block of the pages is run or validated, or is listed with the reason why not."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deploy.test_grafana_dashboards import problems
from documented import BLOCKS, ROOT, Block, console
from gpu_engines.__main__ import command_parser
from gpu_engines.machine import DeviceKind
from gpu_engines.run import names_of

from kvferry import DiscoveryClient
from kvferry.cli.main import build_parser
from kvferry.connectors.vllm.settings import read_settings
from kvferry.layout.layout import Parallel
from kvferry.security.signing import HEADER, sign
from kvferry.security.tokens import TOKEN

# Blocks that a test runs, by page and language. Each of these tests takes all such blocks of its
# page, or demands that there is one.
RUN = {
    ("README.md", "python"): "test_readmes_calls_have_the_endpoints_signatures",
    ("docs/discovery.md", "python"): "test_the_discovery_pages_example_runs",
    ("docs/embedding.md", "python"): "test_the_tutorial_runs",
    ("docs/embedding-reference.md", "python"): "test_the_reference_runs",
    ("docs/planning.md", "python"): "test_the_page_on_plans_runs",
    ("docs/serving.md", "python"): "test_the_serving_pages_example_runs",
    ("docs/discovery.md", "toml"): "test_the_static_list_is_read",
    ("docs/connectors/vllm.md", "json"): "test_nested_connectors_have_valid_settings",
}
# Other blocks, and the output in console blocks, by page and first line.
COMPARED = {
    ("docs/planning.md", "$ kvferry plan --prefill tp=4 --decode tp=8 --layers 80"): (
        "test_docs_show_what_is_printed"
    ),
    ("docs/planning.md", "TP4, page 16, NHD"): "test_docs_show_what_is_printed",
    ("docs/observing.md", "$ kvferry trace "): "test_the_observing_page_shows_what_trace_prints",
    ("docs/observing.md", "$ kvferry key "): "test_the_shown_token_has_the_form_of_a_token",
    ("docs/discovery.md", "$ kvferry key "): "test_a_signal_stops_the_service_cleanly",
    ("docs/discovery.md", "Authorization: "): "test_the_shown_signature_has_the_form_of_one",
    ("docs/metrics.md", "# Share of rooms"): "test_shown_queries_use_existing_names",
    ("docs/metrics.md", "2026-11-15 "): "test_the_shown_log_line_is_an_event",
}
NOT_RUN = {
    ("docs/protocol.md", "mix(z):"): "formulas; `tests/checksums.py` has them in Python",
    ("docs/protocol.md", "key(i) "): "formulas; `tests/checksums.py` has them in Python",
    ("ARCHITECTURE.md", "config.json "): "a drawing",
    ("ARCHITECTURE.md", "engine "): "a drawing",
    ("docs/serving.md", "$ pip install 'kvferry[serve]'"): (
        "what `kvferry serve` prints takes the model of the demo; `make demo` runs it"
    ),
}
# Programs of others, whose flags no test can parse here.
EXTERNAL = {
    "git": "takes a network",
    "curl": "takes a running server; its JSON is read",
    "docker": "takes a daemon; its paths are looked up",
    "kubectl": "takes a cluster; its paths and names are looked up",
    "vllm": "takes vLLM; kvferry's settings in --kv-transfer-config are read",
    "dynamo.vllm": "takes Dynamo; kvferry's settings in --kv-transfer-config are read",
    "dynamo.frontend": "takes Dynamo",
    "sglang.launch_server": "takes SGLang; tests_sglang starts it with these flags",
    "sglang_router.launch_router": "takes SGLang's router",
}

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()
MANIFESTS = "".join(path.read_text() for path in (ROOT / "deploy" / "kubernetes").glob("*.yaml"))


def is_run(block: Block) -> bool:
    return (block.page, block.language) in RUN


def listed(block: Block) -> str | None:
    """Return the test of a block, or why there is none."""
    entries = COMPARED | NOT_RUN
    known = [text for (page, first), text in entries.items()
             if page == block.page and block.first.startswith(first)]  # fmt: skip
    return known[0] if known else None


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_is_accounted_for(block: Block) -> None:
    match block.language:
        case "mermaid":
            return  # test_mermaid and scripts/check-mermaid parse all of them.
        case "console":
            shown = console(block.text)
            assert shown.commands
            check_commands(block.text)
            assert not shown.output or listed(block), "test the output, or say why not"
        case _:
            assert is_run(block) or listed(block), "test this block, or say why not"


def test_the_lists_name_existing_blocks_and_tests() -> None:
    languages = {(block.page, block.language) for block in BLOCKS}
    assert set(RUN) <= languages
    for page, first in COMPARED | NOT_RUN:
        assert any(b.page == page and b.first.startswith(first) for b in BLOCKS), (page, first)
    source = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    existing = set(re.findall(r"def (test_\w+)\(", source))
    assert {*RUN.values(), *COMPARED.values()} - existing == set()


# ---------------------------------------------------------------- commands


def kvferry_takes(words: list[str]) -> None:
    assert callable(build_parser().parse_args(words).run)


def gpu_engines_takes(words: list[str]) -> None:
    parsed = command_parser().parse_args(words)
    if parsed.command == "run":
        assert set(parsed.only) <= set(names_of(parsed.engine, DeviceKind.CUDA))


def make_has(words: list[str]) -> None:
    for target in words:
        assert re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE), target


def extras_exist(words: list[str]) -> None:
    assert words[0] == "install"
    extras = [name for word in words for name in re.findall(r"\[([\w,-]+)\]", word)]
    assert set(",".join(extras).split(",")) - {""} <= set(
        PYPROJECT["project"]["optional-dependencies"]
    )
    pinned = (ROOT / "requirements" / "no-deps.txt").read_text().split()
    assert [word for word in words if "==" in word and word not in pinned] == []


def names_exist(words: list[str]) -> None:
    """Look up the paths and the Kubernetes objects of a command."""
    for word in words:
        if word.startswith("deploy"):
            assert (ROOT / word).exists(), word
        if word.startswith("service/"):
            assert f"name: {word.removeprefix('service/')}\n" in MANIFESTS, word
    if "secret" in words:
        assert f"secretName: {words[words.index('generic') + 1]}" in MANIFESTS


def transfer_config_is_valid(words: list[str]) -> None:
    configured = [words[at + 1] for at, word in enumerate(words) if word == "--kv-transfer-config"]
    for text in configured:
        check_transfer_config(json.loads(text))


def check_transfer_config(config: Any) -> None:
    """Read kvferry's settings in a ``--kv-transfer-config``, nested ones too."""
    assert config["kv_role"] in ("kv_producer", "kv_consumer", "kv_both")
    extra = config["kv_connector_extra_config"]
    if config["kv_connector"] == "KVFerryConnector":
        assert read_settings(extra).instance
    for nested in extra.get("connectors", ()):
        check_transfer_config(nested)


def data_is_json(words: list[str]) -> None:
    for at, word in enumerate(words):
        if word == "-d":
            assert isinstance(json.loads(words[at + 1]), dict)


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "kvferry": kvferry_takes,
    "scripts/gpu-engines": gpu_engines_takes,
    "make": make_has,
    "pip": extras_exist,
    "docker": names_exist,
    "kubectl": names_exist,
    "vllm": transfer_config_is_valid,
    "dynamo.vllm": transfer_config_is_valid,
    "curl": data_is_json,
}


def check_commands(text: str) -> None:
    """Check every command of a console block."""
    for words in console(text).commands:
        check_command(words)


def check_command(words: list[str]) -> None:
    """Fail for a command that cannot be right, and for an unknown program."""
    program, *arguments = words[2:] if words[:2] == ["python", "-m"] else words
    if program == "cd":
        return
    check = CHECKS.get(program)
    assert check or program in EXTERNAL, f"check {program}, or say why not"
    if check:
        check(arguments)


@pytest.mark.parametrize(
    "line",
    [
        "kvferry plan --no-such-flag",
        "kvferry no-such-command",
        "OTEL_SERVICE_NAME=x kvferry serve --no-such-flag",
        'curl -H "Bearer $(kvferry key cluster.key --no-such-flag)" http://host',
        "make no-such-target",
        "pip install 'kvferry[no-such-extra]'",
        "kubectl apply -f deploy/no-such-folder",
        "kubectl port-forward service/no-such-service 8000",
        "scripts/gpu-engines run no-such-engine",
        """vllm serve M --kv-transfer-config '{"kv_connector": "KVFerryConnector",
            "kv_role": "kv_producer", "kv_connector_extra_config": {"no_such": "setting"}}'""",
        "no-such-program",
    ],
)
def test_a_wrong_command_is_noticed(line: str) -> None:
    with pytest.raises((AssertionError, SystemExit, ValueError)):
        check_commands(f"$ {line}\n")


# ---------------------------------------------------------------- other blocks


def only(page: str, language: str, first: str = "") -> Block:
    (block,) = [
        one for one in BLOCKS
        if (one.page, one.language) == (page, language) and one.first.startswith(first)
    ]  # fmt: skip
    return block


def test_the_static_list_is_read(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(only("docs/discovery.md", "toml").text)
    model = ROOT / "tests" / "data" / "configs" / "llama-3.3-70b.json"
    shutil.copy(model, tmp_path / "config.json")
    with DiscoveryClient(f"static:{tmp_path / 'cluster.toml'}") as client:
        view = client.resolve("prefill-0", timeout_s=10)
    assert view.fingerprint == "demo@1"
    assert [rank.control for rank in view.ranks] == ["tcp://10.0.0.2:7100", "tcp://10.0.0.3:7100"]
    assert (view.layout.sharding, view.layout.page_tokens) == (Parallel(tp=2), 16)


def test_nested_connectors_have_valid_settings() -> None:
    config = json.loads(only("docs/connectors/vllm.md", "json").text)
    assert len(config["kv_connector_extra_config"]["connectors"]) == 2
    check_transfer_config(config)


def test_the_shown_token_has_the_form_of_a_token() -> None:
    (shown,) = console(only("docs/observing.md", "console", "$ kvferry key ").text).output
    assert TOKEN.fullmatch(shown.removesuffix("...").ljust(len("kvr1.1795412345.") + 64, "0"))


def test_the_shown_signature_has_the_form_of_one() -> None:
    name, _, shown = only("docs/discovery.md", "", "Authorization").text.strip().partition(": ")
    header = sign(bytes(32), "a" * 32, "GET", "/", b"", 0.0)
    assert name == "Authorization"
    assert HEADER.fullmatch(header)
    assert re.sub(r"[A-Z]+", "*", shown) == re.sub(r"(?<= )\S+", "*:*:*:*", header)


def test_shown_queries_use_existing_names() -> None:
    text = only("docs/metrics.md", "", "# Share").text
    queries = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(queries) >= 5
    assert [problem for query in queries for problem in problems(query)] == []


def test_the_shown_log_line_is_an_event() -> None:
    _, _, level, component, event, *fields = only("docs/metrics.md", "", "2026").text.split()
    assert (level, component) == ("WARNING", "router")
    source = (ROOT / "src" / "kvferry" / "router" / "forward.py").read_text()
    (template,) = re.findall(rf'"{event} ([^"]*)"', source)
    names = [field.partition("=")[0] for field in fields]
    assert names == [*re.findall(r"(\w+)=", template), "room", "request"]
