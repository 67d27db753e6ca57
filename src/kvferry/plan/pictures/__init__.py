"""A picture of a plan: sources left, targets right, one band for each move.

Pure functions from a plan and a request to text. ``scene`` decides where
everything stands (``cards`` and ``bands`` give it the two halves), ``words``
says it in words, ``svg`` writes it down, and ``page`` sets the same drawing in
an HTML page. Nothing here reads or writes files, and the same plan always
gives the same text.
"""

from __future__ import annotations

from kvferry.plan.pictures.page import page
from kvferry.plan.pictures.scene import scene
from kvferry.plan.pictures.svg import drawing
from kvferry.plan.plan import Plan, Request

__all__ = ["as_html", "as_svg"]


def as_svg(plan: Plan, request: Request) -> str:
    """A complete ``.svg`` document that shows what travels for that request."""
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + drawing(scene(plan, request)) + "\n"


def as_html(plan: Plan, request: Request) -> str:
    """A complete ``.html`` page: the same drawing, numbers on hover, and a table."""
    return page(scene(plan, request))
