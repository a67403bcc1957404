"""A plan runs against the program, in turn, on real ranks; what was measured joins what was predicted."""

import sys
from dataclasses import replace
from statistics import quantiles
from typing import Final

from lagom_overlap.engines.fx.commands import PlanRun
from lagom_overlap.errors import WrongResultError
from lagom_overlap.planners.base import Plan
from lagom_overlap.results.plan import BeforeAfter, PlanExecution, PlanResult, Spread
from lagom_overlap.timeline import Timeline
from lagom_overlap.tuners.sequential import judged_pairs
from lagom_overlap.verbs.plan_problem import PlanInput
from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings
from lagom_overlap.workload.iteration import graph_digest

MAX_ERROR: Final = 0.02
"""The largest difference of results, relative to the largest value, that is rounding: five times that of bfloat16."""


def executed(given: PlanInput, plan: Plan, result: PlanResult) -> PlanResult:
    """The result with what came of running the plan.

    Raises:
        LagomError: if a rank failed, or the plan's results are not the program's.
    """
    run = _run(given, plan)
    arms = {"before": run.before, "after": run.after}
    measured = {name: Timeline(arm.spans) for name, arm in arms.items() if arm.spans}
    return replace(result, execution=_execution(given, result, run), planned=replace(result.step, measured=measured))


def _run(given: PlanInput, plan: Plan) -> PlanRun:
    assert given.ranks is not None
    if isinstance(plan.settings, Fsdp2Settings):
        run = given.ranks.run_settings(plan.settings, rounds=given.rounds, seed=given.seed)
        if plan.settings.reduce_in_param_dtype and run.max_error < sys.float_info.max:
            return run  # the user allowed other results: how far losses are apart is reported, not judged
    else:
        digest = graph_digest(given.problem.iteration)
        run = given.ranks.run(plan.rewrites, rounds=given.rounds, seed=given.seed, graph=digest)
    if run.max_error > MAX_ERROR:
        raise WrongResultError(
            f"the plan's results differ from the program's by {run.max_error:.1e} of the largest value, or are not "
            f"finite; {MAX_ERROR:g} is allowed for rounding: the run is not reported"
        )
    return run


def _spread(values: list[float]) -> Spread:
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Spread(median=middle, q25=low, q75=high)


def _execution(given: PlanInput, result: PlanResult, run: PlanRun) -> PlanExecution:
    assert given.ranks is not None
    ratios = [before / after for before, after in zip(run.before.makespan_s, run.after.makespan_s, strict=True)]
    arms = {"before": run.before, "after": run.after}
    return PlanExecution(
        backend=given.ranks.description,
        num_ranks=given.num_ranks,
        rounds=len(run.before.makespan_s),
        max_error=run.max_error,
        is_bitwise_equal=run.max_error == 0,
        order_digest=run.order_digest,
        iteration_s={name: _spread(list(arm.makespan_s)) for name, arm in arms.items()},
        exposed_comm_s={name: _spread(list(arm.exposed_s)) for name, arm in arms.items() if arm.exposed_s},
        predicted_iteration_s=BeforeAfter(before=result.iteration_s.before, after=result.iteration_s.after),
        predicted_exposed_comm_s=result.exposed_comm_s,
        speedup=_spread(ratios),
        judgement=judged_pairs(run.before.makespan_s, run.after.makespan_s),
    )
