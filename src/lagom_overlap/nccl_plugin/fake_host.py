"""csrc/nccl/nccl_host.c from Python: NCCL's host code around a tuner, without a GPU.

It drives the real plug-in through dlopen and does what NCCL does around a tuner (lookup, questions, choice, groups,
channels, chunks) per release. Its times are NCCL's model where a communicator is made from a record of `cost.nccl`, and
a caricature otherwise. It is our reading of NCCL's sources, not NCCL.
"""

import ctypes
import os
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Final

from lagom_overlap.collective import Algorithm, CollectiveKind, Protocol
from lagom_overlap.nccl_plugin.table_layout import ALGORITHMS, KINDS, PROTOCOLS

FAKE_LIBRARY_NAME: Final = "libfake_nccl.so"
RELEASES: Final = MappingProxyType(
    {
        "2.21": 22105,
        "2.22": 22203,
        "2.24": 22403,
        "2.28": 22807,
        "2.29": 22907,
        "2.30": 23003,
        "2.31": 23102,
        "2.32.6": 23206,
    }
)
"""The releases that the host imitates, by NCCL's version code."""
WITH_CHUNKS: Final = ("2.30", "2.31", "2.32.6")
"""Those that ask a tuner for the chunk."""


class HostMode(IntFlag):
    """How a group of calls is made: asked for only, with symmetric memory, registered buffers, helper threads.

    `GATHER_V`: the calls are an uneven all-gather, grouped broadcasts of which the largest is asked about.
    """

    PLAIN = 0
    SIMULATE = 1
    SYMMETRIC = 2
    REGISTERED = 4
    HELPERS = 8
    GATHER_V = 16


class Fault(IntFlag):
    """What would have gone wrong in NCCL."""

    NO_CHOICE = 1
    UNAVAILABLE = 2
    CHANNELS = 4
    CHUNK_ZERO = 8
    NVLS_OVERRUN = 16
    OUT_OF_BOUNDS = 32
    TUNER_ERROR = 64


class _Spec(ctypes.Structure):
    _fields_ = (
        ("comm_id", ctypes.c_uint64),
        ("num_ranks", ctypes.c_uint64),
        ("num_nodes", ctypes.c_uint64),
        ("num_channels", ctypes.c_int32),
        ("nvls_channels", ctypes.c_int32),
        ("has_collnet", ctypes.c_int32),
        ("has_ll128", ctypes.c_int32),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        ("num_bytes", ctypes.c_uint64),
        ("kind", ctypes.c_int32),
        ("op_and_type", ctypes.c_int32),
        ("limits", ctypes.c_int32),
        ("element_bytes", ctypes.c_int32),
    )


class _Result(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_int32),
        ("protocol", ctypes.c_int32),
        ("max_channels", ctypes.c_int32),
        ("num_channels", ctypes.c_int32),
        ("chunk_bytes", ctypes.c_uint64 * 3),
        ("channel_bytes", ctypes.c_uint64 * 3),
        ("tuner_channels", ctypes.c_int32),
        ("num_tuner_calls", ctypes.c_int32),
        ("num_chunk_calls", ctypes.c_int32),
        ("faults", ctypes.c_uint32),
        ("predicted_us", ctypes.c_float),
        ("cost_before", ctypes.c_float * 21),
        ("cost_after", ctypes.c_float * 21),
        ("num_threads", ctypes.c_int32),
        ("channel", ctypes.c_int32),
        ("place", ctypes.c_uint32),
    )


@dataclass(frozen=True, slots=True)
class HostCall:
    """A collective as NCCL's tuner sees it; calls of one `op_and_type` in a group are aggregated."""

    kind: CollectiveKind
    num_bytes: int
    op_and_type: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutcome:
    """What became of a call: NCCL's choice after the tuner, the grid, the chunk of each channel group, and faults.

    `num_tuner_calls` counts getCollInfo, `num_chunk_calls` getChunkSize; `predicted_us` and the costs are in us.
    """

    algorithm: Algorithm
    protocol: Protocol
    max_channels: int
    num_channels: int
    chunk_bytes: tuple[int, ...]
    channel_bytes: tuple[int, ...]
    tuner_channels: int
    num_tuner_calls: int
    num_chunk_calls: int
    num_threads: int
    faults: Fault
    predicted_us: float
    cost_before: tuple[float, ...]
    cost_after: tuple[float, ...]

    @property
    def is_untouched(self) -> bool:
        """Whether the tuner left the call as it was."""
        return self.tuner_channels == 0 and self.cost_before == self.cost_after


class FakeComm:
    """One communicator of the host."""

    def __init__(self, library: ctypes.CDLL, pointer: int) -> None:
        self._library = library
        self._pointer = pointer

    def set_costs(self, costs_us: dict[tuple[Algorithm, Protocol], float]) -> None:
        """Fixes the cost table (us) that is offered from now on; what is not named is unavailable."""
        flat = [costs_us.get((a, p), -1.0) for a in ALGORITHMS for p in PROTOCOLS]
        self._library.fake_set_costs(self._pointer, (ctypes.c_float * 21)(*flat))

    def group(self, *calls: HostCall, mode: HostMode = HostMode.PLAIN) -> list[CallOutcome]:
        """Enqueues the calls between ncclGroupStart and ncclGroupEnd, and launches them."""
        array = (_Call * len(calls))(*[_Call(c.num_bytes, KINDS.index(c.kind), c.op_and_type) for c in calls])
        results = (_Result * len(calls))()
        self._library.fake_group(self._pointer, array, len(calls), int(mode), results)
        return [_outcome(r) for r in results]

    def run(self, kind: CollectiveKind, num_bytes: int, mode: HostMode = HostMode.PLAIN) -> CallOutcome:
        """One call by itself."""
        return self.group(HostCall(kind, num_bytes), mode=mode)[0]

    def ask_raw(
        self, kind: CollectiveKind, num_bytes: int, *, num_pipe_ops: int, costs_us: list[float]
    ) -> tuple[list[float], int]:
        """One getCollInfo with these costs: the costs and channels after it."""
        costs, channels = (ctypes.c_float * 21)(*costs_us), ctypes.c_int(0)
        self._library.fake_raw_coll_info(
            self._pointer, KINDS.index(kind), num_bytes, num_pipe_ops, costs, 7, 3, 0, ctypes.byref(channels)
        )
        return list(costs), channels.value

    def finalize(self) -> None:
        """Destroys the communicator; safe to call twice."""
        if self._pointer:
            self._library.fake_comm_finalize(self._pointer)
        self._pointer = 0


def _outcome(r: _Result) -> CallOutcome:
    return CallOutcome(
        algorithm=ALGORITHMS[r.algorithm],
        protocol=PROTOCOLS[r.protocol],
        max_channels=r.max_channels,
        num_channels=r.num_channels,
        chunk_bytes=tuple(b for b in r.chunk_bytes if b),
        channel_bytes=tuple(b for b in r.channel_bytes if b),
        tuner_channels=r.tuner_channels,
        num_tuner_calls=r.num_tuner_calls,
        num_chunk_calls=r.num_chunk_calls,
        num_threads=r.num_threads,
        faults=Fault(r.faults),
        predicted_us=r.predicted_us,
        cost_before=tuple(r.cost_before),
        cost_after=tuple(r.cost_after),
    )


def load_fake_library(path: Path) -> ctypes.CDLL:
    """The host's library with its functions typed."""
    library = ctypes.CDLL(str(path))
    library.fake_open.restype = ctypes.c_void_p
    library.fake_close.argtypes = [ctypes.c_void_p]
    library.fake_tuner_version.argtypes = [ctypes.c_void_p]
    library.fake_tuner_name.argtypes = [ctypes.c_void_p]
    library.fake_tuner_name.restype = ctypes.c_char_p
    library.fake_comm_init.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Spec)]
    library.fake_comm_init.restype = ctypes.c_void_p
    library.fake_comm_init_shape.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p]
    library.fake_comm_init_shape.restype = ctypes.c_void_p
    library.fake_comm_finalize.argtypes = [ctypes.c_void_p]
    library.fake_set_costs.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.fake_group.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    library.fake_raw_coll_info.argtypes = [
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p),
    ]
    library.fake_take_log.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    return library


class FakeNccl:
    """One process's NCCL of one release; the plug-in is found through the environment, as by NCCL."""

    def __init__(self, library: ctypes.CDLL, release: str | int) -> None:
        """`release` is one of `RELEASES`, or NCCL's version code."""
        self._library = library
        self.take_log()
        self._pointer = library.fake_open(release if isinstance(release, int) else RELEASES[release])
        self._comms: list[FakeComm] = []

    @property
    def tuner_version(self) -> int:
        """The interface version of the tuner that was found; 0: none."""
        return int(self._library.fake_tuner_version(self._pointer))

    @property
    def tuner_name(self) -> str:
        """The tuner's own name."""
        return str(self._library.fake_tuner_name(self._pointer).decode())

    def comm(
        self,
        num_ranks: int = 8,
        num_nodes: int = 1,
        *,
        comm_id: int | None = None,
        num_channels: int = 24,
        nvls_channels: int = 0,
        has_collnet: bool = False,
        has_ll128: bool = True,
    ) -> FakeComm:
        """A new communicator; its id is random, as in every run of NCCL."""
        comm_id = int.from_bytes(os.urandom(8), "little") if comm_id is None else comm_id  # new in every run
        spec = _Spec(comm_id, num_ranks, num_nodes, num_channels, nvls_channels, has_collnet, has_ll128)
        pointer = self._library.fake_comm_init(self._pointer, ctypes.byref(spec))
        assert pointer, "the tuner's init failed"
        self._comms.append(FakeComm(self._library, pointer))
        return self._comms[-1]

    def comm_of(self, record: bytes, constants: bytes | None = None) -> FakeComm:
        """A new communicator that decides with NCCL's model: an `nccl_shape` of nccl_host.h."""
        comm_id = int.from_bytes(os.urandom(8), "little")
        pointer = self._library.fake_comm_init_shape(self._pointer, comm_id, record, constants)
        assert pointer, "the tuner's init failed"
        self._comms.append(FakeComm(self._library, pointer))
        return self._comms[-1]

    def take_log(self) -> list[str]:
        """What was logged in this process since the last call."""
        buffer = ctypes.create_string_buffer(1 << 16)
        self._library.fake_take_log(buffer, len(buffer))
        return buffer.value.decode().splitlines()

    def __enter__(self) -> "FakeNccl":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for comm in self._comms:
            comm.finalize()
        self._library.fake_close(self._pointer)
