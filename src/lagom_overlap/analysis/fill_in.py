"""Contention where the trace has no uncontended twin: the cost model estimates what it would have taken alone.

`contention.py` speaks only of kernels that also ran without a concurrent collective. For the others the model gives the
slowdown r of the kernel during the collective that overlaps it longest (Eqs 5 and 6: SMs held, memory traffic
taken), and Eq. 4 inverts the run: of length T, with concurrent collectives for o of that time, it would have taken

    alone = T - o (1 - 1/r)

What the trace does not tell of the kernel is assumed by its class (`concurrency_model.py`); the collective's traffic
follows from its measured rate. These are estimates: they are reported next to the measured stretch, never added to it.
Kernels that overlap another kernel are left out, as they are of the measured contention.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from lagom_overlap.analysis.collectives import CollectiveKey, CollectiveRow, key_of
from lagom_overlap.analysis.concurrency import overlaps_of
from lagom_overlap.analysis.contention import CROWDED
from lagom_overlap.analysis.equal_rows import equal_rows
from lagom_overlap.analysis.estimate import PROFILE, FillIn
from lagom_overlap.analysis.findings import Findings, RankFindings
from lagom_overlap.analysis.groups import KernelKey
from lagom_overlap.analysis.intervals import depth_at_least
from lagom_overlap.analysis.trace_gpu import cluster_of_trace
from lagom_overlap.hardware import Cluster
from lagom_overlap.trace.gpu_trace import UNKNOWN, EventRole, Floats, Int64


def _uncovered(findings: Findings, index: int) -> Int64:
    """Rows of kernels during a collective that have no twin and run by themselves."""
    rank, runs = findings.ranks[index], findings.contention.runs
    events = rank.trace.events
    rows = events.rows(EventRole.COMPUTE)
    start, end = events.start_ns[rows], events.end_ns[rows]
    crowded = depth_at_least(start, end, 2).within(start, end)
    touched = (rank.occupation.comm.within(start, end) > 0) & (crowded <= CROWDED * (end - start))
    return np.setdiff1d(rows[touched], runs.row[runs.rank == index])


def _longest_overlap(rank: RankFindings, rows: Int64) -> Int64:
    """For each kernel run the index of the call that overlaps it longest; of equals the first."""
    pairs = overlaps_of(rank.trace, rows)
    best = np.full(len(rows), UNKNOWN, dtype=np.int64)
    best[pairs.run[pairs.longest]] = pairs.call[pairs.longest]
    return best


def fill_in(findings: Findings, machine: Cluster | None = None) -> FillIn:
    """What the cost model estimates of all runs without a twin on that machine, by default the preset of the GPU.

    Nothing where no preset has it.
    """
    rows_of_keys = {row.key: row for row in findings.rows}
    num = run_ns = 0
    estimated_ns = 0.0
    for index, rank in enumerate(findings.ranks):
        rows, cluster = _uncovered(findings, index), cluster_of_trace(rank.trace, machine)
        events = rank.trace.events
        lengths = events.end_ns[rows] - events.start_ns[rows]
        if cluster is None:
            continue
        from lagom_overlap.analysis import concurrency_model  # noqa: PLC0415 - the cost model takes its time to import

        slowdown = partial(concurrency_model.slowdown_during, model=concurrency_model.model_of(cluster, PROFILE))
        touched_ns = rank.occupation.comm.within(events.start_ns[rows], events.end_ns[rows])
        calls = _longest_overlap(rank, rows)
        ratio = _ratios(rank, rows, calls, rows_of_keys, slowdown)
        known = calls != UNKNOWN
        num += int(known.sum())
        run_ns += int(lengths[known].sum())
        estimated_ns += float((lengths - touched_ns * (1 - 1 / ratio))[known].sum())
    return FillIn(num_runs=num, run_ns=run_ns, alone_ns=estimated_ns, left_ns=findings.contention.uncovered_ns - run_ns)


def _ratios(
    rank: RankFindings,
    rows: Int64,
    calls: Int64,
    rows_of_keys: dict[CollectiveKey, CollectiveRow],
    slowdown: Callable[..., float],
) -> Floats:
    """The slowdown of each kernel run during its call, 1 where it has none.

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
    every_key = list(keys)
    ratios = np.ones(len(first))
    for index, at in enumerate(first.tolist()):
        if which[at] == UNKNOWN:
            continue
        name, gx, gy, gz, bx, by, bz, key = columns[at].tolist()
        kernel = KernelKey(events.names[name], (gx, gy, gz), (bx, by, bz))
        length = int(events.end_ns[rows[at]] - events.start_ns[rows[at]])
        row = rows_of_keys[every_key[key]]
        ratios[index] = slowdown(kernel, length, key=row.key, kind=row.kind, comm_ns=row.median_ns)
    return ratios[inverse]
