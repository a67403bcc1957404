"""One rank's side of a measurement: makes groups ready, checks answers, runs, compares times between ranks."""

import gc
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
from torch import distributed as dist

from lagom_overlap.collective import Collective, CommConfig, CommunicatorId, ConfigKey, ConfigTable
from lagom_overlap.engines.base import Buffers, Engine
from lagom_overlap.engines.buffers import allocate, clear, expected, fill
from lagom_overlap.engines.compute import ComputeBuilder
from lagom_overlap.engines.gloo_group import GlooGroup
from lagom_overlap.engines.messages import GroupMessage, Measure, Measured, RunTimes, Wrong
from lagom_overlap.engines.overlap_run import CommStream, RankProgram, RankRunTimes
from lagom_overlap.workload import OverlapGroup


def is_correct(engine: Engine, key: ConfigKey, collective: Collective, rank: int, buffers: Buffers) -> bool:
    """Whether this rank ends with the right numbers under the configuration in force; leaves the buffers zeroed.

    Collective: every rank calls it.
    """
    fill(collective, rank, buffers)
    engine.execute(key, buffers).wait()
    correct = torch.equal(buffers.target, expected(collective, rank))
    clear(buffers)
    return correct


WARM_UP_RUNS: Final = 1
"""Untimed runs before the first timing of an assignment: first touches, connections, caches."""


class Control:
    """Agreement between ranks, on a group that carries no measured traffic."""

    def __init__(self, group: GlooGroup, num_ranks: int) -> None:
        self._group = group
        self._num_ranks = num_ranks

    def barrier(self) -> None:
        """Returns when every rank has come."""
        self._group.barrier().wait()

    def maxima(self, values: list[float]) -> list[float]:
        """Each value's maximum over ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        options = dist.AllreduceOptions()
        options.reduceOp = cast("Any", dist.ReduceOp.MAX)  # stubs before torch 2.15 want the wrapper
        self._group.allreduce([tensor], options).wait()
        return [float(value) for value in tensor]

    def gather(self, value: int) -> tuple[int, ...]:
        """Every rank's number, by rank."""
        outputs = [torch.zeros(1, dtype=torch.int64) for _ in range(self._num_ranks)]
        self._group.allgather([outputs], [torch.tensor([value])]).wait()
        return tuple(int(output) for output in outputs)

    def broadcast(self, line: bytes | None) -> bytes:
        """Rank 0's line, on every rank; the others pass None."""
        length = torch.tensor([len(line or b"")])
        self._group.broadcast([length]).wait()
        payload = torch.zeros(int(length), dtype=torch.uint8)
        if line is not None:
            payload.copy_(torch.frombuffer(bytearray(line), dtype=torch.uint8))
        self._group.broadcast([payload]).wait()
        return bytes(payload.tolist())


@dataclass(slots=True)
class _ReadyGroup:
    group: OverlapGroup
    program: RankProgram
    warm: set[tuple[CommConfig, ...]] = field(default_factory=set)


class RankSession:
    """Executes `Measure` commands on one rank; every rank executes the same ones in the same order."""

    def __init__(self, *, rank: int, num_ranks: int, engine: Engine, control: Control) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._engine = engine
        self._control = control
        self._stream = CommStream(engine)
        self._builder = ComputeBuilder()
        self._pool: dict[tuple[Collective, int], Buffers] = {}
        self._groups: dict[GroupMessage, _ReadyGroup] = {}
        self._checked: set[tuple[Collective, CommConfig]] = set()
        self._epoch = 0

    def measure(self, command: Measure) -> Measured | Wrong:
        """The times, or which collective was wrong and where."""
        ready = self._groups.get(command.group)
        if ready is None:
            ready = self._groups[command.group] = self._make_ready(command.group)
        self._epoch += 1
        keys = [key for key, _ in ready.program.calls]
        self._engine.apply(ConfigTable(dict(zip(keys, command.assignment, strict=True))), self._epoch)
        wrong = self._check(ready, command.assignment)
        if wrong is not None:
            return wrong
        warm_ups = 0 if command.assignment in ready.warm else WARM_UP_RUNS
        ready.warm.add(command.assignment)
        native = all(config.is_untouched for config in command.assignment)
        gc.collect()
        gc.disable()  # a collection in the middle of a run would be measured
        try:
            runs = [self._run(ready.program, native=native) for _ in range(warm_ups + command.repeats)][warm_ups:]
        finally:
            gc.enable()
        return Measured(tuple(times for times, _ in runs), runs[-1][1].spans(ready.group))

    def _run(self, program: RankProgram, *, native: bool) -> tuple[RunTimes, RankRunTimes]:
        mine = self._stream.run(program, native=native, barrier=self._control.barrier)
        makespan_s, comp_s, *comm_s = self._control.maxima(mine.as_vector())
        return RunTimes(makespan_s, comp_s, tuple(comm_s)), mine

    def _make_ready(self, message: GroupMessage) -> _ReadyGroup:
        group = message.to_group()
        occurrences: Counter[Collective] = Counter()
        calls = []
        for place, comm in enumerate(group.comms):
            collective = comm.collective
            slot = (collective, occurrences[collective])
            occurrences[collective] += 1
            if slot not in self._pool:
                self._pool[slot] = allocate(collective)
            communicator = CommunicatorId(description=comm.communicator, ranks=tuple(range(self._num_ranks)))
            key = ConfigKey(
                communicator=communicator, kind=collective.kind, num_bytes=collective.num_bytes, occurrence=place
            )
            calls.append((key, self._pool[slot]))
        program = RankProgram(
            computations=tuple(self._builder.build(op.work) for op in group.computations),
            calls=tuple(calls),
            starts_after=group.starts_after,
        )
        return _ReadyGroup(group, program)

    def _check(self, ready: _ReadyGroup, assignment: tuple[CommConfig, ...]) -> Wrong | None:
        """Checks each collective whose configuration is new; all ranks learn the same verdict."""
        calls = zip(ready.group.comms, ready.program.calls, assignment, strict=True)
        for place, (comm, (key, buffers), config) in enumerate(calls):
            if (comm.collective, config) in self._checked:
                continue
            correct = is_correct(self._engine, key, comm.collective, self._rank, buffers)
            verdicts = self._control.gather(int(correct))
            if not all(verdicts):
                return Wrong(place, tuple(rank for rank, verdict in enumerate(verdicts) if not verdict))
            self._checked.add((comm.collective, config))
        return None
