"""A plan beside its program on ranks: what is reported, and what is not."""

from dataclasses import dataclass

import pytest

from lagom_overlap.engines.planned.commands import ArmRuns, PlanRun
from lagom_overlap.errors import WrongResultError
from lagom_overlap.hardware import load_preset
from lagom_overlap.job.plan import MAX_ERROR, PlanRequest, run_plan
from lagom_overlap.job.plan_problem import PlanInput
from lagom_overlap.plan.base import PlanProblem
from lagom_overlap.workload import CompOp, Gemm, Iteration


class Times:
    def seconds(self, op):
        return 1e-3


@dataclass
class Ranks:
    """Two runs of the program take 2 s, of the plan 1 s."""

    max_error: float
    description: str = "ranks of a test"

    def run(self, rewrites, *, rounds, seed, graph):
        before, after = ArmRuns((2.0, 2.0), (0.0, 0.0), ()), ArmRuns((1.0, 1.0), (0.0, 0.0), ())
        return PlanRun(before=before, after=after, max_error=self.max_error, order_digest="0")


def execution(max_error):
    iteration = Iteration("step", (CompOp(name="a", work=Gemm(8, 8, 8)),), is_dataflow=True)
    problem = PlanProblem(iteration=iteration, cluster=load_preset("a40_nvlink"), times=Times())
    given = PlanInput(name="step", problem=problem, issued=iteration, num_ranks=2, ranks=Ranks(max_error))
    return run_plan(given, PlanRequest(planner="program_order", execute=True)).json.execution


def test_outputs_that_rounding_explains_are_reported_with_their_difference():
    found = execution(MAX_ERROR)
    assert (found.max_error, found.is_bitwise_equal, found.speedup.median) == (MAX_ERROR, False, 2.0)
    assert execution(0.0).is_bitwise_equal


@pytest.mark.parametrize("max_error", [0.5, 1e308])
def test_other_outputs_than_the_programs_are_an_error(max_error):
    with pytest.raises(WrongResultError, match="differ from the program's"):
        execution(max_error)
