"""A simulated iteration in words, and a stage's as parts that add up to its time: one colour and one word each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lagom_overlap.report.style import BAD, COMPUTE, colour_of
from lagom_overlap.results.simulate import SimulatedStage, SimulateResult
from lagom_overlap.sim.what_if import whether
from lagom_overlap.units import format_memory, format_seconds

_COLOURS: Final = {"compute": COMPUTE[0], "launch gaps": "#8C6BB1", "bubble": "#C9CED6", "optimizer": "#7A5C3E"}
"""Only one is a dark grey and only one a light grey, so that all are told apart; from `style.PALETTE`."""


@dataclass(frozen=True, slots=True)
class IterationShare:
    """A share of a stage's iteration."""

    name: str
    seconds: float
    colour: str


def stage_parts(stage: SimulatedStage, iteration_s: float, communicators: Sequence[str]) -> tuple[IterationShare, ...]:
    """The parts of one stage, in the order in which they are drawn; what is empty is left out.

    `communicators` are those of all stages. One counts what of it is exposed; what it stretches computation by is
    `stretched`. What is left at the end is waiting for a stage that ends later.
    """
    sizes = [("compute", stage.compute_s), ("launch gaps", stage.launch_s)]
    sizes += [(f"{name} exposed", comm.exposed_s) for name, comm in stage.communicators.items()]
    sizes += [("stretched", sum(comm.stretched_s for comm in stage.communicators.values()))]
    sizes += [("bubble", stage.bubble_s), ("optimizer", stage.optimizer_s)]
    rest = iteration_s - sum(seconds for _, seconds in sizes)
    sizes += [("waits at the end", rest)]
    shown = [(name, seconds) for name, seconds in sizes if seconds > 1e-9 * iteration_s]
    return tuple(IterationShare(name, seconds, _colour(name, communicators)) for name, seconds in shown)


def _colour(name: str, communicators: Sequence[str]) -> str:
    """Of a communicator, by its place among the job's, so that every stage and the legend agree."""
    if name == "stretched":
        return BAD
    if name.endswith(" exposed"):
        return colour_of(communicators.index(name.removesuffix(" exposed")) + 1)
    return _COLOURS.get(name, "#EFE3C2")


def summary(result: SimulateResult) -> str:
    """The iteration, what it runs on, whether a change would pay, and the caveats."""
    answer = whether(result.what_ifs)
    said = (f"{result.job}: {headline(result)}", f"{size_text(result)}.", *((answer,) if answer else ()), *result.notes)
    return "\n".join(said)


def size_text(result: SimulateResult) -> str:
    """Model, GPUs and micro-batches."""
    batches = "1 micro-batch" if result.num_micro_batches == 1 else f"{result.num_micro_batches} micro-batches"
    return f"{result.model} on {result.num_gpus} GPUs ({result.cluster}), {batches}"


def headline(result: SimulateResult) -> str:
    """The iteration in one sentence."""
    memory = f"{format_memory(result.memory_bytes)} of {format_memory(result.memory_limit_bytes)}"
    return (
        f"{format_seconds(result.iteration_s)} per iteration, {result.tokens_per_s:,.0f} tokens/s, "
        f"MFU {100 * result.mfu:.1f} %, {memory} per GPU"
    )
