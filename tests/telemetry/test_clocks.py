"""Clock offsets: the true offset is within the error bound, over one link and several."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.telemetry.clocks import DRIFT, Offset, aligned, better, offset_of


def times(most: int, least: int = 0) -> st.SearchStrategy[float]:
    """Seconds that are added and subtracted without rounding: an instant must stay one."""
    return st.integers(least << 10, most << 10).map(lambda count: count / 1024)


@given(times(10**6, -(10**6)), times(10), times(10), times(10))
def test_true_offset_is_within_the_bound(
    ahead: float, there_s: float, held_s: float, back_s: float
) -> None:
    asked = 5.0
    heard = asked + there_s + ahead
    said = heard + held_s
    found = offset_of(asked, heard, said, said - ahead + back_s)
    assert abs(found.seconds - ahead) <= found.error_s + 1e-6
    assert found.error_s == pytest.approx((there_s + back_s) / 2, abs=1e-6)


@pytest.mark.parametrize(
    "times", [(2.0, 5.0, 5.0, 1.0), (1.0, 5.0, 4.0, 2.0), (1.0, 5.0, 9.0, 2.0)]
)
def test_impossible_round_trips_raise(times: tuple[float, float, float, float]) -> None:
    with pytest.raises(ValueError, match=r"answer|held"):
        offset_of(*times)


def test_an_exact_offset_is_kept_until_drift_exceeds_the_new_error() -> None:
    sharp = Offset(3.0, 1e-4, at=100.0)
    blunt = Offset(3.1, 1e-3, at=101.0)
    assert better(None, blunt) is blunt
    assert better(sharp, blunt) is sharp
    late = Offset(3.1, 1e-3, at=100.0 + 1e-3 / DRIFT)
    assert better(sharp, late) is late


def test_clocks_are_aligned_over_the_path_with_least_error() -> None:
    offsets = {
        ("d/0", "p/0"): Offset(10.0, 0.001),
        ("p/1", "d/0"): Offset(-20.0, 0.002),
        ("d/1", "p/0"): Offset(4.0, 0.001),
        ("d/1", "p/1"): Offset(14.0, 0.5),
    }
    found = aligned("d/0", offsets)
    assert {name: round(one.seconds, 9) for name, one in found.items()} == {
        "d/0": 0.0,
        "p/0": 10.0,
        "p/1": 20.0,
        "d/1": 6.0,
    }
    assert found["d/1"].error_s == pytest.approx(0.002)


def test_unreachable_clocks_are_not_guessed() -> None:
    offsets = {("d/0", "p/0"): Offset(1.0, 0.1)}
    assert set(aligned("d/0", offsets)) == {"d/0", "p/0"}
