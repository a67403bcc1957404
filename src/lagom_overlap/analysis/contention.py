"""What collectives cost the concurrent computation, from the trace itself.

A kernel and its twin are the same code on the same problem: equal name, grid, block and, where the profiler recorded
shapes, equal shapes. A run of a kernel is *alone* if no collective touches it, *overlapped* if one runs during any
part of it; runs during which another stream computes too (for more than `CROWDED` of them) are left out of both. The
base of a kernel is the median of its runs alone, given at least `MIN_ALONE` of them; without that nothing is said
about the kernel, and its time is reported as uncovered.

    stretched time = sum over overlapped runs of (duration - base)
    slowdown       = sum of their durations / sum of their bases

Where no shapes were recorded, the same kernel on the same grid may still be another problem (a concatenation, a sort).
Two guards: a kernel whose runs alone differ by more than `MAX_SPREAD` (90th over 10th percentile) has no base; a run
during that takes more than `PLAUSIBLE` times its base, or less than its inverse, is left out.

Stretched time may be negative by noise; it is never clipped per run, which would turn noise into stretch. The interval
is a percentile bootstrap over runs (both alone and overlapped, per kernel), seeded.

Blame: the stretched time of a run is shared among the collectives that touch it, in proportion to the time that each
lies during it.

This is an observation, not an experiment: runs during a collective may also differ in cache state, clocks or data.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from lagom_overlap.analysis.bootstrap import Uniform, heaviest, intervals, resampled_medians, resampled_sums
from lagom_overlap.analysis.collectives import CollectiveKey, key_of
from lagom_overlap.analysis.concurrency import overlaps_of
from lagom_overlap.analysis.equal_rows import equal_rows
from lagom_overlap.analysis.intervals import depth_at_least
from lagom_overlap.analysis.kernel_class import KernelClass, kernel_class
from lagom_overlap.analysis.measures import Occupation
from lagom_overlap.trace.gpu_trace import UNKNOWN, Bools, EventRole, Floats, GpuTrace, Int64

MIN_ALONE: Final = 3
"""Runs alone that make a base."""
MIN_PROOF: Final = 5
"""Overlapped and lone runs that make a proof: a bootstrap of fewer is too sure of itself."""
CROWDED: Final = 0.05
"""The part of a run during which another kernel computes, above which it is left out."""
PLAUSIBLE: Final = 4.0
"""The largest slowdown that is believed of a kernel whose shapes are unknown."""
MAX_SPREAD: Final = 2.0
"""How much the runs alone of a kernel whose shapes are unknown may differ and still be one problem."""
_RESOLUTION_NS: Final = 2000
"""Durations that differ by less are the same to a profiler, whose own work varies as much. Chosen."""
TOP_KERNELS: Final = 50
"""Kernels that are told one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """Runs of kernels during collectives against the same kernels alone.

    `slowdown`, `low` and `high` are ratios (1 = not slowed), the bounds of a 95 % interval, None where too few runs
    allow one. `stretched_ns` is signed.
    """

    num_overlapped: int
    num_alone: int
    base_ns: float
    stretched_ns: float
    low: float | None
    high: float | None

    @property
    def slowdown(self) -> float:
        """Durations of overlapped runs over their bases."""
        return 1 + self.stretched_ns / self.base_ns if self.base_ns else 1.0

    @property
    def is_proven(self) -> bool:
        """Whether the interval excludes 1 from below; of fewer than `MIN_PROOF` runs on a side it never does."""
        return self.low is not None and self.low > 1 and min(self.num_overlapped, self.num_alone) >= MIN_PROOF


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassSlowdown:
    """One kernel class during one collective configuration."""

    kernel_class: KernelClass
    collective: CollectiveKey
    found: Slowdown


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSlowdown:
    """One kernel during any collective."""

    name: str
    kernel_class: KernelClass
    grid: tuple[int, int, int]
    found: Slowdown


@dataclass(frozen=True, slots=True, kw_only=True)
class StretchedRuns:
    """Every run during a collective that has a base: its trace's index, its row among the events, duration - base.

    `call` is the index among its trace's calls of the collective that overlaps it longest, `UNKNOWN` of none.
    """

    rank: Int64
    row: Int64
    excess_ns: Floats
    call: Int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """The contention of a job. Times summed over all ranks; `of_rank` is stretched time by trace, in order.

    `by_collective` groups runs by the collective that overlaps each longest; `blame` shares each run's stretch among
    all.
    `covered_ns` is computation during collectives whose kernels have a base, `uncovered_ns` the rest of it.
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
    overlapped: Bools
    usable: Bools
    shaped: Bools
    rank: Int64
    row: Int64


@dataclass(frozen=True, slots=True)
class _Table:
    """The kernels' bases; `alone` holds the durations alone, kernel after kernel, cut at `edges`."""

    runs: _Runs
    base: Floats
    has_base: Bools
    num_alone: Int64
    alone: Int64
    edges: Int64


def _runs_of(traces: Sequence[GpuTrace], occupations: Sequence[Occupation]) -> tuple[_Runs, list[_Kernel]]:
    kernels: dict[_Kernel, int] = {}
    parts: list[tuple[Int64 | Bools, ...]] = []
    for index, (trace, occupation) in enumerate(zip(traces, occupations, strict=True)):
        events = trace.events
        rows = events.rows(EventRole.COMPUTE)
        start, end = events.start_ns[rows], events.end_ns[rows]
        duration = end - start
        columns = np.column_stack((events.name[rows], events.shape[rows], events.grid[rows], events.block[rows]))
        first, inverse = equal_rows(columns)
        numbers = np.empty(len(first), dtype=np.int64)
        for at, (name, shape, gx, gy, gz, bx, by, bz) in enumerate(columns[first].tolist()):
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
        touched = occupation.comm.within(start, end) > 0
        usable = (duration > 0) & (crowded <= CROWDED * duration)
        shaped = events.shape[rows] != UNKNOWN
        parts.append((numbers[inverse], duration, touched, usable, shaped, np.full(len(rows), index), rows))
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
    alone = np.flatnonzero(runs.usable & ~runs.overlapped)
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


def _believed(table: _Table) -> Bools:
    """The runs that can be compared with a base: not crowded, and not evidently another problem."""
    runs, base = table.runs, table.base[table.runs.kernel]
    plausible = (runs.duration <= PLAUSIBLE * base) & (PLAUSIBLE * runs.duration >= base)
    return runs.usable & table.has_base[runs.kernel] & (runs.shaped | plausible)


@dataclass(frozen=True, slots=True)
class _Cells:
    """Covered runs by (`of`, kernel): how many, their summed durations and bases, and both resampled.

    The resamples, (resample, cell), are those of the cells `drawn`.
    """

    kernel: Int64
    of: Int64
    count: Int64
    duration_ns: Int64
    base_ns: Floats
    num_alone: Int64
    drawn: Int64
    durations: Floats
    bases: Floats


def _cells(table: _Table, covered: Int64, of: Int64, seed: int) -> _Cells:
    runs = table.runs
    uniform = Uniform(seed)
    order = np.lexsort((runs.kernel[covered], of))
    of, rows = of[order], covered[order]
    kernel, duration = runs.kernel[rows], runs.duration[rows]
    begins = np.flatnonzero(np.diff(of, prepend=UNKNOWN) | np.diff(kernel, prepend=UNKNOWN))
    count = np.diff(begins, append=len(rows))
    kernel, of = kernel[begins], of[begins]
    base_ns = count * table.base[kernel]
    drawn = heaviest(base_ns)
    which, inverse = np.unique(kernel[drawn], return_inverse=True)
    edges = np.concatenate(([0], np.cumsum(count[drawn])))
    kept = np.concatenate([np.arange(at, at + num) for at, num in zip(begins[drawn], count[drawn], strict=True)])
    alone_edges = np.concatenate(([0], np.cumsum(table.num_alone[which])))
    alone = np.concatenate([table.alone[table.edges[k] : table.edges[k + 1]] for k in which.tolist()])
    return _Cells(
        kernel=kernel,
        of=of,
        count=count,
        duration_ns=np.add.reduceat(duration, begins),
        base_ns=base_ns,
        num_alone=table.num_alone[kernel],
        drawn=drawn,
        durations=resampled_sums(duration[kept], edges, uniform),
        bases=resampled_medians(alone, alone_edges, uniform)[:, inverse] * count[drawn],
    )


def _slowdowns(cells: _Cells, group: Int64) -> list[Slowdown]:
    """The slowdown of each group of cells; groups are numbered from 0, none is empty, none holds a kernel twice."""
    num = int(group.max()) + 1

    def summed(values: Int64 | Floats) -> Floats:
        return np.bincount(group, weights=values, minlength=num).astype(np.float64, copy=False)

    count, base_ns = summed(cells.count), summed(cells.base_ns)
    duration_ns, num_alone = summed(cells.duration_ns), summed(cells.num_alone)
    order = np.argsort(group[cells.drawn], kind="stable")
    begins = np.flatnonzero(np.diff(group[cells.drawn][order], prepend=UNKNOWN))
    bounds = np.full((2, num), np.nan)
    bounds[:, group[cells.drawn][order[begins]]] = intervals(
        np.add.reduceat(cells.durations[:, order], begins, axis=1),
        np.add.reduceat(cells.bases[:, order], begins, axis=1),
    )
    bounds[:, count < MIN_ALONE] = np.nan
    return [
        Slowdown(
            num_overlapped=int(count[at]),
            num_alone=int(num_alone[at]),
            base_ns=float(base_ns[at]),
            stretched_ns=float(duration_ns[at] - base_ns[at]),
            low=None if np.isnan(bounds[0, at]) else float(bounds[0, at]),
            high=None if np.isnan(bounds[1, at]) else float(bounds[1, at]),
        )
        for at in range(num)
    ]


@dataclass(frozen=True, slots=True)
class _Blame:
    """Stretched time by collective, and per covered run the call and the key of the one that overlaps it longest."""

    by_key: dict[CollectiveKey, float]
    keys: tuple[CollectiveKey, ...]
    call: Int64
    key: Int64


def _blame(traces: Sequence[GpuTrace], runs: _Runs, covered: Int64, excess: Floats) -> _Blame:
    numbers: dict[CollectiveKey, int] = {}
    shares: dict[int, float] = defaultdict(float)
    longest, key = (np.full(len(covered), UNKNOWN, dtype=np.int64) for _ in range(2))
    for index, trace in enumerate(traces):
        mine = np.flatnonzero(runs.rank[covered] == index)
        if not len(mine):
            continue
        key_of_call = np.array([numbers.setdefault(key_of(call), len(numbers)) for call in trace.calls], dtype=np.int64)
        pairs = overlaps_of(trace, runs.row[covered[mine]])
        whole = np.bincount(pairs.run, weights=pairs.shared_ns, minlength=len(mine))
        share = excess[mine[pairs.run]] * pairs.shared_ns / whole[pairs.run]
        for number, blamed in enumerate(np.bincount(key_of_call[pairs.call], weights=share).tolist()):
            shares[number] += blamed
        first = pairs.longest
        longest[mine[pairs.run[first]]] = pairs.call[first]
        key[mine[pairs.run[first]]] = key_of_call[pairs.call[first]]
    keys = tuple(numbers)
    touched = set(np.unique(key).tolist())
    by_key = {keys[number]: blamed for number, blamed in shares.items() if blamed or number in touched}
    return _Blame(dict(sorted(by_key.items(), key=lambda pair: (-pair[1], pair[0]))), keys, longest, key)


def contention_of(traces: Sequence[GpuTrace], occupations: Sequence[Occupation], seed: int = 0) -> Contention:
    """The contention of a job's ranks, from their traces."""
    runs, kernels = _runs_of(traces, occupations)
    table = _bases(runs, len(kernels))
    candidates = np.flatnonzero(runs.overlapped)
    covered = candidates[_believed(table)[candidates]] if len(kernels) else candidates
    excess = runs.duration[covered] - table.base[runs.kernel[covered]]
    blame = _blame(traces, runs, covered, excess)
    total, of_kernels = _by_kernel(table, covered, kernels, seed)
    classes, by_collective = _by_collective(table, covered, kernels, blame, seed)
    covered_ns = int(runs.duration[covered].sum())
    return Contention(
        total=total,
        of_rank=tuple(np.bincount(runs.rank[covered], weights=excess, minlength=len(traces)).tolist()),
        kernels=of_kernels,
        classes=classes,
        by_collective=by_collective,
        blame=blame.by_key,
        runs=StretchedRuns(rank=runs.rank[covered], row=runs.row[covered], excess_ns=excess, call=blame.call),
        covered_ns=covered_ns,
        uncovered_ns=int(runs.duration[candidates].sum()) - covered_ns,
    )


def _by_kernel(
    table: _Table, covered: Int64, kernels: list[_Kernel], seed: int
) -> tuple[Slowdown, tuple[KernelSlowdown, ...]]:
    """All runs in one, and the kernels that lost most, at most `TOP_KERNELS`."""
    if not len(covered):
        return Slowdown(num_overlapped=0, num_alone=0, base_ns=0.0, stretched_ns=0.0, low=None, high=None), ()
    cells = _cells(table, covered, np.zeros(len(covered), dtype=np.int64), seed)
    (total,) = _slowdowns(cells, np.zeros(len(cells.kernel), dtype=np.int64))
    each = _slowdowns(cells, np.arange(len(cells.kernel)))
    worst = np.argsort([-slowdown.stretched_ns for slowdown in each], kind="stable")[:TOP_KERNELS].tolist()
    return total, tuple(
        KernelSlowdown(name=kernel.name, kernel_class=kernel.kernel_class, grid=kernel.grid, found=each[at])
        for at in worst
        for kernel in (kernels[int(cells.kernel[at])],)
    )


def _by_collective(
    table: _Table, covered: Int64, kernels: list[_Kernel], blame: _Blame, seed: int
) -> tuple[tuple[ClassSlowdown, ...], dict[CollectiveKey, Slowdown]]:
    """The runs by kernel class and the collective that overlaps them longest, and by that collective alone."""
    known = np.flatnonzero(blame.key != UNKNOWN)
    if not len(known):
        return (), {}
    cells = _cells(table, covered[known], blame.key[known], seed)
    numbers: dict[tuple[KernelClass, int], int] = {}
    sorts = [kernels[kernel].kernel_class for kernel in cells.kernel.tolist()]
    group = [numbers.setdefault(pair, len(numbers)) for pair in zip(sorts, cells.of.tolist(), strict=True)]
    classes = [
        ClassSlowdown(kernel_class=sort, collective=blame.keys[number], found=one)
        for (sort, number), one in zip(numbers, _slowdowns(cells, np.array(group)), strict=True)
    ]
    keys, group_of_key = np.unique(cells.of, return_inverse=True)
    by_key = {
        blame.keys[number]: one for number, one in zip(keys.tolist(), _slowdowns(cells, group_of_key), strict=True)
    }
    return (
        tuple(sorted(classes, key=lambda row: (-row.found.stretched_ns, row.kernel_class, row.collective))),
        dict(sorted(by_key.items())),
    )
