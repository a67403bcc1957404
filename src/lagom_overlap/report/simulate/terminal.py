"""A simulated iteration for a terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lagom_overlap.report.fitted import WIDTH, Fitted
from lagom_overlap.report.simulate.words import headline, size_text
from lagom_overlap.report.what_if import what_if_parts
from lagom_overlap.results.profile import ProfileResult
from lagom_overlap.results.simulate import SimulateCaptureResult, SimulatedStage, SimulateResult
from lagom_overlap.units import US, format_memory, format_percent, format_seconds

MAX_STAGES = 8
"""Stages in the table; the others are in the page and in --json."""


def simulation_summary(result: SimulateResult) -> Group:
    """Headline, communicators of the stage that ends last, stages, what changes would do, notes."""
    parts: list[RenderableType] = [Text(size_text(result), style="dim"), Text(headline(result), style="bold"), Text()]
    if result.communicators:
        parts += [_communicators(result), Text()]
    parts += [_stages(result), Text(), *what_if_parts(result.what_ifs, has_job=True)]
    parts += [Text(note, style="dim") for note in result.notes]
    return Group(*parts)


def captured_summary(result: SimulateCaptureResult) -> Group:
    """The same of a captured step."""
    step, parts = result.headline()
    said: list[RenderableType] = [Text(step, style="bold"), Text(parts), Text()]
    said += what_if_parts(result.what_ifs, has_job=True)
    return Group(*said, *(Text(note, style="dim") for note in result.notes))


def _communicators(result: SimulateResult) -> Fitted:
    table = Table(box=None, width=WIDTH, pad_edge=False, header_style="dim")
    table.add_column("communicator", ratio=1)
    for name in ("running", "exposed", "stretches compute by"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, comm in result.communicators.items():
        times = (comm.total_s, comm.exposed_s, comm.stretched_s)
        table.add_row(Text(name), *(Text(format_seconds(seconds)) for seconds in times))
    return Fitted(table)


def _shown(stages: tuple[SimulatedStage, ...]) -> tuple[SimulatedStage, ...]:
    """The first stages and the last one."""
    return stages if len(stages) <= MAX_STAGES else (*stages[: MAX_STAGES - 1], stages[-1])


def _stages(result: SimulateResult) -> Fitted:
    table = Table(box=None, width=WIDTH, pad_edge=False, header_style="dim")
    table.add_column("stage", ratio=1)
    for name in ("compute", "launch", "bubble", "gradients", "optimizer", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for stage in _shown(result.stages):
        times = (stage.compute_s, stage.launch_s, stage.bubble_s, stage.gradients_s, stage.optimizer_s)
        cells = [format_seconds(seconds) for seconds in times]
        table.add_row(str(stage.stage), *cells, format_memory(stage.memory.total_bytes))
    if len(result.stages) > MAX_STAGES:
        table.caption = f"{len(result.stages) - MAX_STAGES} stages between are left out here"
    return Fitted(table)


def profile_summary(profile: ProfileResult) -> RenderableType:
    """Operators with their errors, the constants with theirs, and the held-out error in one line."""
    operators = Table(title=f"Operators of {profile.job} on this machine", title_justify="left")
    for name in ("operator", "pieces", "measured us", "fit", "held out"):
        operators.add_column(
            name, justify="left" if name == "operator" else "right", overflow="fold", no_wrap=name != "operator"
        )
    for row in profile.operators:
        held_out = "-" if row.held_out_error is None else format_percent(row.held_out_error, signed=True)
        operators.add_row(
            row.work,
            str(row.pieces),
            f"{row.measured_s / US:.0f}",
            format_percent(row.fit_error, signed=True),
            held_out,
        )
    constants = Table(title="Fitted constants (FP32)", title_justify="left")
    for name in ("constant", "value", "known to"):
        constants.add_column(name, justify="left" if name == "constant" else "right", no_wrap=name != "constant")
    for constant in profile.constants:
        known = format_percent(constant.error, 0) if constant.identified else "not identified"
        constants.add_row(constant.name, f"{constant.value:.4g}", known)
    return Group(Fitted(operators), Text(), Fitted(constants), Text(), Text(profile.summary()))
