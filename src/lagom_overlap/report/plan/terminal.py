"""A plan for a terminal."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lagom_overlap.report.fitted import WIDTH, Fitted
from lagom_overlap.report.plan.path import ExposedPart, exposed_by
from lagom_overlap.report.plan.words import (
    carrier_text,
    decision_text,
    decisions_headline,
    headline,
    run_rows,
    solved_text,
)
from lagom_overlap.results.plan import PlanExecution, PlanResult
from lagom_overlap.results.plan_decisions import PlanDecision
from lagom_overlap.units import format_memory, format_percent, format_seconds

MAX_ROWS: Final = 8
"""Rows of a table in the terminal; the page and --json hold all."""


def plan_summary(result: PlanResult) -> Group:
    """Headline, what is exposed and held, decisions, the rest of the exposed time, the run, notes."""
    title = f"{result.job}: {result.num_ops} operators, {result.num_comms} collectives, {result.num_ranks} ranks"
    proof = "proved shortest without contention; " if result.is_optimal else ""
    parts: list[RenderableType] = [
        Text(title, style="dim"),
        Text(headline(result), style="bold"),
        Text(f"{proof}{solved_text(result)}; {carrier_text(result)}", style="dim"),
        Text(),
        _quantities(result),
        Text(),
    ]
    if result.fsdp2 is None and result.megatron is None:
        parts += [*_decisions(result.decisions), Text()]
    exposed = (
        [] if result.megatron is not None else exposed_by(result.step.timelines["after"], result.step.plan.iteration)
    )
    if exposed:
        parts += [_exposed(result, exposed), Text()]
    if result.execution is not None:
        parts += [*_execution(result.execution), Text()]
    for framework, lines in ((name, lines) for name, lines in result.advice.items() if lines):
        parts.append(Text(f"As settings of {framework}:"))
        parts += [*(Text(f"  {line}") for line in lines), Text()]
    parts += [Text(note, style="dim") for note in result.notes]
    return Group(*parts)


def plan_table(first: str, *others: str) -> Table:
    """An empty table with numbers in all columns but the first."""
    table = Table(box=None, width=WIDTH, pad_edge=False, header_style="dim")
    table.add_column(first, ratio=1)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _quantities(result: PlanResult) -> Fitted:
    table = plan_table(f"simulated {result.simulation}", "before", "after", "bound or limit")
    times, exposed, memory = result.iteration_s, result.exposed_comm_s, result.peak_memory_bytes
    table.add_row(
        "iteration",
        format_seconds(times.before),
        format_seconds(times.after),
        "" if times.lower_bound is None else format_seconds(times.lower_bound),
    )
    table.add_row("exposed communication", format_seconds(exposed.before), format_seconds(exposed.after), "")
    limit = "none" if memory.limit is None else format_memory(memory.limit)
    table.add_row("peak memory", format_memory(memory.before), format_memory(memory.after), limit)
    return Fitted(table)


def _decisions(decisions: Sequence[PlanDecision]) -> list[RenderableType]:
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
    table = plan_table("collective or computation" if any(d.is_computation for d in decisions) else "collective")
    table.columns[0].ratio = None
    table.columns[0].overflow = "fold"
    table.columns[0].max_width = 30
    table.add_column("decision", ratio=1)
    told = sorted(decisions, key=lambda d: (d.substitution is None, d.groups is None, d.num_chunks == 1))
    for decision in told[:MAX_ROWS]:
        table.add_row(Text(decision.comm), Text(decision_text(decision)))
    left = len(decisions) - min(len(decisions), MAX_ROWS)
    more = [Text(f"... and {left} more, in --json and in the report", style="dim")] if left else []
    return [Text(f"{decisions_headline(decisions)}{': ' + said if said else ''}"), Fitted(table), *more]


def _exposed(result: PlanResult, exposed: Sequence[ExposedPart]) -> Fitted:
    table = plan_table("exposed after the plan, while this runs", "collectives", "time", "of the iteration")
    for part in exposed[:MAX_ROWS]:
        share = part.seconds / result.iteration_s.after
        table.add_row(Text(part.what), str(part.num_comms or ""), format_seconds(part.seconds), format_percent(share))
    return Fitted(table)


def _execution(run: PlanExecution) -> list[RenderableType]:
    equal = "equal bit for bit" if run.is_bitwise_equal else f"equal within {run.max_error:.1e} of the largest value"
    speed = f"{run.speedup.median:.3f}x (quartiles {run.speedup.q25:.3f} to {run.speedup.q75:.3f})"
    table = plan_table("on real ranks", "before", "after", "predicted before", "after")
    for row in run_rows(run):
        table.add_row(*row)
    return [
        Text(f"Run {run.rounds} rounds side by side: {speed}; results {equal}", style="bold"),
        Fitted(table),
        Text(run.backend, style="dim"),
    ]
