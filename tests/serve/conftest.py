from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.serve.smollm import default_model
from kvferry.serve.tiny import Kind, make_tiny

Models = dict[Kind, Path]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A small random model of every kind."""
    return {kind: make_tiny(tmp_path_factory.mktemp(kind), kind, seed=7) for kind in Kind}


@pytest.fixture(scope="session")
def smollm() -> Path:
    """The default model, in the user's own cache as the commands would have it."""
    return default_model()
