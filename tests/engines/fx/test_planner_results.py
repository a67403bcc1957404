"""Every registered planner's plan of one program, executed on four gloo ranks (2 nodes of 2): the program's results."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from coarse_times import CoarseTimes

from lagom_overlap.capturing.fake_world import fake_world
from lagom_overlap.engines.fx.program import load_program
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import load_preset
from lagom_overlap.jobfile.registry import make_planner, planner_names
from lagom_overlap.planners.base import PlanProblem

pytestmark = [pytest.mark.torch, pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(180)]  # 4 ranks import

PROGRAM = Path(__file__).parent / "block_program.py"
TOLERANCE = 1e-5
"""Of the largest value: sums in another order, products in pieces, FP32."""


@pytest.fixture(scope="module")
def problem():
    with fake_world(4):
        captured = load_program(PROGRAM, "step").captured("block")
    cluster = replace(load_preset("a40_nvlink"), num_nodes=2, gpus_per_node=2)
    placed = captured.capture.placed_on(cluster)
    return PlanProblem(
        iteration=placed.iteration, cluster=cluster, times=CoarseTimes(), groups=placed.groups, budget_s=3
    )


@pytest.mark.parametrize("name", planner_names())
def test_a_plan_gives_the_results_of_the_program(ranks, problem, name):
    try:
        plan = make_planner(name, {}).plan(problem)
    except JobError as error:
        pytest.skip(f"{name} does not plan such a step: {error}")
    outcomes = ranks.call("run_program", str(PROGRAM), plan.rewrites)
    kinds = Counter(type(step).__name__ for step in plan.rewrites)
    assert max(error for error, _ in outcomes) <= TOLERANCE, kinds
    assert len({digest for _, digest in outcomes}) == 1
