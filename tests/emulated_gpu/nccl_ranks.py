"""Ranks as processes on the emulated device: what each does is a function of this file, named on the command line."""

import ctypes as c
import os
import struct
import sys
import time
from pathlib import Path

FLOAT32, INT64, UINT8, BFLOAT16, INT32, INT8 = 7, 4, 1, 9, 2, 0
SUM, PROD, MAX, MIN, AVG = range(5)
INVALID_HANDLE = 400


class UniqueId(c.Structure):
    _fields_ = (("internal", c.c_char * 128),)


class Handle(c.Structure):
    """`CUipcMemHandle`, which is passed by value."""

    _fields_ = (("bytes", c.c_char * 64),)


class Nccl:
    """libnccl.so.2 and enough of the CUDA driver for buffers, of one rank."""

    def __init__(self, rank: int, num_ranks: int, folder: Path) -> None:
        self.cuda, self.nccl = c.CDLL("libcuda.so.1"), c.CDLL(os.environ.get("LAGOM_TEST_NCCL", "libnccl.so.2"))
        self.nccl.ncclGetLastError.restype = c.c_char_p
        self.rank, self.num_ranks, self.folder = rank, num_ranks, folder
        self.cuda.cuInit(0)
        context = c.c_void_p()
        gpus_per_host = int(os.environ.get("LAGOM_TEST_GPUS", "8"))
        assert self.cuda.cuDevicePrimaryCtxRetain(c.byref(context), rank % gpus_per_host) == 0
        assert self.cuda.cuCtxSetCurrent(context) == 0
        self.stream = c.c_void_p()
        assert self.cuda.cuStreamCreate(c.byref(self.stream), 1) == 0

    def buffer(self, num_bytes: int, content: bytes = b"") -> c.c_void_p:
        at = c.c_uint64()
        assert self.cuda.cuMemAlloc_v2(c.byref(at), c.c_size_t(max(1, num_bytes))) == 0
        if content:
            c.memmove(at.value, content, len(content))
        return c.c_void_p(at.value)

    def read(self, at: c.c_void_p, layout: str) -> tuple[float, ...]:
        assert self.cuda.cuStreamSynchronize(self.stream) == 0
        return struct.unpack(layout, c.string_at(at, struct.calcsize(layout)))

    def call(self, name: str, *arguments: object) -> None:
        result = getattr(self.nccl, name)(*arguments)
        assert result == 0, f"rank {self.rank}: {name} {result} {self.nccl.ncclGetLastError(None)}"

    def unique_id(self, name: str = "id") -> UniqueId:
        path, made = self.folder / name, UniqueId()
        if self.rank == 0:
            self.call("ncclGetUniqueId", c.byref(made))
            part = path.with_suffix(".part")
            part.write_bytes(bytes(made))
            part.rename(path)
        while not path.exists():
            time.sleep(1e-3)  # a rank that spins takes the core of the one that it waits for
        return UniqueId.from_buffer_copy(path.read_bytes())

    def init(self, name: str = "id") -> c.c_void_p:
        comm = c.c_void_p()
        self.call("ncclCommInitRank", c.byref(comm), self.num_ranks, self.unique_id(name), self.rank)
        return comm

    def all_reduce(
        self, comm: c.c_void_p, layout: str, values: tuple[float, ...], kind: int, op: int
    ) -> tuple[float, ...]:
        content = struct.pack(layout, *values)
        at = self.buffer(len(content), content)
        self.call("ncclAllReduce", at, at, c.c_size_t(len(values)), kind, op, comm, self.stream)
        return self.read(at, layout)


def collectives(n: Nccl) -> None:
    comm, r, size = n.init(), n.rank, n.num_ranks
    total = size * (size - 1) // 2
    assert n.all_reduce(comm, "4f", (r, 1, -r, 0.5), FLOAT32, SUM) == (total, size, -total, size / 2)
    assert n.all_reduce(comm, "2q", (r + 2**60, -r), INT64, MAX) == (size - 1 + 2**60, 0)
    assert n.all_reduce(comm, "2f", (r, 4), FLOAT32, AVG) == ((size - 1) / 2, 4)
    assert n.all_reduce(comm, "2B", (200, r), UINT8, SUM) == (200 * size % 256, total)
    one = 0x3F80  # bfloat16 1.0: sums of ones stay exact up to 256
    (found,) = n.all_reduce(comm, "H", (one,), BFLOAT16, SUM)
    assert struct.unpack("f", struct.pack("I", int(found) << 16))[0] == size
    gathered = n.buffer(4 * size)
    own = n.buffer(4, struct.pack("i", 10 + r))
    n.call("ncclAllGather", own, gathered, c.c_size_t(1), INT32, comm, n.stream)
    assert n.read(gathered, f"{size}i") == tuple(range(10, 10 + size))
    parts = n.buffer(4 * size, struct.pack(f"{size}i", *(100 * r + k for k in range(size))))
    n.call("ncclReduceScatter", parts, own, c.c_size_t(1), INT32, SUM, comm, n.stream)
    assert n.read(own, "i") == (100 * total + size * r,)
    n.call("ncclAlltoAll", parts, gathered, c.c_size_t(1), INT32, comm, n.stream)
    assert n.read(gathered, f"{size}i") == tuple(100 * k + r for k in range(size))
    n.call("ncclBroadcast", parts, gathered, c.c_size_t(size), INT32, 1, comm, n.stream)
    assert n.read(gathered, f"{size}i") == tuple(100 + k for k in range(size))
    n.call("ncclReduce", parts, gathered, c.c_size_t(size), INT32, MIN, size - 1, comm, n.stream)
    if r == size - 1:
        assert n.read(gathered, f"{size}i") == tuple(range(size))
    n.call("ncclCommDestroy", comm)


def groups(n: Nccl) -> None:
    comm, r, size = n.init(), n.rank, n.num_ranks
    n.call("ncclGroupStart")
    n.call("ncclGroupStart")  # groups nest
    received = [n.buffer(8) for _ in range(size)]
    for peer in range(size):
        n.call("ncclSend", n.buffer(8, struct.pack("q", 1000 * r + peer)), c.c_size_t(1), INT64, peer, comm, n.stream)
        n.call("ncclRecv", received[peer], c.c_size_t(1), INT64, peer, comm, n.stream)
    n.call("ncclGroupEnd")
    many = [n.buffer(4, struct.pack("i", k)) for k in range(11)]  # more than parts that may wait
    for at in many:
        n.call("ncclAllReduce", at, at, c.c_size_t(1), INT32, SUM, comm, n.stream)
    n.call("ncclGroupEnd")
    assert [n.read(at, "q")[0] for at in received] == [1000 * peer + r for peer in range(size)]
    assert [n.read(at, "i")[0] for at in many] == [size * k for k in range(11)]
    # A ring shift by single calls, then of something too large to be computed.
    n.call("ncclGroupStart")
    n.call("ncclSend", many[1], c.c_size_t(1), INT32, (r + 1) % size, comm, n.stream)
    n.call("ncclRecv", many[2], c.c_size_t(1), INT32, (r - 1) % size, comm, n.stream)
    n.call("ncclGroupEnd")
    assert n.read(many[2], "i") == (size,)
    large = n.buffer(8 << 20, b"\1")
    n.call("ncclAllReduce", large, large, c.c_size_t(2 << 20), FLOAT32, SUM, comm, n.stream)
    assert n.read(large, "4B") == (1, 0, 0, 0)
    n.call("ncclCommDestroy", comm)


def splits(n: Nccl) -> None:
    comm, r, size = n.init(), n.rank, n.num_ranks
    for _ in range(3):
        half, empty = c.c_void_p(), c.c_void_p(1)
        n.call("ncclCommSplit", comm, r % 2, -r, c.byref(half), None)
        n.call("ncclCommSplit", comm, -1, 0, c.byref(empty), None)
        assert empty.value is None
        count, rank = c.c_int(), c.c_int()
        n.call("ncclCommCount", half, c.byref(count))
        n.call("ncclCommUserRank", half, c.byref(rank))
        members = [k for k in range(size) if k % 2 == r % 2]
        assert (count.value, rank.value) == (len(members), members[::-1].index(r))
        if len(members) > 1:
            assert n.all_reduce(half, "q", (r,), INT64, SUM) == (sum(members),)
        n.call("ncclCommDestroy", half)
    scaled, factor = c.c_int(), c.c_float(0.5)
    n.call("ncclRedOpCreatePreMulSum", c.byref(scaled), c.byref(factor), FLOAT32, 1, comm)
    assert n.all_reduce(comm, "f", (3.0,), FLOAT32, scaled.value) == (1.5 * size,)
    n.call("ncclRedOpDestroy", scaled, comm)
    assert n.nccl.ncclAllReduce(scaled, scaled, c.c_size_t(1), FLOAT32, scaled.value, comm, n.stream) == 4
    if size > 2:
        fewer, without = c.c_void_p(), c.c_int(size - 1)
        if r < size - 1:
            n.call("ncclCommShrink", comm, c.byref(without), 1, c.byref(fewer), None, 0)
            assert n.all_reduce(fewer, "i", (1,), INT32, SUM) == (size - 1,)
            n.call("ncclCommDestroy", fewer)
    n.call("ncclCommFinalize", comm)
    n.call("ncclCommDestroy", comm)


def many_inits(n: Nccl) -> None:
    for k in range(50):
        comm = n.init(f"id{k}")
        assert n.all_reduce(comm, "i", (k,), INT32, SUM) == (k * n.num_ranks,)
        n.call("ncclCommDestroy", comm)


def a_rank_goes(n: Nccl) -> None:
    comm = n.init()
    assert n.all_reduce(comm, "i", (1,), INT32, SUM) == (n.num_ranks,)
    if n.rank == 0:
        sys.exit(0)
    at = n.buffer(4)
    n.call("ncclAllReduce", at, at, c.c_size_t(1), INT32, SUM, comm, n.stream)  # its result never comes
    n.cuda.cuStreamSynchronize(n.stream)
    error = c.c_int()
    n.call("ncclCommGetAsyncError", comm, c.byref(error))
    assert error.value == 6
    assert b"rank 0 has gone" in n.nccl.ncclGetLastError(comm) or n.rank > 1
    n.call("ncclCommAbort", comm)


def nobody_comes(n: Nccl) -> None:
    comm = c.c_void_p()
    made = UniqueId()
    n.call("ncclGetUniqueId", c.byref(made))
    assert n.nccl.ncclCommInitRank(c.byref(comm), 2, made, 0) == 8


def refused_settings(n: Nccl) -> None:
    comm = c.c_void_p()
    assert n.nccl.ncclCommInitRank(c.byref(comm), n.num_ranks, n.unique_id(), n.rank) == 5  # ncclInvalidUsage


class Config(c.Structure):
    """`ncclConfig_t` as far as the limits of channels."""

    _fields_ = (
        ("size", c.c_size_t), ("magic", c.c_uint), ("version", c.c_uint), ("blocking", c.c_int), ("cluster", c.c_int),
        ("min_ctas", c.c_int), ("max_ctas", c.c_int),
    )  # fmt: skip


def limited(n: Nccl) -> None:
    """A large all-reduce of a communicator that may have two channels, and of its split."""
    config, comm, half, at = Config(c.sizeof(Config), 0xCAFEBEEF, 22907), c.c_void_p(), c.c_void_p(), n.buffer(64 << 20)
    undefined = -(2**31)
    config.blocking = config.cluster = config.min_ctas = undefined
    config.max_ctas = 2
    n.call("ncclCommInitRankConfig", c.byref(comm), n.num_ranks, n.unique_id(), n.rank, c.byref(config))
    n.call("ncclCommSplit", comm, 0, n.rank, c.byref(half), None)
    for used in (comm, half):
        n.call("ncclAllReduce", at, at, c.c_size_t(16 << 20), FLOAT32, SUM, used, n.stream)
    n.call("ncclCommDestroy", half)
    n.call("ncclCommDestroy", comm)


class FullConfig(Config):
    """`ncclConfig_t` of NCCL 2.32."""

    _fields_ = (
        ("net_name", c.c_char_p), ("split_share", c.c_int), ("traffic_class", c.c_int), ("comm_name", c.c_char_p),
        ("collnet", c.c_int), ("policy", c.c_int), ("shrink_share", c.c_int), ("nvls_ctas", c.c_int),
        ("others", c.c_int * 11),
    )  # fmt: skip


def limited_by_switch(n: Nccl) -> None:
    """A large all-reduce through the switch, of a communicator that says how many channels that may have."""
    undefined, comm, at = -(2**31), c.c_void_p(), n.buffer(64 << 20)
    config = FullConfig(c.sizeof(FullConfig), 0xCAFEBEEF, 23203, *[undefined] * 4, None, undefined, undefined, None)
    assert c.sizeof(config) == 120
    config.collnet = config.policy = config.shrink_share = undefined
    config.others[:] = [undefined] * 11
    for channels, result in ((0, 4), (5, 0)):
        config.nvls_ctas = channels
        unique_id = n.unique_id(f"id{channels}")
        found = n.nccl.ncclCommInitRankConfig(c.byref(comm), n.num_ranks, unique_id, n.rank, c.byref(config))
        assert found == result
    n.call("ncclAllReduce", at, at, c.c_size_t(16 << 20), FLOAT32, SUM, comm, n.stream)
    n.call("ncclCommDestroy", comm)


class CallConfig(c.Structure):
    """`ncclCollConfig_t` of NCCL 2.32."""

    _fields_ = (
        ("size", c.c_size_t), ("magic", c.c_uint), ("version", c.c_uint), ("ext", c.c_void_p), ("min_ctas", c.c_int),
        ("max_ctas", c.c_int), ("nvls_ctas", c.c_int), ("cluster", c.c_int), ("selection", c.c_char_p),
        ("is_forced", c.c_int), ("policy", c.c_int), ("tag", c.c_uint64), ("launched", c.c_void_p),
    )  # fmt: skip

    @classmethod
    def unset(cls) -> "CallConfig":
        u = -(2**31)
        return cls(c.sizeof(cls), 0xCAFEBEEF, 23203, None, u, u, u, u, None, 1, u, 0, None)


def configured(n: Nccl) -> None:
    """Each collective with a configuration of its own, as without; limits of channels; what is refused."""
    comm, r, size, config = n.init(), n.rank, n.num_ranks, CallConfig.unset()
    total = size * (size - 1) // 2
    event = c.c_void_p()
    assert n.cuda.cuEventCreate(c.byref(event), 2) == 0
    config.launched = event.value
    own, all_, by = (
        n.buffer(4 * size, struct.pack(f"{size}i", *(100 * r + k for k in range(size)))),
        n.buffer(4 * size),
        c.byref(config),
    )
    one, end = c.c_size_t(1), (comm, n.stream, by)
    n.call("ncclReduceScatterConfig", own, all_, one, INT32, SUM, *end)
    assert n.read(all_, "i") == (100 * total + size * r,)
    assert n.cuda.cuEventQuery(event) == 0
    n.call("ncclAlltoAllConfig", own, all_, one, INT32, *end)
    assert n.read(all_, f"{size}i") == tuple(100 * k + r for k in range(size))
    n.call("ncclAllGatherConfig", own, all_, one, INT32, *end)
    assert n.read(all_, f"{size}i") == tuple(100 * k for k in range(size))
    n.call("ncclAllReduceConfig", own, all_, one, INT32, SUM, *end)
    assert n.read(all_, "i") == (100 * total,)
    n.call("ncclBroadcastConfig", own, all_, one, INT32, 1, *end)
    assert n.read(all_, "i") == (100,)
    n.call("ncclReduceConfig", own, all_, one, INT32, MAX, 0, *end)
    n.call("ncclGatherConfig", own, all_, one, INT32, 0, *end)
    if r == 0:
        assert n.read(all_, f"{size}i") == tuple(100 * k for k in range(size))
    n.call("ncclScatterConfig", own, all_, one, INT32, 0, *end)
    assert n.read(all_, "i") == (r,)
    large = n.buffer(64 << 20)
    config.launched, config.max_ctas = None, 3
    n.call("ncclAllReduceConfig", large, large, c.c_size_t(16 << 20), FLOAT32, SUM, *end)
    n.call("ncclAllReduceConfig", large, large, c.c_size_t(16 << 20), FLOAT32, SUM, comm, n.stream, None)
    for field, value, result in (
        ("magic", 0, 4), ("min_ctas", 4, 4), ("max_ctas", 0, 4), ("max_ctas", 65, 4), ("selection", b"ring", 5),
    ):  # fmt: skip
        wrong = CallConfig.unset()
        wrong.max_ctas = 3
        setattr(wrong, field, value)
        assert n.nccl.ncclAllReduceConfig(large, large, one, INT32, SUM, comm, n.stream, c.byref(wrong)) == result, (
            field
        )
    n.call("ncclCommDestroy", comm)


def refused_limits(n: Nccl) -> None:
    """Limits of channels in a configuration that contradict each other; a least without a most does."""
    undefined = -(2**31)
    for least, most in ((4, 2), (0, undefined), (undefined, 0), (4, undefined)):
        config, comm = Config(c.sizeof(Config), 0xCAFEBEEF, 22907), c.c_void_p()
        config.blocking = config.cluster = undefined
        config.min_ctas, config.max_ctas = least, most
        unique_id = n.unique_id()
        found = n.nccl.ncclCommInitRankConfig(c.byref(comm), n.num_ranks, unique_id, n.rank, c.byref(config))
        assert found == 4, (least, most, found)  # ncclInvalidArgument


def version(n: Nccl) -> None:
    code = c.c_int()
    n.call("ncclGetVersion", c.byref(code))
    (n.folder / "release").write_text(f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}")


def decisions(n: Nccl) -> None:
    """Every collective at every size, alone, then three in a group, then on half of the ranks; values do not matter."""
    comm, half = n.init(), c.c_void_p()
    n.call("ncclCommSplit", comm, n.rank % 2, n.rank, c.byref(half), None)
    at = n.buffer(256 << 20)
    for used in (comm, half) if n.num_ranks > 3 else (comm,):
        for power in range(8, 27):
            count = c.c_size_t(1 << power)
            n.call("ncclAllReduce", at, at, count, FLOAT32, SUM, used, n.stream)
            n.call("ncclBroadcast", at, at, count, FLOAT32, 0, used, n.stream)
            n.call("ncclReduce", at, at, count, FLOAT32, SUM, 0, used, n.stream)
            part = c.c_size_t((1 << power) // n.num_ranks)
            n.call("ncclAllGather", at, at, part, FLOAT32, used, n.stream)
            n.call("ncclReduceScatter", at, at, part, FLOAT32, SUM, used, n.stream)
    n.call("ncclGroupStart")
    for power in (10, 14, 20):
        n.call("ncclAllReduce", at, at, c.c_size_t(1 << power), FLOAT32, SUM, comm, n.stream)
    n.call("ncclGroupEnd")
    n.call("ncclCommDestroy", half)
    n.call("ncclCommDestroy", comm)


def comings_and_goings(n: Nccl) -> None:
    """As often as LAGOM_TEST_COMINGS says; what is open after the first ten must be all that is open at the end."""
    at, held = n.buffer(1 << 20), (0, 0)
    for k in range(int(os.environ["LAGOM_TEST_COMINGS"])):
        comm = n.init(f"id{k}")
        n.call("ncclAllReduce", at, at, c.c_size_t(1 << 18), FLOAT32, SUM, comm, n.stream)
        n.call("ncclCommFinalize", comm)
        n.call("ncclCommDestroy", comm)
        held = _held() if k == 9 else held
    assert _held() <= held, f"rank {n.rank}: files and threads {held} after ten, {_held()} at the end"


def _held() -> tuple[int, int]:
    """Open files and threads of this process."""
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


WAYS = {
    "all_reduce": ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (4, 2)),
    "all_gather": ((1, 0), (1, 1), (1, 2), (4, 2)),
    "reduce_scatter": ((1, 0), (1, 1), (1, 2), (4, 2)),
    "broadcast": ((1, 0), (1, 1), (1, 2)),
    "reduce": ((1, 0), (1, 1), (1, 2)),
}
"""Algorithms (tree, ring, NVLS) and protocols (LL, LL128, Simple) by number, those that NCCL offers somewhere."""
ASKED_CHANNELS = (0, 1, 3, 8, 16)
ASKED_POWERS = (12, 16, 20, 24)
ASKED_CHUNKS = (0, 64 << 10)


def asked(n: Nccl) -> None:
    """What a tuner asks for: every way, channels and chunk, at four sizes; one call at a time."""
    asking = c.CDLL(os.environ["NCCL_TUNER_PLUGIN"])
    algorithm, protocol, channels = (
        c.c_int.in_dll(asking, f"asked_{name}") for name in ("algorithm", "protocol", "channels")
    )
    chunk = c.c_size_t.in_dll(asking, "asked_chunk")
    comm, at = n.init(), n.buffer(256 << 20)
    for kind, ways in WAYS.items():
        for way in ways:
            for channels.value in ASKED_CHANNELS:
                for chunk.value in ASKED_CHUNKS:
                    algorithm.value, protocol.value = way
                    for power in ASKED_POWERS:
                        call(n, kind, 1 << power, at, comm)
    n.call("ncclCommDestroy", comm)


def call(n: Nccl, kind: str, count: int, at: c.c_void_p, comm: c.c_void_p) -> None:
    whole, part, stream = c.c_size_t(count), c.c_size_t(count // n.num_ranks), n.stream
    match kind:
        case "all_reduce":
            n.call("ncclAllReduce", at, at, whole, FLOAT32, SUM, comm, stream)
        case "all_gather":
            n.call("ncclAllGather", at, at, part, FLOAT32, comm, stream)
        case "reduce_scatter":
            n.call("ncclReduceScatter", at, at, part, FLOAT32, SUM, comm, stream)
        case "broadcast":
            n.call("ncclBroadcast", at, at, whole, FLOAT32, 0, comm, stream)
        case "reduce":
            n.call("ncclReduce", at, at, whole, FLOAT32, SUM, 0, comm, stream)


def grouped(n: Nccl) -> None:
    """Groups of one kind and of several, sizes in any order."""
    comm, at = n.init(), n.buffer(256 << 20)
    groups = (
        [("all_reduce", p) for p in (10, 14, 20)],
        [("all_reduce", p) for p in (20, 14, 10, 20)],
        [("all_gather", p) for p in (12, 22, 16)],
        [("reduce_scatter", p) for p in (24, 12)],
        [("broadcast", p) for p in (10, 11, 18, 19)],
        [("all_reduce", 12), ("all_gather", 20), ("all_reduce", 22), ("reduce_scatter", 16), ("all_gather", 14)],
    )
    for group in groups:
        n.call("ncclGroupStart")
        for kind, power in group:
            call(n, kind, 1 << power, at, comm)
        n.call("ncclGroupEnd")
    n.call("ncclCommDestroy", comm)


def swaps(n: Nccl) -> None:
    """Tables are swapped between steps while others are in flight: each call runs by the table of its step."""
    from lagom_overlap.collective import CollectiveKind, CommConfig, CommunicatorId, ConfigKey, ConfigTable
    from lagom_overlap.nccl_plugin.library import TunerPlugin
    from lagom_overlap.nccl_plugin.table_writer import ProcessCommunicator, encode_table

    plugin = TunerPlugin(Path(os.environ["NCCL_TUNER_PLUGIN"]))
    name = CommunicatorId(description="nccl", ranks=tuple(range(n.num_ranks)), creation_order=0)
    comm, at = n.init(), n.buffer(64 << 20)
    for step in range(200):
        key = ConfigKey(communicator=name, kind=CollectiveKind.ALL_REDUCE, num_bytes=64 << 20, occurrence=0)
        table = ConfigTable({key: CommConfig(num_channels=1 + step % 16)} if step % 17 else {})
        encoded = encode_table(table, generation=step + 1, communicators=[ProcessCommunicator(name, 1)])
        plugin.prepare(encoded.data, step + 1)
        plugin.commit(step + 1)
        for _ in range(3):
            n.call("ncclAllReduce", at, at, c.c_size_t(16 << 20), FLOAT32, SUM, comm, n.stream)
    n.call("ncclCommDestroy", comm)


def two_streams(n: Nccl) -> None:
    """Calls on two streams: of one communicator one after another, of two beside each other."""
    cuda, other, at = n.cuda, c.c_void_p(), n.buffer(128 << 20)
    assert cuda.cuStreamCreate(c.byref(other), 1) == 0
    first_done, second_done = c.c_void_p(), c.c_void_p()
    for event in (first_done, second_done):
        assert cuda.cuEventCreate(c.byref(event), 0) == 0
    comms = [n.init(name) for name in ("first", "second")]

    def behind_ms(first: c.c_void_p, second: c.c_void_p) -> float:
        """How long after the last of twenty calls on one stream a call on the other one ends."""
        for comm, count, stream, event in ((first, 20, n.stream, first_done), (second, 1, other, second_done)):
            for _ in range(count):
                n.call("ncclAllReduce", at, at, c.c_size_t(16 << 20), FLOAT32, SUM, comm, stream)
            assert cuda.cuEventRecord(event, stream) == 0
        assert cuda.cuCtxSynchronize() == 0
        gap = c.c_float()
        assert cuda.cuEventElapsedTime(c.byref(gap), first_done, second_done) == 0
        return gap.value

    behind_ms(comms[0], comms[1])  # the first calls connect
    assert behind_ms(comms[0], comms[0]) > 0
    assert behind_ms(comms[0], comms[1]) < 0
    for comm in comms:
        n.call("ncclCommDestroy", comm)


def hosts(n: Nccl) -> None:
    """Two steps over emulated hosts: a large sum, sends to the next rank and the one after; a sum of values."""
    cuda, at, other = n.cuda, n.buffer(64 << 20), n.buffer(64 << 20)
    comm = n.init()
    for _ in range(3):
        cuda.lagom_emulation_mark(b'{"step":"begin"}')
        n.call("ncclAllReduce", at, at, c.c_size_t(16 << 20), FLOAT32, SUM, comm, n.stream)
        for count, distance in ((1 << 22, 1), (1 << 23, 2)):
            if n.rank == 0:
                n.call("ncclSend", at, c.c_size_t(count), FLOAT32, distance, comm, n.stream)
            if n.rank == distance:
                n.call("ncclRecv", other, c.c_size_t(count), FLOAT32, 0, comm, n.stream)
        assert cuda.cuCtxSynchronize() == 0
    assert n.all_reduce(comm, "2f", (float(n.rank), 1.0), FLOAT32, SUM) == (6.0, 4.0)
    cuda.lagom_emulation_mark(b'{"step":"begin"}')
    handle, name, opened = (c.c_char * 64)(), n.folder / "memory", c.c_uint64()
    if n.rank == 0:
        assert cuda.cuIpcGetMemHandle(handle, at) == 0
        name.with_suffix(".part").write_bytes(bytes(handle))
        name.with_suffix(".part").rename(name)
    while not name.exists():
        time.sleep(1e-3)
    if n.rank:
        code = cuda.cuIpcOpenMemHandle_v2(c.byref(opened), Handle.from_buffer_copy(name.read_bytes()), 1)
        assert code == (0 if n.rank == 1 else INVALID_HANDLE)
    n.all_reduce(comm, "1f", (1.0,), FLOAT32, SUM)
    n.call("ncclCommDestroy", comm)


def several_hosts(n: Nccl) -> None:
    """Decisions of a communicator over hosts; real proxies wait for kernels that never move, so it is aborted."""
    comm, at = n.init(), n.buffer(64 << 20)
    for kind in WAYS:
        for power in (10, 16, 20, 24):
            call(n, kind, 1 << power, at, comm)
    n.call("ncclCommAbort", comm)


if __name__ == "__main__":
    function, rank, num_ranks, folder = sys.argv[1:]
    globals()[function](Nccl(int(rank), int(num_ranks), Path(folder)))
