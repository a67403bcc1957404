"""Constants fitted to measurements by least squares: their values, how well each is known, and what they leave over.

Every constant has a start. A weak pull towards it (`_PULL`) keeps the constants that the measurements say nothing
about where they began; the uncertainties are computed without it. Errors come from the curvature at the solution.
Where it is below `_SINGULAR` of the steepest, a direction of the constants is unknown, and so is every constant with a
part in it. A constant on one of its bounds is not known either: the measurements would have it elsewhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, inf, log
from typing import Final

import numpy as np
from numpy.typing import NDArray

IDENTIFIED: Final = 0.3
"""A constant counts as identified while its standard error is below that share of it."""
_SOFT_LIMIT: Final = 0.1
"""Residual from which the fit counts linearly instead of squared: disturbed runs do not pull it."""
_PULL: Final = 3e-3
"""Of the pull towards a constant's start, against a residual's 1: decides only what measurements leave open."""
_SINGULAR: Final = 1e-6
"""Of the steepest direction: what is flatter is unknown. Chosen, well above rounding."""
_PART: Final = 0.01
"""Of a constant's direction that may be unknown, before the constant counts as not identified."""
_STEP: Final = 1e-4
"""Of the logarithms, for derivatives by differences and for "at the bound"."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Constant:
    """A positive constant to be fitted: its start and its bounds."""

    name: str
    start: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.start <= self.high < inf:
            raise ValueError(f"{self.name}: 0 < low <= start <= high is needed, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedConstant:
    """One constant: its value and relative standard error (infinite where the measurements say nothing)."""

    name: str
    value: float
    error: float

    @property
    def identified(self) -> bool:
        """Whether the measurements determine it."""
        return self.error < IDENTIFIED


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Fitted constants, and log(predicted / measured) of what they were fitted to, in order."""

    table: tuple[FittedConstant, ...]
    log_residuals: tuple[float, ...]

    @property
    def errors(self) -> list[float]:
        """Predicted / measured - 1, in order."""
        return [float(value) for value in np.expm1(self.log_residuals)]

    @property
    def mean_abs_error(self) -> float:
        """Mean of the errors' sizes."""
        return float(np.mean(np.abs(self.errors)))

    @property
    def unidentified(self) -> tuple[str, ...]:
        """Names of the constants that the measurements do not determine."""
        return tuple(constant.name for constant in self.table if not constant.identified)


def fit_constants(
    residuals: Callable[[Sequence[float]], Sequence[float]],
    constants: Sequence[Constant],
    *,
    tolerance: float = 1e-8,
    max_steps: int | None = None,
) -> tuple[FittedConstant, ...]:
    """The constants that make the residuals small, in the order given; `residuals` takes their values.

    Residuals are dimensionless, logarithms of predicted over measured as a rule. The search ends where they, or the
    constants, change by less than `tolerance`, or after `max_steps` steps.
    """
    # Not at the top: a third of a second of every verb that can show a fit, and few make one.
    from scipy.optimize import least_squares  # noqa: PLC0415

    start = np.array([log(constant.start) for constant in constants])
    low = np.array([log(constant.low) for constant in constants]) - 1e-12
    high = np.array([log(constant.high) for constant in constants]) + 1e-12

    def left(vector: Floats) -> Floats:
        values = [
            min(constant.high, max(constant.low, exp(value)))
            for constant, value in zip(constants, vector.tolist(), strict=True)
        ]
        return np.asarray(residuals(values), dtype=np.float64)

    def pulled(vector: Floats) -> Floats:
        return np.append(left(vector), _PULL * (vector - start))

    solution = least_squares(
        pulled,
        start,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=_SOFT_LIMIT,
        x_scale="jac",
        ftol=tolerance,
        xtol=tolerance,
        max_nfev=max_steps,
    ).x
    errors = _errors(_jacobian(left, solution, low, high), left(solution))
    bounded = (solution - low < _STEP) | (high - solution < _STEP)
    errors = [inf if stuck else error for stuck, error in zip(bounded.tolist(), errors, strict=True)]
    return tuple(
        FittedConstant(name=constant.name, value=min(constant.high, max(constant.low, exp(value))), error=error)
        for constant, value, error in zip(constants, solution.tolist(), errors, strict=True)
    )


def _jacobian(residuals: Callable[[Floats], Floats], at: Floats, low: Floats, high: Floats) -> Floats:
    """Differences within the bounds: models have kinks, where derivatives by formula would mislead."""
    columns = []
    for index in range(len(at)):
        below, above = at.copy(), at.copy()
        below[index] = max(low[index], at[index] - _STEP)
        above[index] = min(high[index], at[index] + _STEP)
        columns.append((residuals(above) - residuals(below)) / (above[index] - below[index]))
    return np.stack(columns, axis=1)


def _errors(jacobian: Floats, left: Floats) -> list[float]:
    """Standard errors of the parameters; infinite for those that lie in directions without information."""
    variance = float(left @ left) / max(1, len(left) - jacobian.shape[1])
    values, vectors = np.linalg.eigh(jacobian.T @ jacobian)
    known = values > _SINGULAR * max(float(values[-1]), 1e-300)
    spread = (vectors[:, known] ** 2 / values[known]).sum(axis=1) * variance
    lost = (vectors[:, ~known] ** 2).sum(axis=1) > _PART
    return [inf if gone else float(np.sqrt(value)) for gone, value in zip(lost, spread, strict=True)]
