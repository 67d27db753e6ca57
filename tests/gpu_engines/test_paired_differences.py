"""The difference of two ways that were measured in alternation."""

from __future__ import annotations

import random

from gpu_engines.differences import shown_difference


def test_bounds_of_a_few_pairs_are_all_of_them() -> None:
    assert shown_difference([3.0, 1.0, 2.0], [1.0, 2.0, 2.0]) == "+0.00 ms (-1.00 to +2.00)"


def test_the_interval_covers_the_true_difference_as_often_as_it_says() -> None:
    """Of 400 experiments with an outlier in ten, 95 % give or take three deviations."""
    drawn, covered = random.Random(1), 0
    for _ in range(400):
        noise = [drawn.gauss(0, 2) + 30 * (drawn.random() < 0.1) for _ in range(120)]
        shown = shown_difference([each - 1 for each in noise[:60]], noise[60:])
        low, high = (float(word.strip("()")) for word in shown.split()[2:5:2])
        covered += low <= -1 <= high
    assert covered >= 400 * 0.95 - 13
