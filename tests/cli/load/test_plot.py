"""The figure of a sweep."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.cli.load.client import LoadReply
from kvferry.cli.load.plot import Series, check_plot_path, draw
from kvferry.cli.load.stats import summarise
from kvferry.errors import InputError, KvferryError

MAGIC = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


def series(name: str, *levels: int) -> Series:
    reply = LoadReply(total_s=1.0, stamps=[0.1, 1.0], tokens=[1] * 5, finish="length")
    return Series(name, [summarise(n, [reply]) for n in levels])


@pytest.mark.parametrize("ending", MAGIC)
def test_a_figure_of_every_kind_is_drawn(tmp_path: Path, ending: str) -> None:
    path = check_plot_path(str(tmp_path / f"figure.{ending}"))
    failed = Series("failed", [summarise(1, [LoadReply(error="gone")])])
    draw(path, "a title", [series("one", 1, 2, 4), series("two", 1, 3), failed, series("none")])
    content = path.read_bytes()
    assert content.startswith(MAGIC[ending])
    if ending == "svg":
        for label in (b"one", b"two", b"failed: no answers", b"none: no answers"):
            assert b"<!-- %b -->" % label in content


def test_an_empty_figure_is_drawn(tmp_path: Path) -> None:
    draw(tmp_path / "x.png", "nothing", [])
    draw(tmp_path / "x.png", "nothing", [Series("none", [])])
    assert (tmp_path / "x.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("figure", "end its name in png, svg, pdf"),
        ("figure.gif", "end its name in png, svg, pdf"),
        ("missing/figure.png", "choose a folder that exists"),
        ("folder.png", "choose a folder that exists"),
    ],
)
def test_a_figure_that_cannot_be_written_is_refused(
    tmp_path: Path, name: str, sentence: str
) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(InputError, match=sentence):
        check_plot_path(str(tmp_path / name))
    assert os.listdir(tmp_path) == ["folder.png"]


def test_a_disk_that_is_full_is_one_sentence(tmp_path: Path) -> None:
    full = tmp_path / "full.png"
    full.symlink_to("/dev/full")
    with pytest.raises(KvferryError, match=r"cannot write .*No space left on device"):
        draw(full, "t", [series("one", 1)])


def test_a_missing_matplotlib_is_reported(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from kvferry.cli.load.plot import check_plot_path\n"
        f"check_plot_path({str(tmp_path / 'x.png')!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert 'pip install "kvferry[plot]"' in done.stderr.splitlines()[-1]
