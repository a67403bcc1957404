"""What is exposed: a step whose starts and ends are given, charged by hand."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.sim.columns import Columns
from lagom_overlap.sim.step_parts import SimulatedStep, StepWaits, parts_of
from lagom_overlap.workload import CommOp, CompOp, Iteration, MemoryBound, Op, Origin, Phase
from lagom_overlap.workload.streams import COMPUTE

FORWARD, BACKWARD = Origin(phase=Phase.FORWARD, microbatch=0), Origin(phase=Phase.BACKWARD, microbatch=0)


def comp(name: str, origin: Origin, *deps: str, stream: str = COMPUTE) -> CompOp:
    return CompOp(name=name, work=MemoryBound(1), deps=deps, origin=origin, stream=stream)


def comm(name: str, group: str, *deps: str) -> CommOp:
    call = Collective(CollectiveKind.ALL_TO_ALL, 1024, 8)
    return CommOp(name=name, collective=call, communicator=group, stream=group, deps=deps, origin=BACKWARD)


def charged(rows: list[tuple[Op, float, float]], waits: dict[str, tuple[str, ...]] | None = None) -> dict[str, float]:
    ops, starts, ends = zip(*rows, strict=True)
    place, last, numbers, distances = {op.name: at for at, op in enumerate(ops)}, dict[str, int](), [], []
    for at, op in enumerate(ops):
        waited = [place[name] for name in (*op.deps, *(waits or {}).get(op.name, ()))]
        waited += [last[op.stream]] if op.stream in last else []
        last[op.stream] = at
        numbers.append(len(waited))
        distances += [one - at for one in waited]
    step = SimulatedStep(
        columns=Columns(Iteration("x", ops)),
        waits=StepWaits(numbers, distances),
        starts_s=np.array(starts, float),
        ends_s=np.array(ends, float),
        host_s=np.zeros(len(ops)),
    )
    price: Any = SimpleNamespace(alone_s=lambda op: next(end - start for o, start, end in rows if o is op))
    parts = parts_of(step, price, 1, waits_for_sends=True)
    return {name: times.exposed_s for name, times in parts.comms(1).items()}


def test_time_that_computations_wait_is_that_of_what_they_wait_for_and_of_what_that_waited_for() -> None:
    """The reduction from 1 to 9 keeps nobody waiting, though nothing computes from 2 to 5 while it runs."""
    found = charged(
        [
            (comp("one", FORWARD), 0, 2),
            (comm("reduce", "edp"), 1, 9),
            (comm("dispatch", "ep", "one"), 2, 5),
            (comp("two", BACKWARD, "dispatch"), 5, 10),
            (comm("first", "tp", "two"), 10, 12),
            (comm("second", "ep", "two", "first"), 12, 15),
            (comp("three", BACKWARD, "second"), 15, 16),
            (comp("copy", BACKWARD, "three", stream="copies"), 16, 17),
            (comm("gather", "fsdp", "copy"), 17, 20),
        ]
    )
    assert found == {"edp": 0, "ep": 3 + 3, "tp": 2, "fsdp": 1 + 3}
    assert sum(found.values()) == 20 - (2 + 5 + 1)  # no second that nothing computes counts twice, or not at all


def test_a_collective_behind_another_one_of_its_stream_waits_for_that_one() -> None:
    rows: list[tuple[Op, float, float]] = [
        (comp("one", FORWARD), 0, 2),
        (comm("long", "tp"), 1, 6),
        (comp("two", BACKWARD), 9, 10),
    ]
    queued = comm("short", "ep", "one")
    rows.insert(2, (queued, 6, 9))
    assert charged(rows, {"short": ("long",), "two": ("short",)}) == {"tp": 4, "ep": 3}


def test_what_is_hidden_is_not_exposed() -> None:
    rows: list[tuple[Op, float, float]] = [
        (comp("one", FORWARD), 0, 4),
        (comm("hidden", "ep"), 1, 3),
        (comp("two", BACKWARD, "hidden"), 4, 6),
    ]
    assert charged(rows) == {"ep": pytest.approx(0)}
