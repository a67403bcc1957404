"""A small contention model of collectives that share the computation's processor, fitted to measured overlaps.

For engines whose collectives run as threads during the computation (gloo). Per kind of collective and way of running it
(native call, or slices on channels), a message of S bytes in n slices on c channels needs

    work   a S + b n                 core seconds that the computation cannot have while the collective runs
    wait   (t S + o n) / c^g         seconds in which it waits for the wire, the peer, a wake-up
    x      work + wait               alone
    x      f work + wait             during a computation, f >= 1: it queues for the core
    the concurrent computation advances at 1 - work / (f work + wait)

Collectives run one after the other; after the computation's end the one that is left goes on alone. The makespan is the
later end. That is a closed form per collective and no simulation of events: the computation is one fluid, and a fit
asks for it some ten thousand times. g and f are shared by all kinds. A native call is one slice on one channel, so b,
o and g have no meaning for it.

The constants are fitted to logarithms of makespans, computations and collectives (`fit.py`); those that the runs do not
determine are named.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, log
from typing import Final

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig
from lagom_overlap.cost.fit import Constant, Fit, fit_constants
from lagom_overlap.units import GB_PER_S, MS

_COMM_WEIGHT: Final = 0.3
"""Weight of a collective's time in the fit; makespan and computation count 1."""
_SPAN: Final = 1000.0
"""How many times larger or smaller than its start a constant may become."""
_SCALING_STEPS: Final = 12
"""Iterations of the scale: where times follow it, the damping leaves 1e-6 of the first error."""
_DAMPING: Final = 0.7
"""A whole step would swing between too slow and too fast where the overlap feeds back."""
_MAX_SCALE: Final = 30.0
"""Off by more than this the constants are of another machine."""
_LATENCY_POWER: Final = 0.5
"""How a slice's wait grows with the machine's state: measured, see `scaled`."""
_LEAST_S: Final = 1e-9
"""Predicted times below count as this: their logarithm is needed."""


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
class FittedOverlap:
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

    overlap: FittedOverlap
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
    way = constants.ways[way_of(collective, config)]
    slices = num_slices(collective, config)
    channels = min(config.num_channels or 1, slices)
    work_s = way.work_s_per_byte * collective.num_bytes + way.work_s_per_slice * slices
    wait_s = way.wait_s_per_byte * collective.num_bytes + way.wait_s_per_slice * slices
    return work_s, wait_s / channels**constants.channel_power


def predict(overlap: FittedOverlap, constants: OverlapConstants) -> OverlapTimes:
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
            stretched_s = constants.queueing * work_s + wait_s
            rate = 1.0 - work_s / stretched_s if stretched_s > 0 else 1.0
            needed = (total - done) / rate if rate > 0 else inf
            if needed <= stretched_s:
                now, done, comp_end = now + needed, total, now + needed
                left = 1.0 - needed / stretched_s if stretched_s > 0 else 0.0
            else:
                now, done, left = now + stretched_s, done + rate * stretched_s, 0.0
        now += left * (work_s + wait_s)
        comm_s.append(now - began)
    if comp_end is None:
        comp_end = now + total - done
    return OverlapTimes(max(now, comp_end), comp_end, tuple(comm_s))


def comp_alone_from_makespan(overlap: FittedOverlap, constants: OverlapConstants, makespan_s: float) -> float:
    """The computation alone with which the model gives that makespan: one default run tells it, nothing runs alone.

    Raises:
        ValueError: if the collectives alone take longer: the makespan says nothing of the computation then.
    """

    def excess(comp_alone_s: float) -> float:
        return predict(replace(overlap, comp_alone_s=comp_alone_s), constants).makespan_s - makespan_s

    if excess(0.0) >= 0:
        raise ValueError(f"the collectives alone take {predict(replace(overlap, comp_alone_s=0.0), constants)}")
    from scipy.optimize import brentq  # noqa: PLC0415 - takes longer to load than most verbs to start

    return float(brentq(excess, 0.0, makespan_s, xtol=1e-9))


@dataclass(frozen=True, slots=True)
class Inferred:
    """What one default run tells: its computation alone, and how much dearer its collectives were than fitted."""

    comp_alone_s: float
    scale: float


def infer_from_default(overlap: FittedOverlap, constants: OverlapConstants, times: OverlapTimes) -> Inferred:
    """The computation alone behind one measured setting, its collectives' own times taken into account.

    The constants are scaled by one factor (`scaled`) until the collectives take as long in sum as measured: how costly
    they were in this run is read from its own times, not only from other overlaps.

    Raises:
        ValueError: if the collectives alone take longer than the makespan.
    """
    scale, alone_s = 1.0, 0.0
    for _ in range(_SCALING_STEPS):
        dearer = scaled(constants, scale)
        bare_s = predict(replace(overlap, comp_alone_s=0.0), dearer).makespan_s
        alone_s = comp_alone_from_makespan(overlap, dearer, times.makespan_s) if bare_s < times.makespan_s else 0.0
        predicted_s = sum(predict(replace(overlap, comp_alone_s=alone_s), dearer).comm_s)
        if not 0 < sum(times.comm_s) < inf or predicted_s <= 0:
            break
        wanted = scale * (sum(times.comm_s) / predicted_s) ** _DAMPING
        scale = min(_MAX_SCALE, max(1 / _MAX_SCALE, wanted))
    if alone_s <= 0:
        raise ValueError(f"collectives of {sum(times.comm_s)} s leave nothing of a makespan of {times.makespan_s} s")
    return Inferred(alone_s, scale)


def scaled(constants: OverlapConstants, scale: float) -> OverlapConstants:
    """The constants of a machine on which collectives are that many times as costly.

    A slice's wait on top of its bytes is mostly the scheduler's latency, which grows more slowly than work does: with
    the square root of the scale. The power was chosen on two recordings of the gloo demo (scales 2.2 and 2.6) and
    holds on five others (6.0 to 7.6): benchmarks/results/calibration_gloo_amd_epyc_2026-11-20.md.
    """
    powers = {name: _LATENCY_POWER if name == "wait_s_per_slice" else 1.0 for name in _FIELDS}
    ways = {
        way: WayConstants(**{name: scale ** powers[name] * getattr(constants_of_way, name) for name in _FIELDS})
        for way, constants_of_way in constants.ways.items()
    }
    return replace(constants, ways=ways)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapFit(Fit):
    """The fitted constants of a machine; the residuals are the makespans'."""

    constants: OverlapConstants


_FIELDS: Final = tuple(WayConstants.__slots__)
_NATIVE_FIELDS: Final = ("work_s_per_byte", "wait_s_per_byte")
_START: Final = {
    "work_s_per_byte": 1 / GB_PER_S,
    "work_s_per_slice": 1 * MS,
    "wait_s_per_byte": 1 / GB_PER_S,
    "wait_s_per_slice": 1 * MS,
}


def _slots(ways: Sequence[Way]) -> list[tuple[Way, str]]:
    return [(way, name) for way in ways for name in (_FIELDS if way.sliced else _NATIVE_FIELDS)]


def _constants(ways: Sequence[Way], values: Sequence[float]) -> OverlapConstants:
    """The values in the order of `_slots`, then g and f."""
    fields_of_way: dict[Way, dict[str, float]] = {way: dict.fromkeys(_FIELDS, 0.0) for way in ways}
    for (way, name), value in zip(_slots(ways), values[:-2], strict=True):
        fields_of_way[way][name] = value
    return OverlapConstants(
        ways={way: WayConstants(**fields) for way, fields in fields_of_way.items()},
        channel_power=values[-2],
        queueing=values[-1],
    )


def fit_overlaps(observations: Sequence[Observation]) -> OverlapFit:
    """The constants that explain the observations best.

    Raises:
        ValueError: if there is no observation.
    """
    if not observations:
        raise ValueError("no measured overlap to fit")
    pairs = (zip(each.overlap.collectives, each.overlap.configs, strict=True) for each in observations)
    ways = sorted({way_of(collective, config) for pair in pairs for collective, config in pair})
    wanted = [
        Constant(f"{way} {name}", _START[name], _START[name] / _SPAN, _START[name] * _SPAN)
        for way, name in _slots(ways)
    ]
    wanted += [Constant("channel_power", 0.5, 0.01, 1.0), Constant("queueing", 1.5, 1.0, 5.0)]

    def residuals(values: Sequence[float]) -> list[float]:
        constants = _constants(ways, values)
        return [left for each in observations for left in _residuals(predict(each.overlap, constants), each.times)]

    table = fit_constants(residuals, wanted)
    constants = _constants(ways, [constant.value for constant in table])
    return OverlapFit(
        constants=constants,
        table=table,
        log_residuals=tuple(
            log(predict(each.overlap, constants).makespan_s / each.times.makespan_s) for each in observations
        ),
    )


def _residuals(modelled: OverlapTimes, measured: OverlapTimes) -> list[float]:
    pairs = [(modelled.makespan_s, measured.makespan_s, 1.0), (modelled.comp_s, measured.comp_s, 1.0)]
    pairs += [(ours, theirs, _COMM_WEIGHT) for ours, theirs in zip(modelled.comm_s, measured.comm_s, strict=True)]
    return [weight * log(max(ours, _LEAST_S) / theirs) if theirs > 0 else 0.0 for ours, theirs, weight in pairs]
