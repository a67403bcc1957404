"""Every planner's plan of a mixed program, executed on two and on four gloo ranks: the program's bits."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from coarse_times import CoarseTimes
from rank_pool import RankPool

from lagom_overlap.capturing.fake_world import fake_world
from lagom_overlap.engines.fx.program import load_program
from lagom_overlap.hardware import load_preset
from lagom_overlap.jobfile.registry import make_planner, planner_names
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.deadline import SearchBudget
from lagom_overlap.workload.rewrite.steps import Reorder, Split

pytestmark = [pytest.mark.torch, pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(180)]

PROGRAM = Path(__file__).parent / "mixed_program.py"
PLANNERS = sorted(set(planner_names()) - {"fsdp2", "joint"})
"""FSDP2's plans are settings, no rewrites; the joint planner takes no times that were measured or made up."""


@pytest.fixture(scope="module")
def two_ranks():
    pool = RankPool(2)
    yield pool
    pool.close()


@cache
def problem(num_ranks):
    with fake_world(num_ranks):
        captured = load_program(PROGRAM, "step").captured("mixed")
    cluster = replace(load_preset("a40_pcie", 2), gpus_per_node=num_ranks // 2)
    placed = captured.capture.placed_on(cluster)
    return PlanProblem(
        iteration=placed.iteration,
        cluster=cluster,
        times=CoarseTimes(),
        groups=placed.groups,
        work=SearchBudget(0.2),
    )


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_plan_gives_the_programs_bits(request, num_ranks):
    ranks = request.getfixturevalue("ranks" if num_ranks == 4 else "two_ranks")
    moved, cut = False, False
    for name in PLANNERS:
        found = problem(num_ranks)
        plan = make_planner(name, {}).plan(found)
        outcomes = ranks.call("run_program", str(PROGRAM), plan.rewrites)
        assert [error for error, _ in outcomes] == [0.0] * num_ranks, (name, plan.rewrites)
        assert len({digest for _, digest in outcomes}) == 1, name
        cut |= any(isinstance(step, Split) for step in plan.rewrites)
        orders = [step.order for step in plan.rewrites if isinstance(step, Reorder)]
        moved |= any(order != tuple(op.name for op in found.iteration.ops) for order in orders)
    assert moved  # else every plan was the program
    assert cut
