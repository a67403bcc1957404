"""Memory that groups take on all ranks of this machine, checked before any rank is told to allocate it.

A rank keeps what it made ready for every group that it has run, and shares it between groups: equal computations, and
the k-th collective of a kind, size and number of ranks in one group with the k-th such in another.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.engines.cpu_limits import ELEMENT_BYTES
from lagom_overlap.errors import BackendError
from lagom_overlap.units import KIB, format_bytes
from lagom_overlap.workload import Attention, Gemm, Kernel, MemoryBound, OverlapGroup, Work

_MEMINFO: Final = Path("/proc/meminfo")
_MAX_NAMES: Final = 4


def _buffer_bytes(collective: Collective) -> int:
    """Source and target; an all-reduce has one for both."""
    match collective.kind:
        case CollectiveKind.ALL_REDUCE:
            return collective.num_bytes
        case CollectiveKind.ALL_TO_ALL:
            return 2 * collective.num_bytes
        case _:
            return collective.num_bytes + collective.num_bytes // collective.num_ranks


def _check_bytes(collective: Collective) -> int:
    """A pattern and an expected target, while the answer is checked."""
    return _buffer_bytes(collective) * (2 if collective.kind is CollectiveKind.ALL_REDUCE else 1)


def _work_bytes(work: Work) -> int:
    match work:
        case Gemm():
            return ELEMENT_BYTES * (work.m * work.k + work.k * work.n + work.m * work.n)
        case Attention():
            return ELEMENT_BYTES * 4 * work.batch * work.num_heads * work.seq_len * work.head_dim
        case MemoryBound():
            return work.num_bytes
        case Kernel():
            return 0


def kept_bytes(groups: Collection[OverlapGroup]) -> int:
    """What one rank keeps once it has run all of these groups."""
    slots: Counter[Collective] = Counter()
    for group in groups:
        slots |= Counter(comm.collective for comm in group.comms)
    works = {op.work for group in groups for op in group.computations}
    buffers = sum(count * _buffer_bytes(collective) for collective, count in slots.items())
    return buffers + sum(_work_bytes(work) for work in works)


def rank_bytes(groups: Collection[OverlapGroup]) -> int:
    """The most that one rank holds at a time: what it keeps, and the check of its largest collective."""
    checks = (_check_bytes(comm.collective) for group in groups for comm in group.comms)
    return kept_bytes(groups) + max(checks, default=0)


def check_memory(groups: Sequence[OverlapGroup], num_ranks: int, held: Collection[OverlapGroup] = ()) -> None:
    """Refuses groups that cannot fit side by side; the ranks have run the groups `held`, whose memory is taken already.

    Raises:
        BackendError: if they need more than the machine has available; it names the last group alone if that alone
            does not fit.
    """
    available = _available_bytes()
    if available is None:
        return
    free = available + num_ranks * kept_bytes(held)
    for asked in (groups[-1:], groups):
        needed = num_ranks * rank_bytes(asked)
        if needed > free:
            raise BackendError(
                f"{_named(asked)} {format_bytes(needed)} ({needed} bytes) for {num_ranks} ranks, "
                f"this machine has {format_bytes(free)} ({free} bytes) of memory free for that"
            )


def _named(groups: Sequence[OverlapGroup]) -> str:
    names = [repr(group.name) for group in groups]
    if len(names) == 1:
        return f"group {names[0]} needs"
    shown = ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")
    return f"the ranks keep the buffers of every group: groups {shown} together need"


def _available_bytes() -> int | None:
    """The kernel's estimate; None where it does not say."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * KIB if "MemAvailable" in fields else None
