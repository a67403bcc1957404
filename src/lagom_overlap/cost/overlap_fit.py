"""A small contention model of collectives that share the computation's processor, fitted to measured overlaps.

For engines whose collectives run as threads beside the computation (gloo). Per kind of collective and way of running it
(native call, or slices on channels), a message of S bytes in n slices on c channels needs

    work   a S + b n                 core seconds that the computation cannot have while the collective runs
    wait   (t S + o n) / c^g         seconds in which it waits for the wire, the peer, a wake-up
    x      work + wait               alone
    x      f work + wait             beside a computation, f >= 1: it queues for the core
    the computation beside it advances at 1 - work / (f work + wait)

Collectives run one after the other; after the computation's end the one that is left goes on alone. The makespan is the
later end. g and f are shared by all kinds. A native call is one slice on one channel, so b, o and g have no meaning
for it.

The constants are fitted to logarithms of makespans, computations and collectives with a soft L1 norm, so that a few
disturbed runs do not pull them. A constant is *identified* if its relative standard error is below `IDENTIFIED`; one that
the runs say nothing about keeps its start and is named.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, inf, log
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, least_squares

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig
from lagom_overlap.units import GB_PER_S, MS

IDENTIFIED: Final = 0.3
"""A constant counts as identified while its standard error is below that share of it."""
_SOFT_LIMIT: Final = 0.1
_SINGULAR: Final = 1e-6
"""Directions in which the fit's information is below this share of the largest are unknown."""
_COMM_WEIGHT: Final = 0.3
"""Weight of a collective's time in the fit; makespan and computation count 1."""
_SPAN: Final = log(1000.0)
"""How far from its start a constant may go, up or down."""


@dataclass(frozen=True, slots=True, order=True)
class Way:
    """A kind of collective and how it is run: the native call, or slices."""

    kind: CollectiveKind
    sliced: bool

    def __str__(self) -> str:
        return f"{self.kind} {'sliced' if self.sliced else 'native'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WayConstants:
    """a, b, t, o of the module's text, in s/B, s, s/B, s."""

    work_s_per_byte: float
    work_s_per_slice: float
    wait_s_per_byte: float
    wait_s_per_slice: float

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name} is {getattr(self, name)}, must be finite and not negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapConstants:
    """The model's constants: per way, `channel_power` g in 0..1 and `queueing` f of at least 1."""

    ways: Mapping[Way, WayConstants]
    channel_power: float
    queueing: float

    def __post_init__(self) -> None:
        if not 0 <= self.channel_power <= 1 or not 1 <= self.queueing < inf:
            raise ValueError(f"channel_power {self.channel_power} must lie in 0..1, queueing {self.queueing} from 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What runs: a computation that takes `comp_alone_s` alone, and collectives with their configurations, in order.

    Collective j waits until the share `starts[j]` of the computation is done.
    """

    comp_alone_s: float
    collectives: tuple[Collective, ...]
    configs: tuple[CommConfig, ...]
    starts: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.starts:
            object.__setattr__(self, "starts", (0.0,) * len(self.collectives))
        if not len(self.collectives) == len(self.configs) == len(self.starts):
            raise ValueError("collectives, configurations and starts must be as many")
        if not 0 <= self.comp_alone_s < inf:
            raise ValueError(f"comp_alone_s is {self.comp_alone_s}, must be finite and not negative")


@dataclass(frozen=True, slots=True)
class OverlapTimes:
    """Z, Y and the x_j in seconds."""

    makespan_s: float
    comp_s: float
    comm_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Observation:
    """An overlap and its measured times; a time of 0 is not fitted."""

    overlap: Overlap
    times: OverlapTimes


def way_of(collective: Collective, config: CommConfig) -> Way:
    """How a configuration runs a collective."""
    return Way(collective.kind, not config.is_untouched)


def num_slices(collective: Collective, config: CommConfig) -> int:
    """n: slices of the message; 1 where the whole goes at once."""
    return 1 if config.chunk_bytes is None else ceil(collective.num_bytes / config.chunk_bytes)


def work_and_wait(collective: Collective, config: CommConfig, constants: OverlapConstants) -> tuple[float, float]:
    """(work, wait) of a collective in seconds.

    Raises:
        KeyError: if the constants lack its way.
    """
    held = constants.ways[way_of(collective, config)]
    slices = num_slices(collective, config)
    channels = min(config.num_channels or 1, slices)
    work_s = held.work_s_per_byte * collective.num_bytes + held.work_s_per_slice * slices
    wait_s = held.wait_s_per_byte * collective.num_bytes + held.wait_s_per_slice * slices
    return work_s, wait_s / channels**constants.channel_power


def predict(overlap: Overlap, constants: OverlapConstants) -> OverlapTimes:
    """The times of an overlap.

    Raises:
        KeyError: if the constants lack the way of a collective.
    """
    now, done, total = 0.0, 0.0, overlap.comp_alone_s
    comp_end = None if total > 0 else 0.0
    comm_s = []
    for collective, config, start in zip(overlap.collectives, overlap.configs, overlap.starts, strict=True):
        work_s, wait_s = work_and_wait(collective, config, constants)
        if comp_end is None and start * total > done:
            now, done = now + start * total - done, start * total
            comp_end = now if done >= total else None
        began, left = now, 1.0
        if comp_end is None:
            beside_s = constants.queueing * work_s + wait_s
            rate = 1.0 - work_s / beside_s if beside_s > 0 else 1.0
            needed = (total - done) / rate if rate > 0 else inf
            if needed <= beside_s:
                now, done, comp_end = now + needed, total, now + needed
                left = 1.0 - needed / beside_s if beside_s > 0 else 0.0
            else:
                now, done, left = now + beside_s, done + rate * beside_s, 0.0
        now += left * (work_s + wait_s)
        comm_s.append(now - began)
    if comp_end is None:
        comp_end = now + total - done
    return OverlapTimes(max(now, comp_end), comp_end, tuple(comm_s))


def comp_alone_from_makespan(overlap: Overlap, constants: OverlapConstants, makespan_s: float) -> float:
    """The computation alone with which the model gives that makespan: one default run tells it, nothing runs alone.

    Raises:
        ValueError: if the collectives alone take longer: the makespan says nothing of the computation then.
    """

    def excess(comp_alone_s: float) -> float:
        return predict(replace(overlap, comp_alone_s=comp_alone_s), constants).makespan_s - makespan_s

    if excess(0.0) >= 0:
        raise ValueError(f"the collectives alone take {predict(replace(overlap, comp_alone_s=0.0), constants)}")
    return float(brentq(excess, 0.0, makespan_s, xtol=1e-9))


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedConstant:
    """One constant: its value and relative standard error (infinite where the runs say nothing)."""

    name: str
    value: float
    error: float

    @property
    def identified(self) -> bool:
        """Whether the runs determine it."""
        return self.error < IDENTIFIED


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapFit:
    """Fitted constants; `log_residuals` are log(predicted / measured) of the makespans, in order."""

    constants: OverlapConstants
    table: tuple[FittedConstant, ...]
    log_residuals: tuple[float, ...]

    @property
    def mean_abs_error(self) -> float:
        """Mean of |predicted / measured - 1| over the fitted makespans."""
        return float(np.mean(np.abs(np.expm1(self.log_residuals))))

    @property
    def unidentified(self) -> tuple[str, ...]:
        """Names of the constants that the runs do not determine."""
        return tuple(constant.name for constant in self.table if not constant.identified)


_FIELDS: Final = tuple(WayConstants.__slots__)
_NATIVE_FIELDS: Final = ("work_s_per_byte", "wait_s_per_byte")
_START: Final = {
    "work_s_per_byte": 1 / GB_PER_S,
    "work_s_per_slice": 1 * MS,
    "wait_s_per_byte": 1 / GB_PER_S,
    "wait_s_per_slice": 1 * MS,
}


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where each constant stands in the vector of parameters: logarithms, then g, then log f."""

    ways: tuple[Way, ...]

    @property
    def slots(self) -> list[tuple[Way, str]]:
        return [(way, name) for way in self.ways for name in (_FIELDS if way.sliced else _NATIVE_FIELDS)]

    def names(self) -> list[str]:
        return [f"{way} {name}" for way, name in self.slots] + ["channel_power", "queueing"]

    def start(self) -> NDArray[np.float64]:
        return np.array([log(_START[name]) for _, name in self.slots] + [0.5, log(1.5)])

    def bounds(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        middle = self.start()[:-2]
        return np.append(middle - _SPAN, [0.0, 0.0]), np.append(middle + _SPAN, [1.0, log(5.0)])

    def constants(self, vector: NDArray[np.float64]) -> OverlapConstants:
        held: dict[Way, dict[str, float]] = {way: dict.fromkeys(_FIELDS, 0.0) for way in self.ways}
        for (way, name), value in zip(self.slots, vector[:-2].tolist(), strict=True):
            held[way][name] = exp(value)
        return OverlapConstants(
            ways={way: WayConstants(**values) for way, values in held.items()},
            channel_power=min(1.0, max(0.0, float(vector[-2]))),
            queueing=max(1.0, exp(float(vector[-1]))),
        )


def fit_overlaps(observations: Sequence[Observation]) -> OverlapFit:
    """The constants that explain the observations best.

    Raises:
        ValueError: if there is no observation.
    """
    if not observations:
        raise ValueError("no measured overlap to fit")
    layout = _Layout(
        tuple(
            sorted(
                {
                    way_of(collective, config)
                    for held in observations
                    for collective, config in zip(held.overlap.collectives, held.overlap.configs, strict=True)
                }
            )
        )
    )

    def residuals(vector: NDArray[np.float64]) -> NDArray[np.float64]:
        constants = layout.constants(vector)
        found: list[float] = []
        for held in observations:
            found += _residuals(predict(held.overlap, constants), held.times)
        return np.array(found)

    fit = least_squares(
        residuals, layout.start(), bounds=layout.bounds(), loss="soft_l1", f_scale=_SOFT_LIMIT, x_scale="jac"
    )
    constants = layout.constants(fit.x)
    errors = _errors(_jacobian(residuals, fit.x), residuals(fit.x))
    values = [getattr(constants.ways[way], name) for way, name in layout.slots]
    values += [constants.channel_power, constants.queueing]
    errors[-2] /= max(abs(float(fit.x[-2])), 1e-9)  # g is fitted as it is, not by its logarithm
    return OverlapFit(
        constants=constants,
        table=tuple(
            FittedConstant(name=name, value=value, error=error)
            for name, value, error in zip(layout.names(), values, errors, strict=True)
        ),
        log_residuals=tuple(
            log(predict(held.overlap, constants).makespan_s / held.times.makespan_s) for held in observations
        ),
    )


def _residuals(found: OverlapTimes, measured: OverlapTimes) -> list[float]:
    pairs = [(found.makespan_s, measured.makespan_s, 1.0), (found.comp_s, measured.comp_s, 1.0)]
    pairs += [(ours, theirs, _COMM_WEIGHT) for ours, theirs in zip(found.comm_s, measured.comm_s, strict=True)]
    return [weight * log(max(ours, 1e-9) / theirs) if theirs > 0 else 0.0 for ours, theirs, weight in pairs]


def _jacobian(residuals: "Callable[[NDArray[np.float64]], NDArray[np.float64]]", at: NDArray[np.float64], step: float = 1e-4) -> NDArray[np.float64]:
    """Central differences: the model has kinks where one stream overtakes the other."""
    columns = []
    for index in range(len(at)):
        low, high = at.copy(), at.copy()
        low[index] -= step
        high[index] += step
        columns.append((residuals(high) - residuals(low)) / (2 * step))
    return np.stack(columns, axis=1)


def _errors(jacobian: NDArray[np.float64], left: NDArray[np.float64]) -> list[float]:
    """Standard errors of the parameters; infinite for those that lie in directions without information."""
    variance = float(left @ left) / max(1, len(left) - jacobian.shape[1])
    values, vectors = np.linalg.eigh(jacobian.T @ jacobian)
    known = values > _SINGULAR * values[-1]
    spread = (vectors[:, known] ** 2 / values[known]).sum(axis=1) * variance
    lost = (vectors[:, ~known] ** 2).sum(axis=1) > 0.01
    return [inf if gone else float(np.sqrt(value)) for gone, value in zip(lost, spread, strict=True)]
