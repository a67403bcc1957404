"""A link fitted to measured times of collectives: two numbers, their uncertainty, and what they leave unexplained.

The model is that of `nccl/wire.py`, linear in 1/B and s; the fit minimises a soft L1 norm of the logarithm of
predicted over measured time, so that a few outliers (a first call, a clock step) do not pull it and every size counts
alike.

Sizes held out: message sizes fall into quarter octaves, numbered floor(4 log2 bytes). A fit sees the even ones, errors
are reported on the odd ones. Whole bands are left out because neighbouring sizes are near copies of each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, floor, inf, log, log2, sqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from lagom_overlap.collective import Collective
from lagom_overlap.cost.nccl.topology import Topology
from lagom_overlap.cost.nccl.wire import FittedLink, wire_terms

BANDS_PER_OCTAVE: Final = 4
MIN_LATENCY_SCALE: Final = 0.01
MAX_LATENCY_SCALE: Final = 100.0
IDENTIFIED: Final = 0.3
"""A number counts as identified while its standard error is below that share of it."""
_SOFT_LIMIT: Final = 0.05
"""Logarithmic residual from which the fit counts linearly instead of squared."""
_BANDWIDTH_RANGE: Final = 10.0
"""Bounds of log(B / typical)."""
_STARTS: Final = ((0.3, 0.0), (0.0, -1.0), (0.1, 0.5))
_SINGULAR: Final = 1e12


@dataclass(frozen=True, slots=True)
class Measurement:
    """One collective and the seconds that it took."""

    collective: Collective
    seconds: float

    def __post_init__(self) -> None:
        if not 0 < self.seconds < inf:
            raise ValueError(f"measured time is {self.seconds} s, must be positive and finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """A fitted link with how well its two numbers are known.

    `log_residuals` are log(predicted / measured) in the order of the measurements. Standard errors are relative;
    `correlation` is that of the two numbers' errors (near -1 or 1: only a combination of them is known).
    """

    link: FittedLink
    log_residuals: tuple[float, ...]
    bytes_per_s_error: float
    latency_scale_error: float
    correlation: float

    @property
    def mean_abs_error(self) -> float:
        """Mean of |predicted / measured - 1| over the fitted measurements."""
        return float(np.mean(np.abs(np.expm1(self.log_residuals))))

    @property
    def bandwidth_identified(self) -> bool:
        """Whether the measurements determine the bandwidth."""
        return self.bytes_per_s_error < IDENTIFIED

    @property
    def latency_identified(self) -> bool:
        """Whether the measurements determine the latency scale."""
        return self.latency_scale_error < IDENTIFIED


def size_band(num_bytes: int) -> int:
    """The quarter octave of a message size."""
    return floor(BANDS_PER_OCTAVE * log2(num_bytes))


def is_held_out(num_bytes: int) -> bool:
    """Whether errors are reported on that size; else a fit may see it."""
    return size_band(num_bytes) % 2 == 1


def fit_link(measurements: Sequence[Measurement], topology: Topology) -> LinkFit:
    """The link that explains the measurements best.

    Raises:
        ValueError: if they have fewer than two sizes: two numbers need two equations.
    """
    if len({measurement.collective.num_bytes for measurement in measurements}) < 2:
        raise ValueError(f"{len(measurements)} measurements of fewer than 2 sizes; a link has two numbers")
    terms = [wire_terms(measurement.collective, topology) for measurement in measurements]
    problem = _Problem(
        fixed_s=np.array([term.fixed_s for term in terms]),
        scaled_s=np.array([term.scaled_s for term in terms]),
        wire_bytes=np.array([term.wire_bytes for term in terms]),
        seconds=np.array([measurement.seconds for measurement in measurements]),
    )
    fits = [
        least_squares(
            problem.residuals,
            start,
            jac=problem.jacobian,
            bounds=([-_BANDWIDTH_RANGE, log(MIN_LATENCY_SCALE)], [_BANDWIDTH_RANGE, log(MAX_LATENCY_SCALE)]),
            loss="soft_l1",
            f_scale=_SOFT_LIMIT,
        )
        for start in _STARTS
    ]
    best = min(fits, key=lambda fit: float(fit.cost)).x
    left = problem.residuals(best)
    rate_error, scale_error, correlation = _uncertainty(problem.jacobian(best), left)
    return LinkFit(
        link=FittedLink(problem.typical_bytes_per_s * exp(best[0]), exp(best[1])),
        log_residuals=tuple(float(value) for value in left),
        bytes_per_s_error=rate_error,
        latency_scale_error=scale_error,
        correlation=correlation,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """Terms and measured seconds as arrays; parameters are log(B / typical) and log s."""

    fixed_s: NDArray[np.float64]
    scaled_s: NDArray[np.float64]
    wire_bytes: NDArray[np.float64]
    seconds: NDArray[np.float64]

    @property
    def typical_bytes_per_s(self) -> float:
        return float(np.median(self.wire_bytes / self.seconds))

    def _parts(self, parameters: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        transfer = self.wire_bytes / (self.typical_bytes_per_s * exp(parameters[0]))
        return exp(parameters[1]) * self.scaled_s, transfer

    def residuals(self, parameters: NDArray[np.float64]) -> NDArray[np.float64]:
        """log(predicted / measured)."""
        start, transfer = self._parts(parameters)
        return np.asarray(np.log((self.fixed_s + start + transfer) / self.seconds), dtype=np.float64)

    def jacobian(self, parameters: NDArray[np.float64]) -> NDArray[np.float64]:
        """Derivatives of the residuals by the two parameters."""
        start, transfer = self._parts(parameters)
        total = self.fixed_s + start + transfer
        return np.stack((-transfer / total, start / total), axis=1)


def _uncertainty(jacobian: NDArray[np.float64], residuals: NDArray[np.float64]) -> tuple[float, float, float]:
    """Relative standard errors of B and s and their correlation; infinite where the measurements say nothing."""
    information = jacobian.T @ jacobian
    freedom = max(1, len(residuals) - 2)
    variance = float(residuals @ residuals) / freedom
    if np.linalg.cond(information) > _SINGULAR:
        known = [bool(information[i, i] > 1 / _SINGULAR) for i in range(2)]
        errors = [sqrt(variance / information[i, i]) if known[i] and not all(known) else inf for i in range(2)]
        return errors[0], errors[1], 0.0
    covariance = variance * np.linalg.inv(information)
    rate, scale = (sqrt(float(covariance[i, i])) for i in range(2))
    correlation = float(covariance[0, 1]) / (rate * scale) if rate and scale else 0.0
    return rate, scale, correlation
