"""The number that an answer gives, and how sure a score is. Pure.

Where an answer has ``#### 42`` the number behind it counts, else the last number of the text.
Thousands may have commas, money its sign, and a minus belongs to a number unless something that
could be the left side of a subtraction or a range stands right before it.
"""

from __future__ import annotations

import math
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
# Some write '#### **42**' or '#### \(42\)'; many use '#### 1. First' as a heading, which is no
# answer. The group is atomic, so that a number is never cut short to get past the last line.
_MARKED = re.compile(
    rf"\#\#\#\# [ \t*_`({{\[\\]* (?> {_NUMBER} ) (?! [.):] [ \t*]* \w )", re.VERBOSE
)
_STATED = re.compile(rf"\#\#\#\# [ \t]* {_NUMBER} \s* \Z", re.VERBOSE)


def answered_number(text: str) -> Decimal | None:
    """The number that a model's answer comes to; None if it has none."""
    # The last of them: a model may correct itself, and write headings before.
    found = list(_MARKED.finditer(text)) or list(_ANY.finditer(text))
    return _value(found[-1]) if found else None


def stated_number(answer: str) -> Decimal | None:
    """The number that a problem of the data set ends in; None if it doesn't."""
    found = _STATED.search(answer)
    return None if found is None else _value(found)


def _value(found: re.Match[str]) -> Decimal:
    # Built from text, so that no digit is rounded away, however many there are.
    sign = "-" if found["before"] or found["inside"] else ""
    return Decimal(sign + found["digits"].replace(",", ""))


def standard_error(num_right: int, num_answered: int) -> float:
    """The standard error of the mean of yes-or-no outcomes: sqrt(p (1 - p) / n)."""
    p = num_right / num_answered
    return math.sqrt(p * (1 - p) / num_answered)
