"""The interval of a median of ratios, against a table of order statistics and against coin tosses."""

import random

import pytest

from lagom_overlap.tuners.verdict import compared


@pytest.mark.parametrize(("num_pairs", "rank"), [(6, 1), (9, 2), (11, 2), (15, 4), (21, 6), (25, 8)])
def test_the_interval_ends_at_the_tabled_order_statistics(num_pairs, rank):
    # Ranks of the 95 % interval of a median (sign test): Conover, table A3 with p = 1/2.
    found = compared([float(n) for n in range(1, num_pairs + 1)], [1.0] * num_pairs)
    assert (found.low, found.high) == (rank, num_pairs + 1 - rank)
    assert found.ratio == (num_pairs + 1) / 2


def test_too_few_pairs_say_nothing():
    assert compared([2.0] * 5, [1.0] * 5).verdict == "not separable"


def test_a_shift_of_all_rounds_is_seen_and_noise_is_not():
    rng = random.Random(0)
    noise = [rng.uniform(0.9, 1.1) for _ in range(21)]
    assert compared([1.3 * n for n in noise], [1.0] * 21).verdict == "faster"
    assert compared([1.0] * 21, [1.3 * n for n in noise]).verdict == "slower"
    assert compared(noise, [1.0] * 21).verdict == "not separable"


def test_equal_arms_are_told_apart_no_more_often_than_promised():
    rng = random.Random(1)
    wrong = sum(
        compared([rng.lognormvariate(0, 0.2) for _ in range(21)], [1.0] * 21).verdict != "not separable"
        for _ in range(2000)
    )
    assert wrong / 2000 <= 0.05
