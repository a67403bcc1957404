"""What the search makes of noise: repeats, pairs, effort; judged by closed forms and by worlds whose truth is known."""

from math import exp, log, sqrt
from random import Random
from statistics import stdev

import pytest
from toy_overlap import drive, measured, problem

from lagom_overlap.collective import CommConfig, ConfigSpace, Subspace
from lagom_overlap.tuners.model_based import ModelBased
from lagom_overlap.tuners.model_based.effort import EFFORTS, MOST_EFFORT, USUAL_NOISE
from lagom_overlap.tuners.model_based.evidence import LEAST_PAIRS, Arms, Lead, usual
from lagom_overlap.tuners.problem import Assignment, Measurement

SPACE = ConfigSpace((Subspace(num_channels=(1, 2, 4, 8), chunk_bytes=(2**19, 2**21, 2**23)),))
ONE, OTHER = CommConfig(num_channels=1, chunk_bytes=2**19), CommConfig(num_channels=2, chunk_bytes=2**19)


def test_usual_is_the_mean_of_repeats_without_those_of_a_late_rank() -> None:
    assert usual([3.0]) == 3.0
    assert usual([1.0, 1.1]) == pytest.approx(1.05)
    assert usual([1.0, 1.5]) == 1.0
    assert usual([1.5, 1.0, 1.04]) == pytest.approx(1.02)


def test_pairs_see_a_lead_that_a_mood_of_the_machine_hides() -> None:
    # Both arms wander by a factor of two, one is always 5 % faster: mean and error are those of the ratios.
    arms, ratios = Arms(), [1.05, 1.06, 1.04, 1.05, 1.05]
    for mood, ratio in zip((1.0, 2.0, 1.5, 1.2, 1.8), ratios, strict=True):
        arms.add((ONE,), measured(mood, 0.1))
        arms.add((OTHER,), measured(mood * ratio, 0.1))
    lead = arms.lead((ONE,), (OTHER,))
    assert lead is not None
    assert lead.mean == pytest.approx(sum(map(log, ratios)) / 5)
    # One more pair's worth of the noise of single runs.
    spread = sqrt((4 * stdev(map(log, ratios)) ** 2 + 2 * arms.sigma**2) / 5)
    assert lead.error == pytest.approx(spread / sqrt(5))
    backwards = arms.lead((OTHER,), (ONE,))
    assert backwards is not None
    assert backwards.mean == -lead.mean


def test_a_run_is_in_one_pair_only_and_few_pairs_are_no_lead() -> None:
    arms = Arms()
    for _ in range(9):
        arms.add((ONE,), measured(1.0, 0.1))
    for _ in range(9):
        arms.add((OTHER,), measured(1.1, 0.1))
    assert arms.lead((ONE,), (OTHER,)) is None
    for _ in range(LEAST_PAIRS):
        arms.add((ONE,), measured(1.0, 0.1))
        arms.add((OTHER,), measured(1.1, 0.1))
    assert arms.lead((ONE,), (OTHER,)) is not None


@pytest.mark.parametrize(("dof", "quantile"), [(5, 2.015), (10, 1.812), (30, 1.697)])
def test_a_lead_is_judged_by_students_quantiles(dof: float, quantile: float) -> None:
    # One-sided 95 %: 1.645 of the normal, printed tables of Student's distribution for the others.
    assert Lead(1.0, 1.0 / (1.01 * quantile), dof).is_beyond(1.645, 0.0)
    assert not Lead(1.0, 1.0 / (0.96 * quantile), dof).is_beyond(1.645, 0.0)
    assert not Lead(-0.001, 1e-9, dof).is_beyond(1.645, 0.005)


def test_effort_grows_with_the_noise_up_to_a_bound() -> None:
    normal = EFFORTS["normal"]
    assert normal.under(USUAL_NOISE / 2) == normal
    assert normal.under(1.5 * USUAL_NOISE).max_measurements == round(1.5 * normal.max_measurements)
    assert normal.under(9.0).max_repeats == round(MOST_EFFORT * normal.max_repeats)


def test_a_tenth_is_found_under_noise_as_large_that_comes_in_moods() -> None:
    # Large chunks gain 12 %; every time carries a mood (first-order autoregressive) of 8 % and 4 % of its own.
    found = []
    for seed in range(10):
        rng, mood = Random(seed), [0.0]

        def run(name: str, assignment: Assignment, rng: Random = rng, mood: list[float] = mood) -> Measurement:
            mood[0] = 0.8 * mood[0] + 0.6 * rng.gauss(0, 0.08)
            chunk = assignment[0].chunk_bytes or 2**21
            comp_s = 0.08 * (1 - 0.06 * log(chunk / 2**21, 4)) * exp(mood[0] + rng.gauss(0, 0.04))
            return measured(comp_s, 0.04 * exp(mood[0] + rng.gauss(0, 0.04)))

        tuner = ModelBased((problem(SPACE),), seed=seed)
        drive(tuner, run)
        found.append((tuner.recommend()["g"][0].chunk_bytes or 2**21) >> 20)
    assert 0 not in found  # 512 KiB is slower than the default
    assert sum(chunk == 8 for chunk in found) >= 6
