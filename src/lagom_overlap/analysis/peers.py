"""The same call on several ranks: which calls are one, and whether they end at one time.

Calls are matched by (communicator, sequence number), and without numbers by their order on the communicator if all
ranks agree on that order. More calls than the communicator has ranks are several communicators of one name, and are
left alone; send and receive pair ranks, not groups.

No rank leaves an all-reduce, all-gather or reduce-scatter before the last one has come, so its ends lie close together
on all ranks. Ranks on different machines have different clocks: what all ends of two ranks differ by is the difference
of their clocks (its constant part and its drift are taken from medians, so that single calls do not move them). Ends
that differ beyond that are no difference of clocks: a rank's duration is wrong, or the calls are not the same.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.trace.gpu_trace import NS_PER_S, UNKNOWN, GpuTrace, Int64
from lagom_overlap.units import format_seconds

_MIN_RANKS: Final = 2
"""There is nothing to compare with below."""
_TOGETHER: Final = frozenset({CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER})
"""Kinds that no rank leaves before all have come, and that give all ranks alike."""
_APART_NS: Final = 200_000
"""The last chunk goes round a ring of hundreds of ranks in as long.

On eight V100s (the traces of PARAM's DLRM) ends differ by 7 us at most."""
_APART: Final = 0.25
"""Of the shortest duration: ends that differ by less change waiting by less than that, too."""
_CLOCK_NS: Final = 1_000_000
"""Machines that keep their time by NTP differ by less."""
_MIN_DRIFT: Final = 16
"""Calls from which a drift is told from noise."""
_MAX_DRIFT: Final = 1e-3
"""A clock that is being set (adjtime) runs at most 500 ppm wrong, two differ by twice that."""

CallName = tuple[object, ...]
"""What one call is called on all of its ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """For every rank and call its name, None where its peers are not known; what was found of ends, in words."""

    names: tuple[tuple[CallName | None, ...], ...]
    warnings: tuple[str, ...] = ()


def _own_names(trace: GpuTrace) -> list[CallName]:
    """A name for every call that its peers on other ranks give to the same call."""
    seen: Counter[CallName] = Counter()
    names: list[CallName] = []
    for call in trace.calls:
        group = (call.communicator, call.ranks)
        if call.sequence is not None:
            names.append((*group, "seq", call.sequence, call.op))
            continue
        names.append((*group, "order", seen[group], call.op))
        seen[group] += 1
    return names


def _agree(traces: Sequence[GpuTrace]) -> frozenset[CallName]:
    """The communicators on which all ranks that use them ran the same operations in the same order."""
    orders: dict[CallName, set[tuple[str, ...]]] = defaultdict(set)
    for trace in traces:
        orders_by_call: dict[CallName, list[str]] = defaultdict(list)
        for call in trace.calls:
            orders_by_call[call.communicator, call.ranks].append(call.op)
        for group, ops in orders_by_call.items():
            orders[group].add(tuple(ops))
    return frozenset(group for group, distinct in orders.items() if len(distinct) == 1)


def peers_of(traces: Sequence[GpuTrace]) -> Peers:
    """The calls that several of the traces ran together; those whose ends do not fit together have no peers."""
    agreed = _agree(traces)
    own = [_own_names(trace) for trace in traces]
    count: Counter[CallName] = Counter()
    for trace, call_names in zip(traces, own, strict=True):
        count.update(name for call, name in zip(trace.calls, call_names, strict=True) if call.is_finished)
    names = [
        tuple(
            name
            if (call.sequence is not None or (call.communicator, call.ranks) in agreed)
            and call.is_finished
            and call.kind is not CollectiveKind.SEND_RECV
            and _MIN_RANKS <= count[name] <= (call.num_ranks or count[name])
            else None
            for call, name in zip(trace.calls, call_names, strict=True)
        )
        for trace, call_names in zip(traces, own, strict=True)
    ]
    apart, warnings = _ends(traces, names)
    return Peers(
        names=tuple(tuple(None if name in apart else name for name in call_names) for call_names in names),
        warnings=warnings,
    )


def _ends(
    traces: Sequence[GpuTrace], names: Sequence[Sequence[CallName | None]]
) -> tuple[frozenset[CallName], tuple[str, ...]]:
    """(calls that end apart, sentences about them and about clocks)."""
    ends: list[dict[CallName, int]] = []
    shortest: dict[CallName, int] = {}
    for trace, call_names in zip(traces, names, strict=True):
        mine: dict[CallName, int] = {}
        for call, name in zip(trace.calls, call_names, strict=True):
            if name is not None and call.event != UNKNOWN and call.kind in _TOGETHER:
                mine[name] = int(trace.events.end_ns[call.event])
                shortest[name] = min(call.duration_ns, shortest.get(name, call.duration_ns))
        ends.append(mine)
    shared: list[dict[CallName, int]] = [{} for _ in traces]
    clocks: list[str] = []
    for tree in _clocks(ends):
        for rank, own in tree.items():
            shared[rank] = own
        clocks += _clock_warning(traces, ends, tree)
    first: dict[CallName, int] = {}
    last: dict[CallName, tuple[int, int]] = {}
    for rank, own in enumerate(shared):
        for name, end in own.items():
            first[name] = min(end, first.get(name, end))
            last[name] = max((end, rank), last.get(name, (end, rank)))
    spread = {name: last[name][0] - first[name] for name in first}
    apart = frozenset(name for name, ns in spread.items() if ns > max(_APART_NS, _APART * shortest[name]))
    if not apart:
        return apart, tuple(clocks)
    worst = max(apart, key=lambda name: spread[name])
    several = len(apart) > 1
    sentence = (
        f"{len(apart)} of {len(spread)} collectives that all their ranks leave at once end"
        f"{'' if several else 's'} at different times on them, "
        f"{'the worst ' if several else ''}{worst[-1]} on {worst[0]} {format_seconds(spread[worst] / NS_PER_S)} later "
        f"on {_name_of(traces[last[worst][1]])}: a duration is wrong or the calls are not the same, so waiting for "
        f"late peers is not told of {'them' if several else 'it'}"
    )
    return apart, (*clocks, sentence)


def _clocks(ends: Sequence[Mapping[CallName, int]]) -> list[dict[int, dict[CallName, int]]]:
    """The ranks that calls connect, and the ends of each by the clock of the first of them."""
    left = [rank for rank, own in enumerate(ends) if own]
    trees: list[dict[int, dict[CallName, int]]] = []
    while left:
        root = left.pop(0)
        tree = {root: dict(ends[root])}
        reached = [root]
        while reached and left:
            parent = tree[reached.pop(0)]
            for rank in [rank for rank in left if not parent.keys().isdisjoint(ends[rank])]:
                tree[rank] = _by_the_clock_of(parent, ends[rank])
                reached.append(rank)
                left.remove(rank)
        trees.append(tree)
    return trees


def _by_the_clock_of(parent: Mapping[CallName, int], own: Mapping[CallName, int]) -> dict[CallName, int]:
    """The ends of a rank by another one's clock."""
    shared = [name for name in own if name in parent]
    begin = min(own.values())
    at: Int64 = np.array([own[name] for name in shared], dtype=np.int64) - begin
    ahead: Int64 = np.array([own[name] - parent[name] for name in shared], dtype=np.int64)
    drift = 0.0
    if len(shared) >= _MIN_DRIFT:
        order = np.argsort(at, kind="stable")
        early, late = order[: len(order) // 2], order[len(order) // 2 :]
        length = float(np.median(at[late]) - np.median(at[early]))
        if length > 0:
            drift = float(np.median(ahead[late]) - np.median(ahead[early])) / length
    if abs(drift) > _MAX_DRIFT:
        drift = 0.0
    offset = float(np.median(ahead - drift * at))
    return {name: end - round(offset + drift * (end - begin)) for name, end in own.items()}


def _clock_warning(
    traces: Sequence[GpuTrace], ends: Sequence[Mapping[CallName, int]], tree: Mapping[int, Mapping[CallName, int]]
) -> list[str]:
    """A sentence where clocks differ; no more than that is wrong, as no figure compares two ranks' clocks."""
    ahead = {rank: int(np.median([ends[rank][name] - end for name, end in own.items()])) for rank, own in tree.items()}
    off = [rank for rank in ahead if abs(ahead[rank]) >= _CLOCK_NS]
    if not off:
        return []
    worst = max(off, key=lambda rank: abs(ahead[rank]))
    root = _name_of(traces[next(iter(tree))])
    far = f"{format_seconds(abs(ahead[worst]) / NS_PER_S)} {'ahead of' if ahead[worst] > 0 else 'behind'}"
    who = (
        f"{_name_of(traces[worst])}'s clock is {far} {root}'s"
        if len(off) == 1
        else f"the clocks of {len(off)} of {len(ahead)} ranks differ from {root}'s, most {_name_of(traces[worst])}'s, "
        f"which is {far} it"
    )
    num = len(tree[worst])
    return [
        f"{who}, by the ends of {num} collective{'s' if num > 1 else ''}: no figure compares the clocks of two ranks, "
        "but timelines of several ranks do not line up"
    ]


def _name_of(trace: GpuTrace) -> str:
    return f"rank {trace.rank}" if trace.rank is not None else trace.file
