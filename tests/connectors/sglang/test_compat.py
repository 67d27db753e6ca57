"""Which SGLang versions the backend accepts, and what it says of the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvferry.connectors.sglang.compat import (
    PLUGIN_HOOKS,
    SCHEDULER_HOOKS,
    TESTED_VERSIONS,
    allocates_early,
    is_tested,
    missing_method,
    num_dp_ranks,
    shards_kv_cache,
    why_unavailable,
)

INTERFACE = "sglang.srt.disaggregation.base.conn.BaseKVSender"
# Prints what a process and a scheduler of that version would hear.
PROGRAM = """
import logging, sys
from kvferry import KvferryError
from kvferry.connectors.sglang.compat import check_scheduler, why_unavailable
logging.basicConfig(stream=sys.stdout)
print("unavailable:", why_unavailable("0.6.0"))
try:
    check_scheduler("0.6.0", [("BaseKVSender", type("Sender", (), {"send": None}))])
except KvferryError as error:
    print("refused:", error)
"""


def write_sglang(folder: Path, paths: tuple[str, ...], methods: str = "send = None") -> None:
    """Write a package that has these functions and classes, and nothing else of SGLang."""
    modules: dict[str, dict[str, list[str]]] = {}
    for path in paths:
        owner, _, name = path.rpartition(".")
        module, _, class_name = owner.rpartition(".")
        if class_name[0].isupper():
            modules.setdefault(module, {}).setdefault(class_name, []).append(f"{name} = None")
        else:
            body = methods if path == INTERFACE else "pass"
            modules.setdefault(owner, {}).setdefault(name, []).append(body)
    for module, classes in modules.items():
        file = folder.joinpath(*module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            line
            for name, body in classes.items()
            for line in (f"class {name}:", *(f"    {statement}" for statement in body))
        ]
        file.write_text("\n".join([*lines, ""]))
    for package in filter(Path.is_dir, folder.rglob("*")):
        (package / "__init__.py").touch()


def heard(folder: Path) -> str:
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.parametrize("version", [*TESTED_VERSIONS, "0.5.22.post1", "0.5.23+cpu"])
def test_a_tested_version_is_accepted(version: str) -> None:
    assert is_tested(version)
    assert why_unavailable(version) is None


@pytest.mark.parametrize("version", ["0.5.20", "0.5.230", "0.5.23.dev4", "0.5.23rc1", "main"])
def test_other_versions_are_judged_by_their_hooks(version: str) -> None:
    """This environment has no SGLang, so the first hook is missing."""
    assert not is_tested(version)
    reason = why_unavailable(version)
    assert reason is not None
    assert reason.startswith(f"SGLang {version} has no {PLUGIN_HOOKS[0]}, which kvferry hooks; ")
    assert "install a tested version (0.5.21, 0.5.22, 0.5.23)" in reason


def test_an_untested_version_with_all_hooks_runs_with_a_warning(tmp_path: Path) -> None:
    write_sglang(tmp_path, (*PLUGIN_HOOKS, *SCHEDULER_HOOKS, INTERFACE))
    said = heard(tmp_path)
    assert "unavailable: None" in said
    assert "untested-version sglang=0.6.0" in said
    assert "refused" not in said


@pytest.mark.parametrize("missing", SCHEDULER_HOOKS)
def test_a_scheduler_without_a_hook_is_refused_by_the_name_of_the_hook(
    tmp_path: Path, missing: str
) -> None:
    hooks = tuple(hook for hook in SCHEDULER_HOOKS if hook != missing)
    write_sglang(tmp_path, (*PLUGIN_HOOKS, *hooks, INTERFACE))
    assert f"refused: SGLang 0.6.0 has no {missing}, which kvferry hooks; install" in heard(
        tmp_path
    )


def test_a_method_that_the_backend_lacks_is_refused_by_its_name(tmp_path: Path) -> None:
    write_sglang(tmp_path, (*PLUGIN_HOOKS, *SCHEDULER_HOOKS, INTERFACE), "send = resume = None")
    assert "refused: SGLang 0.6.0 calls BaseKVSender.resume, which kvferry lacks" in heard(tmp_path)


def test_private_names_of_an_interface_are_not_required() -> None:
    theirs = type("Theirs", (), {"_hidden": None, "poll": None})
    assert missing_method(theirs, type("Ours", (), {"poll": None})) is None
    assert missing_method(theirs, type("Ours", (), {})) == "poll"


def test_settings_that_older_versions_lack_have_defaults() -> None:
    older = SimpleNamespace(dp_size=3)
    assert (num_dp_ranks(older), shards_kv_cache(older), allocates_early(older)) == (3, False, True)
    newer = SimpleNamespace(
        dp_size=1,
        num_dp_ranks=2,
        enable_kv_cache_sharding=True,
        disaggregation_decode_allocation_policy="prefill_complete",
    )
    assert (num_dp_ranks(newer), shards_kv_cache(newer), allocates_early(newer)) == (2, True, False)
