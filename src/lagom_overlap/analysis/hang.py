"""Which collective a job hangs in, and for whom it waits: flight recorder dumps of several ranks held side by side.

The calls of a process group are numbered, and each rank must issue the same ones in the same order. The first number at
which a group's dumps disagree, or that never ended, is where the job stands: what comes later waits for it. Of groups
that all wait, the one whose call differs between ranks or that a rank never issued comes first: the others are more
likely to wait for that one.

Sends and receives are numbered by each rank for itself. A pair of ranks stands where one of them is in such a call
(started and not ended) and the other is in none towards it, or gives another size. What is sent in a batch is never
started by itself and tells nothing here.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.trace.gpu_trace import CommCall, GpuTrace
from lagom_overlap.units import format_bytes

_MAX_RANKS: Final = 8
"""Ranks that a line names one by one."""
_EQUAL: Final = frozenset(
    {
        *(CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE),
        *(CollectiveKind.BROADCAST, CollectiveKind.REDUCE),
    }
)
"""Calls to which all ranks give as much; of a gather or a scatter one gives, or takes, all."""
_Group = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A call that a group's ranks never ended together: `cause` says in words why, as far as the dumps tell.

    `rank_is_at_fault` where ranks disagree or never came; else the call is only under way.
    """

    communicator: str
    sequence: int
    cause: str
    rank_is_at_fault: bool

    def __str__(self) -> str:
        return f"{self.cause} (number {self.sequence} on {self.communicator})"


def hangs_of(traces: Sequence[GpuTrace]) -> tuple[Hang, ...]:
    """One for every process group that stands, those first in which ranks disagree; none where all calls ended."""
    groups: dict[_Group, dict[int, dict[int, CommCall]]] = defaultdict(lambda: defaultdict(dict))
    for at, trace in enumerate(traces):
        for call in trace.calls:
            if call.sequence is not None and call.kind is not CollectiveKind.SEND_RECV:
                rank = at if trace.rank is None else trace.rank
                groups[call.communicator, call.ranks][rank][call.sequence] = call
    given = {trace.rank for trace in traces if trace.rank is not None}
    hangs = [hang for group, ranks in groups.items() if (hang := _first_of(group, ranks, given)) is not None]
    hangs += _pairs_that_stand(traces, given)
    hangs.sort(key=lambda hang: not hang.rank_is_at_fault)
    return tuple(hangs)


def _pairs_that_stand(traces: Sequence[GpuTrace], given: set[int]) -> list[Hang]:
    """One for each pair of ranks of which one is in a send or a receive that never ended."""
    under_way: dict[tuple[str, tuple[int, int]], dict[int, CommCall]] = defaultdict(dict)
    for trace in traces:
        for call in trace.calls:
            stands = call.is_started is True and not call.is_finished
            if stands and call.pair is not None and trace.rank is not None and trace.rank in call.pair:
                under_way[call.communicator, call.pair].setdefault(trace.rank, call)
    return [
        Hang(
            communicator=communicator,
            sequence=next(iter(calls.values())).sequence or 0,
            cause=_standing(pair, calls, given),
            rank_is_at_fault=_is_at_fault(pair, calls, given),
        )
        for (communicator, pair), calls in under_way.items()
    ]


def _is_at_fault(pair: tuple[int, int], calls: dict[int, CommCall], given: set[int]) -> bool:
    if len(calls) == len(set(pair)):
        return len({call.num_bytes for call in calls.values()}) > 1
    return given.issuperset(pair)


def _standing(pair: tuple[int, int], calls: dict[int, CommCall], given: set[int]) -> str:
    """What a pair waits for, in words."""
    sender, receiver = pair
    sizes = {rank: format_bytes(call.num_bytes) for rank, call in calls.items()}
    if len(calls) == len(set(pair)):
        if len({call.num_bytes for call in calls.values()}) > 1:
            return f"rank {sender} sends {sizes[sender]}, rank {receiver} receives {sizes[receiver]}"
        return f"send of {sizes[sender]} from rank {sender} to rank {receiver}: started and not ended on both"
    (rank,) = calls
    does, other = (
        (f"sends {sizes[rank]} to", "receives") if rank == sender else (f"receives {sizes[rank]} from", "sends")
    )
    peer = receiver if rank == sender else sender
    if peer not in given:
        return f"rank {rank} {does} rank {peer}: started and not ended; no dump of rank {peer}"
    return f"rank {rank} {does} rank {peer}, which {other} nothing {'from' if rank == sender else 'to'} it"


def _first_of(group: _Group, ranks: dict[int, dict[int, CommCall]], given: set[int]) -> Hang | None:
    """Where a group stands."""
    communicator, members = group
    here = sorted(set(ranks) | (set(members) & given))
    oldest = max(min(calls) for calls in ranks.values())  # a recorder keeps only the newest calls
    for sequence in sorted({number for calls in ranks.values() for number in calls if number >= oldest}):
        calls = {rank: ranks[rank][sequence] for rank in here if rank in ranks and sequence in ranks[rank]}
        missing = [rank for rank in here if rank not in calls]
        is_finished = all(call.is_finished for call in calls.values())
        cause = ("" if is_finished else _differing(calls)) or _missing(calls, missing, ranks)
        if not cause and is_finished:
            continue
        absent = [rank for rank in members if rank not in here]
        blamed = bool(cause)
        if not cause:
            cause = _under_way(calls)
        if absent and not blamed:
            cause += f"; no dump of {_ranks_text(absent)}, which may be what it waits for"
        return Hang(communicator=communicator, sequence=sequence, cause=cause, rank_is_at_fault=blamed)
    return None


def _differing(calls: dict[int, CommCall]) -> str:
    """What the ranks call differently: another operation, another size."""
    by_op: dict[str, list[int]] = defaultdict(list)
    by_size: dict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, call in calls.items():
        by_op[call.op].append(rank)
        by_size[call.num_bytes, call.dtype].append(rank)
    if len(by_op) > 1:
        parts = ", ".join(f"{op} on {_ranks_text(ranks)}" for op, ranks in sorted(by_op.items(), key=_most_first))
        return f"ranks call different operations: {parts}"
    first = next(iter(calls.values()))
    if len(by_size) > 1 and first.kind in _EQUAL:
        has_dtypes = len({dtype for _, dtype in by_size}) > 1
        shown = {size: format_bytes(size) for size, _ in by_size}
        if len(set(shown.values())) < len(shown):  # rounded, they look equal
            shown = {size: f"{size} B" for size in shown}
        parts = ", ".join(
            f"{shown[size]}{f' of {dtype}' if dtype and has_dtypes else ''} on {_ranks_text(ranks)}"
            for (size, dtype), ranks in sorted(by_size.items(), key=_most_first)
        )
        return f"ranks give {first.op} different sizes: {parts}"
    return ""


def _most_first(item: tuple[object, list[int]]) -> tuple[int, int]:
    return -len(item[1]), item[1][0]


def _missing(calls: dict[int, CommCall], missing: list[int], ranks: dict[int, dict[int, CommCall]]) -> str:
    waiting = [rank for rank, call in calls.items() if not (call.is_finished and call.is_followed)]
    if not missing or not waiting:
        return ""
    lasts = {rank: ranks[rank][max(ranks[rank])] for rank in missing if ranks.get(rank)}
    last = ""
    if len(missing) == 1 and missing[0] in lasts:
        call = lasts[missing[0]]
        last = f" (its last was {call.op}, number {call.sequence})"
    wait = "waits" if len(waiting) == 1 else "wait"
    return f"{_text(calls)}: {_ranks_text(waiting)} {wait}, {_ranks_text(missing)} never called it{last}"


def _under_way(calls: dict[int, CommCall]) -> str:
    words = {True: "started and not ended", False: "queued and not started", None: "not ended"}
    parts = [
        f"{text} on {_ranks_text(ranks)}"
        for state, text in words.items()
        if (ranks := [rank for rank, call in calls.items() if not call.is_finished and call.is_started is state])
    ]
    return f"{_text(calls)}: {', '.join(parts)}"


def _text(calls: dict[int, CommCall]) -> str:
    call = next(iter(calls.values()))
    return f"{call.op} of {format_bytes(call.num_bytes)}" if call.num_bytes else call.op


def _ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in words: `"rank 3"`, `"ranks 0-2, 5"`."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:_MAX_RANKS]]
    more = f" and {sum(b - a + 1 for a, b in runs[_MAX_RANKS:])} more" if len(runs) > _MAX_RANKS else ""
    return f"rank{'s' if len(ordered) > 1 else ''} {', '.join(parts)}{more}"
