"""Colours for units: one ramp, even to the eye, that also reads without hue.

The ramp runs through OKLCH from deep teal over violet to amber. Lightness rises
all the way, so neighbours stay in order for colour-blind readers and in print.
Several groups get a part of the ramp each.
"""

from __future__ import annotations

import math
from functools import cache

# Lightness, chroma and hue (degrees) at the ramp's two ends.
_LIGHTNESS = (0.50, 0.80)
_CHROMA = 0.15
_HUE = (210.0, 440.0)
# What a group leaves free at each end of its part, so that groups differ clearly.
_MARGIN = 0.12
# How much white the last layer is mixed with; the first has none.
PALEST = 0.32

Rgb = tuple[float, float, float]


@cache
def unit_colour(group: int, num_groups: int, place: float, depth: float) -> str:
    """The colour of a unit at ``place`` (0 to 1 of its group) and ``depth`` (of its layers)."""
    margin = _MARGIN if num_groups > 1 else 0.0
    inside = margin + (1 - 2 * margin) * place
    rgb = _ramp((group + inside) / num_groups)
    white = PALEST * depth
    return "#" + "".join(f"{round(255 * (c + (1 - c) * white)):02x}" for c in rgb)


def _ramp(at: float) -> Rgb:
    lightness = _LIGHTNESS[0] + (_LIGHTNESS[1] - _LIGHTNESS[0]) * at
    hue = math.radians(_HUE[0] + (_HUE[1] - _HUE[0]) * at)
    chroma = _CHROMA
    # Not every colour of the ramp exists on a screen: give up saturation, keep lightness.
    while not _shown(light := _linear(lightness, chroma, hue)):
        chroma -= 0.004
    red, green, blue = (_gamma(channel) for channel in light)
    return red, green, blue


def _shown(light: Rgb) -> bool:
    return all(-1e-4 <= channel <= 1 + 1e-4 for channel in light)


def _linear(lightness: float, chroma: float, hue: float) -> Rgb:
    """OKLCH to linear light (Ottosson's matrices)."""
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )


def _gamma(channel: float) -> float:
    channel = min(1.0, max(0.0, channel))
    return 12.92 * channel if channel <= 0.0031308 else 1.055 * channel ** (1 / 2.4) - 0.055
