"""What a stage's iteration is spent on, as parts that add up to its time: one colour and one word each."""

from dataclasses import dataclass
from typing import Final

from lagom_overlap.report.simulate_model import SimulateJson, StageJson
from lagom_overlap.report.style import BAD, COMPUTE, NEUTRAL, colour_of

_COLOURS: Final = {"compute": COMPUTE[0], "launch gaps": NEUTRAL, "bubble": "#C9CED6", "optimizer": COMPUTE[1]}


@dataclass(frozen=True, slots=True)
class Part:
    """A share of a stage's iteration."""

    name: str
    seconds: float
    colour: str


def stage_parts(stage: StageJson, iteration_s: float) -> tuple[Part, ...]:
    """The parts of one stage, in the order in which they are drawn; what is empty is left out.

    A communicator counts what of it is exposed; what it stretches computation by is `stretched`. What is left at the
    end is waiting for a stage that ends later.
    """
    sizes = [("compute", stage.compute_s), ("launch gaps", stage.launch_s)]
    sizes += [(f"{comm.name} exposed", comm.exposed_s) for comm in stage.communicators]
    sizes += [("stretched", sum(comm.stretched_s for comm in stage.communicators))]
    sizes += [("bubble", stage.bubble_s), ("optimizer", stage.optimizer_s)]
    rest = iteration_s - sum(seconds for _, seconds in sizes)
    sizes += [("waits at the end", rest)]
    shown = [(name, seconds) for name, seconds in sizes if seconds > 1e-9 * iteration_s]
    return tuple(Part(name, seconds, _colour(name)) for name, seconds in shown)


def _colour(name: str) -> str:
    if name == "stretched":
        return BAD
    if name.endswith(" exposed"):
        return colour_of(("tp", "dp", "pp", "ep").index(name.removesuffix(" exposed")) + 1)
    return _COLOURS.get(name, "#E3E6EB")


def headline(result: SimulateJson) -> str:
    """The iteration in one sentence."""
    memory = f"{result.memory_bytes / 1e9:.1f} of {result.memory_limit_bytes / 1e9:.0f} GB"
    return (
        f"{result.iteration_s:.4g} s per iteration, {result.tokens_per_s:,.0f} tokens/s, "
        f"MFU {100 * result.mfu:.1f} %, {memory} per GPU"
    )
