"""Memory that a group takes on all ranks of this machine, checked before any rank is told to allocate it."""

from pathlib import Path
from typing import Final

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.engines.gloo_space import ELEMENT_BYTES
from lagom_overlap.errors import BackendError
from lagom_overlap.units import KIB, format_bytes
from lagom_overlap.workload import Attention, Gemm, Kernel, MemoryBound, OverlapGroup, Work

_MEMINFO: Final = Path("/proc/meminfo")


def _buffer_bytes(collective: Collective) -> int:
    """Source, target, and while the answer is checked a pattern and an expected target."""
    part = collective.num_bytes // collective.num_ranks
    match collective.kind:
        case CollectiveKind.ALL_REDUCE:
            return 3 * collective.num_bytes
        case CollectiveKind.ALL_TO_ALL:
            return 4 * collective.num_bytes
        case _:
            return 2 * (collective.num_bytes + part)


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


def rank_bytes(group: OverlapGroup) -> int:
    """Bytes of one rank; equal computations share their tensors."""
    works = {op.work for op in group.computations}
    return sum(_buffer_bytes(comm.collective) for comm in group.comms) + sum(_work_bytes(work) for work in works)


def check_memory(group: OverlapGroup, num_ranks: int) -> None:
    """Refuses a group that cannot fit.

    Raises:
        BackendError: if it needs more than the machine has available.
    """
    available = _available_bytes()
    needed = num_ranks * rank_bytes(group)
    if available is not None and needed > available:
        raise BackendError(
            f"group {group.name!r} needs {format_bytes(needed)} for {num_ranks} ranks, "
            f"this machine has {format_bytes(available)} of memory available"
        )


def _available_bytes() -> int | None:
    """The kernel's estimate; None where it does not say."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * KIB if "MemAvailable" in fields else None
