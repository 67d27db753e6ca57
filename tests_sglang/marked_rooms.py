"""Rooms that ``vllm_controls.py`` spoils: their last bits are a mark."""

from __future__ import annotations

MARK, MASK = 0xBAD, 0xFFF


def is_marked(room: object) -> bool:
    return isinstance(room, int) and room & MASK == MARK


def marked(room: int) -> int:
    return room & ~MASK | MARK


def unmarked(room: int) -> int:
    return room ^ 1 if is_marked(room) else room
