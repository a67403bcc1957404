"""A comparison of tuners in words."""

from lagom_overlap.report.tune.words import change_text
from lagom_overlap.results.compare import CompareResult, CompareRow
from lagom_overlap.units import format_seconds


def summary(result: CompareResult) -> str:
    """The fastest tuner against the default, and the caveats."""
    measured = [(row.makespan_s, row) for row in result.rows if row.makespan_s is not None]
    if not measured:
        outcome = f"{len(result.rows)} searches were done; the results were not measured side by side."
    else:
        best_s = min(makespan_s for makespan_s, _ in measured)
        outcome = _best(
            next(row for makespan_s, row in measured if makespan_s == best_s), best_s, len(measured), result.step_s
        )
    return "\n".join((f"{result.job}: {outcome}", *result.notes))


def _best(row: CompareRow, makespan_s: float, num_rows: int, step_s: float | None) -> str:
    ratio, interval = row.speedup_over_default, row.speedup_interval
    over = "" if ratio is None else f", {ratio:.3f}× the default's speed"
    within = "" if interval is None else f" (95 % interval {interval[0]:.3f} to {interval[1]:.3f})"
    even = interval is not None and interval[0] <= 1 <= interval[1]
    said = "has the shortest time" if even else "is the fastest"
    doubt = " It is not measurably different from the default." if even else ""
    return (
        f"{row.tuner} {said} of {num_rows}: {format_seconds(makespan_s)}{over}{within}, "
        f"after {row.num_measurements} measurements.{doubt}{_of_step(row, step_s)}"
    )


def _of_step(row: CompareRow, step_s: float | None) -> str:
    """What the fastest is worth of the whole step."""
    if step_s is None or row.step_s is None:
        return ""
    change = change_text(step_s, row.step_s)
    return f" The whole step: {format_seconds(step_s)} to {format_seconds(row.step_s)} ({change}), by lagom simulate."
