"""Rules about waits that no setting of a collective shortens: for the host, for late ranks, for other stages."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from lagom_overlap.analysis.advice import Advice, per_step, per_step_s
from lagom_overlap.analysis.findings import Findings, RankFindings
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.trace.gpu_trace import NS_PER_S, SLOW_LAUNCH_NS
from lagom_overlap.units import format_seconds

_HOST_SHARE: Final = 0.10
"""Of the span. From here on the CPU is called what limits the job; below it, nothing is said. Chosen."""
_WAIT_SHARE: Final = 0.30
"""Of the time in matched collectives. Ranks of a healthy job wait for each other, too. Chosen."""
_STALL_NS: Final = 1_000_000
"""A launch takes microseconds; a GPU that waits longer than this for one waits for something else on the CPU."""


def _stalled_ns(rank: RankFindings) -> int:
    """The host-bound time of a rank that comes in gaps too long for a launch."""
    gaps = rank.occupation.host_bound
    lengths_ns = gaps.end_ns - gaps.start_ns
    return int(lengths_ns[lengths_ns > _STALL_NS].sum())


def host_bound(findings: Findings) -> Iterator[Advice]:
    """A GPU that has nothing to do because the next kernel is not yet launched."""
    host_ns = sum(rank.measures.host_bound_ns for rank in findings.ranks)
    span_ns = sum(rank.measures.span_ns for rank in findings.ranks)
    if not span_ns or host_ns < _HOST_SHARE * span_ns:
        return
    stalled_ns = sum(_stalled_ns(rank) for rank in findings.ranks)
    stalls = 2 * stalled_ns >= host_ns
    yield Advice(
        rule="host_bound",
        what="The CPU stalls before it launches more: look for data loading and synchronisation; no communication knob "
        "helps before that"
        if stalls
        else "The CPU launches too slowly: no communication knob helps before that; capture the step in CUDA graphs",
        apply='torch.cuda.set_sync_debug_mode("warn")  # names what waits for the GPU; then DataLoader(num_workers=)'
        if stalls
        else 'model = torch.compile(model, mode="reduce-overhead")',
        evidence=f"in {100 * host_ns / span_ns:.0f} % of the time the GPU had nothing to do because the next "
        f"kernel was not yet launched ({per_step(findings, host_ns)}; {100 * stalled_ns / host_ns:.0f} % of it in gaps "
        f"of more than {format_seconds(_STALL_NS / NS_PER_S)}; profiling itself slows launches)",
        predicted_gain_s=per_step_s(findings, host_ns),
    )


def blocking_launches(findings: Findings) -> Iterator[Advice]:
    """Launches that hold the CPU while the GPU is idle."""
    blocking = [rank.blocking for rank in findings.ranks]
    idle_ns = sum(one.idle_ns for one in blocking)
    longest = max(
        (one.longest for one in blocking if one.longest), key=lambda call: call.end_ns - call.start_ns, default=None
    )
    if longest is None or not idle_ns:
        return
    causes = {
        "collective": sum(one.idle_collective_ns for one in blocking),
        "first": sum(one.idle_first_ns for one in blocking),
        "other": sum(one.idle_other_ns for one in blocking),
    }
    cause = max(causes, key=lambda name: causes[name])
    what, apply = {
        "collective": (
            "Make communicators before the first step: calls of collectives block the CPU while the GPU is idle",
            'dist.init_process_group("nccl", device_id=device)  # of other groups: a call before the loop',
        ),
        "first": (
            "Load kernels before the steps that count: their first launches block while the GPU is idle",
            "export CUDA_MODULE_LOADING=EAGER  # or profile later: torch.profiler.schedule(wait=5, warmup=2, active=3)",
        ),
        "other": (
            "Find what holds the launches: they block while the GPU is idle, and their queue is not full",
            "nsys profile --trace=cuda,nvtx,osrt ...  # shows the lock or call of another thread that they wait for",
        ),
    }[cause]
    span_ns = sum(rank.measures.span_ns for rank in findings.ranks)
    num, blocked_ns = sum(one.num for one in blocking), sum(one.blocked_ns for one in blocking)
    yield Advice(
        rule="blocking_launches",
        what=what,
        apply=apply,
        evidence=f"{num / findings.num_windows:.1f} launches per step took {format_seconds(SLOW_LAUNCH_NS / NS_PER_S)} "
        f"or longer on the CPU, {per_step(findings, blocked_ns)} in all ({100 * blocked_ns / span_ns:.1f} % of it; the "
        f"longest, {longest.name}, {format_seconds((longest.end_ns - longest.start_ns) / NS_PER_S)}); for "
        f"{per_step(findings, idle_ns)} of that nothing ran on the GPU",
        predicted_gain_s=per_step_s(findings, idle_ns),
    )


def late_peers(findings: Findings) -> Iterator[Advice]:
    """Ranks that wait in their collectives for the last one to arrive."""
    waits = [sum(wait for wait in rank.waiting_ns if wait is not None) for rank in findings.ranks]
    matched = [
        sum(call.duration_ns for call, wait in zip(rank.trace.calls, rank.waiting_ns, strict=True) if wait is not None)
        for rank in findings.ranks
    ]
    if len(findings.ranks) < 2 or not sum(matched) or sum(waits) < _WAIT_SHARE * sum(matched):
        return
    late = int(np.argmin([wait / total if total else 1.0 for wait, total in zip(waits, matched, strict=True)]))
    rank = findings.ranks[late].trace
    name = f"rank {rank.rank}" if rank.rank is not None else rank.file
    yield Advice(
        rule="late_peers",
        what=f"Ranks wait for each other, most of all for {name}: even out the work before tuning collectives",
        apply=f"lagom analyze <trace of {name}>  # find why it arrives late; no NCCL knob shortens this wait",
        evidence=f"{100 * sum(waits) / sum(matched):.0f} % of the matched communication is waiting for the last peer "
        f"({per_step(findings, sum(waits))}); {name} itself waits least. To simulate it: [cost] rank_skew_s = "
        f"{(findings.rank_skew_ns or 0.0) / NS_PER_S:.2g}",
        predicted_gain_s=per_step_s(findings, sum(waits)),
    )


def pipeline_bubbles(findings: Findings) -> Iterator[Advice]:
    """Stages that wait in send and receive."""
    transfers = [
        row
        for row in findings.rows
        if row.kind is CollectiveKind.SEND_RECV and any(w in row.key.communicator.lower() for w in ("pp", "pipeline"))
    ]
    exposed_ns = sum(row.exposed_ns for row in transfers)
    span_ns = sum(rank.measures.span_ns for rank in findings.ranks)
    if span_ns and exposed_ns >= _HOST_SHARE * span_ns:
        yield Advice(
            rule="pipeline_bubbles",
            what="Split the batch into twice as many micro-batches: at most half of the bubble goes",
            apply="num_microbatches *= 2  # of the pipeline schedule",
            evidence=f"stages wait exposed in send/receive for {100 * exposed_ns / span_ns:.0f} % of the time",
            predicted_gain_s=per_step_s(findings, exposed_ns / 2),
        )
