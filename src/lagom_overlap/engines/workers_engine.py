"""Collectives on worker threads of our own: an instrument on which channels and chunks cost what the paper says.

On gloo a larger slice is better for computation and communication alike. Here, as on a GPU, more channels speed the
collective and slow the computation, because each is a thread that wants the core; and so does a larger chunk. The
engine exists to study tuners under genuine contention on a machine without a GPU. It is no product path: torch's gloo
is faster, and nothing here is deployed.

More than two ranks: an all-reduce and a reduce-scatter sum in ring order, which depends on the part, never on the
configuration; so results do not change with the knobs.
"""

import os
from dataclasses import dataclass, field

from lagom_overlap.collective import Collective, ConfigKey, ConfigSpace, ConfigTable, Protocol
from lagom_overlap.engines.base import Buffers, Handle
from lagom_overlap.engines.cpu_limits import ELEMENT_BYTES
from lagom_overlap.engines.gloo_group import Store
from lagom_overlap.engines.workers_library import WorkersLibrary
from lagom_overlap.engines.workers_mesh import WorkersMesh
from lagom_overlap.engines.workers_space import CHANNELS, DEFAULT, PROTOCOLS, check_config, effective, workers_space


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A collective that the threads are moving; keeps its memory alive."""

    library: WorkersLibrary
    number: int
    buffers: Buffers

    def wait(self) -> None:
        """Returns when this rank's target is complete.

        Raises:
            RuntimeError: if a connection broke; torch raises the same when gloo loses a rank.
        """
        error = self.library.wait(self.number)
        if error:
            raise RuntimeError(f"a worker lost its connection: {os.strerror(abs(error))}")


@dataclass(slots=True)
class WorkersEngine:
    """Implements `Engine`; every rank must be on this machine."""

    mesh: WorkersMesh
    library: WorkersLibrary
    _table: ConfigTable = field(default_factory=lambda: ConfigTable({}))
    _epoch: int = -1

    def space(self, collective: Collective) -> ConfigSpace:
        """See `Engine`."""
        return workers_space(collective)

    def apply(self, table: ConfigTable, epoch: int) -> None:
        """See `Engine`."""
        if epoch <= self._epoch:
            raise ValueError(f"epoch {epoch} is not after {self._epoch}, the one in force")
        for _, config in table:
            check_config(config)
        self._table, self._epoch = table, epoch

    def execute(self, key: ConfigKey, buffers: Buffers) -> Handle:
        """See `Engine`; an untouched call runs under `workers_space.DEFAULT`."""
        config = effective(self._table.get(key) or DEFAULT)
        assert config.num_channels is not None, "filled"
        assert config.chunk_bytes is not None, "filled"
        number = self.library.start(
            key.kind,
            buffers.source.data_ptr(),
            buffers.target.data_ptr(),
            num_elements=key.num_bytes // ELEMENT_BYTES,
            num_channels=config.num_channels,
            chunk_elements=config.chunk_bytes // ELEMENT_BYTES,
            wait_mode=PROTOCOLS.index(config.protocol or Protocol.LL128),
        )
        return _InFlight(self.library, number, buffers)

    def close(self) -> None:
        """Ends the threads, then the connections."""
        self.library.close()
        self.mesh.close()


def open_workers(store: Store, *, rank: int, num_ranks: int, host: str) -> WorkersEngine:
    """Meets the other ranks and starts the threads. Collective: every rank calls it.

    Raises:
        MissingDependencyError: if the library is not built.
        BackendError: if threads or connections are refused.
    """
    mesh = WorkersMesh(store, rank=rank, num_ranks=num_ranks, num_channels=CHANNELS[-1], host=host)
    try:
        library = WorkersLibrary(rank=rank, num_ranks=num_ranks, sockets=mesh.numbers())
    except BaseException:
        mesh.close()
        raise
    return WorkersEngine(mesh, library)
