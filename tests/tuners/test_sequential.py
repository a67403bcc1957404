"""The sequential test against draws, the coin it bets on, and cases worked by hand."""

from itertools import product
from math import exp, inf, log

import numpy as np
import pytest

from lagom_overlap.tuners.sequential import (
    ALPHA,
    LEAST_PAIRS,
    MIN_EFFECT,
    Decision,
    judged_pairs,
    log_wealth,
    more_pairs,
    scales,
)


def test_the_wealth_is_a_fair_game_whatever_the_sizes_are() -> None:
    """Every sign of every pair equally likely: the mean of W over all of them is 1, with wild sizes, too."""
    sizes = np.array([0.001, 5.0, 0.02, 0.02, 0.3, 1e-9, 0.05, 0.01])
    signs = np.array(list(product((-1.0, 1.0), repeat=len(sizes))))
    scale = np.broadcast_to(np.array([0.01, 0.01, 2.0, 0.02, 0.02, 0.02, 0.03, 0.03]), signs.shape)
    assert np.exp(log_wealth(signs * sizes, scale))[:, -1].mean() == pytest.approx(1, rel=1e-9)
    assert (np.exp(log_wealth(signs * sizes - 0.01, scale))[:, -1].mean()) < 1, "slower: a losing game"


def test_a_scale_is_known_before_its_pair() -> None:
    x = np.random.default_rng(1).normal(size=(5, 12))
    found = scales(x, np.full((5, 3), 0.5))
    for number in range(12):
        other = x.copy()
        other[:, number:] = 77.0
        assert np.array_equal(scales(other, np.full((5, 3), 0.5))[:, : number + 1], found[:, : number + 1])


def test_seven_clear_wins_are_enough_and_six_are_not() -> None:
    assert LEAST_PAIRS == 7  # 2^7 is above 100
    slow, fast = [1.1 + 0.001 * n for n in range(7)], [1.0 + 0.0013 * n for n in range(7)]
    assert judged_pairs(slow, fast, same_s=[(1.0, 1.001)]).decision is Decision.FASTER
    assert judged_pairs(slow[:6], fast[:6], same_s=[(1.0, 1.001)]).decision is Decision.OPEN
    assert judged_pairs(fast, slow, same_s=[(1.0, 1.001)]).decision is Decision.SLOWER


@pytest.mark.parametrize("shape", ["gauss", "cauchy", "drift"])
def test_at_most_one_null_in_a_hundred_is_ever_adopted(shape: str) -> None:
    rng = np.random.default_rng(5)
    first, second = rng.normal(size=(2, 4000, 40)) * 0.02
    if shape == "cauchy":
        first, second = rng.standard_cauchy(size=(2, 4000, 40)) * 0.02
    if shape == "drift":  # every second block is later
        second = second - 0.03
    coin = rng.choice((-1.0, 1.0), size=first.shape)
    x = coin * (first - second)
    scale = scales(x, np.abs(rng.normal(size=(4000, 3))) * 0.03)
    adopted = (log_wealth(x, scale) >= log(1 / ALPHA)).any(axis=1).mean()
    assert adopted <= ALPHA + 3 * (ALPHA / 4000) ** 0.5


def test_a_gain_beyond_the_noise_takes_few_pairs() -> None:
    rng = np.random.default_rng(6)
    x = rng.normal(log(1.05), 0.02 * 2**0.5, size=(1000, 40))
    won = log_wealth(x, scales(x, np.abs(rng.normal(0, 0.028, size=(1000, 3))))) >= log(1 / ALPHA)
    assert won.any(axis=1).mean() > 0.99
    assert np.median(won.argmax(axis=1) + 1) <= 10


def test_the_limits_hold_the_true_ratio_ninety_eight_times_in_a_hundred() -> None:
    rng = np.random.default_rng(7)
    inside = 0
    for _ in range(200):
        x = rng.normal(log(1.03), 0.02, size=30)
        found = judged_pairs(list(np.exp(x)), [1.0] * 30)
        inside += found.low <= 1.03 <= found.high
    assert inside >= 192


def test_no_difference_says_what_could_not_be_seen() -> None:
    rng = np.random.default_rng(8)
    times = np.exp(rng.normal(0, 0.02, size=(2, 25)))
    found = judged_pairs(list(times[0]), list(times[1]), same_s=[(1.0, 1.02)], most_pairs=25)
    assert found.decision is Decision.NO_DIFFERENCE
    assert 0.005 < found.largest_unseen < 0.05
    words = found.sentence(steps_per_pair=6)
    limits = f"({found.low:.3f} to {found.high:.3f})"
    assert words.startswith("not proven faster or slower in 25 pairs of 6 steps: ")
    assert words.endswith(f"{limits}; equal runs differ by 2.00 %")
    noisy = judged_pairs(list(times[0]), list(times[1]), same_s=[(1.0, 1.2)], most_pairs=25).sentence()
    assert noisy.endswith("; the machine is noisy, equal runs differ by 20 %")


def test_it_ends_as_soon_as_nothing_can_be_won_any_more() -> None:
    open_ = judged_pairs([1.0, 1.02, 1.01], [1.01, 1.0, 1.03], most_pairs=12)
    assert open_.decision is Decision.OPEN
    given_up = judged_pairs([1.0, 1.02, 1.01], [1.01, 1.0, 1.03], most_pairs=8)
    assert given_up.decision is Decision.NO_DIFFERENCE
    assert given_up.sentence() == "not proven faster: 0.990x, ended after 3 pairs because no more could prove it"
    few = judged_pairs([1.1, 1.12], [1.0, 1.01], most_pairs=2)
    assert few.decision is Decision.NO_DIFFERENCE
    assert few.largest_unseen == inf
    assert "not proven faster or slower in 2 pairs (a decision needs at least 7): " in few.sentence()


def test_times_to_the_last_bit_need_no_test() -> None:
    assert judged_pairs([1.1] * 3, [1.0] * 3, same_s=[(1.1, 1.1)]).decision is Decision.FASTER
    assert judged_pairs([1.1] * 3, [1.0] * 3, same_s=[(1.1, 1.2)]).decision is Decision.OPEN, "the A/A phase saw noise"
    assert judged_pairs([1.0] * 3, [1.1] * 3).decision is Decision.SLOWER
    assert judged_pairs([1.0] * 3, [1.0] * 3).decision is Decision.NO_DIFFERENCE


@pytest.mark.parametrize("gain", [1 + MIN_EFFECT, 1 + MIN_EFFECT / 2, 1.0000014])
def test_a_formula_s_difference_below_the_least_effect_is_none(gain: float) -> None:
    counts = gain >= 1 + MIN_EFFECT
    found = judged_pairs([gain] * 3, [1.0] * 3)
    assert found.decision is (Decision.FASTER if counts else Decision.NO_DIFFERENCE)
    assert ("counts as no difference" in found.sentence()) is not counts
    slower = judged_pairs([1.0] * 3, [gain] * 3).decision
    assert slower is (Decision.SLOWER if counts else Decision.NO_DIFFERENCE)


def test_a_gain_that_is_sure_but_too_small_to_count_is_not_adopted() -> None:
    gain = 1 + MIN_EFFECT / 2
    rng = np.random.default_rng(9)
    x = rng.normal(log(gain), 0.0002, size=40)
    found = judged_pairs([exp(value) for value in x], [1.0] * 40, same_s=[(1.0, 1.0002)])
    assert found.low > 1
    assert found.decision is Decision.NO_DIFFERENCE


def test_a_gain_of_0_3_percent_that_might_be_2_is_not_adopted_before_it_is_known() -> None:
    """Seven wins out of seven are enough to be sure of "faster"; that it is worth having nothing says yet."""
    gains = [0.001, 0.002, 0.003, 0.003, 0.003, 0.02, 0.03]
    found = judged_pairs([1 + gain for gain in gains], [1.0] * len(gains), same_s=[(1.0, 1.0002)] * 3)
    assert found.low > 1
    assert found.high > 1.02
    assert found.decision is Decision.OPEN


@pytest.mark.parametrize("times", [([], []), ([1.0], [0.0]), ([-1.0], [1.0])])
def test_times_must_be_positive(times) -> None:
    with pytest.raises(ValueError, match="positive times"):
        judged_pairs(*times)


@pytest.mark.parametrize(("gain", "noise"), [(0.05, 0.08), (0.1, 0.2), (-0.1, 0.2)])
def test_the_pairs_that_are_said_to_decide_are_about_those_that_do(gain: float, noise: float) -> None:
    """Heavy-tailed noise; in the median of many tests, from their first 25 pairs."""
    random = np.random.default_rng(3)
    said, did = [], []
    for _ in range(60):
        ratios = np.exp(np.log1p(gain) + noise * random.standard_t(4, 400))
        same = [(float(ratio), 1.0) for ratio in np.exp(noise * random.standard_t(4, 3))]
        said.append(more_pairs(ratios[:25].tolist(), [1.0] * 25, same_s=same) or inf)
        x = np.log(ratios)
        scale = scales(x[None], np.abs(np.log([[first for first, _ in same]])))
        wealth = np.maximum(log_wealth(x[None], scale)[0], log_wealth(-x[None], scale)[0])
        did.append(int(np.argmax(wealth >= log(1 / ALPHA))) + 1 if wealth.max() >= log(1 / ALPHA) else inf)
    assert np.median(did) / 2 < np.median(said) < 2.5 * np.median(did), (np.median(said), np.median(did))


def test_pairs_that_go_nowhere_promise_no_end() -> None:
    assert more_pairs([1.0, 1.1, 1.0, 1.1], [1.1, 1.0, 1.1, 1.0], same_s=[(1.0, 1.1)]) is None
