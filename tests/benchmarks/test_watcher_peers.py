"""The watcher's peers, on steps whose alarm can be told by hand."""

from math import exp, log
from random import Random

import pytest

from lagom_overlap.online.watcher import FIRST, LEAST_SPREAD, SETTLE
from watcher_peers import PEERS, Detector

QUIET = [1.0] * (SETTLE + FIRST + 20)


def alarm(detector: Detector, longer: float, most: int = 500) -> int | None:
    """Steps of a rise until it is seen."""
    return next((number for number in range(1, most) if detector.see([longer])), None)


def test_a_cumulative_sum_needs_its_threshold_over_what_each_step_adds() -> None:
    # Without noise the deviation is the least one: a step adds (ln 1.2 - ln 1.08 / 2) / 0.004 = 36.0 deviations.
    each = (log(1.2) - log(1.08) / 2) / LEAST_SPREAD
    for num_steps in (1, 3, 10):
        detector = PEERS["cusum"](1.08, (num_steps - 0.5) * each)
        assert not detector.see(QUIET)
        assert alarm(detector, 1.2) == num_steps


def test_page_hinkley_sums_what_lies_above_the_running_mean() -> None:
    detector = PEERS["page_hinkley"](1.08, 10.0)
    assert not detector.see(QUIET)
    mean, num, above, steps = 0.0, FIRST + 20, 0.0, 0
    while above <= 10 * log(1.08):
        steps, num = steps + 1, num + 1
        mean += (log(1.2) - mean) / num
        above += log(1.2) - mean - log(1.08) / 2
    assert alarm(detector, 1.2) == steps


@pytest.mark.parametrize("threshold", [10, 40])
def test_bocpd_finds_a_rise_when_the_new_run_is_as_long_as_asked(threshold: int) -> None:
    rng = Random(1)
    detector = PEERS["bocpd"](1.08, threshold)
    assert not detector.see([exp(rng.gauss(0, 0.02)) for _ in range(2000)])
    number = 1
    while not detector.see([1.2 * exp(rng.gauss(0, 0.02))]):
        number += 1
    assert threshold - 1 <= number <= threshold + 3


@pytest.mark.parametrize(("name", "threshold"), [("cusum", 40.0), ("page_hinkley", 16.0), ("bocpd", 40.0)])
def test_a_fall_and_small_rises_are_no_alarm(name: str, threshold: float) -> None:
    rng = Random(2)
    detector = PEERS[name](1.08, threshold)
    for level in (1.0, 0.8, 0.81):
        assert not detector.see([level * exp(rng.gauss(0, 0.01)) for _ in range(300)])
