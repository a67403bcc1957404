"""What to change, each with its evidence in this trace; a rule that cannot show evidence stays silent.

Where all stay silent, `looked_for` says what was looked for, and why nothing can be gained.

Every rule is one function from `Findings` to at most a few `Advice`. A predicted gain is per step of the average rank
and is an upper bound where the sentence says "at most". Knobs are named only where they reach: by the kind of
collective (`KnobReach`), and by NCCL's version where the trace says it. Not covered, because a Kineto trace does not
show it: CUDA_DEVICE_MAX_CONNECTIONS (a queue and a true dependency look alike), the wire chunk (no field holds it).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

import numpy as np

from lagom_overlap.analysis.collectives import CollectiveKey
from lagom_overlap.analysis.contention import Slowdown
from lagom_overlap.analysis.findings import Findings, RankFindings
from lagom_overlap.analysis.kernel_class import KernelClass
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.sim.what_if import COPY_ENGINES, AskedChange, WhatIf
from lagom_overlap.trace.gpu_trace import NO_TIME, NS_PER_S, SLOW_LAUNCH_NS, UNKNOWN, EventRole, KnobReach
from lagom_overlap.units import MIB, format_bytes, format_seconds
from lagom_overlap.workload.step.rules import changes_of

_MIN_GAIN: Final = 0.002
"""Advice worth less than this part of a step is left out."""
_HIDDEN: Final = 0.25
"""A collective counts as hidden if at most this part of it is exposed."""
_WHOLLY: Final = 0.95
"""Of what nothing hides; the rest is what a stray small kernel may cover."""
_NEAR_NS: Final = 20_000
"""A kernel that starts this soon after its cause followed it at once."""
_LARGE: Final = 4 * MIB
"""From here on a call should come near its wire's rate; below it latency may be what it costs. Chosen, not measured."""
_SMALL: Final = 1 * MIB
"""Calls below it are worth joining: at such sizes latency is a good part of their time. Chosen, not measured."""
_SHARDED: Final = frozenset({CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER})
"""What sharded data parallelism alternates."""
_MAX_NODE_RANKS: Final = 8
"""A communicator of more ranks may leave the machine, which copy engines cannot."""
_HOST_SHARE: Final = 0.10
"""Of the span. From here on the CPU is called what limits the job; below it, nothing is said. Chosen."""
_WAIT_SHARE: Final = 0.30
"""Of the time in matched collectives. Ranks of a healthy job wait for each other, too. Chosen."""
WORTH: Final = 0.02
"""Less exposed communication than this part of a step is not worth a search."""
_STALL_NS: Final = 1_000_000
"""A launch takes microseconds; a GPU that waits longer than this for one waits for something else on the CPU."""
_CTAS_SINCE: Final = (2, 17)
"""The first NCCL whose communicators take minCTAs and maxCTAs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One change: what, the line to apply, why, and what it may gain per step of the average rank.

    `change` is what the model is asked of it (`AskedChange`), "" where it cannot be.
    """

    rule: str
    what: str
    apply: str
    evidence: str
    predicted_gain_s: float
    change: str = ""


def describe(key: CollectiveKey) -> str:
    """A collective for people: `"all_gather of 64 MiB on fsdp (8 channels)"`."""
    size = f" of {format_bytes(key.num_bytes)}" if key.num_bytes else ""
    channels = f" ({key.num_channels} channels)" if key.num_channels else ""
    return f"{key.op}{size} on {key.communicator}{channels}"


def nccl_version(text: str) -> tuple[int, int] | None:
    """(major, minor) of `"2.27.5"`; None where the trace does not say."""
    parts = text.split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) >= 2 and all(p.isdecimal() for p in parts[:2]) else None


def _version(findings: Findings) -> tuple[int, int] | None:
    return next((v for rank in findings.ranks if (v := nccl_version(rank.trace.nccl_version)) is not None), None)


def _per_step(findings: Findings, length_ns: float) -> float:
    return length_ns / NS_PER_S / findings.num_windows


def _time(findings: Findings, length_ns: float) -> str:
    return f"{format_seconds(_per_step(findings, length_ns))} per step"


def _ratio(slowdown: Slowdown) -> str:
    interval = (
        f" ({slowdown.low:.2f}-{slowdown.high:.2f})" if slowdown.low is not None and slowdown.high is not None else ""
    )
    return f"{slowdown.slowdown:.2f} times as long{interval}"


def _channel_line(key: CollectiveKey, bound: Literal["min", "max"], channels: int, findings: Findings) -> str:
    """What bounds the channels, and of how much more than this collective."""
    version = _version(findings)
    if key.reach is KnobReach.P2P_CHANNELS:
        return f"export NCCL_{bound.upper()}_P2P_NCHANNELS={channels}  # of every communicator's point-to-point"
    if version is not None and version < _CTAS_SINCE:
        return f"export NCCL_{bound.upper()}_NCHANNELS={channels}  # of every communicator"
    constructor = "init_process_group" if key.communicator == "default_pg" else "new_group"
    return (
        f"opts = dist.ProcessGroupNCCL.Options(); opts.config.{bound}_ctas = {channels}; "
        f"dist.{constructor}(..., pg_options=opts)  # where {key.communicator} is made; holds for all its collectives"
    )


def _fewer_channels(findings: Findings) -> Iterator[Advice]:
    rows = {row.key: row for row in findings.rows}
    for key, slowdown in findings.contention.by_collective.items():
        row = rows.get(key)
        if row is None or key.reach is KnobReach.NONE or not slowdown.is_proven or key.num_channels < 2:
            continue
        if row.exposed_ns > _HIDDEN * row.total_ns:
            continue
        channels = max(1, key.num_channels // 2)
        yield Advice(
            rule="fewer_channels",
            what=f"Give {describe(key)} {channels} channel{'s' if channels > 1 else ''}: at most half of its "
            "stretch goes",
            apply=_channel_line(key, "max", channels, findings),
            evidence=f"{slowdown.num_overlapped} kernel runs during it take {_ratio(slowdown)}, "
            f"{_time(findings, slowdown.stretched_ns)} in all; only "
            f"{100 * row.exposed_ns / row.total_ns:.0f} % of it is exposed",
            predicted_gain_s=_per_step(findings, slowdown.stretched_ns / 2),
            change=AskedChange.channels(channels).change,
        )


def _more_channels(findings: Findings) -> Iterator[Advice]:
    for row in findings.rows:
        key = row.key
        if key.reach is not KnobReach.TUNER or key.num_bytes < _LARGE or row.busbw_bytes_per_s is None:
            continue
        if key.num_channels < 1 or row.exposed_ns < row.total_ns / 2:
            continue
        better = [
            other
            for other in findings.rows
            if (other.key.op, other.key.communicator, other.key.num_ranks) == (key.op, key.communicator, key.num_ranks)
            and other.key.num_channels > key.num_channels
            and key.num_bytes <= 4 * other.key.num_bytes <= 16 * key.num_bytes
            and (other.busbw_bytes_per_s or 0) >= 1.3 * row.busbw_bytes_per_s
        ]
        if not better:
            continue
        best = max(better, key=lambda other: (other.busbw_bytes_per_s or 0, other.key))
        channels = best.key.num_channels
        yield Advice(
            rule="more_channels",
            what=f"Give {describe(key)} {channels} channels",
            apply=_channel_line(key, "min", channels, findings),
            evidence=f"it runs at {row.busbw_bytes_per_s / 1e9:.1f} GB/s of bus bandwidth and is "
            f"{100 * row.exposed_ns / row.total_ns:.0f} % exposed; {describe(best.key)} reaches "
            f"{(best.busbw_bytes_per_s or 0) / 1e9:.1f} GB/s in this trace",
            predicted_gain_s=_per_step(
                findings, row.exposed_ns * (1 - row.busbw_bytes_per_s / (best.busbw_bytes_per_s or 1))
            ),
        )


def _larger_buckets(findings: Findings) -> Iterator[Advice]:
    reduces = [row for row in findings.rows if row.kind is CollectiveKind.ALL_REDUCE and row.key.num_bytes]
    for communicator in sorted({row.key.communicator for row in reduces}):
        alike = [row for row in reduces if row.key.communicator == communicator]
        small = [row for row in alike if row.key.num_bytes < _SMALL]
        large = [row for row in alike if row.key.num_bytes >= _SMALL]
        count = sum(row.count for row in small)
        if count < 4 * findings.num_windows:
            continue
        exposed_ns = sum(row.exposed_ns for row in small)
        best = max((row.busbw_bytes_per_s or 0 for row in large), default=0)
        if best:
            gain = sum(row.exposed_ns * max(0.0, 1 - (row.busbw_bytes_per_s or 0) / best) for row in small)
            compared = f"large ones reach {best / 1e9:.1f} GB/s"
        else:
            gain = exposed_ns * (1 - findings.num_windows / count)
            compared = "each pays the latency that one joined call pays once"
        is_ddp = "DDP" in findings.frameworks
        yield Advice(
            rule="larger_buckets",
            what=f"Join the small all-reduces on {communicator} into fewer: at most their latency goes",
            apply="DistributedDataParallel(model, bucket_cap_mb=25)  # if they are gradient buckets; "
            "metrics and statistics: reduce one joined tensor"
            if is_ddp
            else "dist.all_reduce(torch._utils._flatten_dense_tensors(tensors))  # one joined tensor; gradients: "
            "DistributedDataParallel joins them into buckets of 25 MB",
            evidence=f"{count / findings.num_windows:.0f} all-reduces below {format_bytes(_SMALL)} per step, "
            f"exposed for {_time(findings, exposed_ns)}; {compared}",
            predicted_gain_s=_per_step(findings, gain),
        )


def _waiting_buckets(findings: Findings) -> Iterator[Advice]:
    """DDP hides all buckets but the last where its engine lets it; without the engine's annotations it is another."""
    if "DDP" not in findings.frameworks or "ProcessGroupNCCL" in findings.frameworks:
        return
    reduces = [
        row
        for row in findings.rows
        if row.kind is CollectiveKind.ALL_REDUCE and row.key.reach is KnobReach.TUNER and row.key.num_bytes >= _SMALL
    ]
    count, total_ns = sum(row.count for row in reduces), sum(row.total_ns for row in reduces)
    exposed_ns = sum(row.exposed_ns for row in reduces)
    if count < 2 * findings.num_windows or exposed_ns < _WHOLLY * total_ns:
        return
    for change in changes_of("ddp"):
        yield Advice(
            rule="waiting_buckets",
            what=f"Let DDP's buckets overlap. From {change.software} {change.since} on, {change.what}",
            apply=f"{change.avoided_by}  # in the environment of all ranks",
            evidence=f"{count / findings.num_windows:.0f} all-reduces per step, of which "
            f"{100 * exposed_ns / total_ns:.0f} % is exposed, by an engine without annotations in the trace; at most "
            "all but the last of them can be hidden",
            predicted_gain_s=_per_step(findings, exposed_ns * (1 - findings.num_windows / count)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Queued:
    """Calls of a communicator that waited for another of its own: how many, how long, what of it may be won (ns)."""

    count: int = 0
    queued_ns: int = 0
    won_ns: int = 0

    def __add__(self, other: "_Queued") -> "_Queued":
        return _Queued(
            count=self.count + other.count,
            queued_ns=self.queued_ns + other.queued_ns,
            won_ns=self.won_ns + other.won_ns,
        )


_Pair = tuple[CollectiveKind, CollectiveKind]
"""The kind of a call, and of the one that it waited for."""


def _queued_behind(rank: RankFindings) -> dict[str, dict[_Pair, _Queued]]:
    """By communicator and kinds, calls that started as one of another kind ended, and were launched before that."""
    events, calls = rank.trace.events, rank.trace.calls
    by_group: dict[str, list[int]] = {}
    for index, call in enumerate(calls):
        if call.event != UNKNOWN:
            by_group.setdefault(call.communicator, []).append(index)
    rows = events.rows(EventRole.COMPUTE)
    rows = rows[np.argsort(events.start_ns[rows], kind="stable")]
    begins, ends = events.start_ns[rows], events.end_ns[rows]
    queued: dict[str, dict[_Pair, _Queued]] = {}
    for communicator, indices in by_group.items():
        indices.sort(key=lambda index: int(events.start_ns[calls[index].event]))
        for before, after in pairwise(indices):
            kind, other = calls[after].kind, calls[before].kind
            if kind is None or other is None or kind is other or CollectiveKind.SEND_RECV in (kind, other):
                continue
            ended = int(events.end_ns[calls[before].event])
            row = calls[after].event
            start, launch = int(events.start_ns[row]), int(events.launch_ns[row])
            if launch == NO_TIME or launch >= ended or not 0 <= start - ended <= _NEAR_NS:
                continue
            between = slice(*np.searchsorted(begins, (ended, start)))
            if np.any(ends[between] <= start):  # it waited for a kernel that waited for the other: a true dependence
                continue
            queued_ns = start - max(launch, int(events.start_ns[calls[before].event]))
            one = _Queued(count=1, queued_ns=queued_ns, won_ns=min(queued_ns, int(rank.exposed_ns[after])))
            mine = queued.setdefault(communicator, {})
            mine[kind, other] = mine.get((kind, other), _Queued()) + one
    return queued


def _reverse(count: int) -> str:
    return f", and {count} the other way round" if count else ""


def _shared_communicator(findings: Findings) -> Iterator[Advice]:
    parts: dict[tuple[str, frozenset[CollectiveKind]], dict[_Pair, _Queued]] = {}
    for rank in findings.ranks:
        for communicator, by_pair in _queued_behind(rank).items():
            for pair, waiting in by_pair.items():
                mine = parts.setdefault((communicator, frozenset(pair)), {})
                mine[pair] = mine.get(pair, _Queued()) + waiting
    for (communicator, kinds), by_pair in parts.items():
        (kind, other), queued = max(by_pair.items(), key=lambda item: (item[1].won_ns, item[0]))
        all_queued = sum(by_pair.values(), _Queued())
        moved, kept = (kind, other) if kind.traits.adds and not other.traits.adds else (other, kind)
        yield Advice(
            rule="shared_communicator",
            what=f"Give {_noun(moved)} a communicator of its own: {communicator}, which {_noun(kept)} uses too, runs "
            "one collective at a time",
            apply="model.set_separate_reduce_scatter_group(True)  # FSDP2, torch 2.13 or later"
            if "FSDP" in findings.frameworks and kinds == _SHARDED
            else f"own_group = dist.new_group(ranks)  # a second group of the same ranks, for {_noun(moved)}",
            evidence=f"{queued.count} calls of {kind.value} on {communicator} started at once when the {other.value} "
            f"before them ended{_reverse(all_queued.count - queued.count)}, queued for "
            f"{_time(findings, all_queued.queued_ns)}; of that at most {_time(findings, all_queued.won_ns)} was "
            "exposed",
            predicted_gain_s=_per_step(findings, all_queued.won_ns),
        )


def _noun(kind: CollectiveKind) -> str:
    return kind.value.replace("_", "-")


def _late_all_gathers(rank: RankFindings) -> tuple[int, int, int]:
    """(all-gathers launched too late, their exposed ns, exposed ns of all all-gathers)."""
    events = rank.trace.events
    count = late_ns = all_ns = 0
    for index, call in enumerate(rank.trace.calls):
        if call.kind is not CollectiveKind.ALL_GATHER or call.event == UNKNOWN:
            continue
        exposed_ns = int(rank.exposed_ns[index])
        all_ns += exposed_ns
        launch, start = int(events.launch_ns[call.event]), int(events.start_ns[call.event])
        if launch != NO_TIME and 0 <= start - launch <= _NEAR_NS and exposed_ns > 0:
            count += 1
            late_ns += exposed_ns
    return count, late_ns, all_ns


def _prefetch(findings: Findings) -> Iterator[Advice]:
    if "FSDP" not in findings.frameworks:
        return
    parts = [_late_all_gathers(rank) for rank in findings.ranks]
    count, late_ns, all_ns = (sum(part[index] for part in parts) for index in range(3))
    if count and late_ns >= all_ns / 2:
        yield Advice(
            rule="prefetch",
            what="Prefetch the next layers' all-gathers further ahead: at most their exposed time goes",
            apply="for a, b, c in zip(layers, layers[1:], layers[2:]): a.set_modules_to_forward_prefetch([b, c])"
            "  # FSDP2; over reversed(layers) set_modules_to_backward_prefetch",
            evidence=f"{count} exposed all-gathers started within {format_seconds(_NEAR_NS / NS_PER_S)} of their "
            f"launch: the wire was free, the launch came late; exposed {_time(findings, late_ns)}",
            predicted_gain_s=_per_step(findings, late_ns),
        )


def _carve_out(findings: Findings) -> Iterator[Advice]:
    sms = next((rank.trace.num_sms for rank in findings.ranks if rank.trace.num_sms), None)
    gpu = next((rank.trace.gpu_name for rank in findings.ranks if rank.trace.gpu_name), "")
    if sms is None:
        return
    channels = max((row.key.num_channels for row in findings.rows if row.key.num_channels < sms), default=0)
    for kernel in findings.contention.kernels:
        blocks = kernel.grid[0] * kernel.grid[1] * kernel.grid[2]
        slowdown = kernel.found
        if kernel.kernel_class is not KernelClass.GEMM or blocks != sms or not slowdown.is_proven or not channels:
            continue
        gain_ns = slowdown.stretched_ns - slowdown.base_ns * channels / (sms - channels)
        if gain_ns <= 0:
            continue
        blackwell = any(word in gpu for word in ("B100", "B200", "B300", "GB200", "GB300"))
        yield Advice(
            rule="carve_out",
            what=f"Leave {channels} SMs to the collectives: the persistent GEMM waits for a second wave",
            apply=f"stream = torch.cuda.GreenContext.create(num_sms={sms - channels}).Stream()"
            if blackwell
            else f"torch._C._set_sm_carveout_experimental({channels})",
            evidence=f"a GEMM with one block for each of the {sms} SMs takes {_ratio(slowdown)} during collectives of "
            f"up to {channels} channels ({slowdown.num_overlapped} runs)",
            predicted_gain_s=_per_step(findings, gain_ns),
        )
        return


def _copy_engine(findings: Findings) -> Iterator[Advice]:
    version = _version(findings)
    if "FSDP" not in findings.frameworks or version is None or version < (2, 28):
        return
    gathers = [
        (key, slowdown)
        for key, slowdown in findings.contention.by_collective.items()
        if key.op == CollectiveKind.ALL_GATHER and slowdown.is_proven and 2 <= key.num_ranks <= _MAX_NODE_RANKS
    ]
    stretched_ns = sum(slowdown.stretched_ns for _, slowdown in gathers)
    if gathers:
        yield Advice(
            rule="copy_engine_all_gather",
            what="Let the copy engines gather (no SM): at most the stretch during all-gathers goes; "
            "needs one NVLink domain",
            apply='model.set_symm_mem_for_comm("NCCL")  # FSDP2, torch 2.13 or later; start with NCCL_CTA_POLICY=2',
            evidence=f"kernels during {describe(gathers[0][0])} take {_ratio(gathers[0][1])}; "
            f"NCCL {version[0]}.{version[1]} has copy-engine collectives",
            predicted_gain_s=_per_step(findings, stretched_ns),
            change=COPY_ENGINES.change,
        )


def _stalled_ns(rank: RankFindings) -> int:
    """The host-bound time of a rank that comes in gaps too long for a launch."""
    gaps = rank.occupation.host_bound
    lengths_ns = gaps.end_ns - gaps.start_ns
    return int(lengths_ns[lengths_ns > _STALL_NS].sum())


def _host_bound(findings: Findings) -> Iterator[Advice]:
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
        f"kernel was not yet launched ({_time(findings, host_ns)}; {100 * stalled_ns / host_ns:.0f} % of it in gaps "
        f"of more than {format_seconds(_STALL_NS / NS_PER_S)}; profiling itself slows launches)",
        predicted_gain_s=_per_step(findings, host_ns),
    )


def _blocking_launches(findings: Findings) -> Iterator[Advice]:
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
        f"or longer on the CPU, {_time(findings, blocked_ns)} in all ({100 * blocked_ns / span_ns:.1f} % of it; the "
        f"longest, {longest.name}, {format_seconds((longest.end_ns - longest.start_ns) / NS_PER_S)}); for "
        f"{_time(findings, idle_ns)} of that nothing ran on the GPU",
        predicted_gain_s=_per_step(findings, idle_ns),
    )


def _late_peers(findings: Findings) -> Iterator[Advice]:
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
        f"({_time(findings, sum(waits))}); {name} itself waits least. To simulate it: [cost] rank_skew_s = "
        f"{(findings.rank_skew_ns or 0.0) / NS_PER_S:.2g}",
        predicted_gain_s=_per_step(findings, sum(waits)),
    )


def _pipeline_bubbles(findings: Findings) -> Iterator[Advice]:
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
            predicted_gain_s=_per_step(findings, exposed_ns / 2),
        )


_RULES: Final[tuple[Callable[[Findings], Iterator[Advice]], ...]] = (
    _fewer_channels,
    _more_channels,
    _larger_buckets,
    _waiting_buckets,
    _shared_communicator,
    _prefetch,
    _carve_out,
    _copy_engine,
    _host_bound,
    _blocking_launches,
    _late_peers,
    _pipeline_bubbles,
)


def advice_of(findings: Findings) -> tuple[Advice, ...]:
    """All advice that this trace gives evidence for and that is worth at least `_MIN_GAIN` of a step, best first."""
    span_s = sum(rank.measures.span_ns for rank in findings.ranks) / NS_PER_S / findings.num_windows
    advice_of_rules = [advice for rule in _RULES for advice in rule(findings)]
    worth = [
        advice
        for advice in advice_of_rules
        if advice.predicted_gain_s >= _MIN_GAIN * span_s and advice.predicted_gain_s > 0
    ]
    return tuple(sorted(worth, key=lambda advice: (-advice.predicted_gain_s, advice.rule, advice.what)))


def without_losses(every_advice: Sequence[Advice], answers: Sequence[WhatIf]) -> tuple[Advice, ...]:
    """The advice without what the model predicts to lose: the trace alone gives an upper bound of a gain."""
    losing = {answer.change for answer in answers if answer.gain_s < 0}
    return tuple(advice for advice in every_advice if advice.change not in losing)


def looked_for(findings: Findings, losing: Sequence[Advice] = ()) -> str:
    """What the rules looked for, and why none of it can be gained here: what is said where there is no advice.

    `losing` is what they found and the model predicts to lose.
    """
    timed = [rank for rank in findings.ranks if len(rank.trace.events)]
    if not timed:
        if findings.hangs:
            return "The job hangs in the call above; no setting of a collective helps before that is mended."
        return (
            "Without a timeline only sizes and bandwidths can be compared: no size of a collective is much slower than "
            "a like one here. A torch.profiler trace of the same steps tells what is exposed."
        )
    span_ns = sum(rank.measures.span_ns for rank in timed)
    exposed_ns = sum(rank.measures.exposed_comm_ns for rank in timed)
    comm_ns = sum(rank.measures.comm_ns for rank in timed)
    if not comm_ns:
        return "No collective runs: there is nothing to overlap. Give a trace of a job with several ranks."
    parts = [f"{100 * exposed_ns / span_ns:.1f} % of the step is exposed communication"]
    if exposed_ns < WORTH * span_ns:
        parts.append("more overlap cannot gain more than that")
    else:
        row = max(findings.rows, key=lambda row: (row.exposed_ns, row.key))
        parts.append(
            f"most of it {describe(row.key)}, and nothing in the trace says that it was late, queued behind its own "
            "communicator, slower than its like, or waiting for another rank"
        )
    total = findings.contention.total
    if findings.contention.by_collective and total.is_proven:
        parts.append(f"computation takes {_ratio(total)} during collectives, with no collective to blame for enough")
    else:
        parts.append("no stretch of computation is proven")
    host_ns = sum(rank.measures.host_bound_ns for rank in timed)
    parts.append(f"{100 * host_ns / span_ns:.1f} % waits for the CPU")
    changes = ", ".join(dict.fromkeys(advice.change for advice in losing))
    outcome = f"nothing that is predicted to pay (not {changes})" if losing else "nothing"
    return f"{len(_RULES)} rules found {outcome}: {'; '.join(parts)}."
