from math import exp, inf, log

import numpy as np
import pytest

from lagom_overlap.cost.fit import Constant, fit_constants

X = np.linspace(1, 10, 40)


def fitted(residuals, *constants):
    return {held.name: held for held in fit_constants(residuals, constants)}


def test_known_constants_come_back_from_noisy_data_within_their_errors():
    noise = np.exp(0.02 * np.random.default_rng(1).standard_normal(len(X)))
    measured = (3.0 + 0.5 * X) * noise
    found = fitted(
        lambda v: np.log((v[0] + v[1] * X) / measured), Constant("a", 1, 0.01, 100), Constant("b", 1, 0.01, 100)
    )
    for name, truth in (("a", 3.0), ("b", 0.5)):
        assert found[name].identified
        assert abs(log(found[name].value / truth)) < 4 * found[name].error


def test_the_error_is_that_of_linear_regression():
    noise = 0.05 * np.random.default_rng(2).standard_normal(len(X))
    (found,) = fit_constants(lambda v: log(v[0]) + noise, [Constant("a", 1, 0.01, 100)])
    assert found.value == pytest.approx(exp(-float(noise.mean())), rel=1e-3)
    assert found.error == pytest.approx(float(noise.std(ddof=1)) / len(X) ** 0.5, rel=0.01)


def test_a_product_of_two_constants_is_not_told_apart():
    found = fitted(
        lambda v: np.log(v[0] * v[1] * X / (6 * X)) + 1e-3 * np.sin(X),
        Constant("a", 2, 0.01, 100),
        Constant("b", 2, 0.01, 100),
    )
    assert found["a"].error == found["b"].error == inf
    assert found["a"].value * found["b"].value == pytest.approx(6, rel=1e-2)


def test_a_constant_without_influence_keeps_its_start_and_is_not_identified():
    found = fitted(
        lambda v: np.log(v[0] / 5) + 1e-3 * np.sin(X), Constant("a", 1, 0.1, 100), Constant("idle", 7, 1, 100)
    )
    assert found["a"].value == pytest.approx(5, rel=1e-2)
    assert found["a"].identified
    assert found["idle"].value == pytest.approx(7)
    assert not found["idle"].identified


def test_a_constant_on_its_bound_is_not_identified():
    found = fitted(lambda v: np.log(v[0] / 5) * np.ones(9) + 1e-3, Constant("a", 1, 0.1, 2))
    assert found["a"].value == pytest.approx(2)
    assert not found["a"].identified


def test_outliers_do_not_pull_the_fit():
    measured = np.full(40, 4.0)
    measured[:4] = 40.0
    (found,) = fit_constants(lambda v: np.log(v[0] / measured), [Constant("a", 1, 0.1, 100)])
    assert found.value == pytest.approx(4, rel=0.03)


def test_a_start_outside_its_bounds_is_refused():
    with pytest.raises(ValueError, match="low <= start"):
        Constant("a", 5, 1, 2)
