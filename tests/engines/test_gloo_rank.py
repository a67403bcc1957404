# ruff: noqa: E402  # without torch the file is skipped before it imports what needs torch
"""One rank of two in one process: the other one is played by a fake that knows the pattern by its formula.

Only the agreement between ranks is tested on two real ones, two threads of this process.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig, ConfigKey, ConfigSpace, ConfigTable
from lagom_overlap.engines.base import Buffers
from lagom_overlap.engines.gloo_group import PrefixStore, TCPStore, open_group
from lagom_overlap.engines.gloo_rank import Control, RankSession
from lagom_overlap.engines.messages import GroupMessage, Measure, Measured, Wrong
from lagom_overlap.workload import CommOp, CompOp, Gemm, OverlapGroup

pytestmark = pytest.mark.torch
WHOLE, TWO = CommConfig(num_channels=1, chunk_bytes=1 << 20), CommConfig(num_channels=2, chunk_bytes=1 << 20)
GROUP = OverlapGroup(
    name="g",
    computations=(CompOp(name="c", work=Gemm(2, 2, 2)),),
    comms=(
        CommOp(name="first", collective=Collective(CollectiveKind.ALL_GATHER, 800, 2)),
        CommOp(name="second", collective=Collective(CollectiveKind.ALL_GATHER, 1600, 2)),
    ),
)


class Done:
    def wait(self) -> None:
        pass


class TwoRankGather:
    """An all-gather seen from rank 0."""

    def __init__(self) -> None:
        self.table = ConfigTable({})
        self.calls: list[tuple[int, CommConfig | None]] = []

    def space(self, collective: Collective) -> ConfigSpace:
        raise NotImplementedError

    def apply(self, table: ConfigTable, epoch: int) -> None:
        self.table = table

    def execute(self, key: ConfigKey, buffers: Buffers) -> Done:
        self.calls.append((key.num_bytes, self.table.get(key)))
        part = buffers.source.numel()
        buffers.target[:part] = buffers.source
        buffers.target[part:] = torch.tensor([float((31 * index + 7919) % 65521) for index in range(part)])
        return Done()


class LosesTheLastElement(TwoRankGather):
    """Wrong where the message is cut for two channels and longer than 1000 bytes."""

    def execute(self, key: ConfigKey, buffers: Buffers) -> Done:
        done = super().execute(key, buffers)
        if key.num_bytes > 1000 and self.table.get(key) == TWO:
            buffers.target[-1] = 0
        return done


class Alone:
    """Agreement with a second rank that always says yes."""

    def __init__(self) -> None:
        self.barriers = 0

    def barrier(self) -> None:
        self.barriers += 1

    def maxima(self, values: list[float]) -> list[float]:
        return values

    def gather(self, value: int) -> tuple[int, ...]:
        return value, 1


def session_on(engine: TwoRankGather, control: Alone) -> RankSession:
    return RankSession(rank=0, num_ranks=2, engine=engine, control=control)


def test_wrong_numbers_name_the_collective_and_the_rank_and_nothing_is_timed() -> None:
    control = Alone()
    session = session_on(LosesTheLastElement(), control)
    assert isinstance(session.measure(Measure(GroupMessage.of(GROUP), (TWO, WHOLE), 1)), Measured)
    timed = control.barriers
    assert session.measure(Measure(GroupMessage.of(GROUP), (WHOLE, TWO), 1)) == Wrong(1, (0,))
    assert control.barriers == timed


def test_each_collective_is_checked_once_per_configuration_and_warmed_up_once_per_assignment() -> None:
    engine = TwoRankGather()
    session = session_on(engine, Alone())
    message = GroupMessage.of(GROUP)
    calls = []
    for assignment in ((WHOLE, WHOLE), (WHOLE, WHOLE), (WHOLE, TWO)):
        engine.calls.clear()
        session.measure(Measure(message, assignment, 3))
        calls.append(len(engine.calls))
    # 2 checks + (1 warm-up + 3 runs) of 2 calls; 3 runs of 2; 1 check + 4 runs of 2
    assert calls == [10, 6, 9]


def test_a_measurement_holds_every_run_and_the_spans_of_the_last() -> None:
    reply = session_on(TwoRankGather(), Alone()).measure(Measure(GroupMessage.of(GROUP), (WHOLE, TWO), 3))
    assert isinstance(reply, Measured)
    assert len(reply.runs) == 3
    assert [span.name for span in reply.spans] == ["c", "first", "second"]
    assert all(run.makespan_s >= max(run.comp_s, sum(run.comm_s)) for run in reply.runs)


class BesideASlowerRank(Alone):
    """Agreement with a second rank that took 100 s for everything but the first collective, which took it no time."""

    def maxima(self, values: list[float]) -> list[float]:
        theirs = [100.0, 100.0, 0.0, 100.0]
        return [max(pair) for pair in zip(values, theirs, strict=True)]


def test_what_is_reported_are_the_maxima_over_ranks_and_not_this_rank_s_own_times() -> None:
    reply = session_on(TwoRankGather(), BesideASlowerRank()).measure(Measure(GroupMessage.of(GROUP), (WHOLE, WHOLE), 1))
    assert isinstance(reply, Measured)
    (run,) = reply.runs
    assert (run.makespan_s, run.comp_s, run.comm_s[1]) == (100.0, 100.0, 100.0)
    first = next(span for span in reply.spans if span.name == "first")
    assert 0 < run.comm_s[0] == first.end_s - first.start_s


@pytest.mark.gloo
def test_two_ranks_with_unequal_times_agree_on_the_larger_of_each() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def agree(rank: int) -> tuple[list[float], tuple[int, ...]]:
        own = PrefixStore("control", store if rank == 0 else TCPStore("127.0.0.1", store.port, is_master=False))
        control = Control(
            open_group(own, rank, 2, torch.distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")), 2
        )
        control.barrier()
        agreed = control.maxima([[1.0, 5.0, 1e-9], [3.0, 2.0, 2e-9]][rank])
        gathered = control.gather(10 + rank)
        control.barrier()
        return agreed, gathered

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(agree, range(2))) == [([3.0, 5.0, 2e-9], (10, 11))] * 2
