"""Colours for units: one ramp from teal over violet to amber.

The stops are evenly spaced in OKLCH (lightness 0.50 to 0.80, chroma 0.15, hue 210 to 440 degrees).
Lightness rises all the way, so units stay in order for colour-blind readers and in print. With
several groups, each gets a part of the ramp.
"""

from __future__ import annotations

from functools import cache

_STOPS = (
    *((0x02, 0x70, 0x7E), (0x07, 0x75, 0x99), (0x0A, 0x75, 0xC2), (0x52, 0x72, 0xD1)),
    *((0x7B, 0x6F, 0xD4), (0x9E, 0x6D, 0xCF), (0xBC, 0x6C, 0xC1), (0xD5, 0x6D, 0xAD)),
    *((0xE9, 0x72, 0x95), (0xF6, 0x7C, 0x7A), (0xFC, 0x8A, 0x5E), (0xFA, 0x9D, 0x44)),
    (0xF0, 0xB1, 0x35),
)
# Share of its part that a group leaves unused at each end, so that groups differ clearly.
_MARGIN = 0.12
# Share of white in a group's last layer. The first layer has none.
PALEST = 0.32


@cache
def unit_colour(group: int, num_groups: int, place: float, depth: float) -> str:
    """Return the colour at ``place`` among a group's units and ``depth`` among its layers.

    Both run from 0 to 1.
    """
    margin = _MARGIN if num_groups > 1 else 0.0
    at = (group + margin + (1 - 2 * margin) * place) / num_groups * (len(_STOPS) - 1)
    below = min(int(at), len(_STOPS) - 2)
    white = PALEST * depth
    channels = (
        low + (high - low) * (at - below)
        for low, high in zip(_STOPS[below], _STOPS[below + 1], strict=True)
    )
    return "#" + "".join(f"{round(c + (255 - c) * white):02x}" for c in channels)
