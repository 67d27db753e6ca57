"""``kvferry serve`` as its user types it: what is refused, and in which words."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.cli.main import main

CLUSTER = """
model = "tiny"
[[prefill]]
instances = 2
[[decode]]
"""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--model /nothing/there", "there is no model folder '/nothing/there'"),
        ("--tiny --model x", "--tiny is a model already"),
        ("--tiny --prefill tp=12", "tp=12 is more ranks than the model's 6 query heads"),
        ("--tiny --decode tp=4", "tp=4 neither divides nor is divided by the 3 units (heads)"),
        ("--tiny --decode cp=2", "this engine shards by tp only; leave cp out"),
        ("--tiny --prefill pp=2", "this engine shards by tp only; leave pp out"),
        ("--tiny --decode tp=0", "--decode tp must be at least 1"),
        ("--tiny --prefill=", "--prefill is empty"),
        ("--tiny --port 70000", "a port is between 0 and 65535"),
        ("--tiny --port x", "--port must be a whole number"),
        ("--tiny --deadline 0", "--deadline must be a number from 0.1 to"),
        ("--config /nothing/there", "cannot read '/nothing/there'"),
        ("--config x --port 1", "--config says what --port would"),
        ("--polcy=x", "unknown argument '--polcy'; did you mean --policy?"),
        ("--polcy x", "unknown argument '--polcy'; did you mean --policy?"),
        ("--policy round-robin --jsn router", "did you mean --json?"),
        ("pefill", "kvferry serve has no command 'pefill'; did you mean prefill?"),
        ("--tiny --port 0 roter", "kvferry serve has no command 'roter'; did you mean router?"),
        ("x", "kvferry serve has no command 'x'; use discovery, status, prefill, decode, router"),
        ("prefill --lyout tp=1", "did you mean --layout?"),
        ("--prefill tp=3 router", "a router has no use for --prefill"),
        ("--device cuda router", "a router has no use for --device"),
        ("--device tpu decode --tiny", "device is cpu or cuda, not 'tpu'"),
        ("--tiny --device tpu", "device is cpu or cuda, not 'tpu'"),
        ("discovery --policy round-robin", "unknown argument"),
        ("--policy round-robin discovery", "a discovery has no use for --policy"),
        ("router", "give --discovery or --decode-url"),
        (
            "router --engine vllm --prefill-url http://h:1 --decode-url http://h:2",
            "give 'http://h:1' as NAME=URL, such as prefill-0=http://10.0.0.2:8000",
        ),
        ("router --engine llvm --decode-url http://h:2", "--engine: invalid choice: 'llvm'"),
        ("router --decode-url x", "'x' is not a worker's address"),
        ("prefill --tiny --layout dp=2", "one process runs one instance"),
        ("decode --tiny --layout tp=12", "more ranks than the model's 6 query heads"),
        ("decode --tiny --name @", "the worker's name '@'"),
        ("decode --tiny --host 0.0.0.0", "make a cluster key with `kvferry key FILE`"),
        ("prefill --tiny --host 0.0.0.0 --advertise 10.0.0.2", "would let anyone in"),
        ("discovery --host 0.0.0.0", "make a cluster key with `kvferry key FILE`"),
        ("router --decode-url http://h:1 --host 0.0.0.0", "make a cluster key"),
        ("prefill --tiny --transport pigeon --discovery http://127.0.0.1:1", "pigeon"),
    ],
)
def test_bad_input_is_reported_in_one_sentence(
    capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    assert main(["serve", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert sentence in err
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize(
    ("words", "nearest"),
    [("serv", "serve"), ("bench transfre", "transfer"), ("--verison", "--version")],
)
def test_the_nearest_word_is_named(
    capsys: pytest.CaptureFixture[str], words: str, nearest: str
) -> None:
    assert main(words.split()) == 2
    assert f"did you mean {nearest}?" in capsys.readouterr().err


def test_what_does_not_compute_does_not_wait_for_torch() -> None:
    """Importing it takes seconds on a small machine, and a router has no use for it."""
    parts = (
        "cli.main",
        "cli.demo.output",
        "discovery.http.server",
        "reference.models.find",
        "reference.cluster.launch",
        "router.serving",
    )
    program = f"import sys; import {', '.join(f'kvferry.{part}' for part in parts)}; " + (
        "sys.exit([m for m in ('torch', 'gguf', 'tokenizers') if m in sys.modules] or None)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("words", ["router --decode-url http://127.0.0.1:1", "decode --tiny"])
def test_a_port_in_use_is_one_sentence(capsys: pytest.CaptureFixture[str], words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", *words.split(), "--port", port]) == 2
    err = capsys.readouterr().err
    assert "cannot listen on 127.0.0.1" in err
    assert port in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("prefill", "has the prefill workers prefill-0, prefill-1; pick one with --name"),
        ("prefill --name x", "has the prefill workers prefill-0, prefill-1; pick one with --name"),
        ("decode --port 3", "--config says what --port would"),
    ],
)
def test_a_worker_out_of_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: str, sentence: str
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    assert main(["serve", *words.split(), "--config", str(path)]) == 2
    assert sentence in capsys.readouterr().err


def test_print_config_prints_the_resulting_configuration(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    for words, expected in (
        ("--tiny --prefill tp=3 --port 9000 --print-config", (3, 9000)),
        (f"--config {path} --print-config", (1, 8000)),
    ):
        assert main(["serve", *words.split()]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["model"] == "tiny"
        assert (document["prefill"][0]["tp"], document["router"]["port"]) == expected
    assert main(["serve", "decode", "--tiny", "--layout", "tp=3", "--print-config"]) == 0
    options = json.loads(capsys.readouterr().out)
    assert (options["name"], options["engine"]["tp"]) == ("decode-0", 3)
    router = "router --decode-url http://127.0.0.1:1 --max-in-flight 3 --print-config"
    assert main(["serve", *router.split()]) == 0
    assert json.loads(capsys.readouterr().out)["max_in_flight"] == 3
