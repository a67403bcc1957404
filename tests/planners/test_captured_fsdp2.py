"""FSDP2's own step, and what planners make of it: judged on captures, under contention."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from time import process_time
from unittest.mock import patch

import pytest

pytest.importorskip("torch")

from captured_steps import fsdp2_capture, problem_of

from lagom_overlap.jobfile.registry import make_planner, planner_names
from lagom_overlap.planners.base import Plan, PlanProblem
from lagom_overlap.planners.carriers import Carrier
from lagom_overlap.planners.deadline import SearchBudget
from lagom_overlap.planners.ours import Ours
from lagom_overlap.planners.ours import planner as ours_planner
from lagom_overlap.planners.predict import predict
from lagom_overlap.planners.simulated import Simulation, simulated
from lagom_overlap.timeline import SpanKind
from lagom_overlap.verbs.plan import PlanRequest, judged, offered, own_order, run_plan
from lagom_overlap.verbs.plan_problem import PlanInput
from lagom_overlap.workload import Phase
from lagom_overlap.workload.gathers import copies_into, parameter_gathers

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


@cache
def step() -> PlanProblem:
    return problem_of(fsdp2_capture())


@cache
def plan_of(planner: str) -> Plan:
    if planner != "joint":
        return make_planner(planner, {}).plan(replace(step(), work=SearchBudget(1.0)))
    # The joint planner counts no work; it gets seconds of this process, which a loaded machine does not take from it.
    with patch("lagom_overlap.planners.deadline.monotonic", process_time):
        return make_planner(planner, {}).plan(replace(step(), budget_s=1.0))


def given() -> PlanInput:
    return PlanInput(name="step", problem=step(), issued=step().unplanned, num_ranks=8)


def test_prefetching_one_module_explicitly_is_the_default_overlap():
    """PyTorch's docstring of `set_modules_to_forward_prefetch`: a list of one is the same as the default overlap."""
    default, explicit = problem_of(fsdp2_capture()), problem_of(fsdp2_capture(prefetched=1))
    assert simulated(explicit, explicit.unplanned).makespan_s == simulated(default, default.unplanned).makespan_s
    alone = [predict(problem, problem.unplanned).schedule.makespan for problem in (default, explicit)]
    assert alone[0] == alone[1]


SHORTER = ("concerto", "concerto_paper", "fsdp2", "joint", "ours", "out_of_order")
"""Planners whose plan of this step is shorter under contention; the others issue it as another framework does."""


@pytest.mark.parametrize("planner", sorted(set(planner_names()) - {"program_order"}))
def test_a_planner_shortens_the_step_or_is_another_frameworks_or_says_why(planner: str):
    plan, unplanned = plan_of(planner), step().unplanned
    before, after = simulated(step(), unplanned), simulated(step(), plan.iteration, plan.configs)
    if planner in SHORTER:
        assert after.makespan_s < before.makespan_s
    else:
        said = [note for note in plan.notes if "program order" in note]
        assert after.makespan_s != before.makespan_s or said


def test_program_order_is_what_the_framework_does():
    assert plan_of("program_order").iteration == step().unplanned
    assert own_order(given()) == "FSDP2's own order"


@pytest.mark.parametrize("planner", planner_names())
def test_no_plan_does_what_the_framework_cannot(planner: str):
    """Judged by who runs when: after the last reduction the optimizer, after the release the next gathering."""
    plan, problem = plan_of(planner), step()
    timeline = simulated(problem, plan.iteration, plan.configs).timeline
    ops = {op.name: op for op in plan.iteration.ops}
    spans = {span.name: span for span in timeline.spans}
    phases = {name: op.origin.phase for name, op in ops.items()}
    backward = [spans[name].end_s for name in spans if phases[name] in (Phase.BACKWARD, Phase.WEIGHT_GRAD)]
    assert min(spans[name].start_s for name in spans if phases[name] is Phase.OPTIMIZER) >= max(backward)
    copies = copies_into(problem.iteration)
    gathered = {op.name: op for op in problem.iteration.comms if op.name in copies and op.name in spans}
    forward = [name for name, op in gathered.items() if op.origin.phase is Phase.FORWARD]
    begun = {name: spans[(*copies[name], name)[0]].start_s for name in gathered}
    later = [begun[name] for name in gathered if name not in forward]  # none where parameters are kept
    assert min(later, default=float("inf")) >= max(spans[name].start_s for name in forward)
    users = {buffer.maker: buffer.users for buffer in parameter_gathers(plan.iteration)}
    for first, again in ((f"fwd.{name.removeprefix('bwd.')}", name) for name in gathered if name not in forward):
        if first in users and again in users:
            assert begun[again] >= max(spans[user].end_s for user in users[first])


@pytest.mark.parametrize("planner", ["ours", "megatron", "zero2"])
def test_a_communicator_runs_one_collective_at_a_time(planner: str):
    timeline = simulated(step(), plan_of(planner).iteration).timeline
    spans = sorted(timeline.of(SpanKind.COMM), key=lambda span: span.start_s)
    assert all(one.end_s <= other.start_s for one, other in pairwise(spans))


@pytest.mark.parametrize("planner", ["zero1", "zero2"])
def test_a_plan_that_loses_under_contention_is_not_offered(planner: str):
    found = judged(given(), plan_of(planner), 0.0)
    assert found.after.makespan_s > found.before.makespan_s
    assert found.after.simulation is Simulation.CONTENTION
    kept = offered(given(), found)
    assert kept.plan.rewrites == ()
    assert kept.plan.iteration == step().unplanned
    assert kept.after.makespan_s == found.before.makespan_s
    assert kept.plan.notes[-1].startswith("No gain: with contention")
    assert "FSDP2's own order" in kept.plan.notes[-1]


def test_a_plan_that_gains_is_offered_as_it_is():
    found = judged(given(), plan_of("joint"), 0.0)
    assert found.after.makespan_s < found.before.makespan_s
    assert offered(given(), found) is found


def test_a_plan_that_the_gpu_cannot_hold_is_not_offered():
    found, problem = judged(given(), plan_of("joint"), 0.0), given().problem
    gpu = replace(problem.cluster.gpu, memory_bytes=found.before.peak_bytes)
    tight = replace(given(), problem=replace(problem, cluster=replace(problem.cluster, gpu=gpu)))
    larger = replace(found, after=replace(found.after, peak_bytes=found.before.peak_bytes + 1))
    assert offered(tight, larger).plan.rewrites == ()
    assert "the step is left as it is. With [plan] memory_limit" in offered(tight, larger).plan.notes[-1]
    same = replace(found, after=replace(found.after, peak_bytes=found.before.peak_bytes))
    assert offered(tight, same) is same


def test_ours_takes_of_its_orders_the_shortest_with_contention(monkeypatch):
    problem = replace(step(), work=SearchBudget(0.3), prefetch=None)
    chosen = Ours(split=False, starts=False).plan(problem)
    monkeypatch.setattr("lagom_overlap.planners.ours.planner._SIMULATED_OPERATORS", 0)
    shortest = Ours(split=False, starts=False).plan(problem)
    alone = [predict(problem, plan.iteration).schedule.makespan for plan in (shortest, chosen)]
    contended = [simulated(problem, plan.iteration).makespan_s for plan in (shortest, chosen)]
    assert alone[0] < alone[1]
    assert contended[0] > contended[1]
    assert "with contention" in chosen.notes[1]


def test_settings_that_gain_are_the_plan_where_no_order_gains(monkeypatch):
    judged_as_is = ours_planner._judged

    def orders_lose(problem, plan):
        one = judged_as_is(problem, plan)
        return replace(one, makespan_s=2 * one.makespan_s) if plan.rewrites else one

    monkeypatch.setattr(ours_planner, "_judged", orders_lose)
    plan = Ours().plan(replace(step(), work=SearchBudget(0.1)))
    assert plan.settings is not None
    assert plan.notes[0] == "No order that was found is faster than the step as it is issued."


def test_what_fsdp2_can_be_told_is_among_what_the_default_planner_weighs():
    """An order is carried by nothing; settings that are shorter still are, and the plan says by whom."""
    result = run_plan(given(), PlanRequest(planner="ours", work=1.0))
    settings = run_plan(given(), PlanRequest(work=1.0))
    assert settings.carrier is Carrier.FSDP2
    assert result.iteration_s.after <= settings.iteration_s.after * 1.001
    assert result.carrier is Carrier.FSDP2
    assert result.fsdp2 is not None
    assert not any("No framework issues this order" in note for note in result.notes)
