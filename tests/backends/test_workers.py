"""The workers backend on real rank processes: right answers under every knob, refusals, no hang when one dies."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from itertools import product

import pytest

pytest.importorskip("torch")

from forked_ranks import forked_ranks
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not marked as re-exported

from lagom_overlap.backends import BackendRequest
from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, CommConfig, Protocol, SpaceLimits
from lagom_overlap.errors import BackendError, RankError, SpaceError
from lagom_overlap.papers.lab.backend import WorkersBackend, open_backend, space_within
from lagom_overlap.papers.lab.engine import WorkersLibrary, WorkersMesh
from lagom_overlap.papers.lab.space import DEFAULT, PROTOCOLS, effective, workers_space
from lagom_overlap.tuners.problem import Failure, Measurement
from lagom_overlap.units import KIB, MIB
from lagom_overlap.workload import CommOp, CompOp, Gemm, OverlapGroup

__all__ = ["forked_ranks"]
pytestmark = [pytest.mark.torch, pytest.mark.gloo]

KINDS = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_TO_ALL,
)


def group_of(*collectives: Collective) -> OverlapGroup:
    return OverlapGroup(
        name="g",
        computations=(CompOp(name="mm", work=Gemm(64, 64, 64)),),
        comms=tuple(CommOp(name=f"{i}-{c.kind}", collective=c) for i, c in enumerate(collectives)),
    )


def opened_for(num_ranks: int, **changes: object) -> WorkersBackend:
    return open_backend(
        BackendRequest(**{"job_fingerprint": "test", "timeout_s": 40.0, "num_ranks": num_ranks, **changes})
    )


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[WorkersBackend]:
    backend = opened_for(2)
    yield backend
    backend.close()


def test_every_knob_gives_right_answers_on_two_ranks(two_ranks: WorkersBackend) -> None:
    group = group_of(*(Collective(kind, 520 * KIB, 2) for kind in KINDS))
    for protocol, channels, chunk_bytes in product(PROTOCOLS, (1, 3, 8), (64 * KIB, 200 * KIB + 4, 4 * MIB)):
        config = CommConfig(protocol=protocol, num_channels=channels, chunk_bytes=chunk_bytes)
        # a wrong answer raises WrongResultError: the ranks check each collective before they time it
        outcome = two_ranks.measure(group, (config,) * len(KINDS))
        assert isinstance(outcome, Measurement)
        assert all(time_s > 0 for time_s in outcome.comm_s)


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_rings_of_more_ranks_are_right_too(num_ranks: int) -> None:
    backend = opened_for(num_ranks)
    try:
        group = group_of(
            *(Collective(kind, 960 * KIB, num_ranks) for kind in KINDS),
            Collective(CollectiveKind.ALL_REDUCE, 64 * KIB + 4, num_ranks),  # parts of different lengths
        )
        for channels, chunk_bytes in ((1, 64 * KIB), (8, 100 * KIB)):
            config = CommConfig(protocol=Protocol.LL128, num_channels=channels, chunk_bytes=chunk_bytes)
            assert isinstance(backend.measure(group, (config,) * 5), Measurement)
    finally:
        backend.close()


def test_the_problem_offers_three_ways_of_waiting_and_the_papers_default(two_ranks: WorkersBackend) -> None:
    group = group_of(Collective(CollectiveKind.ALL_REDUCE, 32 * MIB, 2))
    problem = two_ranks.problem(group)
    assert problem.default == (CommConfig(protocol=Protocol.LL128, num_channels=8, chunk_bytes=2 * MIB),)
    assert problem.default[0] in problem.spaces[0]
    assert [subspace.protocol for subspace in problem.spaces[0].subspaces] == list(PROTOCOLS)
    assert set(problem.baselines) == {"fixed_min", "fixed_max"}


def test_what_workers_lack_is_a_failure_and_the_search_goes_on(two_ranks: WorkersBackend) -> None:
    group = group_of(Collective(CollectiveKind.ALL_GATHER, 64 * KIB, 2))
    for config in (CommConfig(algorithm=Algorithm.TREE), CommConfig(num_channels=9), CommConfig(chunk_bytes=4 * KIB)):
        assert isinstance(two_ranks.measure(group, (config,)), Failure)
    assert isinstance(two_ranks.measure(group, (CommConfig(),)), Measurement)


def test_limits_of_a_job_are_kept_or_refused() -> None:
    collective = Collective(CollectiveKind.ALL_GATHER, 32 * MIB, 2)
    space = space_within(collective, SpaceLimits(protocols=(Protocol.LL,), num_channels=(2, 4)))
    assert [(s.protocol, s.num_channels) for s in space.subspaces] == [(Protocol.LL, (2, 4))]
    for limits in (SpaceLimits(num_threads=(64,)), SpaceLimits(num_channels=(16,)), SpaceLimits(chunk_bytes=(KIB,))):
        with pytest.raises(SpaceError, match=r"tune\.space\."):
            space_within(collective, limits)


def test_none_is_filled_from_the_default_and_small_messages_keep_one_chunk() -> None:
    assert effective(CommConfig(num_channels=2)) == CommConfig(
        protocol=DEFAULT.protocol, num_channels=2, chunk_bytes=DEFAULT.chunk_bytes
    )
    small = workers_space(Collective(CollectiveKind.ALL_GATHER, 8 * KIB, 2))
    assert {subspace.chunk_bytes for subspace in small.subspaces} == {(256 * KIB,)}


def test_a_killed_rank_ends_the_run_with_its_number() -> None:
    backend = opened_for(2, repeats=1000)
    group = group_of(Collective(CollectiveKind.ALL_REDUCE, 8 * MIB, 2))
    threading.Timer(1.0, os.kill, (backend.pids[1], signal.SIGKILL)).start()
    with pytest.raises(RankError, match=r"rank 1.*SIGKILL"):
        backend.measure(group, (CommConfig(protocol=Protocol.LL, num_channels=8),))
    assert backend.pids == ()


def test_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BackendError, match="without a launcher"):
        opened_for(2)


# --- the library and its connections, without rank processes


def both_ends(num_channels: int) -> tuple[list[socket.socket], list[WorkersLibrary]]:
    pairs = [socket.socketpair() for _ in range(num_channels)]
    libraries = [
        WorkersLibrary(rank=0, num_ranks=2, sockets=[[-1, a.fileno()] for a, _ in pairs]),
        WorkersLibrary(rank=1, num_ranks=2, sockets=[[b.fileno(), -1] for _, b in pairs]),
    ]
    return [end for pair in pairs for end in pair], libraries


def test_a_broken_connection_is_an_error_now_and_for_every_later_collective() -> None:
    import torch

    sockets, (left, right) = both_ends(2)
    tensor = torch.zeros(4096)
    terms = {"num_elements": 4096, "num_channels": 2, "chunk_elements": 512, "wait_mode": 0}
    first = left.start(CollectiveKind.ALL_REDUCE, tensor.data_ptr(), tensor.data_ptr(), **terms)
    for end in sockets[1::2]:
        end.shutdown(socket.SHUT_RDWR)
    assert left.wait(first) != 0
    again = left.start(CollectiveKind.ALL_REDUCE, tensor.data_ptr(), tensor.data_ptr(), **terms)
    assert left.wait(again) != 0
    left.close()
    right.close()
    for end in sockets:
        end.close()


def test_arguments_out_of_range_are_refused() -> None:
    import torch

    sockets, (left, right) = both_ends(1)
    tensor = torch.zeros(64)
    good = {"num_elements": 64, "num_channels": 1, "chunk_elements": 8, "wait_mode": 0}
    for change in ({"num_channels": 2}, {"chunk_elements": 0}, {"wait_mode": 3}, {"num_elements": 0}):
        with pytest.raises(BackendError, match="refused"):
            left.start(CollectiveKind.ALL_GATHER, tensor.data_ptr(), tensor.data_ptr(), **{**good, **change})
    assert left.wait(5) < 0
    left.close()
    left.close()
    right.close()
    for end in sockets:
        end.close()


def test_a_stranger_on_the_port_is_turned_away() -> None:
    store = HashStore()
    meshes: dict[int, WorkersMesh] = {}

    def meet(rank: int) -> None:
        meshes[rank] = WorkersMesh(store, rank=rank, num_ranks=2, num_channels=2, host="127.0.0.1")

    waiting = threading.Thread(target=meet, args=(0,))
    waiting.start()
    port = int(store.get("workers/0").split()[0])
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"x" * 24)
        meet(1)
    waiting.join()
    assert [[number >= 0 for number in channel] for channel in meshes[0].numbers()] == [[False, True]] * 2
    for mesh in meshes.values():
        mesh.close()
