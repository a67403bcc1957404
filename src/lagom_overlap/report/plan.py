"""A plan: in words, in the terminal, as a page with inline SVG, and as a figure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from lagom_overlap.planners.carriers import Carrier
from lagom_overlap.planners.simulated import Simulation
from lagom_overlap.report.bars import BARS_WIDTH, Bar, Tick, longest_spans, span_bar, time_ticks
from lagom_overlap.report.fitted_table import Fitted, numbers_table
from lagom_overlap.report.plan_path import ExposedPart, PathPart, critical_path, exposed_by
from lagom_overlap.report.render import render
from lagom_overlap.report.style import COMPUTE, colour_of
from lagom_overlap.results.plan import PlanExecution, PlannedIteration, PlanResult
from lagom_overlap.results.plan_decisions import PlanDecision
from lagom_overlap.timeline import SpanKind, Timeline
from lagom_overlap.units import format_memory, format_percent, format_seconds

if TYPE_CHECKING:  # the terminal must not wait for plotly
    import plotly.graph_objects as go


def summary(result: PlanResult) -> str:
    """What was predicted or measured, what the plan decides, and the caveats."""
    decided = decisions_headline(result.decisions)
    settings = [f"{framework}: {line}" for framework, lines in result.advice.items() for line in lines]
    sentences = settings or [f"{decided[:1].upper()}{decided[1:]}."]
    return "\n".join((f"{result.job}: {headline(result)}", *sentences, *result.notes))


_CARRIERS: Final = {
    Carrier.FSDP2: "applied as settings of FSDP2",
    Carrier.MEGATRON: "applied as switches of Megatron-LM",
    Carrier.PROGRAM: "run as a rewritten program",
    Carrier.INDUCTOR: "applied as a pass of torch.compile",
}


def solved_text(result: PlanResult) -> str:
    """How long planning took; nothing was planned where a file was applied."""
    return f"planned in {format_seconds(result.solve_s)}" if result.solve_s else "read from a file"


def carrier_text(result: PlanResult) -> str:
    """Who runs the plan."""
    if result.carrier is None:
        return "no framework of today can apply it"
    return _CARRIERS[result.carrier]


def command_lines(result: PlanResult) -> tuple[str, ...]:
    """What to type or paste to use the plan; empty where nothing can apply it, or it changes nothing."""
    if result.megatron is not None:
        return (" ".join(result.megatron.arguments),) if result.megatron.arguments else ()
    match result.carrier:
        case Carrier.FSDP2:
            if result.fsdp2 is None or result.fsdp2.settings is None:
                return ()
            return (
                "# in the script, after fully_shard and before the first forward",
                "from pathlib import Path",
                "from lagom_overlap import apply_fsdp2",
                'apply_fsdp2(model, Path("plan.toml"))',
            )
        case Carrier.PROGRAM:
            return ("lagom plan JOB.toml --execute    # JOB.toml: the job file of this plan",)
        case _:
            return ()


def headline(result: PlanResult) -> str:
    """One sentence: what was measured, where it ran; the step before and after, how that is known, and the bound."""
    times = result.iteration_s
    gain = times.before / times.after
    unpriced = " (contention left out)" if result.simulation != Simulation.ALONE else ""
    run, measured = result.execution, ""
    if run is not None:
        ratio = run.speedup
        measured = (
            f"measured {ratio.median:.3f}x (quartiles {ratio.q25:.3f} to {ratio.q75:.3f}) on real ranks, "
            f"by the sequential test the plan is {run.judgement.sentence()}; "
        )
    before, after, ratio_text = format_seconds(times.before), format_seconds(times.after), f"{gain:.3f}x"
    changed = f"{before} -> {after} ({ratio_text}) against {result.baseline}"
    if ratio_text == "1.000x":
        changed = f"nothing faster than {result.baseline}, {before}"
    return f"{result.planner}: {measured}{changed}, simulated {result.simulation}{_bound_text(times, unpriced)}"


def _bound_text(times: PlannedIteration, unpriced: str) -> str:
    """How far the step after the plan is from the bound; "" where there is none."""
    if times.lower_bound is None:
        return ", whole iteration"
    over = times.after / times.lower_bound - 1 if times.lower_bound else 0.0
    far, bound = format_percent(abs(over), 2), format_seconds(times.lower_bound)
    if over >= 0:
        return f"; at most {far} longer than any order must take, {bound}{unpriced}"
    return f"; {far} shorter than any order of the step before must take, {bound}{unpriced}"


def run_rows(run: PlanExecution) -> list[tuple[str, ...]]:
    """What was measured before and after, and what was predicted; of a framework's step only its length is known."""
    return [
        (
            name,
            *(format_seconds(measured[arm].median) for arm in ("before", "after")),
            *(format_seconds(value) for value in (predicted.before, predicted.after)),
        )
        for name, measured, predicted in (
            ("iteration", run.iteration_s, run.predicted_iteration_s),
            ("exposed", run.exposed_comm_s, run.predicted_exposed_comm_s),
        )
        if measured
    ]


def decision_text(decision: PlanDecision) -> str:
    """What is done with a collective, in words."""
    parts = []
    if decision.substitution is not None:
        parts.append(f"as {decision.substitution.replace('_', ' ')}")
    if decision.groups is not None:
        mesh = " x ".join(map(str, decision.groups.mesh))
        parts.append(f"over {mesh} ranks, axes {', '.join(map(str, decision.groups.order))}")
    if decision.num_chunks > 1:
        along = "that are summed" if decision.split_dim is None else f"along {decision.split_dim}"
        parts.append(f"in {decision.num_chunks} pieces {along}")
    if decision.fused_with:
        parts.append(f"fused with {len(decision.fused_with)} more")
    parts.append(
        "a computation"
        if decision.is_computation
        else f"{decision.prefetch} computation{'s' if decision.prefetch != 1 else ''} ahead"
    )
    return "; ".join(parts)


def decisions_headline(decisions: Sequence[PlanDecision]) -> str:
    """How many collectives are changed, and how many computations are split on their own."""
    num_comps = sum(decision.is_computation for decision in decisions)
    alone = f", {num_comps} computation{'s'[: num_comps > 1]} cut alone" if num_comps else ""
    return f"{len(decisions) - num_comps} collectives changed{alone}"


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
    step = result.step
    exposed = () if step.is_whole else exposed_by(step.timelines["after"], step.plan.iteration)
    if exposed:
        parts += [_exposed(result, exposed), Text()]
    if result.execution is not None:
        parts += [*_execution(result.execution), Text()]
    for framework, lines in ((name, lines) for name, lines in result.advice.items() if lines):
        parts.append(Text(f"As settings of {framework}:"))
        parts += [*map(_indented, lines), Text()]
    parts += [Text(note, style="dim") for note in result.notes]
    return Group(*parts)


def _indented(line: str) -> Padding:
    """A line below a heading, as far in as its own blanks say, however often it wraps."""
    words = line.lstrip(" ")
    return Padding(Text(words), (0, 0, 0, 2 + len(line) - len(words)), expand=False)


def _quantities(result: PlanResult) -> Fitted:
    table = numbers_table(f"simulated {result.simulation}", "before", "after", "bound or limit")
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
    counted = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    table = numbers_table("collective or computation" if any(d.is_computation for d in decisions) else "collective")
    table.columns[0].ratio = None
    table.columns[0].overflow = "fold"
    table.columns[0].max_width = 30
    table.add_column("decision", ratio=1)
    in_order = sorted(decisions, key=lambda d: (d.substitution is None, d.groups is None, d.num_chunks == 1))
    for decision in in_order[:MAX_ROWS]:
        table.add_row(Text(decision.comm), Text(decision_text(decision)))
    left = len(decisions) - min(len(decisions), MAX_ROWS)
    more = [Text(f"... and {left} more, in --json and in the report", style="dim")] if left else []
    return [Text(f"{decisions_headline(decisions)}{': ' + counted if counted else ''}"), Fitted(table), *more]


def _exposed(result: PlanResult, exposed: Sequence[ExposedPart]) -> Fitted:
    table = numbers_table("exposed after the plan, while this runs", "collectives", "time", "of the iteration")
    for part in exposed[:MAX_ROWS]:
        share = part.seconds / result.iteration_s.after
        table.add_row(Text(part.what), str(part.num_comms or ""), format_seconds(part.seconds), format_percent(share))
    return Fitted(table)


def _execution(run: PlanExecution) -> list[RenderableType]:
    equal = "equal bit for bit" if run.is_bitwise_equal else f"equal within {run.max_error:.1e} of the largest value"
    speed = f"{run.speedup.median:.3f}x (quartiles {run.speedup.q25:.3f} to {run.speedup.q75:.3f})"
    table = numbers_table("on real ranks", "before", "after", "predicted before", "after")
    for row in run_rows(run):
        table.add_row(*row)
    return [
        Text(f"Run {run.rounds} rounds side by side: {speed}; results {equal}", style="bold"),
        Fitted(table),
        Text(run.backend, style="dim"),
    ]


MAX_SPANS: Final = 2600
"""Spans that are drawn in all timelines of a page, 140 bytes each: the page is to be half a megabyte at most."""
MAX_DECISIONS: Final = 200
"""Rows of the page's tables, here and below; plan.toml has all."""
MAX_PATH_PARTS: Final = 60
"""Parts of the critical path on the page: the longest ones."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A timeline: its rows' names from the top, what is drawn, what was left out."""

    title: str
    rows: tuple[str, ...]
    bars: tuple[Bar, ...]
    num_left_out: int
    ticks: tuple[Tick, ...]
    key: tuple[tuple[str, str], ...]
    """(colour, name) of what is drawn."""


def timeline_figure(
    title: str,
    timeline: Timeline,
    longest_s: float,
    colours: dict[str, str],
    kinds: Mapping[str, str],
    *,
    max_spans: int = MAX_SPANS,
) -> Figure:
    """A timeline on an axis that is `longest_s` long; a row per stream, computations on top.

    A plan may put all of a link's collectives on one stream, so a row names the kinds that run on it.
    """
    computing = {span.stream for span in timeline.of(SpanKind.COMP)}
    rows = sorted({span.stream for span in timeline.spans}, key=lambda stream: (stream not in computing, stream))
    place = {stream: row for row, stream in enumerate(rows)}
    bars = []
    for number, span in enumerate(longest_spans(timeline.spans, max_spans)):
        colour = (
            COMPUTE[number % 2]
            if span.kind is SpanKind.COMP
            else colours.setdefault(kinds.get(span.name, span.stream), colour_of(len(colours)))
        )
        bars.append(span_bar(span, longest_s, place[span.stream], colour))
    left_out = max(0, len(timeline.spans) - max_spans)
    kinds_of_row: dict[str, set[str]] = {row: set() for row in rows}
    for span in timeline.of(SpanKind.COMM):
        kinds_of_row[span.stream].add(kinds.get(span.name, span.stream))
    names = tuple(", ".join(sorted(kinds_of_row[row])) if len(kinds_of_row[row]) > 1 else row for row in rows)
    key = ((COMPUTE[0], "computation"), *((colour, kind) for kind, colour in colours.items()))
    title = f"{title}: {format_seconds(timeline.makespan_s)}"
    return Figure(title, names, tuple(bars), left_out, time_ticks(longest_s), key)


def _path_bars(parts: tuple[PathPart, ...], colours: dict[str, str]) -> tuple[Bar, ...]:
    total = sum(part.seconds for part in parts) or 1.0
    bars, x = [], 0.0
    for number, part in enumerate(parts):
        width = BARS_WIDTH * part.seconds / total
        colour = (
            COMPUTE[number % 2]
            if part.kind is SpanKind.COMP
            else colours.setdefault(part.what, colour_of(len(colours)))
        )
        bars.append(Bar(x, width, 0, colour, f"{part.what}: {part.num_ops}, {format_seconds(part.seconds)}"))
        x += width
    return tuple(bars)


def _figures(result: PlanResult) -> list[Figure]:
    figures: list[Figure] = []
    max_spans = MAX_SPANS // (len(result.step.timelines) + len(result.step.measured))
    kinds = {op.name: op.collective.kind.value for op in result.step.plan.iteration.comms}
    for source, timelines in (("predicted", result.step.timelines), ("measured, rank 0", result.step.measured)):
        longest_s = max((line.makespan_s for line in timelines.values()), default=0.0) or 1.0
        colours: dict[str, str] = {}
        figures += [
            timeline_figure(
                f"{name}, {source}",
                _by_stage(line) if result.step.is_whole and source == "predicted" else line,
                longest_s,
                colours,
                kinds,
                max_spans=max_spans,
            )
            for name, line in timelines.items()
        ]
    return figures


def _by_stage(timeline: Timeline) -> Timeline:
    """A whole iteration with a row per pipeline stage."""
    spans = (replace(span, stream=f"stage {span.rank}, {span.stream}") for span in timeline.spans)
    return Timeline(tuple(spans))


def render_plan(result: PlanResult) -> str:
    """The whole page; the same plan gives the same page."""
    iteration, after = result.step.plan.iteration, result.step.timelines["after"]
    is_whole = result.step.is_whole
    critical = () if is_whole else critical_path(iteration, after)
    return render(
        "plan.html.j2",
        result=result,
        run=result.execution,
        run_rows=() if result.execution is None else run_rows(result.execution),
        headline=headline(result),
        solved=solved_text(result),
        carrier=carrier_text(result),
        commands=command_lines(result),
        figures=_figures(result),
        exposed=() if is_whole else exposed_by(after, iteration),
        path=_path_bars(critical, {}),
        path_parts=sorted(_path_sums(critical), key=lambda row: -row[2])[:MAX_PATH_PARTS],
        decisions=[(decision.comm, decision_text(decision)) for decision in result.decisions[:MAX_DECISIONS]],
        decisions_headline=decisions_headline(result.decisions),
        decisions_left=max(0, len(result.decisions) - MAX_DECISIONS),
        seconds=format_seconds,
        size=format_memory,
        width=BARS_WIDTH,
    )


def _path_sums(parts: tuple[PathPart, ...]) -> list[tuple[str, int, float]]:
    """The critical path by sort of operator: name, operators, seconds."""
    sums: dict[str, tuple[int, float]] = {}
    for part in parts:
        number, seconds = sums.get(part.what, (0, 0.0))
        sums[part.what] = (number + part.num_ops, seconds + part.seconds)
    return [(what, number, seconds) for what, (number, seconds) in sums.items()]


def figure(result: PlanResult) -> "go.Figure":
    """What ran when on which stream: as simulated before and after the plan."""
    from lagom_overlap.report.timeline_figure import streams_figure  # noqa: PLC0415 - the terminal must not wait for plotly

    return streams_figure(result.step.timelines)
