"""Two NCCL ranks on one GPU, driven through ctypes: real collectives without a second GPU.

Needs NCCL 2.30.3 or later (NCCL_MULTI_RANK_GPU_ENABLE). Each rank has its own channels, so a collective with NC
channels holds 2 NC SMs, and both ways of its traffic go through this GPU's memory: the scheduling is real, the link is
not. All blocks must be resident at once, or the collective hangs: `MAX_BLOCKS` is refused beyond, and the caller still
needs a time limit.
"""

import ctypes
import math
import os
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path

import torch
from standin import Cover

from lagom_overlap.cost.measured_surface import Setting

NUM_RANKS = 2
MAX_BLOCKS = 120
UNDEF_INT = -(2**31)  # NCCL_CONFIG_UNDEF_INT
API_MAGIC = 0xCAFEBEEF
OLDEST = 23003  # 2.30.3
BFLOAT16, SUM = 9, 0  # ncclBfloat16, ncclSum
SETTLE_S = 300e-6  # from the start event to a kernel that surely holds its SMs
HANG_S = 20.0
SHARED_GPU = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NET_GDR_LEVEL": "LOC",
    "NCCL_NVLS_ENABLE": "0",
}
"""What several ranks on one GPU need; nothing of it chooses an algorithm, a protocol, channels or chunks."""
RING_SIMPLE = {
    "NCCL_NO_CACHE": "ALL",  # NCCL_BUFFSIZE and NCCL_NTHREADS are read again by every communicator
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}
"""For a sweep over channels and chunks of one kind of kernel."""


class NcclError(RuntimeError):
    """An NCCL call failed, gave a wrong result, or hung."""


class Kind(StrEnum):
    """Collectives the pair can run."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"


class UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = (("internal", ctypes.c_char * 128),)


CONFIG_HEAD = ("blocking", "cga_cluster_size", "min_ctas", "max_ctas")
CONFIG_MIDDLE = ("split_share", "traffic_class")
CONFIG_TAIL = (
    "collnet_enable",
    "cta_policy",
    "shrink_share",
    "nvls_ctas",
    "num_channels_per_net_peer",
    "nvlink_centric_sched",
    "graph_usage_mode",
    "num_rma_ctx",
    "max_p2p_peers",
    "graph_stream_ordering",
)
CONFIG_INTS = CONFIG_HEAD + CONFIG_MIDDLE + CONFIG_TAIL


class Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.30.x; `size` tells newer libraries how much of theirs is meant."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        *((name, ctypes.c_int) for name in CONFIG_HEAD),
        ("net_name", ctypes.c_char_p),
        *((name, ctypes.c_int) for name in CONFIG_MIDDLE),
        ("comm_name", ctypes.c_char_p),
        *((name, ctypes.c_int) for name in CONFIG_TAIL),
    )


def make_config(version: int, num_channels: int | None) -> Config:
    """A config that pins the number of channels, if it is given; everything else at NCCL's default."""
    config = Config()
    for name in CONFIG_INTS:
        setattr(config, name, UNDEF_INT)
    config.size, config.magic, config.version = ctypes.sizeof(Config), API_MAGIC, version
    if num_channels is not None:
        config.min_ctas = config.max_ctas = num_channels
    return config


class Library:
    """libnccl.so.2 with its return codes turned into NcclError."""

    def __init__(self, path: Path, environment: Mapping[str, str] = RING_SIMPLE) -> None:
        """Load by absolute path: a bare name would find the library that torch has loaded."""
        os.environ.update(SHARED_GPU | dict(environment))
        self._lib = ctypes.CDLL(str(path.resolve(strict=True)), mode=os.RTLD_NOW | os.RTLD_DEEPBIND)
        self._lib.ncclGetErrorString.restype = ctypes.c_char_p
        found = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(found))
        self.version = found.value
        if self.version < OLDEST:
            raise NcclError(f"NCCL {self.version} cannot put two ranks on one GPU; need {OLDEST} or later")

    def call(self, name: str, *arguments: object) -> None:
        """Call `name`; raise unless it returns ncclSuccess."""
        status = getattr(self._lib, name)(*arguments)
        if status:
            raise NcclError(f"{name}: {self._lib.ncclGetErrorString(status).decode()}")


class Comms:
    """Two communicators' ends on this GPU, each with its stream."""

    def __init__(self, library: Library, num_channels: int | None) -> None:
        """`num_channels` None: as many as NCCL, or a tuner, chooses."""
        self.streams = [torch.cuda.Stream(priority=-1) for _ in range(NUM_RANKS)]
        self._lib = library
        self._comms = self._connect(num_channels)

    def enqueue(self, kind: Kind, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """One call on both ranks, in one group; does not wait."""
        self._lib.call("ncclGroupStart")
        for rank in range(NUM_RANKS):
            self._collective(kind, rank, sent[rank], received[rank])
        self._lib.call("ncclGroupEnd")

    def close(self) -> None:
        """Destroy both."""
        torch.cuda.synchronize()
        for comm in self._comms:
            self._lib.call("ncclCommDestroy", comm)
        self._comms = []

    def _connect(self, num_channels: int | None) -> list[ctypes.c_void_p]:
        unique = UniqueId()
        self._lib.call("ncclGetUniqueId", ctypes.byref(unique))
        comms = [ctypes.c_void_p() for _ in range(NUM_RANKS)]
        configs = [make_config(self._lib.version, num_channels) for _ in range(NUM_RANKS)]
        self._lib.call("ncclGroupStart")
        for rank, (comm, config) in enumerate(zip(comms, configs, strict=True)):
            self._lib.call("ncclCommInitRankConfig", ctypes.byref(comm), NUM_RANKS, unique, rank, ctypes.byref(config))
        self._lib.call("ncclGroupEnd")
        return comms

    def _collective(self, kind: Kind, rank: int, sent: torch.Tensor, received: torch.Tensor) -> None:
        source, target = ctypes.c_void_p(sent.data_ptr()), ctypes.c_void_p(received.data_ptr())
        comm, stream = self._comms[rank], ctypes.c_void_p(self.streams[rank].cuda_stream)
        dtype, add = ctypes.c_int(BFLOAT16), ctypes.c_int(SUM)
        count = ctypes.c_size_t(min(sent.numel(), received.numel()))
        match kind:
            case Kind.ALL_GATHER:
                self._lib.call("ncclAllGather", source, target, count, dtype, comm, stream)
            case Kind.REDUCE_SCATTER:
                self._lib.call("ncclReduceScatter", source, target, count, dtype, add, comm, stream)
            case Kind.ALL_REDUCE:
                self._lib.call("ncclAllReduce", source, target, count, dtype, add, comm, stream)


def buffers_of(kind: Kind, num_bytes: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What each rank sends, and where it receives, for a whole tensor of `num_bytes` in bf16.

    Small integers: they are exact in bf16, and so are their sums.
    """
    num_elements = num_bytes // 2 // NUM_RANKS * NUM_RANKS
    shard = num_elements // NUM_RANKS
    num_sent = shard if kind is Kind.ALL_GATHER else num_elements
    num_received = shard if kind is Kind.REDUCE_SCATTER else num_elements
    sent = [torch.randint(-8, 9, (num_sent,), device="cuda").bfloat16() for _ in range(NUM_RANKS)]
    received = [torch.empty(num_received, dtype=torch.bfloat16, device="cuda") for _ in range(NUM_RANKS)]
    torch.cuda.synchronize()
    return sent, received


def poison(received: Sequence[torch.Tensor]) -> None:
    """So that an element that nobody wrote is found."""
    for tensor in received:
        tensor.fill_(float("nan"))
    torch.cuda.synchronize()


def wrong_rank(kind: Kind, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> int | None:
    """The first rank whose result differs from the reference in any element; None: both are right."""
    for rank, got in enumerate(received):
        expected = torch.cat(list(sent)) if kind is Kind.ALL_GATHER else sent[0] + sent[1]
        if kind is Kind.REDUCE_SCATTER:
            expected = expected[rank * got.numel() : (rank + 1) * got.numel()]
        if not torch.equal(got, expected):
            return rank
    return None


class NcclPair:
    """One collective between two ranks of this GPU, repeated until the victim is covered."""

    def __init__(self, library: Library, kind: Kind, setting: Setting) -> None:
        if setting.num_blocks > MAX_BLOCKS:
            raise ValueError(f"{setting.num_blocks} blocks cannot all be resident; at most {MAX_BLOCKS}")
        if setting.num_ranks != NUM_RANKS or setting.message_bytes is None:
            raise ValueError("an NCCL setting has two ranks and a message size")
        for variable, value in (("NCCL_BUFFSIZE", setting.chunk_bytes), ("NCCL_NTHREADS", setting.num_threads)):
            os.environ.pop(variable, None)
            if value is not None:  # the chunk of a Simple ring is half of the buffer: 4 of 8 steps
                os.environ[variable] = str(2 * value if variable == "NCCL_BUFFSIZE" else value)
        self._kind, self._message_bytes = kind, setting.message_bytes
        self._setting = setting
        self._sent, self._received = buffers_of(kind, setting.message_bytes)
        self._comms = Comms(library, setting.num_channels)
        self._streams = self._comms.streams
        self._starts = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_RANKS)]
        self._ends = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_RANKS)]
        self.check()
        self.one_s = self._time_one()
        self._num_calls = 1

    def cover(self, duration_s: float) -> None:
        """Repeat the collective often enough to outlast `duration_s` of a victim that runs up to four times slower."""
        self._num_calls = min(400, max(2, math.ceil((4 * duration_s + 2e-3) / self.one_s)))

    def start(self) -> None:
        """Enqueue all repetitions on both ranks' streams and return once the first holds its SMs."""
        self._enqueue(self._num_calls)
        self._await(self._starts)
        time.sleep(SETTLE_S)

    def enqueue_once(self) -> None:
        """Enqueue one call on both ranks; does not wait."""
        self._enqueue(1)

    def stop_after(self, victim_stream: torch.cuda.Stream) -> None:
        """Nothing: a collective ends by itself, and `finish` says whether it ended too early."""

    def finish(self, victim_end: torch.cuda.Event) -> Cover:
        """Wait for both ranks; covered means that both ended after the victim did."""
        self._await(self._ends)
        victim_end.synchronize()
        covered = all(victim_end.elapsed_time(end) > 0 for end in self._ends)
        elapsed_s = max(a.elapsed_time(b) for a, b in zip(self._starts, self._ends, strict=True)) * 1e-3  # ms
        wire_bytes = self._num_calls * self._message_bytes  # both ranks together, n = 2: AG, RS
        if self._kind is Kind.ALL_REDUCE:
            wire_bytes *= 2
        return Cover(covered=covered, bytes_per_s=wire_bytes / elapsed_s, num_held_sms=None)

    def check(self) -> None:
        """Run the collective once into poisoned memory and compare every element with a reference."""
        poison(self._received)
        self._enqueue(1)
        self._await(self._ends)
        if (rank := wrong_rank(self._kind, self._sent, self._received)) is not None:
            raise NcclError(f"{self._kind} gave a wrong result on rank {rank} with {self._setting}")

    def close(self) -> None:
        """Destroy both communicators."""
        self._comms.close()

    def _enqueue(self, num_calls: int) -> None:
        for stream, event in zip(self._streams, self._starts, strict=True):
            event.record(stream)
        for _ in range(num_calls):
            self._comms.enqueue(self._kind, self._sent, self._received)
        for stream, event in zip(self._streams, self._ends, strict=True):
            event.record(stream)

    def _time_one(self) -> float:
        self._enqueue(3)
        self._await(self._ends)
        self._enqueue(5)
        self._await(self._ends)
        return self._starts[0].elapsed_time(self._ends[0]) * 1e-3 / 5  # ms, five calls

    @staticmethod
    def _await(events: list[torch.cuda.Event]) -> None:
        give_up = time.monotonic() + HANG_S
        while not all(event.query() for event in events):
            if time.monotonic() > give_up:
                raise NcclError(f"no end after {HANG_S} s: the ranks' blocks are probably not all resident")
