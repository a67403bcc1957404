# ruff: noqa: E402  # without torch the file is skipped before it imports what needs torch
import threading
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from lagom_overlap.collective import Collective, CollectiveKind, CommunicatorId, ConfigKey, ConfigSpace, ConfigTable
from lagom_overlap.engines.base import Buffers
from lagom_overlap.engines.overlap_run import CommStream, RankProgram

pytestmark = pytest.mark.torch
RANKS = CommunicatorId(description="default", ranks=(0, 1))


def call(occurrence: int) -> tuple[ConfigKey, Buffers]:
    key = ConfigKey(communicator=RANKS, kind=CollectiveKind.ALL_REDUCE, num_bytes=4, occurrence=occurrence)
    return key, Buffers(torch.zeros(1), torch.zeros(1))


class LoggingEngine:
    """Writes down who starts and ends what; optionally fails at one collective."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.log: list[str] = []
        self.threads: set[int] = set()
        self.fails_at = fails_at

    def space(self, collective: Collective) -> ConfigSpace:
        raise NotImplementedError

    def apply(self, table: ConfigTable, epoch: int) -> None:
        raise NotImplementedError

    def execute(self, key: ConfigKey, buffers: Buffers) -> "LoggingHandle":
        if key.occurrence == self.fails_at:
            raise RuntimeError("connection closed by peer")
        self.threads.add(threading.get_ident())
        self.log.append(f"start {key.occurrence}")
        return LoggingHandle(self.log, key.occurrence)

    def computation(self, index: int) -> Callable[[], None]:
        return lambda: self.log.append(f"compute {index}")


class LoggingHandle:
    def __init__(self, log: list[str], occurrence: int) -> None:
        self.log, self.occurrence = log, occurrence

    def wait(self) -> None:
        self.log.append(f"end {self.occurrence}")


def program(engine: LoggingEngine, starts_after: tuple[int, ...], num_computations: int = 3) -> RankProgram:
    return RankProgram(
        computations=tuple(engine.computation(index) for index in range(1, num_computations + 1)),
        calls=tuple(call(index) for index in range(len(starts_after))),
        starts_after=starts_after,
    )


def test_collectives_are_released_by_their_computations_and_never_overtake() -> None:
    engine = LoggingEngine()
    assert program(engine, (0, 2, 1, 3)).released_by() == [[0], [], [1, 2], [3]]


@pytest.mark.parametrize("native", [True, False])
def test_a_collective_waits_for_the_computations_before_it(native: bool) -> None:
    engine = LoggingEngine()
    stream = CommStream(engine)
    times = stream.run(program(engine, (0, 2, 1, 3)), native=native, barrier=lambda: None)
    stream.close()
    place = engine.log.index
    assert place("compute 2") < place("start 1") < place("start 2")
    assert place("compute 3") < place("start 3")
    assert [entry for entry in engine.log if entry.startswith("end")] == ["end 0", "end 1", "end 2", "end 3"]
    ends = [end for _, end in times.calls]
    assert ends == sorted(ends)
    assert times.makespan_s >= max(*ends, times.computations[-1][1])
    assert all(start >= end for (_, end), (start, _) in zip(times.calls, times.calls[1:], strict=False))


def test_on_the_stream_a_collective_starts_when_the_one_before_has_ended() -> None:
    engine = LoggingEngine()
    stream = CommStream(engine)
    stream.run(program(engine, (0, 0, 0)), native=False, barrier=lambda: None)
    stream.close()
    comm = [entry for entry in engine.log if not entry.startswith("compute")]
    assert comm == ["start 0", "end 0", "start 1", "end 1", "start 2", "end 2"]
    assert threading.get_ident() not in engine.threads


def test_native_calls_are_all_started_by_the_computing_thread_before_it_computes() -> None:
    engine = LoggingEngine()
    stream = CommStream(engine)
    stream.run(program(engine, (0, 0)), native=True, barrier=lambda: engine.log.append("barrier"))
    stream.close()
    assert engine.threads == {threading.get_ident()}
    own = [entry for entry in engine.log if not entry.startswith("end")]
    assert own == ["barrier", "start 0", "start 1", "compute 1", "compute 2", "compute 3"]


def test_an_error_on_the_stream_reaches_the_caller() -> None:
    engine = LoggingEngine(fails_at=1)
    stream = CommStream(engine)
    with pytest.raises(RuntimeError, match="closed by peer"):
        stream.run(program(engine, (0, 0, 0)), native=False, barrier=lambda: None)
    stream.close()


def test_the_compared_times_are_makespan_computation_and_each_collective() -> None:
    engine = LoggingEngine()
    stream = CommStream(engine)
    times = stream.run(program(engine, (0, 1)), native=False, barrier=lambda: None)
    stream.close()
    makespan, comp, *comm = times.as_vector()
    assert makespan == times.makespan_s
    assert comp == times.computations[-1][1]
    assert comm == [end - start for start, end in times.calls]
