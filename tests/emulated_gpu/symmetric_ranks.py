"""Ranks of the first host of four, as processes: what each does is a function of this file (`nccl_ranks.py`)."""

import ctypes as c
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

from nccl_ranks import AVG, FLOAT32, INT32, MIN, SUM, Nccl

HOSTS = 4
INVALID_USAGE = 5


def name_group(n: Nccl, ranks: Sequence[int], peer: int = -1) -> None:
    """What the framework hook says before a communicator is made."""
    numbers = (c.c_int * len(ranks))(*ranks)
    n.cuda.lagom_emulation_group(n.num_ranks, len(ranks), numbers, list(ranks).index(n.rank), peer)


def make(n: Nccl, name: str, ranks: Sequence[int]) -> c.c_void_p:
    comm = c.c_void_p()
    name_group(n, ranks)
    n.call("ncclCommInitRank", c.byref(comm), len(ranks), n.unique_id(name), list(ranks).index(n.rank))
    return comm


def refused(n: Nccl, result: int, words: str) -> None:
    text = n.nccl.ncclGetLastError(None).decode()
    assert (result, words in text) == (INVALID_USAGE, True), (result, text)


def collectives(n: Nccl) -> None:
    """Absent ranks give what the rank in their place on the first host gives."""
    r, size, total = n.rank, HOSTS * n.num_ranks, n.num_ranks * (n.num_ranks - 1) // 2
    comm = make(n, "world", range(size))
    assert n.all_reduce(comm, "2f", (r, 1), FLOAT32, SUM) == (HOSTS * total, size)
    assert n.all_reduce(comm, "f", (r,), FLOAT32, AVG) == (total / n.num_ranks,)
    own, gathered = n.buffer(4, struct.pack("i", 10 + r)), n.buffer(4 * size)
    n.call("ncclAllGather", own, gathered, c.c_size_t(1), INT32, comm, n.stream)
    assert n.read(gathered, f"{size}i") == tuple(range(10, 10 + n.num_ranks)) * HOSTS
    parts = n.buffer(4 * size, struct.pack(f"{size}i", *(100 * r + k for k in range(size))))
    n.call("ncclReduceScatter", parts, own, c.c_size_t(1), INT32, SUM, comm, n.stream)
    assert n.read(own, "i") == (HOSTS * 100 * total + size * r,)
    n.call("ncclAlltoAll", parts, gathered, c.c_size_t(1), INT32, comm, n.stream)
    assert n.read(gathered, f"{size}i") == tuple(100 * k + r for k in range(n.num_ranks)) * HOSTS
    for root in (1, size - n.num_ranks + 1):  # rank 1, and the one that does what it does on the last host
        at = n.buffer(4, struct.pack("i", 7 * r))
        n.call("ncclBroadcast", at, at, c.c_size_t(1), INT32, root, comm, n.stream)
        assert n.read(at, "i") == (7,)
    n.call("ncclReduce", parts, gathered, c.c_size_t(size), INT32, MIN, 0, comm, n.stream)
    n.call("ncclReduce", parts, gathered, c.c_size_t(size), INT32, MIN, size - 1, comm, n.stream)
    if r == 0:
        assert n.read(gathered, f"{size}i") == tuple(range(size))
    n.call("ncclGather", parts, gathered, c.c_size_t(1), INT32, 0, comm, n.stream)
    if r == 0:
        assert n.read(gathered, f"{size}i") == tuple(100 * k for k in range(n.num_ranks)) * HOSTS
    n.call("ncclScatter", parts, own, c.c_size_t(1), INT32, 1, comm, n.stream)
    assert n.read(own, "i") == (100 + r,)
    n.call("ncclCommDestroy", comm)


def groups(n: Nccl) -> None:
    """Groups over the hosts have one process each, those within a host only such; made anew or split from the world."""
    r, size = n.rank, HOSTS * n.num_ranks
    over, inside = range(r, size, n.num_ranks), range(n.num_ranks)
    world = make(n, "world", range(size))
    made = c.c_void_p()
    n.call("ncclGetUniqueId", c.byref(own := type(n.unique_id("world"))()))
    name_group(n, over)
    n.call("ncclCommInitRank", c.byref(made), HOSTS, own, 0)
    split_over, split_inside, none = c.c_void_p(), c.c_void_p(), c.c_void_p(1)
    name_group(n, over)
    n.call("ncclCommSplit", world, 5 + r, 0, c.byref(split_over), None)
    name_group(n, inside)
    n.call("ncclCommSplit", world, 99, r, c.byref(split_inside), None)
    n.call("ncclCommSplit", world, -1, 0, c.byref(none), None)  # a group of another host: nobody here is in it
    assert none.value is None
    for comm, ranks in ((made, over), (split_over, over), (split_inside, inside), (make(n, "in", inside), inside)):
        count, rank = c.c_int(), c.c_int()
        n.call("ncclCommCount", comm, c.byref(count))
        n.call("ncclCommUserRank", comm, c.byref(rank))
        assert (count.value, rank.value) == (len(ranks), ranks.index(r))
        expected = HOSTS * (r + 1) if ranks is over else sum(range(1, n.num_ranks + 1))
        assert n.all_reduce(comm, "i", (r + 1,), INT32, SUM) == (expected,)
    child = c.c_void_p()  # a split of ranks that are all processes needs no word from the framework
    n.call("ncclCommSplit", split_inside, 0, -r, c.byref(child), None)
    assert n.all_reduce(child, "i", (1,), INT32, SUM) == (n.num_ranks,)


def refusals(n: Nccl) -> None:
    """What nobody can stand for is refused at once, by name."""
    size, one = HOSTS * n.num_ranks, c.c_size_t(1)
    comm, at = make(n, "world", range(size)), n.buffer(4 * size)
    nccl, other = n.nccl, c.c_void_p()
    absent = n.num_ranks + 1
    sent = nccl.ncclSend(at, one, INT32, absent, comm, n.stream)
    refused(n, sent, f"Send: rank {absent} of a communicator of {size} is on host 1, which is not started")
    refused(n, nccl.ncclRecv(at, one, INT32, absent, comm, n.stream), f"Recv: rank {absent} of")
    refused(n, nccl.ncclScatter(at, at, one, INT32, absent, comm, n.stream), f"Scatter: rank {absent} of")
    neighbour = 1 - n.rank
    n.call("ncclGroupStart")
    n.call("ncclSend", at, one, INT32, neighbour, comm, n.stream)
    n.call("ncclRecv", at, one, INT32, neighbour, comm, n.stream)
    n.call("ncclGroupEnd")
    n.read(at, "i")
    unknown = nccl.ncclCommInitRank(c.byref(other), size, n.unique_id("second"), n.rank)
    refused(n, unknown, f"a communicator of {size} ranks that are none of torch.distributed's groups")
    name_group(n, range(size))
    unknown = nccl.ncclCommInitRank(c.byref(other), HOSTS, n.unique_id("second"), n.rank)
    refused(n, unknown, f"a communicator of {HOSTS} ranks that are none")
    name_group(n, (n.rank, n.num_ranks + 1 - n.rank))
    refused(n, nccl.ncclCommInitRank(c.byref(other), 2, n.unique_id("second"), 0), "which stands for it, is not in its")
    refused(n, nccl.ncclCommSplit(comm, 0, 0, c.byref(other), None), "a split of a communicator")
    without = c.c_int(size - 1)
    refused(n, nccl.ncclCommShrink(comm, c.byref(without), 1, c.byref(other), None, 0), "cannot lose ranks")
    name_group(n, range(size), peer=absent)  # PyTorch's older engine: two ranks that send have a communicator
    refused(n, nccl.ncclCommInitRank(c.byref(other), 2, n.unique_id("second"), 0), f"receive from rank {absent}")
    name_group(n, range(size), peer=neighbour)
    n.call("ncclCommInitRank", c.byref(other), 2, n.unique_id("pair"), n.rank)
    assert n.all_reduce(other, "i", (n.rank + 1,), INT32, SUM) == (3,)


if __name__ == "__main__":
    function, rank, num_ranks, folder = sys.argv[1:]
    globals()[function](Nccl(int(rank), int(num_ranks), Path(folder)))
