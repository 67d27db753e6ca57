"""The number in an answer. Pure.

The number after ``####`` counts, else the last number of the text. Thousands may have commas and
money its sign. A minus belongs to a number unless it follows what could be the left side of a
subtraction or of a range.
"""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = r"""
    (?P<before> (?<! [\w.)\]%] ) [-−] )?      # not in 3-4, 5%-6% or (a)-1
    (?: \\? [$€£¥] )?
    (?P<inside> (?<= [$€£¥] ) [-−] )?         # $-5
    (?P<digits>
        (?: [0-9]{1,3} (?: , [0-9]{3} )+ (?! [0-9] ) | [0-9]+ ) (?: \. [0-9]+ )?
        | (?<! [0-9.] ) \. [0-9]+
    )
"""
_ANY = re.compile(_NUMBER, re.VERBOSE)
# Models also write '#### **42**' or '#### \(42\)'. '#### 1. First' is a heading and no answer. The
# group is atomic, so that the last condition never shortens a number.
_MARKED = re.compile(
    rf"\#\#\#\# [ \t*_`({{\[\\]* (?> {_NUMBER} ) (?! [.):] [ \t*]* \w )", re.VERBOSE
)
_STATED = re.compile(rf"\#\#\#\# [ \t]* {_NUMBER} \s* \Z", re.VERBOSE)


def answered_number(text: str) -> Decimal | None:
    """Return the number in a model's answer; None if it has none."""
    # The last one: a model may correct itself or write headings before.
    found = list(_MARKED.finditer(text)) or list(_ANY.finditer(text))
    return _value(found[-1]) if found else None


def stated_number(answer: str) -> Decimal | None:
    """Return the number at the end of a data set's answer; None if it has none."""
    found = _STATED.search(answer)
    return None if found is None else _value(found)


def _value(found: re.Match[str]) -> Decimal:
    # From text, so that no digit is rounded.
    sign = "-" if found["before"] or found["inside"] else ""
    return Decimal(sign + found["digits"].replace(",", ""))
