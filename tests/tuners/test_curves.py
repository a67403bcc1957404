"""The curves against worlds whose times are known: what they predict unmeasured, and which measurements were slow."""

from math import sqrt
from random import Random
from statistics import fmean

import numpy as np
import pytest
from scipy.stats import multivariate_normal

from lagom_overlap.collective import CommConfig
from lagom_overlap.tuners.curves import Curves, Setting, expected_gain, thinned
from lagom_overlap.tuners.gaussian_process import Data, Root
from lagom_overlap.tuners.problem import Assignment, Measurement
from lagom_overlap.units import KIB

CHANNELS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SETTINGS = [Setting(CommConfig(num_channels=n), n, 512 * KIB) for n in CHANNELS]


def at(*channels: int) -> Assignment:
    return tuple(CommConfig(num_channels=n) for n in channels)


def times(assignment: Assignment, noise: Random | None = None, slow: float = 1.0) -> Measurement:
    """16 channels fill the link; a computation of 10 s loses 1.5 % to a channel."""

    def noisy(value: float) -> float:
        return value * slow * (1 + noise.gauss(0, 0.01) if noise else 1.0)

    comm_s = [2.0 * max(1.0, 16 / (config.num_channels or 1)) for config in assignment]
    lost_s = sum(each * 0.015 * (config.num_channels or 1) for each, config in zip(comm_s, assignment, strict=True))
    comp_s = noisy(10 + lost_s)
    return Measurement(
        makespan_s=max(comp_s, noisy(sum(comm_s))), comp_s=comp_s, comm_s=tuple(noisy(each) for each in comm_s)
    )


def fitted(asked: list[Assignment], *, noise: Random | None = None, slow: dict[int, float] | None = None) -> Curves:
    told = [(one, times(one, noise, (slow or {}).get(number, 1.0))) for number, one in enumerate(asked)]
    return Curves(SETTINGS, told, 0.01 if noise else 0.002)


def predicted(curves: Curves, *asked: Assignment) -> list[float]:
    return [float(each) for each in curves.draws(curves.places(asked))[:, 0]]


def test_what_was_not_measured_is_predicted_from_its_neighbours() -> None:
    asked = [at(32), at(24), at(12), at(6)]
    least = min(times(one).makespan_s for one in asked)
    for channels, tolerance in ((16, 0.02), (8, 0.03)):
        (found,) = predicted(fitted(asked), at(channels))
        assert found * least == pytest.approx(times(at(channels)).makespan_s, rel=tolerance)


def test_one_measurement_of_different_settings_tells_of_all_of_them() -> None:
    """Four collectives with settings of their own, once; then the best equal setting of all is predicted best."""
    curves = fitted([at(32, 32, 32, 32), at(24, 16, 8, 4), at(12, 12, 12, 12)])
    found = dict(zip(CHANNELS, predicted(curves, *(at(*[n] * 4) for n in CHANNELS)), strict=True))
    exact = {n: times(at(*[n] * 4)).makespan_s for n in CHANNELS}
    best = min(found, key=found.__getitem__)
    assert exact[best] <= 1.03 * min(exact.values())


def slowed(curves: Curves, num: int) -> frozenset[int]:
    return frozenset(number for number in range(num) if curves.slowed(number) != 1)


def test_a_measurement_that_is_slow_as_a_whole_is_found_and_others_are_not() -> None:
    asked = [at(32), at(16), at(8), at(24), at(12), at(6)]
    for slow in ({}, {0: 1.3}, {3: 1.5}):
        found = [slowed(fitted(asked, noise=Random(seed), slow=slow), len(asked)) for seed in range(10)]
        right = fmean(each == frozenset(slow) for each in found)
        assert right >= 0.8, (slow, found)


def test_many_collectives_are_predicted_in_parts_that_fit_memory() -> None:
    curves = fitted([at(*[32] * 64), at(*[16] * 64)])
    assignments = [at(*[n] * k, *[32] * (64 - k)) for n in CHANNELS for k in range(0, 64, 1)]
    draws = curves.draws(curves.places(assignments))
    assert draws.shape[0] == len(assignments)
    whole = [float(each) for each in curves.draws(curves.places(assignments[-1:]))[0]]
    assert draws[-1] == pytest.approx(whole)


def test_the_expected_gain_counts_only_what_is_faster() -> None:
    gains = expected_gain(np.array([[0.9, 1.3], [1.0, 1.0]]), np.array([1.0, 1.0]))
    assert gains == pytest.approx([0.05, 0.0])


def test_values_of_an_axis_lie_apart() -> None:
    assert thinned(tuple(range(1, 33)), sqrt(2)) == [32, 23, 16, 11, 8, 5, 3, 2, 1]
    assert thinned((None,), 2) == []


def test_noisy_values_are_fitted_as_ridge_regression_fits_them() -> None:
    """A process w'x with weights of variance `kernel` is ridge regression: (X'N^-1 X + K^-1)^-1 X'N^-1 y."""
    random = np.random.default_rng(5)
    weights, values = random.standard_normal((7, 3)), random.standard_normal(7)
    root = random.standard_normal((3, 3))
    kernel, mean = root @ root.T + np.eye(3), random.standard_normal(3)
    variances = random.uniform(0.5, 2.0, 7)
    data = Data(weights=weights, values=values, mean=mean, kernel=kernel, rows=np.arange(7))
    weighted = weights.T / variances
    ridge = np.linalg.solve(weighted @ weights + np.linalg.inv(kernel), weighted @ values)
    assert data.fitted(np.diag(variances)) == pytest.approx(mean + ridge)


def test_the_likelihood_of_correlated_values_is_the_normal_density() -> None:
    random = np.random.default_rng(6)
    root = random.standard_normal((4, 4))
    covariance, values = root @ root.T + np.eye(4), random.standard_normal(4)
    with_constant = multivariate_normal(np.zeros(4), covariance).logpdf(values)
    assert Root(covariance, values).log_likelihood == pytest.approx(with_constant + 2 * np.log(2 * np.pi))
