"""An emulated job in words, and for a terminal."""

from typing import Final

from rich.console import Group
from rich.text import Text

from lagom_emulate.prices import PriceSource
from lagom_emulate.result import EmulateResult
from lagom_overlap.report.fitted_table import Fitted, numbers_table
from lagom_overlap.units import format_memory, format_seconds

_SOURCES: Final = {
    PriceSource.SHAPE: "shapes of products and attention",
    PriceSource.FRAMEWORK: "bytes and flops of PyTorch's operators",
    PriceSource.SIZE: "bytes of copies and fills",
    PriceSource.CONFIGURATION: "collectives as NCCL set them",
    PriceSource.DEFAULT: "collectives as our model sets them",
    PriceSource.NAME: "kernels known by name alone (the weakest)",
    PriceSource.INSTANT: "operations without time",
}


def headline(result: EmulateResult) -> str:
    """The job in one sentence."""
    if result.step_s is None:
        return f"no training step was found; {format_seconds(result.virtual_s)} of virtual time"
    memory = "" if result.memory_bytes is None else f", {memory_text(result)} per GPU"
    return f"{format_seconds(result.step_s)} per step (median of {max(1, result.num_steps - 1)}){memory}"


def memory_text(result: EmulateResult) -> str:
    """Peak memory against the limit."""
    assert result.memory_bytes is not None
    return f"{format_memory(result.memory_bytes)} of {format_memory(result.memory_limit_bytes)}"


def size_text(result: EmulateResult) -> str:
    """What ran, and what that cost here."""
    hosts = f"{result.num_hosts} hosts of " if result.num_hosts > 1 else ""
    started = "" if result.num_started == result.num_ranks else f" ({result.num_started} started)"
    ranks = "1 rank" if result.num_ranks == 1 else f"{result.num_ranks} ranks"
    return (
        f"{ranks}{started} on {hosts}emulated {result.cluster}, {result.num_operations} operations "
        f"in {result.wall_s:.0f} s of real time"
    )


def priced_text(result: EmulateResult) -> str:
    """What the prices rest on, the largest share first."""
    rows = sorted(result.priced, key=lambda row: -row.time_share)
    shares = ", ".join(f"{_SOURCES[PriceSource(row.source)]} {100 * row.time_share:.1f} %" for row in rows)
    return f"Time by what its price rests on: {shares}." if shares else "Nothing was priced."


def summary(result: EmulateResult) -> str:
    """The job, what it ran on, and the caveats."""
    parts = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in result.parts.items())
    lines = [headline(result), f"{size_text(result)}."]
    lines += [f"Last step: {parts}."] if parts else []
    return "\n".join((*lines, priced_text(result), *result.refusals, *result.notes))


def emulation_summary(result: EmulateResult) -> Group:
    """Headline, what the last step was spent on, prices, notes."""
    parts: list[Text | Fitted] = [Text(size_text(result), style="dim"), Text(headline(result), style="bold"), Text()]
    if result.parts:
        parts += [_step(result), Text()]
    parts += [Text(line, style="bold") for line in result.refusals]
    parts += [Text(line, style="dim") for line in (priced_text(result), *result.notes)]
    return Group(*parts)


def _step(result: EmulateResult) -> Fitted:
    table = numbers_table("last step, mean of ranks", "time")
    for name, seconds in result.parts.items():
        table.add_row(Text(name), Text(format_seconds(seconds)))
    return Fitted(table)
