"""Traces of several processes that somebody merged into one file: whose is what.

Each process counts its launches from the same number, so a kernel's launch is only found among those of its own
process. A merged file tells processes apart by `pid`: that of CPU events is the process, that of GPU events is the
device, or what the merging tool made of it. Which GPU belongs to which process, the names say if they all name a rank
("rank 3"), else the launches: those of the right process come before their kernels, and shortly.
"""

import re
from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import Final

import numpy as np

from lagom_overlap.errors import TraceError
from lagom_overlap.trace.gpu_trace import Int64

_RANK: Final = re.compile(r"rank[ _-]?(\d{1,7})", re.IGNORECASE)

Processes = tuple[tuple[str, int | None, frozenset[Hashable]], ...]
"""For each process a name, its rank if that is said, and its values of `pid`."""


class MergedTracesError(TraceError):
    """A file that holds the traces of several processes; `processes` tells them apart."""

    def __init__(self, message: str, processes: Processes) -> None:
        super().__init__(message)
        self.processes = processes


def rank_in(pid: Hashable) -> int | None:
    """The rank that a `pid` names; None if it names none."""
    match = _RANK.search(pid) if isinstance(pid, str) else None
    return None if match is None else int(match[1])


def processes_of(
    launches: Mapping[Hashable, tuple[Int64, Int64]], kernels: Mapping[Hashable, tuple[Int64, Int64]], name: str
) -> Processes:
    """The processes of a file, none if it holds one; by `pid` the correlations and starts (ns) of launches, of kernels.

    Raises:
        TraceError: if there are several, and GPU events do not say whose they are.
    """
    if len(launches) < 2:
        return ()
    pids = [*launches, *kernels]
    if all(rank_in(pid) is not None for pid in pids):
        by_rank: dict[int, set[Hashable]] = defaultdict(set)
        for pid in pids:
            by_rank[rank_in(pid) or 0].add(pid)
        return tuple((f"rank {rank}", rank, frozenset(by_rank[rank])) for rank in sorted(by_rank))
    if len(kernels) < 2:
        raise TraceError(
            f"{name}: holds launches of {len(launches)} processes and GPU events that do not say whose they are: "
            "traces were merged; give the files that they were merged from"
        )
    owned: dict[Hashable, set[Hashable]] = defaultdict(set)
    for pid, (correlation, start_ns) in kernels.items():
        owned[min(launches, key=lambda process: _distance(*launches[process], correlation, start_ns))].add(pid)
    if len(owned) < 2:
        return ()
    return tuple((f"process {pid}", None, frozenset({pid, *others})) for pid, others in owned.items())


def _distance(launched: Int64, launch_ns: Int64, correlation: Int64, start_ns: Int64) -> tuple[int, float]:
    """How ill launches fit kernels: kernels without one before them, and how long kernels wait for theirs (ns)."""
    order = np.argsort(launched, kind="stable")
    at = np.minimum(np.searchsorted(launched[order], correlation), len(launched) - 1)
    waited = start_ns - launch_ns[order][at]
    fits = (launched[order][at] == correlation) & (waited >= 0)
    return int(np.count_nonzero(~fits)), float(np.median(waited[fits])) if fits.any() else float("inf")
