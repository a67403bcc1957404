"""What runs a plan: a framework that is told settings, a compiler's graphs, or a program's own graph."""

from enum import StrEnum
from typing import Final


class Carrier(StrEnum):
    """Who carries a plan out.

    FSDP2 and Megatron-LM take settings, and a plan for them is nothing else. Inductor takes an order of the graphs that
    it compiles, a program any rewrite of the graph that is traced from it.
    """

    FSDP2 = "fsdp2"
    INDUCTOR = "inductor"
    PROGRAM = "program"
    MEGATRON = "megatron"


SETTINGS_PLANNERS: Final = {Carrier.FSDP2: "fsdp2", Carrier.MEGATRON: "megatron"}
"""The planners whose plans are settings; every other one rewrites a graph."""
STEPS_OF: Final = {
    Carrier.FSDP2: ("FSDP2",),
    Carrier.MEGATRON: ("Megatron-LM", "Megatron-DeepSpeed"),
}
"""Whose steps a carrier of settings runs, by the title of the framework's file."""
NO_GRAPH: Final = (
    "FSDP2 gathers and scatters in hooks around modules, outside of the graphs that are compiled (torchtitan compiles "
    "each block, then calls fully_shard): no graph holds a collective, so there is nothing to order"
)
"""Why Inductor cannot carry a plan for FSDP2."""


def settings_carrier(framework: str | None) -> Carrier | None:
    """The carrier that takes settings of a framework, by its title."""
    return next((one for one, whose in STEPS_OF.items() if framework in whose), None)
