"""Where `lagom plan` takes times from: the cost model, a trace, or this machine; and what was found there."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Final

from lagom_overlap.backends.gloo.programs import ProgramRanks, can_time
from lagom_overlap.collective import Collective
from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.spec import TimesSource
from lagom_overlap.planners.base import OpTimes
from lagom_overlap.planners.times import NamedTimes, ShapeTimes
from lagom_overlap.planners.traced_times import ScaledTimes, TraceMatch, kernels_of, match_trace
from lagom_overlap.results.plan import HeldTimes, TimesOrigin
from lagom_overlap.trace.operators import TracedOperators, read_operators
from lagom_overlap.units import format_percent
from lagom_overlap.workload import CommOp, CompOp, Gemm, Iteration, Kernel, Op, Work
from lagom_overlap.workload.rewrite.pieces import piece

MIN_SHARE: Final = 0.1
"""A trace that holds less of a step's time than that is not of this step."""
REPEATS: Final = 7
"""Runs of an operator or collective, of which the median counts. Chosen, not measured."""
CHUNKS: Final = (2, 4, 8)
"""Pieces that planners cut operators into: Concerto's N, Centauri's equal parts."""
MAX_WORKS: Final = 64
"""Shapes of computations whose pieces are measured, those with most time first."""


@dataclass(frozen=True, slots=True)
class TimesWish:
    """What the user asked for: a source, or a trace."""

    source: TimesSource | None = None
    trace: Path | None = None

    @classmethod
    def of(cls, text: str | None) -> "TimesWish":
        """From a flag or a key of the job file.

        Raises:
            JobError: if the trace does not exist.
        """
        if text is None:
            return cls()
        if text in list(TimesSource):
            return cls(source=TimesSource(text))
        path = Path(text)
        if not path.is_file():
            raise JobError(
                f"times is {text!r}: no such file; allowed: {', '.join(TimesSource)}, or a trace of one rank"
            )
        return cls(trace=path)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTimes:
    """Times of operators, what is reported of where they come from, and the same in a sentence.

    `together` are measured rates of what runs side by side (`PlanProblem.together`).
    """

    times: OpTimes
    json: TimesOrigin | None
    notes: tuple[str, ...]
    together: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


def from_model(model: OpTimes, profile: str) -> FoundTimes:
    """The cost model's times."""
    note = f"Times come from the cost model (profile {profile}): nothing was measured."
    return FoundTimes(times=model, json=None, notes=(note,))


def from_trace(path: Path, iteration: Iteration, model: OpTimes, *, on_ranks: bool = False) -> FoundTimes:
    """Times of a trace where it has them, else the model's, scaled; `on_ranks`: pieces as on CPU cores.

    Raises:
        TraceError: if the trace cannot be read.
        JobError: if next to nothing of the step is in it.
    """
    traced = read_operators(path, kernels_of(iteration))
    match = match_trace(iteration, traced)
    measured = match.measured_s
    held_comps = any(op.name in measured for op in iteration.computations)
    held_comms = any(op.name in measured for op in iteration.comms)
    if on_ranks and held_comps and held_comms:
        model = ProportionalTimes.of(iteration, measured)
    scaled = ScaledTimes.fitted(model, iteration, measured)
    times = NamedTimes(measured, iteration, scaled)
    timed = [_held(ops, measured, times) for ops in (iteration.computations, iteration.comms)]
    whole_s = sum(times.seconds(op) for op in iteration.ops)
    if sum(times.seconds(op) for op in iteration.ops if op.name in measured) < MIN_SHARE * whole_s:
        raise JobError(_too_little(path, iteration, traced, timed))
    json = TimesOrigin(
        source="trace",
        file=path.name,
        num_steps=traced.num_steps,
        is_gpu=traced.is_gpu,
        num_in_order=match.num_in_order,
        computations=timed[0],
        collectives=timed[1],
        scale=dict(sorted(scaled.factors.items())),
    )
    return FoundTimes(times=times, json=json, notes=_notes_of(path, iteration, traced, match, json))


def _held(ops: Iterable[Op], measured: Mapping[str, float], times: OpTimes) -> HeldTimes:
    rows = [(op.name in measured, times.seconds(op)) for op in ops]
    whole_s = sum(seconds for _, seconds in rows)
    share = sum(seconds for is_held, seconds in rows if is_held) / whole_s if whole_s else 0.0
    return HeldTimes(num=len(rows), num_measured=sum(is_held for is_held, _ in rows), share_of_time=share)


def _too_little(path: Path, iteration: Iteration, traced: TracedOperators, held: list[HeldTimes]) -> str:
    wanted = Counter(op.origin.kernel or type(op.work).__name__ for op in iteration.computations)
    there = Counter(operator.kernel for operator in traced.operators)
    sorts = [", ".join(f"{name} ({count})" for name, count in c.most_common(3)) or "none" for c in (wanted, there)]
    return (
        f"trace {str(path)!r} is not of this step: it holds times of {held[0].num_measured} of {held[0].num} "
        f"computations and {held[1].num_measured} of {held[1].num} collectives; the step has {sorts[0]}, the trace "
        f"{sorts[1]} of its kernels and {len(traced.collectives)} collectives (record with record_shapes=True)"
    )


def _notes_of(
    path: Path, iteration: Iteration, traced: TracedOperators, match: TraceMatch, json: TimesOrigin
) -> tuple[str, ...]:
    comps, comms = json.computations, json.collectives
    whose = "GPU kernels" if traced.is_gpu else "CPU operators"
    steps = f"{traced.num_steps} steps" if traced.num_steps else "no marked step"
    notes = [
        f"Times come from {path.name} ({whose}, {steps}): {comps.num_measured} of {comps.num} computations "
        f"({format_percent(comps.share_of_time)} of their time) and {comms.num_measured} of {comms.num} collectives "
        f"({format_percent(comms.share_of_time)}); {match.num_in_order} matched in order, "
        f"{len(match.measured_s) - match.num_in_order} by shape."
    ]
    missing = [op for op in iteration.ops if op.name not in match.measured_s]
    if missing:
        factors = ", ".join(f"{name} {factor:.3g}" for name, factor in json.scale.items())
        sorts = Counter(_said(op) for op in missing).most_common(3)
        notes.append(
            f"The trace lacks {', '.join(f'{name} ({count})' for name, count in sorts)}"
            f"{' and others' if len(missing) > sum(count for _, count in sorts) else ''}: "
            f"the model's times, scaled ({factors})."
        )
    if not any(operator.shapes for operator in traced.operators):
        notes.append("The trace has no shapes (record_shapes=True): computations were matched by name and order alone.")
    notes.append("A trace's times hold the contention of that run; collectives in it hold waits for late ranks.")
    return tuple(notes)


def _said(op: Op) -> str:
    if isinstance(op, CommOp):
        return str(op.collective.kind)
    return op.origin.kernel or type(op.work).__name__


def from_ranks(ranks: ProgramRanks, iteration: Iteration) -> FoundTimes:
    """Operators timed alone on the ranks, and pieces of them: collectives on the ranks, computations in this process.

    A piece takes the whole's time times what piece and whole took where both were measured.

    Raises:
        LagomError: if the program cannot be traced or a rank ends.
    """
    profiled = ranks.profile(REPEATS)
    measured = profiled.seconds
    estimate = ProportionalTimes.of(iteration, measured)
    cut = dict.fromkeys(op.collective for op in _with_pieces(iteration.comms) if isinstance(op, CommOp))
    table: dict[Work | Collective, float] = {}
    table.update(_probed(iteration, measured).items())
    table.update(ranks.time_collectives([comm for comm in cut if can_time(comm, ranks.num_ranks)], REPEATS).items())
    times = NamedTimes(measured, iteration, ShapeTimes(table, estimate))
    wholes = {op.collective if isinstance(op, CommOp) else op.work for op in iteration.ops}
    num_pieces = len(table.keys() - wholes)
    json = TimesOrigin(
        source="ranks",
        computations=_held(iteration.computations, measured, times),
        collectives=_held(iteration.comms, measured, times),
        num_pieces=num_pieces,
    )
    note = (
        f"Operators, and {num_pieces} shapes of their pieces, were timed alone on {ranks.description}; "
        "other pieces are estimated."
    )
    return FoundTimes(times=times, json=json, notes=(note, *_together(profiled.rates)), together=profiled.rates)


def from_training(ranks: ProgramRanks, iteration: Iteration) -> FoundTimes:
    """Times of a framework's step, trained on the ranks under PyTorch's profiler.

    Raises:
        LagomError: if the step cannot be made, its trace does not fit the capture, or a rank ends.
    """
    with TemporaryDirectory(prefix="lagom-") as folder:
        path = Path(folder) / "trace.json"
        ranks.trace(path, REPEATS)
        traced = from_trace(path, iteration, ShapeTimes({}), on_ranks=True)
    assert traced.json is not None
    json = replace(traced.json, source="ranks", file=None)
    note = (
        f"Operators were timed by PyTorch's profiler in {REPEATS} steps on {ranks.description}: "
        f"{json.computations.num_measured} of {json.computations.num} computations, "
        f"{json.collectives.num_measured} of {json.collectives.num} collectives. FSDP2's Python between operators is "
        "in no time."
    )
    return FoundTimes(times=traced.times, json=json, notes=(note,))


def _together(rates: Mapping[str, float]) -> tuple[str, ...]:
    """What was measured of collectives next to computations."""
    if not rates:
        return ()
    return (
        f"While a collective and computations run together on these ranks, each goes at {min(rates.values()):.2f} to "
        f"{max(rates.values()):.2f} of its speed alone (0.5: one after the other): measured, and in the prediction.",
    )


def _with_pieces(ops: Iterable[Op]) -> list[Op]:
    """Each operator that can be cut, and one of 2, 4 and 8 equal pieces of it along each of its axes."""
    found: list[Op] = []
    for op in ops:
        pieces = []
        for axis, size in enumerate(op.shards.sizes if op.shards is not None else ()):
            for num_chunks in CHUNKS:
                if size % num_chunks == 0:
                    try:
                        pieces.append(piece(op, axis, (Fraction(0), Fraction(1, num_chunks))))
                    except JobError:  # too little to be cut so finely
                        continue
        if pieces:
            found += [op, *pieces]
    return found


def _probed(iteration: Iteration, measured: Mapping[str, float]) -> dict[Work, float]:
    from lagom_overlap.engines.compute import probe_operators  # noqa: PLC0415  torch, only where it is used

    seconds: dict[Work, float] = defaultdict(float)
    for op in iteration.computations:
        seconds[op.work] += measured[op.name]
    longest = sorted(seconds, key=lambda work: -seconds[work])[:MAX_WORKS]
    of_work = {op.work: op for op in reversed(iteration.computations) if not isinstance(op.work, Kernel)}
    chosen = [of_work[work] for work in longest if work in of_work]
    works = list(dict.fromkeys(op.work for op in _with_pieces(chosen) if isinstance(op, CompOp)))
    return {work: spread[0] for work, spread in probe_operators(works, repeats=REPEATS).items()} if works else {}


_ONE_SIZE: Final = 2.0
"""Largest over smallest below which a line through both says nothing of where it starts."""
_LEAST: Final = 1e-18
"""Seconds per byte or operation where the line through the measurements falls: a piece takes some time."""


@dataclass(frozen=True, slots=True)
class ProportionalTimes:
    """A fixed part and a part that grows with the work: how the time of a piece follows from that of the whole.

    `NamedTimes` scales it to what was measured. The fixed part of computations is the shortest one's time; that of
    collectives is where the line through the smallest and the largest meets zero bytes, or, where all are of about one
    size, the same as of computations. The time of a piece is a guess, not a measurement.
    """

    comp_overhead_s: float
    comm_overhead_s: float
    comp_s_per_unit: float
    comm_s_per_byte: float

    @classmethod
    def of(cls, iteration: Iteration, measured_s: Mapping[str, float]) -> "ProportionalTimes":
        """From the times of those of an iteration's operators that were measured."""
        comps = [(measured_s[op.name], _units(op)) for op in iteration.computations if op.name in measured_s]
        comms = [(measured_s[op.name], _units(op)) for op in iteration.comms if op.name in measured_s]
        fixed_s = min((seconds for seconds, _ in comps), default=1e-6)
        call_s = min((_intercept_s(comms, fixed_s), *(seconds for seconds, _ in comms)))
        return cls(fixed_s, call_s, _slope(comps, fixed_s), _slope(comms, call_s))

    def seconds(self, op: Op) -> float:
        """Seconds of one operator alone."""
        if isinstance(op, CommOp):
            return self.comm_overhead_s + self.comm_s_per_byte * _units(op)
        return self.comp_overhead_s + self.comp_s_per_unit * _units(op)


def _units(op: Op) -> float:
    """Bytes of a collective; of a computation floating-point operations, or bytes where that is all that is known."""
    if isinstance(op, CommOp):
        return float(op.collective.num_bytes)
    work = op.work
    if isinstance(work, Gemm):
        return work.flops
    return float(getattr(work, "flops", 0) or getattr(work, "num_bytes", 0) or 1)


def _intercept_s(times: list[tuple[float, float]], otherwise_s: float) -> float:
    """Where the line through the times (s) of the fewest and of the most units meets no units; at least 0."""
    if not times:
        return otherwise_s
    low, high = min(units for _, units in times), max(units for _, units in times)
    if high < _ONE_SIZE * low:
        return otherwise_s
    low_s, high_s = (median(seconds for seconds, units in times if units == end) for end in (low, high))
    return max(0.0, low_s - low * (high_s - low_s) / (high - low))


def _slope(times: list[tuple[float, float]], fixed_s: float) -> float:
    """Seconds per unit beyond the fixed part, of all together."""
    units = sum(count for _, count in times)
    return max(sum(seconds - fixed_s for seconds, _ in times) / units, _LEAST) if units else _LEAST
