"""The first sentence of a plan: a prediction alone is called one, and where ranks ran, what they took comes first."""

from dataclasses import replace

import pytest
from rich.console import Console

from lagom_overlap.planners.base import Plan
from lagom_overlap.report.plan import headline, plan_summary
from lagom_overlap.results.plan import (
    BeforeAfter,
    PeakMemory,
    PlanExecution,
    PlannedIteration,
    PlannedStep,
    PlanResult,
    Spread,
)
from lagom_overlap.results.plan_decisions import PlanDecision
from lagom_overlap.timeline import Timeline
from lagom_overlap.tuners.sequential import judged_pairs
from lagom_overlap.workload import Iteration

STEP = PlannedStep(
    plan=Plan(planner="ours", rewrites=(), iteration=Iteration("step", ()), lower_bound_s=0.5), timelines={}
)
PREDICTED = PlanResult(
    planner="ours",
    carrier=None,
    fsdp2=None,
    baseline="FSDP2's own order",
    simulation="with contention",
    num_ops=118,
    num_comms=24,
    iteration_s=PlannedIteration(before=1.0, after=0.6, lower_bound=0.5),
    exposed_comm_s=BeforeAfter(before=0.4, after=0.1),
    peak_memory_bytes=PeakMemory(before=1, after=1, limit=None),
    decisions=(),
    solve_s=1.0,
    job="step",
    num_ranks=2,
    is_optimal=False,
    times=None,
    megatron=None,
    advice={},
    notes=(),
    files=(),
    planned=STEP,
)
RAN = replace(STEP, timelines={"after": Timeline(())})
RUN = PlanExecution(
    backend="gloo",
    num_ranks=2,
    rounds=11,
    max_error=0.0,
    is_bitwise_equal=True,
    order_digest="0",
    iteration_s={},
    exposed_comm_s={},
    predicted_iteration_s=PREDICTED.exposed_comm_s,
    predicted_exposed_comm_s=PREDICTED.exposed_comm_s,
    speedup=Spread(median=1.067, q25=1.024, q75=1.126),
    judgement=judged_pairs([1.06 + 0.001 * n for n in range(11)], [1.0] * 11),
)
BOUND = "at most 20.00 % longer than any order must take, 500 ms"
GAIN = "1.00 s -> 600 ms (1.667x)"
PREDICTION = f"{GAIN} against FSDP2's own order, simulated with contention; {BOUND} (contention left out)"


def test_a_plan_that_nothing_ran_says_whose_order_it_is_compared_with_and_that_it_was_simulated_with_contention():
    assert headline(PREDICTED) == f"ours: {PREDICTION}"


def test_times_that_know_no_contention_are_said_to():
    alone = replace(PREDICTED, planned=STEP, baseline="program order", simulation="without contention")
    said = f"ours: 1.00 s -> 600 ms (1.667x) against program order, simulated without contention; {BOUND}"
    assert headline(alone) == said


def test_what_ranks_measured_comes_before_the_prediction():
    run = replace(PREDICTED, planned=STEP, execution=RUN)
    assert headline(run) == (
        "ours: measured 1.067x (quartiles 1.024 to 1.126) on real ranks, by the sequential test the plan is proven "
        f"faster in 11 pairs: 1.065x (1.062 to 1.067; error rate 1 %); {PREDICTION}"
    )


@pytest.mark.parametrize(("num_decisions", "more"), [(1, ""), (8, ""), (9, "and 1 more"), (30, "and 22 more")])
def test_the_terminal_shows_eight_decisions_and_says_how_many_more_there_are(num_decisions: int, more: str):
    decisions = tuple(PlanDecision(comm=f"gather{n:02}", num_chunks=2, split_dim=0) for n in range(num_decisions))
    console = Console(width=120)
    with console.capture() as capture:
        console.print(plan_summary(replace(PREDICTED, planned=RAN, decisions=decisions)))
    shown = capture.get()
    assert sum(f"gather{n:02}" in shown for n in range(num_decisions)) == min(num_decisions, 8)
    assert (f"... {more}, in --json and in the report" in shown) if more else (" more, in --json" not in shown)
    assert f"{num_decisions} split" in shown
