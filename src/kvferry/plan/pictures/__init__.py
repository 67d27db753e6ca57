"""Pictures of a plan: sources on the left, targets on the right, one band for each move.

``scene`` works out where everything stands, ``svg`` writes the drawing, ``page`` puts the same
drawing into an HTML page, and ``captions`` has the words. All are pure functions, and the same
plan and request always give the same text.
"""

from kvferry.plan.pictures.page import as_html
from kvferry.plan.pictures.svg import as_svg

__all__ = ["as_html", "as_svg"]
