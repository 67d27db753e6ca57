"""A cluster's description: files, names, and what is refused before anything starts."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from kvferry.cli.main import main
from kvferry.errors import InputError
from kvferry.reference.cluster.description import (
    ClusterDescription,
    check,
    read_cluster,
    worker_options,
)
from kvferry.reference.models.find import ModelFolder
from kvferry.reference.models.tiny import TinyKind
from kvferry.router.options import OnFailure

Models = dict[TinyKind, Path]
EXAMPLE = Path(__file__).parents[3] / "examples" / "cluster.toml"


def cluster_of(**fields: object) -> ClusterDescription:
    return msgspec.convert(fields, ClusterDescription)


def written(folder: Path, text: str) -> str:
    path = folder / "cluster.toml"
    path.write_text(text)
    return str(path)


def test_the_example_states_the_defaults() -> None:
    """But for the two sides, of which there are none by default."""
    cluster = read_cluster(str(EXAMPLE))
    assert msgspec.structs.replace(cluster, prefill=(), decode=()) == ClusterDescription()
    assert [str(worker.section) for worker in cluster.workers()] == ["TP3, page 16", "TP1, page 32"]


def test_commented_keys_of_the_example_are_valid(tmp_path: Path) -> None:
    """Every line that is a comment with a key is a key that exists."""
    text = re.sub(r"^# (\w+ = )", r"\1", EXAMPLE.read_text(), flags=re.MULTILINE)
    cluster = read_cluster(written(tmp_path, text))
    assert cluster.key == str(tmp_path / "cluster.key")
    assert cluster.decode[0].advertise == "10.0.0.3"
    assert cluster.router.decode_urls == ("http://10.0.0.3:8100",)


def test_workers_are_numbered_unless_they_have_names() -> None:
    cluster = cluster_of(
        prefill=[{"instances": 2, "port": 9000}, {}],
        decode=[{"name": "a"}, {"name": "b", "instances": 2}],
    )
    workers = cluster.workers()
    assert [worker.name for worker in workers] == [
        "prefill-0",
        "prefill-1",
        "prefill-2",
        "a",
        "b-0",
        "b-1",
    ]
    assert [worker.section.port for worker in workers[:3]] == [9000, 0, 0]


def test_a_worker_gets_what_its_section_says(models: Models) -> None:
    cluster = cluster_of(
        transport="nixl",
        router={"room_s": 7, "deadline_s": 70},
        layers=4,
        decode=[{"tp": 3, "page": 32, "order": "hnd", "dtype": "bfloat16", "cache_tokens": 512}],
    )
    (worker,) = cluster.workers()
    model = ModelFolder(models[TinyKind.LLAMA], "m")
    options = worker_options(cluster, worker, model, "http://h:1")
    assert (options.engine.tp, options.engine.page) == (3, 32)
    assert (options.engine.order, options.engine.dtype) == ("hnd", "bfloat16")
    assert (options.engine.cache_tokens, options.transport) == (512, "nixl")
    assert (options.deadline_s, options.layers) == (7, 4)
    assert (options.name, options.model, options.discovery) == ("decode-0", "m", "http://h:1")


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    cluster = read_cluster(written(tmp_path, 'model = "models/x"\nkey = "k"'))
    assert (cluster.model, cluster.key) == (str(tmp_path / "models/x"), str(tmp_path / "k"))
    assert read_cluster(written(tmp_path, 'model = "tiny"')).model == "tiny"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = ", "is not TOML"),
        ("mode = 1", "unknown field `mode`"),
        ("[[decode]]\ntp = 0", ">= 1"),
        ("[[decode]]\ntp = 'a'", "Expected `int`"),
        ("[router]\npolicy = 'best'", "Invalid enum value"),
        ("[router]\ndiscovery = 'http://x:1'", "takes discovery and key from the whole file"),
        ("[router]\nroom_s = -1", "room_s must be above 0"),
        ("[router]\ndecode_urls = ['x']", "is not a worker's address"),
        ("[[decode]]\nname = 'a'\n[[decode]]\nname = 'a'", "two workers have the name 'a'"),
        ("[[prefill]]", "has no [[decode]] worker"),
        ("layers = 0", ">= 1"),
        ("layers = 'some'", "Invalid enum value 'some'"),
    ],
)
def test_a_bad_file_is_one_sentence(
    tmp_path: Path, text: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = text if text.startswith(("x", "mode")) else f'model = "tiny"\n{text}'
    assert main(["serve", "--config", written(tmp_path, text)]) == 2
    out, err = capsys.readouterr()
    assert sentence in err
    assert (out, err.count("\n")) == ("", 1)


def test_sides_that_do_not_fit_are_refused(models: Models) -> None:
    llama = ModelFolder(models[TinyKind.LLAMA], "m")
    with pytest.raises(InputError, match="tp=12 is more ranks than the model's 6 query heads"):
        check(cluster_of(decode=[{"tp": 12}]), llama)
    with pytest.raises(InputError, match="tp=2 neither divides nor is divided by the 3 units"):
        check(cluster_of(decode=[{"tp": 2}]), llama)
    with pytest.raises(InputError, match="dtype"):
        check(cluster_of(prefill=[{"dtype": "bfloat16"}], decode=[{}]), llama)
    check(cluster_of(prefill=[{"tp": 3}], decode=[{"tp": 6, "page": 7}]), llama)
    assert cluster_of().router.on_failure is OnFailure.LOCAL
