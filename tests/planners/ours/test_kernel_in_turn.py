"""Steady states of two microbatches at once, and of long chains of operators."""

import pytest

pytest.importorskip("ortools", reason="needs the extra plan (ortools)")

from dataclasses import replace

from random_graphs import GEMM, SCATTER, NamedSeconds, fsdp_problem

from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.layers import stages_of
from lagom_overlap.planners.modulo_schedule import kernel_of, steady_priorities
from lagom_overlap.planners.schedule import lower_bound, task_graph
from lagom_overlap.planners.schedule.generation import Kind, ScheduleGeneration
from lagom_overlap.workload import CommOp, CompOp, Iteration, Op, Origin, Phase


def _two_microbatches(computations: list[list[float]], comm_s: float, num_layers: int = 8) -> PlanProblem:
    """Forward passes that do not wait for each other: per layer, runs of computations with a collective after each."""
    ops: list[Op] = []
    times: dict[str, float] = {}
    for batch in range(2):
        last: tuple[str, ...] = ()
        for layer in range(num_layers):
            origin = Origin(phase=Phase.FORWARD, layer=layer, microbatch=batch, module=f"layers.{layer}", kernel="mm")
            for part, run in enumerate(computations):
                for number, seconds in enumerate(run):
                    name = f"{batch}.{layer}.{part}.{number}"
                    ops.append(CompOp(name=name, work=GEMM, deps=last, origin=origin))
                    times[name], last = seconds, (name,)
                name = f"{batch}.{layer}.{part}.comm"
                ops.append(CommOp(name=name, collective=SCATTER, communicator="tp", deps=last, origin=origin))
                times[name], last = comm_s, (name,)
    step = Iteration("two", tuple(ops), True)
    return replace(fsdp_problem(2), iteration=step, times=NamedSeconds(times), prefetch=None)


def test_two_microbatches_in_turn_hide_each_others_collectives() -> None:
    problem = _two_microbatches([[100e-6]], 95e-6)
    graph = task_graph(problem)
    stages = stages_of(problem.iteration, graph)
    assert [stage.microbatches for stage in stages] == [(0, 1)]
    priority = steady_priorities(graph, stages, Deadline(3000.0))
    assert priority is not None
    made = ScheduleGeneration(graph).schedule(Kind.SERIAL, priority)
    assert made.makespan <= lower_bound(graph) * 1.001


def test_a_microbatch_gets_in_between_the_operators_of_a_long_run() -> None:
    """30 behind a wait of 90 on each side fits nowhere but inside the other's run of 360: as one task it would wait."""
    problem = _two_microbatches([[90e-6] * 4, [30e-6]], 90e-6)
    graph = task_graph(problem)
    (stage,) = stages_of(problem.iteration, graph)
    assert len(kernel_of(stage, graph).ticks) > 2 * 4
    priority = steady_priorities(graph, [stage], Deadline(3000.0))
    assert priority is not None
    made = ScheduleGeneration(graph).schedule(Kind.SERIAL, priority)
    assert made.makespan <= lower_bound(graph) * 1.03
