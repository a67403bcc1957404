"""A simulated iteration for a terminal of 80 columns."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lagom_overlap.report.simulate_model import SimulateJson, StageJson
from lagom_overlap.report.simulate_parts import headline
from lagom_overlap.units import format_seconds

WIDTH = 80
MAX_STAGES = 8
"""Stages in the table; the others are in the page and in --json."""


def simulation_summary(result: SimulateJson) -> Group:
    """Headline, communicators of the stage that ends last, stages, notes."""
    title = f"{result.model} on {result.num_gpus} GPUs ({result.cluster}), {result.num_micro_batches} micro-batches"
    parts: list[Text | Table] = [Text(title, style="dim"), Text(headline(result), style="bold"), Text()]
    if result.communicators:
        parts += [_communicators(result), Text()]
    parts += [_stages(result), Text()]
    parts += [Text(note, style="dim") for note in result.notes]
    return Group(*parts)


def _communicators(result: SimulateJson) -> Table:
    table = Table(box=None, width=WIDTH, pad_edge=False, header_style="dim")
    table.add_column("communicator", ratio=1)
    for name in ("running", "exposed", "stretches compute by"):
        table.add_column(name, justify="right", no_wrap=True)
    for comm in result.communicators:
        times = (comm.total_s, comm.exposed_s, comm.stretched_s)
        table.add_row(Text(comm.name), *(Text(format_seconds(seconds)) for seconds in times))
    return table


def _shown(stages: list[StageJson]) -> list[StageJson]:
    """The first stages and the last one."""
    return stages if len(stages) <= MAX_STAGES else [*stages[: MAX_STAGES - 1], stages[-1]]


def _stages(result: SimulateJson) -> Table:
    table = Table(box=None, width=WIDTH, pad_edge=False, header_style="dim")
    table.add_column("stage", ratio=1)
    for name in ("compute", "launch", "bubble", "gradients", "optimizer", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for stage in _shown(result.stages):
        times = (stage.compute_s, stage.launch_s, stage.bubble_s, stage.gradients_s, stage.optimizer_s)
        cells = [format_seconds(seconds) for seconds in times]
        table.add_row(str(stage.stage), *cells, f"{stage.memory.total_bytes / 1e9:.1f} GB")
    if len(result.stages) > MAX_STAGES:
        table.caption = f"{len(result.stages) - MAX_STAGES} stages between are left out here"
    return table
