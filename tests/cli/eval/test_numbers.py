"""The number in an answer."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli.eval.numbers import answered_number, stated_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        # the last number
        ("6 * 7 = 42", "42"),
        ("First 3, then 4, so 12.", "12"),
        ("It is **42**!", "42"),
        (r"so \boxed{42}", "42"),
        ("42 apples", "42"),
        ("in 3 steps of 50%", "50"),
        # thousands
        ("1,250", "1250"),
        ("1,234,567.89 in all", "1234567.89"),
        ("one of 1,2,3", "3"),
        ("1,2345", "2345"),
        ("12,34", "34"),
        ("5,000,", "5000"),
        # money
        ("$18", "18"),
        ("$1,000.50.", "1000.50"),
        (r"\$7", "7"),
        ("€ 5", "5"),
        ("18$", "18"),
        # decimals
        ("3.14", "3.14"),
        ("it is 5.", "5"),
        ("it is .5", "0.5"),
        ("7.50", "7.5"),
        ("1.2.3", "3"),
        # minus
        ("-5", "-5"),
        ("−5 degrees", "-5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("= -5", "-5"),
        ("(-5)", "-5"),
        ("3-4", "4"),
        ("$3-$5", "5"),
        ("5%-6%", "6"),
        ("(a)-1", "1"),
        ("x-2", "2"),
        ("- 5 boats", "5"),
        # the mark comes first
        ("#### 42", "42"),
        ("####42", "42"),
        ("#### $1,000", "1000"),
        ("#### -3", "-3"),
        ("#### **42**", "42"),
        (r"#### \(42\)", "42"),
        ("#### 42 boats, for 3 days", "42"),
        ("#### 42\nThat took 2 steps.", "42"),
        ("#### 42. ", "42"),
        ("#### 41\nNo:\n#### 42\nof 50", "42"),
        # a mark without a number, and headings
        ("#### The answer is 42", "42"),
        ("####\nIt is 42", "42"),
        ("#### Step 1: add\n2 + 2 = 4", "4"),
        ("#### 1. Add\n2 + 2 = 4", "4"),
        ("#### 12. Add\n2 + 2 = 4", "4"),
        ("#### 1) Add\n2 + 2 = 4", "4"),
        ("#### 1. Add\n2 + 2\n#### 4\nof 9", "4"),
        ("### 7\nand 8", "8"),
    ],
)
def test_the_number_after_the_mark_counts(text: str, number: str) -> None:
    assert answered_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "none", "#### none", "$,.-", "٣", "²"])
def test_text_without_a_number(text: str) -> None:
    assert answered_number(text) is None


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("6 * 7 = <<6*7=42>>42\n#### 42", "42"),
        ("#### 1,250", "1250"),
        ("#### -5\n", "-5"),
        ("#### $7.50", "7.5"),
        ("####3", "3"),
        ("42", None),
        ("#### ", None),
        ("#### 42 boats", None),
        ("#### 4 2", None),
        ("#### x", None),
    ],
)
def test_the_number_of_the_data_set(answer: str, number: str | None) -> None:
    assert stated_number(answer) == (None if number is None else Decimal(number))


def test_numbers_are_equal_by_value_and_exactly() -> None:
    assert answered_number("#### 18.00") == stated_number("#### 18")
    assert answered_number("0.1") == Decimal("0.1")
    long = "1" * 40
    assert answered_number(long) == Decimal(long)
    assert answered_number(long) != answered_number(long[:-1] + "2")


@given(st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**9)))
def test_numbers_of_every_notation_are_found(number: Decimal) -> None:
    for text in (f"{number:f}", f"{number:,f}", f"so it is {number:f}.", f"**{number:,f}**"):
        assert answered_number(text) == number
    assert answered_number(f"1 of 2\n#### {number:,f}\nand 7 more") == number
    assert stated_number(f"why\n#### {number:,f}") == number


@given(st.text(alphabet="0123456789,.-$#% \n*()ab−", max_size=60))
def test_any_text_gives_a_number_or_none(text: str) -> None:
    found = answered_number(text)
    assert (found is not None) == any(sign in "0123456789" for sign in text)
