"""Pictures of a plan: sources on the left, targets on the right, one band for each move.

``scene`` works out where everything stands, ``svg`` writes the drawing, ``page`` puts the same
drawing into an HTML page, and ``captions`` has the words. All are pure functions, and the same
plan and request always give the same text.
"""

from __future__ import annotations

from kvferry.plan.pictures.page import page
from kvferry.plan.pictures.scene import scene
from kvferry.plan.pictures.svg import drawing
from kvferry.plan.plan import Plan, Request

__all__ = ["as_html", "as_svg"]


def as_svg(plan: Plan, request: Request) -> str:
    """Return an SVG document that shows what a plan moves for a request."""
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + drawing(scene(plan, request)) + "\n"


def as_html(plan: Plan, request: Request) -> str:
    """Return an HTML page with the same drawing, numbers on hover and a table of the moves."""
    return page(scene(plan, request))
