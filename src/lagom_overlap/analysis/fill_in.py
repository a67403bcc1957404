"""Contention where the trace has no uncontended twin: the cost model estimates what it would have taken alone.

`contention.py` speaks only of kernels that also ran with no collective beside them. For the others the model gives the
slowdown r of the kernel beside the collective that lies longest beside it (Eqs 5 and 6: SMs held, memory traffic
taken), and Eq. 4 inverts the run: of length T, with collectives beside it for o of that time, it would have taken

    alone = T - o (1 - 1/r)

What the trace does not tell of the kernel is assumed by its class (`modelled_kernel.py`); the collective's traffic
follows from its measured rate. These are estimates: they are reported beside the measured stretch, never added to it.
Kernels beside which another kernel computes are left out, as they are of the measured contention.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lagom_overlap.analysis.collectives import CollectiveKey, CollectiveRow, key_of
from lagom_overlap.analysis.contention import CROWDED
from lagom_overlap.analysis.equal_rows import equal_rows
from lagom_overlap.analysis.findings import Findings, RankFindings
from lagom_overlap.analysis.groups import KernelKey
from lagom_overlap.analysis.intervals import depth_at_least
from lagom_overlap.analysis.modelled_kernel import cluster_of_trace, modelled_kernel
from lagom_overlap.collective import Collective
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.cost.contention import l2_miss_share, traffic_bytes_per_s
from lagom_overlap.trace.gpu_trace import NS_PER_S, UNKNOWN, Int64, Role
from lagom_overlap.units import MIB, format_seconds

PROFILE: Final = "plausible"
_FIFO_BYTES: Final = 4 * MIB
"""NCCL's Simple FIFO of a channel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FillIn:
    """What the cost model estimates of runs that have no twin; `left_ns` is what it cannot estimate either.

    `run_ns` is their length as it is, `alone_ns` as estimated alone; times summed over all ranks.
    """

    num_runs: int
    run_ns: int
    alone_ns: float
    left_ns: int
    profile: str = PROFILE

    @property
    def stretched_ns(self) -> float:
        """Estimated extra time beside collectives."""
        return self.run_ns - self.alone_ns

    @property
    def sentences(self) -> tuple[str, ...]:
        """One sentence that says what is estimated, not measured; none where nothing is."""
        if not self.num_runs:
            return ()
        return (
            f"{self.num_runs} kernel runs beside collectives ({format_seconds(self.run_ns / NS_PER_S)}) have no "
            f"uncontended twin: the cost model (profile {self.profile}) estimates that "
            f"{format_seconds(self.stretched_ns / NS_PER_S)} of it is stretch; this is no measurement",
        )


def slowdown_beside(kernel: KernelKey, alone_ns: float, row: CollectiveRow, model: ContentionModel) -> float:
    """r: the kernel's time beside the collective over its time alone, at least 1."""
    key, profile, gpu = row.key, model.profile, model.cluster.gpu
    held = modelled_kernel(kernel, alone_ns, gpu, profile)
    channels = min(key.num_channels, gpu.num_sms - 1)
    fifo_bytes = float(channels * _FIFO_BYTES)
    rate = 0.0
    if row.kind is not None and key.num_bytes > 0 and key.num_ranks > 1 and row.median_ns > 0:
        rate = Collective(row.kind, key.num_bytes, key.num_ranks).wire_bytes * NS_PER_S / row.median_ns
    traffic = traffic_bytes_per_s(
        rate,
        profile.user_traffic + profile.fifo_traffic * l2_miss_share(fifo_bytes, gpu.l2_bytes, profile.l2_share),
        amplification=profile.amplification,
        ceiling_bytes_per_s=profile.max_traffic_share * gpu.hbm_bytes_per_s,
    )
    beside = model.kernel_seconds(held, num_channels=channels, traffic_bytes_per_s=traffic, fifo_bytes=fifo_bytes)
    return max(1.0, beside / model.kernel_seconds(held))


def alone_ns(length_ns: float, beside_ns: float, slowdown: float) -> float:
    """The run's time alone, by Eq. 4: beside collectives it advanced at 1/r of its rate."""
    return length_ns - beside_ns * (1 - 1 / slowdown)


def _uncovered(findings: Findings, index: int) -> Int64:
    """Rows of kernels beside a collective that have no twin and run by themselves."""
    rank, runs = findings.ranks[index], findings.contention.runs
    events = rank.trace.events
    rows = events.rows(Role.COMPUTE)
    start, end = events.start_ns[rows], events.end_ns[rows]
    crowded = depth_at_least(start, end, 2).within(start, end)
    beside = (rank.occupation.comm.within(start, end) > 0) & (crowded <= CROWDED * (end - start))
    return np.setdiff1d(rows[beside], runs.row[runs.rank == index])


def _longest_beside(rank: RankFindings, rows: Int64) -> Int64:
    """For each kernel run the index of the call that lies longest beside it; of equals the first."""
    events, calls = rank.trace.events, rank.trace.calls
    best, length = np.full(len(rows), UNKNOWN), np.zeros(len(rows), dtype=np.int64)
    order = np.argsort(events.start_ns[rows], kind="stable")
    start, end = events.start_ns[rows][order], events.end_ns[rows][order]
    reach = np.maximum.accumulate(end) if len(end) else end
    for index, call in enumerate(calls):
        if call.event == UNKNOWN:
            continue
        began, ended = int(events.start_ns[call.event]), int(events.end_ns[call.event])
        low, high = np.searchsorted(reach, began, side="right"), np.searchsorted(start, ended, side="left")
        if high <= low:
            continue
        near = order[low:high]
        beside = np.minimum(end[low:high], ended) - np.maximum(start[low:high], began)
        longer = beside > length[near]
        best[near[longer]], length[near[longer]] = index, beside[longer]
    return best


def fill_in(findings: Findings) -> FillIn:
    """What the cost model estimates of all runs without a twin; nothing where the GPU has no preset."""
    rows_of_keys = {row.key: row for row in findings.rows}
    profile = load_profile(PROFILE)
    num = run_ns = left_ns = 0
    estimated_ns = 0.0
    for index, rank in enumerate(findings.ranks):
        rows, cluster = _uncovered(findings, index), cluster_of_trace(rank.trace)
        events = rank.trace.events
        lengths = events.end_ns[rows] - events.start_ns[rows]
        if cluster is None:
            left_ns += int(lengths.sum())
            continue
        model = ContentionModel(cluster, profile)
        beside = rank.occupation.comm.within(events.start_ns[rows], events.end_ns[rows])
        calls = _longest_beside(rank, rows)
        ratio = _ratios(rank, rows, calls, rows_of_keys, model)
        known = calls != UNKNOWN
        num += int(known.sum())
        run_ns += int(lengths[known].sum())
        left_ns += int(lengths[~known].sum())
        estimated_ns += float((lengths - beside * (1 - 1 / ratio))[known].sum())
    return FillIn(num_runs=num, run_ns=run_ns, alone_ns=estimated_ns, left_ns=left_ns)


def _ratios(
    rank: RankFindings,
    rows: Int64,
    calls: Int64,
    rows_of_keys: dict[CollectiveKey, CollectiveRow],
    model: ContentionModel,
) -> NDArray[np.float64]:
    """The slowdown of each kernel run beside its call, 1 where it has none.

    Computed once per kernel and collective, for it hardly depends on a run's own length.
    """
    events = rank.trace.events
    keys: dict[CollectiveKey, int] = {}
    number = np.array([keys.setdefault(key_of(call), len(keys)) for call in rank.trace.calls], dtype=np.int64)
    if not keys:
        return np.ones(len(rows))
    which = np.where(calls == UNKNOWN, UNKNOWN, number[calls])
    columns = np.column_stack((events.name[rows], events.grid[rows], events.block[rows], which))
    first, inverse = equal_rows(columns)
    held = list(keys)
    found = np.ones(len(first))
    for index, at in enumerate(first.tolist()):
        if which[at] == UNKNOWN:
            continue
        name, gx, gy, gz, bx, by, bz, key = columns[at].tolist()
        kernel = KernelKey(events.names[name], (gx, gy, gz), (bx, by, bz))
        length = int(events.end_ns[rows[at]] - events.start_ns[rows[at]])
        found[index] = slowdown_beside(kernel, length, rows_of_keys[held[key]], model)
    return found[inverse]
