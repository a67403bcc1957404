from dataclasses import replace
from random import Random

import pytest
from random_graphs import fsdp_problem, fsdp_step

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.planners.framework_waits import framework_arcs, framework_of
from lagom_overlap.planners.memory import depth_arcs, lean_order, limit_arcs, peak_of, peak_of_order, with_memory
from lagom_overlap.planners.schedule import Schedule, TaskGraph, check, task_graph
from lagom_overlap.planners.schedule.generation import Kind, ScheduleGeneration
from lagom_overlap.workload import Buffer, CommOp, CompOp, Iteration, MemoryBound, Op, Origin, Phase
from lagom_overlap.workload.gathers import gathers_by_group, parameter_gathers


def _random_schedules(graph: TaskGraph, seed: int) -> list[Schedule]:
    made = ScheduleGeneration(graph)
    priority = [Random(seed).random() for _ in range(len(graph))]
    return [*(made.schedule(kind, priority) for kind in Kind), made.schedule(Kind.SERIAL, range(len(graph)))]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_schedule_holds_more_parameter_groups_than_the_depth(depth: int) -> None:
    for seed in range(10):
        problem = fsdp_problem(5, seed)
        step = problem.iteration
        graph = with_memory(task_graph(problem), step, depth=depth, limit_bytes=None)
        gathers = {buffer.name for buffer in parameter_gathers(step)}
        ones = tuple(replace(b, num_bytes=1) for b in step.buffers if b.name in gathers)
        counted = replace(step, buffers=ones, resident_bytes=0)
        for schedule in _random_schedules(graph, seed):
            check(graph, schedule)
            assert peak_of(counted, graph, schedule) <= depth


def test_no_schedule_holds_more_than_the_limit() -> None:
    tight = 0
    for seed in range(25):
        problem = fsdp_problem(5, seed)
        step = problem.iteration
        lean = peak_of_order(step, lean_order(step))
        for limit in (lean, lean + 2, lean + 6):
            graph = with_memory(task_graph(problem), step, depth=None, limit_bytes=limit)
            for schedule in _random_schedules(graph, seed):
                check(graph, schedule)
                peak = peak_of(step, graph, schedule)
                assert peak <= limit
                tight += peak == limit
    assert tight > 10  # the arcs bind, and do not forbid all overlap


def test_buffers_released_in_another_order_than_they_were_made_keep_the_limit_too() -> None:
    """Activations: made forward, released backward."""
    for seed in range(15):
        problem = fsdp_problem(5, seed)
        activations = tuple(
            Buffer(name=f"a{layer}", num_bytes=3, maker=f"forward.{layer}", users=(f"backward.{layer}",))
            for layer in range(5)
        )
        step = replace(problem.iteration, buffers=(*problem.iteration.buffers, *activations))
        limit = peak_of_order(step, lean_order(step)) + seed % 3
        graph = with_memory(task_graph(problem), step, depth=3, limit_bytes=limit)
        for schedule in _random_schedules(graph, seed):
            assert peak_of(step, graph, schedule) <= limit


def fsdp2_like(num: int) -> Iteration:
    """Per layer a copy into a gather, the gather, the copy out of it and its use; forward, then backward."""
    ops: list[Op] = []
    buffers: list[Buffer] = []
    before: tuple[str, ...] = ()
    for phase, layers in ((Phase.FORWARD, range(num)), (Phase.BACKWARD, reversed(range(num)))):
        for layer in layers:
            at, origin = f"{phase}.{layer}", Origin(phase=phase, layer=layer, module=f"layers.{layer}")
            gather = Collective(CollectiveKind.ALL_GATHER, 64, 2)
            ops += [
                CompOp(name=f"in.{at}", work=MemoryBound(8), stream="all_gather_copy_in", origin=origin),
                CommOp(name=f"gather.{at}", collective=gather, deps=(f"in.{at}",), origin=origin),
                CompOp(name=f"out.{at}", work=MemoryBound(8), deps=(f"gather.{at}",), origin=origin),
                CompOp(name=f"use.{at}", work=MemoryBound(8), deps=(f"out.{at}", *before), origin=origin),
            ]
            buffers += [
                Buffer(name=f"gathered.{at}", num_bytes=1, maker=f"gather.{at}", users=(f"out.{at}",)),
                Buffer(name=f"whole.{at}", num_bytes=1, maker=f"out.{at}", users=(f"use.{at}",)),
            ]
            before = (f"use.{at}",)
    optimizer = Origin(phase=Phase.OPTIMIZER)
    ops += [CompOp(name=f"step.{number}", work=MemoryBound(8), origin=optimizer) for number in range(2)]
    return Iteration("fsdp2", tuple(ops), is_dataflow=True, buffers=tuple(buffers))


def test_a_group_is_held_until_the_copy_out_of_its_gather_is_used_and_its_copy_in_waits_for_that() -> None:
    arcs = set(depth_arcs(fsdp2_like(4), 2))
    assert {("out.forward.0", "in.forward.2"), ("use.forward.0", "in.forward.2")} <= arcs
    assert not any(target.startswith("gather") for _, target in arcs)


def test_a_framework_gathers_again_after_release_and_steps_the_optimizer_after_backward() -> None:
    step = fsdp2_like(3)
    assert [[op.name for op in group] for group in gathers_by_group(step)] == [
        [f"gather.forward.{layer}", f"gather.backward.{layer}"] for layer in range(3)
    ]
    arcs = set(framework_arcs(step))
    assert framework_of(step) == "FSDP2"
    for layer in range(3):
        assert ("use.forward." + str(layer), f"in.backward.{layer}") in arcs
        assert ("gather.forward.2", f"in.backward.{layer}") in arcs
    assert {arc for arc in arcs if arc[1].startswith("step")} == {("use.backward.0", "step.0"), ("step.0", "step.1")}
    place = {op.name: number for number, op in enumerate(step.ops)}
    assert all(place[source] < place[target] for source, target in arcs)


def test_a_program_of_no_framework_keeps_its_data_flow_alone() -> None:
    assert framework_of(fsdp_problem(3).iteration) is None


def test_without_arcs_the_limit_is_broken() -> None:
    problem = fsdp_problem(5)
    graph = task_graph(problem)
    lean = peak_of_order(problem.iteration, lean_order(problem.iteration))
    assert max(peak_of(problem.iteration, graph, s) for s in _random_schedules(graph, 0)) > lean


def test_a_limit_nothing_fits_in_is_refused_by_how_much() -> None:
    step, _ = fsdp_step(3, Random(0))
    lean = peak_of_order(step, lean_order(step))
    with pytest.raises(JobError, match=rf"memory_limit is {lean - 3} bytes.*needs {lean}: 3 bytes too many"):
        limit_arcs(step, lean - 3)


def test_a_gather_of_activations_is_no_parameter_gather() -> None:
    step, _ = fsdp_step(2, Random(0))
    ops = list(step.ops)
    place = next(n for n, op in enumerate(ops) if op.name == "forward.1.ag")
    ops[place] = replace(ops[place], deps=("forward.0",))
    changed = Iteration("step", tuple(ops), True, step.buffers)
    assert "forward.1.params" not in {buffer.name for buffer in parameter_gathers(changed)}
    assert len(parameter_gathers(step)) == 4


def test_parameters_kept_for_the_backward_pass_are_held_as_in_program_order() -> None:
    step, _ = fsdp_step(3, Random(0))
    kept = tuple(
        replace(buffer, users=(*buffer.users, f"backward.{buffer.name.split('.')[1]}"))
        if buffer.name.startswith("forward")
        else buffer
        for buffer in step.buffers
    )
    arcs = depth_arcs(replace(step, buffers=kept), 1)
    assert not any(target.startswith("forward") for _, target in arcs)
