"""A comparison of planners in words."""

from lagom_overlap.results.compare_planners import ComparePlannersResult
from lagom_overlap.units import format_seconds


def summary(result: ComparePlannersResult) -> str:
    """The shortest plan against the step as it is, who found none, and the caveats."""
    planned = [(row.after_s, row) for row in result.rows if row.after_s is not None]
    failures = [f"{row.planner}: {row.failure}" for row in result.rows if row.failure is not None]
    if not planned:
        return "\n".join((f"{result.job}: no planner found a plan.", *failures, *result.notes))
    least_s = min(after_s for after_s, _ in planned)
    best = next(row for after_s, row in planned if after_s == least_s)
    return "\n".join(
        (
            f"{result.job}: {best.planner} plans the shortest step of {len(planned)}, simulated {result.simulation}: "
            f"{result.baseline} {format_seconds(best.before_s)} -> {format_seconds(least_s)} "
            f"({best.before_s / least_s:.3f}x).",
            *failures,
            *result.notes,
        )
    )
