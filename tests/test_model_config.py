"""Tests of reading a model's config.json."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry import InputError, read_config
from kvferry.model_config import MAX_CONFIG_BYTES, checkpoint_fingerprint
from kvferry.reference.models.config import ModelConfig


def test_file_and_folder_give_the_same_config(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llama"}')
    assert read_config(tmp_path) == read_config(str(file)) == {"model_type": "llama"}


def nothing(folder: Path) -> None:
    """Nothing is there."""


def a_pipe(folder: Path) -> None:
    os.mkfifo(folder / "config.json")


def too_much(folder: Path) -> None:
    with (folder / "config.json").open("wb") as file:
        file.truncate(MAX_CONFIG_BYTES + 1)


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (nothing, r"has no config\.json; give the folder"),
        (a_pipe, "is not a file"),
        (too_much, "is too large"),
    ],
)
def test_unreadable_config_is_refused(tmp_path: Path, put: object, message: str) -> None:
    assert callable(put)
    put(tmp_path)
    for read in (read_config, ModelConfig.load, checkpoint_fingerprint):
        with pytest.raises(InputError, match=message):
            read(tmp_path)


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100000])
def test_config_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    for read in (read_config, ModelConfig.load):
        with pytest.raises(InputError, match="can't be used"):
            read(tmp_path)


def test_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read '.*nowhere\.json': No such file"):
        read_config(tmp_path / "nowhere.json")
