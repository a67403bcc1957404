"""The critical path and the sources of exposed time, on a step worked by hand.

compute  |a 2|      |b 3     |   |c 1|
comm          |g 4      |  |s 2|          a -> g -> b -> s -> c, g runs alone but the first second of b
"""

import pytest

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.hardware import load_preset
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.simulated import simulated
from lagom_overlap.report.plan_path import critical_path, exposed_by, sort_of
from lagom_overlap.timeline import SpanKind
from lagom_overlap.workload import CommOp, CompOp, Iteration, MemoryBound, Origin, Phase

SECONDS = {"a": 2e-3, "g": 4e-3, "b": 3e-3, "s": 2e-3, "c": 1e-3, "x": 1e-3}


class Times:
    def seconds(self, op):
        return SECONDS[op.name]


def comp(name, *deps, phase=Phase.FORWARD):
    return CompOp(name=name, work=MemoryBound(8), deps=deps, origin=Origin(phase=phase))


def comm(name, kind, *deps):
    return CommOp(name=name, collective=Collective(kind, 64, 2), deps=deps, communicator="fsdp")


@pytest.fixture
def predicted():
    ops = (
        comp("a"),
        comm("g", CollectiveKind.ALL_GATHER, "a"),
        comp("x", "a"),
        comp("b", "g"),
        comm("s", CollectiveKind.REDUCE_SCATTER, "b"),
        comp("c", "s", phase=Phase.OPTIMIZER),
    )
    iteration = Iteration("step", ops, is_dataflow=True)
    problem = PlanProblem(iteration=iteration, cluster=load_preset("a40_nvlink"), times=Times())
    return iteration, simulated(problem, iteration).timeline


def test_the_timeline_is_the_schedule(predicted):
    _, timeline = predicted
    assert timeline.makespan_s == pytest.approx(12e-3)
    assert {span.name: round(span.start_s, 6) for span in timeline.spans}["b"] == pytest.approx(6e-3)


def test_the_critical_path_leaves_no_gap_and_adds_up_to_the_step(predicted):
    parts = critical_path(*predicted)
    assert [(part.what, part.num_ops) for part in parts] == [
        ("compute (forward)", 1),
        ("all-gather fsdp", 1),
        ("compute (forward)", 1),
        ("reduce-scatter fsdp", 1),
        ("compute (optimizer)", 1),
    ]
    assert sum(part.seconds for part in parts) == pytest.approx(12e-3)


def test_exposed_time_is_told_by_what_ran_meanwhile(predicted):
    iteration, timeline = predicted
    parts = exposed_by(timeline, iteration)
    assert [(part.what, part.num_comms) for part in parts] == [("all-gather fsdp", 1), ("reduce-scatter fsdp", 1)]
    assert [part.seconds for part in parts] == pytest.approx([3e-3, 2e-3])  # x hides one of the gather's four
    assert sum(part.seconds for part in parts) == pytest.approx(5e-3)


def test_sorts_are_words(predicted):
    ops = {op.name: op for op in predicted[0].ops}
    assert sort_of(ops["g"]) == "all-gather fsdp"
    assert sort_of(ops["c"]) == "compute (optimizer)"
    assert {span.kind for span in predicted[1].spans} == {SpanKind.COMP, SpanKind.COMM}
