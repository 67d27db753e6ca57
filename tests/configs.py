"""Configs of published models, and ways to change them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

Json = dict[str, Any]

CONFIGS: dict[str, Json] = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parent / "data" / "configs").glob("*.json"))
}

# Bytes of an entry by model and group, computed by vLLM (tests_vllm/test_cache_specs.py).
ENTRY_BYTES_FILE = Path(__file__).parent / "data" / "vllm_entry_bytes.json"
ENTRY_BYTES: dict[str, dict[str, dict[str, int]]] = (
    json.loads(ENTRY_BYTES_FILE.read_text()) if ENTRY_BYTES_FILE.exists() else {}
)


def config(name: str, **changes: object) -> Json:
    """Return a config with some fields changed, in its text model if it has one."""
    made = copy.deepcopy(CONFIGS[name])
    made.get("text_config", made).update(changes)
    return made


def without(name: str, *fields: str) -> Json:
    made = config(name)
    text = made.get("text_config", made)
    for field in fields:
        del text[field]
    return made
