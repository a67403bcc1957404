"""A plan for a terminal of 80 columns."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lagom_overlap.report.plan_model import Decision, ExecutionJson, PlanJson, PlannerRow
from lagom_overlap.report.plan_view import PlanView
from lagom_overlap.units import format_bytes, format_seconds

WIDTH: Final = 80
MAX_ROWS: Final = 8
"""Rows of a table in the terminal; the page and --json hold all."""


def headline(result: PlanJson) -> str:
    """One sentence: what was measured, where it ran, then the predicted iteration and how far it is from the bound."""
    times = result.iteration_s
    gain = times.before / times.after
    over = times.after / times.lower_bound - 1 if times.lower_bound else 0.0
    run, measured = result.execution, ""
    if isinstance(run, ExecutionJson):
        ratio = run.speedup
        measured = f"measured {ratio.median:.3f}x (quartiles {ratio.q25:.3f} to {ratio.q75:.3f}) on real ranks; "
    return (
        f"{result.planner}: {measured}predicted iteration "
        f"{format_seconds(times.before)} -> {format_seconds(times.after)} ({gain:.3f}x), "
        f"{over:.2%} above the lower bound {format_seconds(times.lower_bound)}"
    )


def plan_summary(view: PlanView) -> Group:
    """Headline, what is exposed and held, decisions, the rest of the exposed time, the run, notes."""
    result = view.result
    title = f"{view.job}: {result.num_ops} operators, {result.num_comms} collectives, {view.num_ranks} ranks"
    proof = "proved shortest without contention; " if view.is_optimal else ""
    parts: list[RenderableType] = [
        Text(title, style="dim"),
        Text(headline(result), style="bold"),
        Text(f"{proof}planned in {format_seconds(result.solve_s)}", style="dim"),
        Text(),
        _quantities(result),
        Text(),
    ]
    parts += [*_decisions(result.decisions), Text()]
    if view.exposed:
        parts += [_exposed(view), Text()]
    if isinstance(result.execution, ExecutionJson):
        parts += [*_execution(result.execution), Text()]
    for framework, lines in view.advice.items():
        parts.append(Text(f"As settings of {framework}:"))
        parts += [*(Text(f"  {line}") for line in lines), Text()]
    parts += [Text(note, style="dim") for note in view.notes]
    return Group(*parts)


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, width=WIDTH, pad_edge=False, header_style="dim")
    table.add_column(first, ratio=1)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _quantities(result: PlanJson) -> Table:
    table = _table("predicted", "before", "after", "bound or limit")
    times, exposed, memory = result.iteration_s, result.exposed_comm_s, result.peak_memory_bytes
    table.add_row(
        "iteration", format_seconds(times.before), format_seconds(times.after), format_seconds(times.lower_bound)
    )
    table.add_row("exposed communication", format_seconds(exposed.before), format_seconds(exposed.after), "")
    limit = "none" if memory.limit is None else format_bytes(memory.limit)
    table.add_row("peak memory", format_bytes(memory.before), format_bytes(memory.after), limit)
    return table


def decision_text(decision: Decision) -> str:
    """What is done with a collective, in words."""
    said = []
    if decision.substitution is not None:
        said.append(f"as {decision.substitution.replace('_', ' ')}")
    if decision.groups is not None:
        mesh = " x ".join(map(str, decision.groups.mesh))
        said.append(f"over {mesh} ranks, axes {', '.join(map(str, decision.groups.order))}")
    if decision.num_chunks > 1:
        along = "that are summed" if decision.split_dim is None else f"along {decision.split_dim}"
        said.append(f"in {decision.num_chunks} pieces {along}")
    if decision.fused_with:
        said.append(f"fused with {len(decision.fused_with)} more")
    said.append("a computation" if decision.is_computation is True else f"{decision.prefetch} computations ahead")
    return "; ".join(said)


def decisions_headline(decisions: Sequence[Decision]) -> str:
    """How many collectives are treated otherwise, and how many computations are cut alone."""
    num_comps = sum(decision.is_computation is True for decision in decisions)
    alone = f", {num_comps} computation{'s'[: num_comps > 1]} cut alone" if num_comps else ""
    return f"{len(decisions) - num_comps} collectives treated otherwise{alone}"


def _decisions(decisions: Sequence[Decision]) -> list[RenderableType]:
    if not decisions:
        return [Text("The plan leaves every collective where it is.")]
    counts = Counter(
        kind
        for decision in decisions
        for kind, applies in (
            ("replaced", decision.substitution is not None),
            ("over a mesh", decision.groups is not None),
            ("split", decision.num_chunks > 1),
            ("fused", bool(decision.fused_with)),
        )
        if applies
    )
    said = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    table = _table("collective or computation" if any(d.is_computation is True for d in decisions) else "collective")
    table.columns[0].ratio = None
    table.columns[0].overflow = "ellipsis"
    table.columns[0].max_width = 30
    table.columns[0].no_wrap = True
    table.add_column("decision", ratio=1)
    told = sorted(decisions, key=lambda d: (d.substitution is None, d.groups is None, d.num_chunks == 1))
    for decision in told[:MAX_ROWS]:
        table.add_row(Text(decision.comm), Text(decision_text(decision)))
    left = len(decisions) - min(len(decisions), MAX_ROWS)
    more = [Text(f"... and {left} more, in --json and in the report", style="dim")] if left else []
    return [Text(f"{decisions_headline(decisions)}{': ' + said if said else ''}"), table, *more]


def _exposed(view: PlanView) -> Table:
    table = _table("exposed after the plan, while this runs", "collectives", "time", "of the iteration")
    for part in view.exposed[:MAX_ROWS]:
        share = part.seconds / view.result.iteration_s.after
        table.add_row(Text(part.what), str(part.num_comms or ""), format_seconds(part.seconds), f"{share:.1%}")
    return table


def _execution(run: ExecutionJson) -> list[RenderableType]:
    equal = "equal bit for bit" if run.is_bitwise_equal else f"equal within {run.max_error:.1e} of the largest value"
    speed = f"{run.speedup.median:.3f}x (quartiles {run.speedup.q25:.3f} to {run.speedup.q75:.3f})"
    table = _table("on real ranks", "before", "after", "predicted before", "after")
    for name, measured, predicted in (
        ("iteration", run.iteration_s, run.predicted_iteration_s),
        ("exposed", run.exposed_comm_s, run.predicted_exposed_comm_s),
    ):
        table.add_row(
            name,
            *(format_seconds(measured[arm].median) for arm in ("before", "after")),
            *(format_seconds(value) for value in (predicted.before, predicted.after)),
        )
    return [
        Text(f"Run {run.rounds} rounds side by side: {speed}; outputs {equal}", style="bold"),
        table,
        Text(run.backend, style="dim"),
    ]


def planners_table(rows: Sequence[PlannerRow]) -> Group:
    """`lagom compare --planners`: one row per planner, and below why some have no plan."""
    table = _table("planner", "before", "after", "bound", "over bound", "exposed", "memory", "solved in")
    for row in rows:
        over = row.after_s / row.lower_bound_s - 1 if row.after_s and row.lower_bound_s else None
        table.add_row(
            Text(row.planner),
            format_seconds(row.before_s),
            _seconds(row.after_s),
            _seconds(row.lower_bound_s),
            "-" if over is None else f"{over:.2%}",
            _seconds(row.exposed_comm_s),
            "-" if row.peak_memory_bytes is None else format_bytes(row.peak_memory_bytes),
            _seconds(row.solve_s),
        )
    return Group(table, *(Text(f"{row.planner}: {row.failure}", style="dim") for row in rows if row.failure))


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)
