"""Rules about how collectives are issued: how many, on which communicator, and how early."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from lagom_overlap.analysis.advice import Advice, per_step, per_step_s
from lagom_overlap.analysis.findings import Findings, RankFindings
from lagom_overlap.analysis.groups import NEAR_NS
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.trace.gpu_trace import NO_TIME, NS_PER_S, UNKNOWN, EventRole, KnobReach
from lagom_overlap.units import MIB, format_bytes, format_seconds
from lagom_overlap.workload.step.rules import changes_of

_WHOLLY: Final = 0.95
"""Of what nothing hides; the rest is what a stray small kernel may cover."""
_SMALL: Final = 1 * MIB
"""Calls below it are worth joining: at such sizes latency is a good part of their time. Chosen, not measured."""
_SHARDED: Final = frozenset({CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER})
"""What sharded data parallelism alternates."""


def larger_buckets(findings: Findings) -> Iterator[Advice]:
    """Many small all-reduces of a communicator: each pays a latency."""
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
            f"exposed for {per_step(findings, exposed_ns)}; {compared}",
            predicted_gain_s=per_step_s(findings, gain),
        )


def waiting_buckets(findings: Findings) -> Iterator[Advice]:
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
            predicted_gain_s=per_step_s(findings, exposed_ns * (1 - findings.num_windows / count)),
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
            if launch == NO_TIME or launch >= ended or not 0 <= start - ended <= NEAR_NS:
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


def shared_communicator(findings: Findings) -> Iterator[Advice]:
    """Calls that could have run when they were launched, had their communicator not been busy with another kind."""
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
            f"{per_step(findings, all_queued.queued_ns)}; of that at most {per_step(findings, all_queued.won_ns)} was "
            "exposed",
            predicted_gain_s=per_step_s(findings, all_queued.won_ns),
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
        if launch != NO_TIME and 0 <= start - launch <= NEAR_NS and exposed_ns > 0:
            count += 1
            late_ns += exposed_ns
    return count, late_ns, all_ns


def prefetch(findings: Findings) -> Iterator[Advice]:
    """FSDP's all-gathers that started as soon as they were launched, and were exposed."""
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
            evidence=f"{count} exposed all-gathers started within {format_seconds(NEAR_NS / NS_PER_S)} of their "
            f"launch: the wire was free, the launch came late; exposed {per_step(findings, late_ns)}",
            predicted_gain_s=per_step_s(findings, late_ns),
        )
