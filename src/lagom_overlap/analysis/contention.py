"""What collectives cost the computation beside them, from the trace itself.

A kernel and its twin are the same code on the same problem: equal name, grid, block and, where the profiler recorded
shapes, equal shapes. A run of a kernel is *alone* if no collective touches it, *beside* if a collective runs during any
part of it; runs during which another stream computes too (for more than `CROWDED` of them) are left out of both. The
base of a kernel is the median of its runs alone, given at least `MIN_ALONE` of them; without that nothing is said
about the kernel, and its time is reported as uncovered.

    stretched time = sum over runs beside of (duration - base)
    slowdown       = sum of durations beside / sum of bases

Where no shapes were recorded, the same kernel on the same grid may still be another problem (a concatenation, a sort).
Two guards: a kernel whose runs alone differ by more than `MAX_SPREAD` (90th over 10th percentile) has no base; a run
beside that takes more than `PLAUSIBLE` times its base, or less than its inverse, is left out.

Stretched time may be negative by noise; it is never clipped per run, which would turn noise into stretch. The interval
is a percentile bootstrap over runs (both alone and beside, per kernel), seeded.

Blame: the stretched time of a run is shared among the collectives that touch it, in proportion to the time that each
lies beside it.

This is an observation, not an experiment: runs beside a collective may also differ in cache state, clocks or data.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lagom_overlap.analysis.collectives import CollectiveKey, key_of
from lagom_overlap.analysis.intervals import depth_at_least
from lagom_overlap.analysis.kernel_class import KernelClass, kernel_class
from lagom_overlap.analysis.measures import Occupation
from lagom_overlap.trace.gpu_trace import UNKNOWN, GpuTrace, Int64, Role

Floats = NDArray[np.float64]

MIN_ALONE: Final = 3
"""Runs alone that make a base."""
MIN_PROOF: Final = 5
"""Runs beside and alone that make a proof: a bootstrap of fewer is too sure of itself."""
CROWDED: Final = 0.05
"""The part of a run during which another kernel computes, above which it is left out."""
PLAUSIBLE: Final = 4.0
"""The largest slowdown that is believed of a kernel whose shapes are unknown."""
MAX_SPREAD: Final = 2.0
"""How much the runs alone of a kernel whose shapes are unknown may differ and still be one problem."""
_RESOLUTION_NS: Final = 2000
NUM_RESAMPLES: Final = 300
MAX_BLAMED: Final = 64
"""Collectives that share the blame for one run, those longest beside it: a damaged trace may show thousands."""
TOP_KERNELS: Final = 50
"""Kernels that are told one by one."""
_MAX_SAMPLE: Final = 256
_MAX_KERNELS_RESAMPLED: Final = 2000
_CONFIDENCE: Final = (2.5, 97.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """Runs of kernels beside collectives against the same kernels alone.

    `slowdown`, `low` and `high` are ratios (1 = not slowed), the bounds of a 95 % interval, None where too few runs
    allow one. `stretched_ns` is signed.
    """

    num_beside: int
    num_alone: int
    base_ns: float
    stretched_ns: float
    low: float | None
    high: float | None

    @property
    def slowdown(self) -> float:
        """Durations beside over bases."""
        return 1 + self.stretched_ns / self.base_ns if self.base_ns else 1.0

    @property
    def is_proven(self) -> bool:
        """Whether the interval excludes 1 from below; of fewer than `MIN_PROOF` runs on a side it never does."""
        return self.low is not None and self.low > 1 and min(self.num_beside, self.num_alone) >= MIN_PROOF


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassSlowdown:
    """One kernel class beside one collective configuration."""

    kernel_class: KernelClass
    collective: CollectiveKey
    found: Slowdown


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSlowdown:
    """One kernel beside any collective."""

    name: str
    kernel_class: KernelClass
    grid: tuple[int, int, int]
    found: Slowdown


@dataclass(frozen=True, slots=True, kw_only=True)
class StretchedRuns:
    """Every run beside a collective that has a base: its trace's index, its row among the events, duration - base.

    `call` is the index among its trace's calls of the collective that lies longest beside it, `UNKNOWN` of none.
    """

    rank: Int64
    row: Int64
    excess_ns: Floats
    call: Int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """The contention of a job. Times summed over all ranks; `of_rank` is stretched time by trace, in order.

    `by_collective` groups runs by the collective that lies longest beside each; `blame` shares each run's stretch among
    all.
    `covered_ns` is computation beside collectives whose kernels have a base, `uncovered_ns` the rest of it.
    """

    total: Slowdown
    of_rank: tuple[float, ...]
    kernels: tuple[KernelSlowdown, ...]
    classes: tuple[ClassSlowdown, ...]
    by_collective: dict[CollectiveKey, Slowdown]
    blame: dict[CollectiveKey, float]
    runs: StretchedRuns
    covered_ns: int
    uncovered_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernel:
    """What makes two runs twins; `trace` is the trace's index where shapes are known (they are numbered per trace)."""

    gpu_name: str
    name: str
    trace: int
    shape: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]

    @property
    def kernel_class(self) -> KernelClass:
        return kernel_class(self.name)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Kernel runs of all ranks, row by row: which kernel, how long, touched by a collective or not, and by which."""

    kernel: Int64
    duration: Int64
    beside: NDArray[np.bool_]
    usable: NDArray[np.bool_]
    shaped: NDArray[np.bool_]
    rank: Int64
    row: Int64


@dataclass(frozen=True, slots=True)
class _Table:
    """The kernels' bases; `alone` holds the durations alone, kernel after kernel, cut at `edges`."""

    runs: _Runs
    base: Floats
    has_base: NDArray[np.bool_]
    num_alone: Int64
    alone: Int64
    edges: Int64
    medians: dict[int, Floats] = field(default_factory=dict)


def _runs_of(traces: Sequence[GpuTrace], occupations: Sequence[Occupation]) -> tuple[_Runs, list[_Kernel]]:
    kernels: dict[_Kernel, int] = {}
    parts: list[tuple[NDArray[np.generic], ...]] = []
    for index, (trace, occupation) in enumerate(zip(traces, occupations, strict=True)):
        events = trace.events
        rows = events.rows(Role.COMPUTE)
        start, end = events.start_ns[rows], events.end_ns[rows]
        duration = end - start
        columns = np.column_stack((events.name[rows], events.shape[rows], events.grid[rows], events.block[rows]))
        unique, inverse = np.unique(columns, axis=0, return_inverse=True) if len(rows) else (columns, rows)
        numbers = np.empty(len(unique), dtype=np.int64)
        for at, (name, shape, gx, gy, gz, bx, by, bz) in enumerate(unique.tolist()):
            kernel = _Kernel(
                gpu_name=trace.gpu_name,
                name=events.names[name],
                trace=index if shape >= 0 else UNKNOWN,
                shape=shape,
                grid=(gx, gy, gz),
                block=(bx, by, bz),
            )
            numbers[at] = kernels.setdefault(kernel, len(kernels))
        crowded = depth_at_least(start, end, 2).within(start, end)
        beside = occupation.comm.within(start, end) > 0
        usable = (duration > 0) & (crowded <= CROWDED * duration)
        shaped = events.shape[rows] != UNKNOWN
        parts.append((numbers[inverse.ravel()], duration, beside, usable, shaped, np.full(len(rows), index), rows))
    columns_of = [
        np.concatenate(column) if parts else np.empty(0, dtype=np.int64) for column in zip(*parts, strict=True)
    ]
    if not columns_of:
        none = np.empty(0, dtype=np.int64)
        false = none.astype(np.bool_)
        return _Runs(none, none, false, false, false, none, none), []
    return _Runs(*columns_of), list(kernels)  # type: ignore[arg-type]  # numpy's concatenate forgets the bool columns


def _bases(runs: _Runs, num_kernels: int) -> _Table:
    """The median duration alone of every kernel."""
    base = np.zeros(num_kernels)
    alone = np.flatnonzero(runs.usable & ~runs.beside)
    order = alone[np.lexsort((runs.duration[alone], runs.kernel[alone]))]
    counts = np.bincount(runs.kernel[alone], minlength=num_kernels).astype(np.int64)
    edges = np.concatenate(([0], np.cumsum(counts)))
    first = edges[:-1]
    ready = np.flatnonzero(counts >= MIN_ALONE)
    low = order[first[ready] + (counts[ready] - 1) // 2] if len(ready) else ready
    high = order[first[ready] + counts[ready] // 2] if len(ready) else ready
    base[ready] = (runs.duration[low] + runs.duration[high]) / 2
    has_base = counts >= MIN_ALONE
    if len(ready):
        quick = runs.duration[order[first[ready] + (counts[ready] - 1) // 10]]
        slow = runs.duration[order[first[ready] + counts[ready] - 1 - (counts[ready] - 1) // 10]]
        mixed = (slow > MAX_SPREAD * quick) & (slow - quick > _RESOLUTION_NS)
        has_base[ready] = runs.shaped[low] | ~mixed
    return _Table(runs, base, has_base, counts, runs.duration[order], edges)


def _believed(table: _Table) -> NDArray[np.bool_]:
    """The runs that can be compared with a base: not crowded, and not evidently another problem."""
    runs, base = table.runs, table.base[table.runs.kernel]
    plausible = (runs.duration <= PLAUSIBLE * base) & (PLAUSIBLE * runs.duration >= base)
    return runs.usable & table.has_base[runs.kernel] & (runs.shaped | plausible)


def _resampled(table: _Table, beside: Int64, seed: int) -> tuple[Floats, Floats]:
    """(durations beside, bases) of every kernel in `beside`'s rows, resampled `NUM_RESAMPLES` times and summed."""
    rng = np.random.default_rng(seed)
    runs = table.runs
    total_beside, total_base = np.zeros(NUM_RESAMPLES), np.zeros(NUM_RESAMPLES)
    ordered = beside[np.argsort(runs.kernel[beside], kind="stable")]
    kernels, starts, counts = np.unique(runs.kernel[ordered], return_index=True, return_counts=True)
    heaviest = np.argsort(-counts * table.base[kernels], kind="stable")[:_MAX_KERNELS_RESAMPLED]
    for kernel, at, count in zip(kernels[heaviest], starts[heaviest], counts[heaviest], strict=True):
        held = _thinned(runs.duration[ordered[at : at + count]])
        total_base += count * _resampled_base(table, int(kernel), seed)
        total_beside += held[rng.integers(len(held), size=(NUM_RESAMPLES, len(held)))].sum(axis=1) * (count / len(held))
    return total_beside, total_base


def _resampled_base(table: _Table, kernel: int, seed: int) -> Floats:
    """The medians of resamples of a kernel's runs alone; the same in every group of runs that asks.

    The k-th smallest of n uniform draws is Beta(k, n + 1 - k), the next one above it the least of the n - k draws
    left: two numbers instead of n for each resample.
    """
    if kernel not in table.medians:
        rng = np.random.default_rng((seed, kernel))
        alone = _thinned(table.alone[table.edges[kernel] : table.edges[kernel + 1]])
        num = len(alone)
        below = (num + 1) // 2
        low = rng.beta(below, num + 1 - below, NUM_RESAMPLES)
        high = low if num % 2 else low + (1 - low) * rng.beta(1, num - below, NUM_RESAMPLES)
        picks = np.minimum((np.stack((low, high)) * num).astype(np.int64), num - 1)
        table.medians[kernel] = np.sort(alone)[picks].mean(axis=0)
    return table.medians[kernel]


def _thinned(values: Int64) -> Int64:
    """At most `_MAX_SAMPLE` values, evenly spaced in order of size; the interval becomes wider by it."""
    if len(values) <= _MAX_SAMPLE:
        return values
    return np.sort(values)[np.linspace(0, len(values) - 1, _MAX_SAMPLE).round().astype(np.int64)]


def _slowdown(table: _Table, beside: Int64, seed: int) -> Slowdown:
    """The slowdown over some runs beside that have a base."""
    runs = table.runs
    kernels = np.unique(runs.kernel[beside])
    base_ns = float(table.base[runs.kernel[beside]].sum())
    low = high = None
    if len(beside) >= MIN_ALONE:
        durations, bases = _resampled(table, beside, seed)
        low, high = (float(v) for v in np.percentile(durations / np.maximum(bases, 1e-9), _CONFIDENCE))
    return Slowdown(
        num_beside=len(beside),
        num_alone=int(table.num_alone[kernels].sum()),
        base_ns=base_ns,
        stretched_ns=float(runs.duration[beside].sum()) - base_ns,
        low=low,
        high=high,
    )


def _touching(trace: GpuTrace, rows: Int64) -> list[list[tuple[int, int]]]:
    """For each kernel run (event row) the collectives beside it: (index among the calls, ns beside it)."""
    calls = [index for index, call in enumerate(trace.calls) if call.event != UNKNOWN]
    events = trace.events
    comm = np.array([trace.calls[index].event for index in calls], dtype=np.int64)
    order = np.argsort(events.start_ns[comm], kind="stable")
    start, end = events.start_ns[comm[order]], events.end_ns[comm[order]]
    reach = np.maximum.accumulate(end) if len(end) else end
    first = np.searchsorted(reach, events.start_ns[rows], side="right")
    last = np.searchsorted(start, events.end_ns[rows], side="left")
    found: list[list[tuple[int, int]]] = []
    for row, low, high in zip(rows.tolist(), first.tolist(), last.tolist(), strict=True):
        begins, ends = int(events.start_ns[row]), int(events.end_ns[row])
        lengths = np.minimum(end[low:high], ends) - np.maximum(start[low:high], begins)
        near = np.flatnonzero(lengths > 0)
        if len(near) > MAX_BLAMED:
            near = np.sort(near[np.argsort(-lengths[near], kind="stable")[:MAX_BLAMED]])
        found.append([(calls[int(order[low + at])], int(lengths[at])) for at in near.tolist()])
    return found


def contention_of(traces: Sequence[GpuTrace], occupations: Sequence[Occupation], seed: int = 0) -> Contention:
    """The contention of a job's ranks, from their traces."""
    runs, kernels = _runs_of(traces, occupations)
    table = _bases(runs, len(kernels))
    candidates = np.flatnonzero(runs.beside)
    covered = candidates[_believed(table)[candidates]] if len(kernels) else candidates
    excess = runs.duration[covered] - table.base[runs.kernel[covered]]
    of_rank = np.bincount(runs.rank[covered], weights=excess, minlength=len(traces))
    blame: dict[CollectiveKey, float] = defaultdict(float)
    groups: dict[tuple[KernelClass, CollectiveKey], list[int]] = defaultdict(list)
    classes = [kernel.kernel_class for kernel in kernels]
    blamed = np.full(len(covered), UNKNOWN, dtype=np.int64)
    for index, trace in enumerate(traces):
        mine = np.flatnonzero(runs.rank[covered] == index)
        keys = [key_of(call) for call in trace.calls]
        for at, touched in zip(mine.tolist(), _touching(trace, runs.row[covered[mine]]), strict=True):
            whole = sum(length for _, length in touched)
            run = int(covered[at])
            for call, length in touched:
                blame[keys[call]] += float(excess[at]) * length / whole
            if touched:
                longest = max(touched, key=lambda pair: (pair[1], -pair[0]))[0]
                blamed[at] = longest
                groups[classes[int(runs.kernel[run])], keys[longest]].append(run)
    by_key: dict[CollectiveKey, list[int]] = defaultdict(list)
    for (_, key), held in groups.items():
        by_key[key].extend(held)
    covered_ns = int(runs.duration[covered].sum())
    return Contention(
        total=_slowdown(table, covered, seed),
        of_rank=tuple(float(value) for value in of_rank),
        kernels=_kernel_rows(table, covered, kernels, seed),
        classes=tuple(
            sorted(
                (
                    ClassSlowdown(kernel_class=sort, collective=key, found=_slowdown(table, np.array(held), seed))
                    for (sort, key), held in groups.items()
                ),
                key=lambda row: (-row.found.stretched_ns, row.kernel_class, row.collective),
            )
        ),
        by_collective={key: _slowdown(table, np.array(held), seed) for key, held in sorted(by_key.items())},
        blame=dict(sorted(blame.items(), key=lambda pair: (-pair[1], pair[0]))),
        runs=StretchedRuns(rank=runs.rank[covered], row=runs.row[covered], excess_ns=excess, call=blamed),
        covered_ns=covered_ns,
        uncovered_ns=int(runs.duration[candidates].sum()) - covered_ns,
    )


def _kernel_rows(
    table: _Table,
    covered: Int64,
    kernels: list[_Kernel],
    seed: int,
) -> tuple[KernelSlowdown, ...]:
    """The kernels that lost most, at most `TOP_KERNELS`."""
    runs = table.runs
    if not len(covered):
        return ()
    excess = np.bincount(
        runs.kernel[covered], weights=runs.duration[covered] - table.base[runs.kernel[covered]], minlength=len(kernels)
    )
    touched = np.unique(runs.kernel[covered])
    worst = touched[np.argsort(-excess[touched], kind="stable")][:TOP_KERNELS]
    rows = []
    for kernel in worst.tolist():
        rows.append(
            KernelSlowdown(
                name=kernels[kernel].name,
                kernel_class=kernels[kernel].kernel_class,
                grid=kernels[kernel].grid,
                found=_slowdown(table, covered[runs.kernel[covered] == kernel], seed),
            )
        )
    return tuple(rows)
