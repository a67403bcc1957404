"""Steps simulated by hand: streams of one GPU run at the same time, whatever their order of issue.

compute  |x 1|y 2 |                    g waits for x, c for g, y for x; c is issued before y
comm         |g 4         |
copy_in                   |c 1|
"""

import pytest

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.hardware import load_preset
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.simulated import Simulation, one_at_a_time, simulated
from lagom_overlap.planners.times import ModelTimes
from lagom_overlap.sim import simulate_iteration
from lagom_overlap.timeline import SpanKind
from lagom_overlap.workload import CommOp, CompOp, Gemm, Iteration, MemoryBound

SECONDS = {"x": 1e-3, "g": 4e-3, "c": 1e-3, "y": 2e-3}
CLUSTER = load_preset("a40_nvlink")


class Times:
    def seconds(self, op):
        return SECONDS[op.name]


def comm(name, *deps, stream="comm", communicator="fsdp"):
    collective = Collective(CollectiveKind.ALL_GATHER, 64 << 20, 8)
    return CommOp(name=name, collective=collective, deps=deps, stream=stream, communicator=communicator)


def problem(ops, times):
    return PlanProblem(iteration=Iteration("step", ops, is_dataflow=True), cluster=CLUSTER, times=times)


def test_a_copy_on_its_own_stream_holds_back_no_computation():
    copy = CompOp(name="c", work=MemoryBound(8), stream="copy_in", deps=("g",))
    x, y = (CompOp(name=name, work=Gemm(64, 64, 64), deps=deps) for name, deps in (("x", ()), ("y", ("x",))))
    given = problem((x, comm("g", "x"), copy, y), Times())
    step = simulated(given, given.iteration)
    assert {span.name: span.start_s for span in step.timeline.spans} == pytest.approx(
        {"x": 0.0, "g": 1e-3, "c": 5e-3, "y": 1e-3}
    )
    assert step.makespan_s == pytest.approx(6e-3)
    assert step.exposed_s == pytest.approx(3e-3)  # from the end of y to that of the copy, which is not on its stream
    assert step.simulation is Simulation.ALONE


def test_times_of_the_cost_model_are_simulated_with_contention():
    model = ContentionModel(CLUSTER, load_profile("plausible"))
    ops = (comm("g"), CompOp(name="x", work=Gemm(8192, 8192, 8192)), CompOp(name="y", work=MemoryBound(8), deps=("g",)))
    given = problem(ops, ModelTimes(model))
    step = simulated(given, given.iteration)
    assert step.simulation is Simulation.CONTENTION
    assert step.timeline == simulate_iteration(given.iteration, {}, model)
    spans = {span.name: span for span in step.timeline.spans}
    assert spans["x"].duration_s > given.times.seconds(given.iteration.ops[1])


def test_collectives_of_one_communicator_wait_for_each_other_on_any_streams():
    ops = (comm("a"), comm("b", stream="other"), comm("c", stream="third", communicator="tp"))
    given = problem((*ops, CompOp(name="y", work=MemoryBound(8), deps=("a", "b", "c"))), None)
    assert [op.deps for op in one_at_a_time(given.iteration).ops] == [(), ("a",), (), ("a", "b", "c")]
    model = ModelTimes(ContentionModel(CLUSTER, load_profile("plausible")))
    timeline = simulated(problem(given.iteration.ops, model), given.iteration).timeline
    spans = {span.name: span for span in timeline.of(SpanKind.COMM)}
    assert spans["a"].end_s <= spans["b"].start_s
    assert spans["c"].start_s == 0.0
