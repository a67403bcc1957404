"""The first sentence of a plan: a prediction alone is called one, and where ranks ran, what they took comes first."""

import msgspec

from lagom_overlap.report.plan_model import (
    BeforeAfter,
    ExecutionJson,
    IterationTimes,
    PeakMemory,
    PlanJson,
    Spread,
)
from lagom_overlap.report.plan_terminal import headline

PREDICTED = PlanJson(
    planner="ours",
    num_ops=118,
    num_comms=24,
    iteration_s=IterationTimes(before=1.0, after=0.6, lower_bound=0.5),
    exposed_comm_s=BeforeAfter(before=0.4, after=0.1),
    peak_memory_bytes=PeakMemory(before=1, after=1, limit=None),
    decisions=[],
    solve_s=1.0,
    files=[],
)
RUN = ExecutionJson(
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
)
PREDICTION = "predicted iteration 1.00 s -> 600 ms (1.667x), 20.00% above the lower bound 500 ms"


def test_a_plan_that_nothing_ran_is_a_prediction():
    assert headline(PREDICTED) == f"ours: {PREDICTION}"


def test_what_ranks_measured_comes_before_the_prediction():
    run = msgspec.structs.replace(PREDICTED, execution=RUN)
    assert headline(run) == f"ours: measured 1.067x (quartiles 1.024 to 1.126) on real ranks; {PREDICTION}"
