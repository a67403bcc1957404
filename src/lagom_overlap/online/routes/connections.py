"""Which algorithms a communicator has connected, because a new one costs GPU memory for good.

NCCL connects an algorithm at its first use (`NCCL_RUNTIME_CONNECT`, on by default where it uses cuMem): it allocates
buffers for all channels of the communicator, outside PyTorch's pool, and keeps them. NVLS takes about 256 MiB, Tree up
to 0.4 GiB a communicator on eight GPUs (from NCCL's sources, not measured). A job that fills its GPUs ends there. So
only algorithms are tried that NCCL itself has chosen on the communicator, by its own costs, unless the user allows
others; and then a switch that would connect one is refused by every rank whose GPU has no room, which all ranks heed.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Final

from lagom_overlap.collective import Algorithm, CommunicatorId, ConfigTable
from lagom_overlap.errors import BackendError
from lagom_overlap.nccl_plugin.record_log import Flag, Implementation, RecordedDecision
from lagom_overlap.units import MIB, format_bytes

_log = logging.getLogger(__name__)

NEW_BYTES: Final = 512 * MIB
"""Room for one more algorithm on one communicator: more than any was seen to need in NCCL's sources."""
SPARE_BYTES: Final = 1024 * MIB
"""GPU memory that must stay free for the job: PyTorch's pool grows in larger pieces than are requested."""


def connects_at_start(environment: Mapping[str, str]) -> bool:
    """Whether NCCL connects every algorithm when a communicator is made."""
    return environment.get("NCCL_RUNTIME_CONNECT") == "0" or environment.get("NCCL_CUMEM_ENABLE") == "0"


class Connections:
    """The connected algorithms of this process's communicators; `free_bytes` asks the GPU."""

    def __init__(
        self, free_bytes: Callable[[], int], *, may_connect: bool = False, all_connected: bool = False
    ) -> None:
        self._free_bytes = free_bytes
        self._may_connect = may_connect
        self._all_connected = all_connected
        self._connected: dict[CommunicatorId, set[Algorithm]] = defaultdict(set)
        self._new: dict[CommunicatorId, set[Algorithm]] = {}
        self._free_before: int | None = None

    def note(self, communicator: CommunicatorId, decision: RecordedDecision) -> None:
        """A call ran: by NCCL's own choice, the cheapest on offer, unless a chained tuner may have chosen."""
        if decision.algorithm is not None and Flag.APPLIED in decision.flags:
            self._connected[communicator].add(decision.algorithm)
        elif decision.offered_s and Flag.CHAINED not in decision.flags:
            algorithm, _ = min(decision.offered_s, key=lambda way: decision.offered_s[way])
            self._connected[communicator].add(algorithm)

    def usable(self, communicator: CommunicatorId, offered: Collection[Implementation]) -> frozenset[Implementation]:
        """The implementations of an offer that may be tried."""
        if self._may_connect or self._all_connected:
            return frozenset(offered)
        return frozenset(way for way in offered if way[0] in self._connected[communicator])

    def check(self, table: ConfigTable) -> None:
        """Refuses a table that would connect what the GPU has no room for.

        Raises:
            BackendError: if so; no rank then switches.
        """
        new: dict[CommunicatorId, set[Algorithm]] = defaultdict(set)
        for key, config in table:
            if config.algorithm is not None and config.algorithm not in self._connected[key.communicator]:
                new[key.communicator].add(config.algorithm)
        self._new = {} if self._all_connected else dict(new)
        if not self._new:
            return
        free, needed = self._free_bytes(), NEW_BYTES * sum(map(len, self._new.values())) + SPARE_BYTES
        if free < needed:
            raise BackendError(
                f"{self._words()} would be used for the first time, for which NCCL allocates buffers: the GPU has "
                f"{format_bytes(free)} free, must have {format_bytes(needed)}"
            )

    def committed(self) -> None:
        """The checked table is in force: its next step connects."""
        self._free_before = self._free_bytes() if self._new else None

    def taken_back(self) -> None:
        """The table is in force no more; what it would have connected is as new as before."""
        self._new, self._free_before = {}, None

    def stepped(self) -> None:
        """A step is over: says what the connections of the table took."""
        if self._free_before is None:
            return
        num_bytes = max(0, self._free_before - self._free_bytes())
        _log.info("the first use of %s took %s of GPU memory, for good", self._words(), format_bytes(num_bytes))
        for communicator, algorithms in self._new.items():
            self._connected[communicator] |= algorithms
        self._new, self._free_before = {}, None

    def _words(self) -> str:
        return ", ".join(
            f"{algorithm} on {communicator.description!r} ({len(communicator.ranks)} ranks)"
            for communicator, algorithms in self._new.items()
            for algorithm in sorted(algorithms)
        )
