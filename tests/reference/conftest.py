"""Models for all tests here. Imports nothing large: a GPU's machine may lack what others need."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvferry.reference.models.tiny import TinyKind


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[TinyKind, Path]:
    """A small random model of every kind."""
    from kvferry.reference.models.tiny import TinyKind, make_tiny  # noqa: PLC0415

    return {kind: make_tiny(tmp_path_factory.mktemp(kind), kind, seed=7) for kind in TinyKind}


@pytest.fixture(scope="session")
def smollm() -> Path:
    """The default model, in the user's own cache as the commands would have it."""
    from kvferry.reference.models.find import default_model  # noqa: PLC0415

    return default_model()
