"""How a predicted gain is judged against a paper's, and tables of markdown."""

from collections.abc import Iterator, Sequence

from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.hardware import Cluster
from lagom_overlap.planners.base import Planner, PlanProblem
from lagom_overlap.planners.predict import Prediction, predict
from lagom_overlap.planners.times import ModelTimes

POINT, THIRD = 0.01, 1 / 3
"""How near to the paper's a relative gain counts as reproduced: a percentage point, or a share of it."""
LEAST_SHARE = 0.5
"""Of a published gain: less is no direction."""


def times_of(cluster: Cluster) -> ModelTimes:
    """The cost model's times."""
    return ModelTimes(ContentionModel(cluster, load_profile("plausible")))


def predicted(problem: PlanProblem, planner: Planner) -> Prediction:
    """The planner's plan, predicted."""
    return predict(problem, planner.plan(problem).iteration)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a markdown table."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def verdict(found: float, stated: float, *, built_in: bool = False) -> str:
    """Of a relative gain; one whose times were taken from the paper itself never counts as reproduced."""
    if found < LEAST_SHARE * stated:
        return "not"
    if built_in:
        return "built in"
    return "reproduced" if abs(found - stated) <= max(POINT, THIRD * stated) else "direction"
