"""Ranks of a host among symmetric ones, as processes: what each does is a function of this file (`nccl_ranks.py`)."""

import ctypes as c
import os
import struct
import sys
import time
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
    own = n.buffer(4, struct.pack("i", 10 + r))
    n.call("ncclGroupStart")  # a gather into a list
    for root in range(size):
        to = c.c_void_p(gathered.value + 4 * root)
        n.call("ncclBroadcast", own if root == r else to, to, c.c_size_t(1), INT32, root, comm, n.stream)
    n.call("ncclGroupEnd")
    assert n.read(gathered, f"{size}i") == tuple(range(10, 10 + n.num_ranks)) * HOSTS
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


def exchanges(n: Nccl) -> None:
    """An uneven all-to-all by sends and receives: an absent rank sends what its stand-in sends."""
    r, size = n.rank, HOSTS * n.num_ranks
    comm = make(n, "world", range(size))

    def counts(sender: int) -> list[int]:
        """Elements to each rank, of which each is told its sender and its receiver."""
        return [1 + (2 * sender + receiver) % n.num_ranks for receiver in range(size)]

    for _ in range(12):  # more than messages that may wait
        received = []
        n.call("ncclGroupStart")
        for peer in range(size):
            out, into = counts(r)[peer], counts(peer % n.num_ranks)[r]
            content = n.buffer(4 * out, struct.pack("i", 1000 * r + peer) * out)
            n.call("ncclSend", content, c.c_size_t(out), INT32, peer, comm, n.stream)
            received.append((n.buffer(4 * into), into))
            n.call("ncclRecv", received[-1][0], c.c_size_t(into), INT32, peer, comm, n.stream)
        n.call("ncclGroupEnd")
    for peer, (at, count) in enumerate(received):
        assert n.read(at, f"{count}i") == (1000 * (peer % n.num_ranks) + r,) * count
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
    n.call("ncclGroupStart")  # a pipeline that also talks within the host
    for peer in (absent, 1 - n.rank):
        n.call("ncclSend", at, one, INT32, peer, comm, n.stream)
    refused(n, nccl.ncclGroupEnd(), f"Send: rank {absent} of")
    n.call("ncclGroupStart")  # an exchange in which an absent rank would have to send another number than its stand-in
    for peer in range(size):
        n.call("ncclSend", at, one, INT32, peer, comm, n.stream)
        n.call("ncclRecv", at, c.c_size_t(1 + (peer == absent)), INT32, peer, comm, n.stream)
    refused(n, nccl.ncclGroupEnd(), f"Recv: rank {absent} of")
    n.call("ncclGroupStart")  # two messages of each to each: nobody says which an absent rank's stand-in sends first
    for peer in (*range(size), *range(size)):
        n.call("ncclSend", at, one, INT32, peer, comm, n.stream)
        n.call("ncclRecv", at, one, INT32, peer, comm, n.stream)
    refused(n, nccl.ncclGroupEnd(), f"Send: rank {n.num_ranks} of")
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


def steps(n: Nccl) -> None:
    """Three steps over two hosts, whether both run or one: sums over all and over the hosts, a gather within a host."""
    size, local = n.num_ranks, n.num_ranks // 2
    assert os.environ["WORLD_SIZE"] == str(size)
    n.num_ranks = local  # started, as far as groups are named
    over, inside = range(n.rank % local, size, local), [k for k in range(size) if k // local == n.rank // local]
    comms = []
    for name, ranks in (("world", range(size)), (f"over{over[0]}", over), (f"inside{inside[0]}", inside)):
        place = list(ranks).index(n.rank)
        number, n.rank = n.rank, place  # the first of the group makes its id
        made = n.unique_id(name)
        n.rank = number
        name_group(n, ranks)
        comm = c.c_void_p()
        n.call("ncclCommInitRank", c.byref(comm), len(ranks), made, place)
        comms.append(comm)
    at = n.buffer(64 << 20)
    n.call("ncclAllReduce", at, at, c.c_size_t(1), FLOAT32, SUM, comms[0], n.stream)  # all begin together
    assert n.cuda.cuCtxSynchronize() == 0
    for _ in range(4):
        n.cuda.lagom_emulation_mark(b'{"step":"begin"}')
        for comm in comms[:2]:
            n.call("ncclAllReduce", at, at, c.c_size_t(16 << 20), FLOAT32, SUM, comm, n.stream)
        n.call("ncclAllGather", at, at, c.c_size_t((16 << 20) // local), FLOAT32, comms[2], n.stream)
        assert n.cuda.cuCtxSynchronize() == 0
    for comm in comms:
        n.call("ncclCommDestroy", comm)


def sends(n: Nccl) -> None:
    """A pipeline over two hosts, of which one is started."""
    size, n.num_ranks = n.num_ranks, n.num_ranks // 2
    comm, at = make(n, "world", range(size)), n.buffer(4)
    n.nccl.ncclSend(at, c.c_size_t(1), INT32, n.num_ranks + n.rank, comm, n.stream)
    time.sleep(600)


def sleeps(n: Nccl) -> None:
    """Waits for nobody knows whom, outside of the GPU."""
    n.buffer(4)
    assert n.cuda.cuCtxSynchronize() == 0
    n.cuda.lagom_emulation_mark(b'{"step":"begin"}')
    time.sleep(600)


if __name__ == "__main__":
    function, rank, num_ranks, folder = sys.argv[1:]
    globals()[function](Nccl(int(rank), int(num_ranks), Path(folder)))
