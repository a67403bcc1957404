"""The choice of a sharding as one of options per node, with what every combination costs.

A node is a call (with the trivial ones that follow it, `clusters`), a parameter at rest, or what the step must deliver.
An option makes tensors in layouts and needs tensors in layouts. A combination costs its options' computing time, and
the conversion of every tensor that is needed in a layout other than the one it is made in, once per layout and part of
the step. Departure from Alpa, which pays for every edge: a tensor that three products read is gathered once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lagom_overlap.planners.sharding_search.call_strategies import Need, ShardingStrategy, Views
from lagom_overlap.planners.sharding_search.conversions import Conversions
from lagom_overlap.planners.sharding_search.mesh_layouts import Layout, SearchMesh
from lagom_overlap.workload.tensor_program import TensorCall, TensorProgram


@dataclass(frozen=True, slots=True)
class Option:
    """One way to do what a node does: seconds, tensors made and needed, the strategy of each of its calls."""

    seconds: float
    makes: tuple[tuple[str, Layout], ...]
    needs: tuple[Need, ...]
    strategies: tuple[ShardingStrategy, ...] = ()
    resident_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What is decided at once; options of nodes with the same `kind` correspond one to one."""

    name: str
    kind: object
    calls: tuple[TensorCall, ...]
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingProblem:
    """Nodes over a program, and the price of conversions."""

    program: TensorProgram
    mesh: SearchMesh
    views: Views
    conversions: Conversions
    nodes: tuple[Node, ...]

    def seconds(self, choice: Sequence[int]) -> float:
        """Seconds of a combination, everything one after the other; infinite where a layout cannot be had."""
        options = [node.options[number] for node, number in zip(self.nodes, choice, strict=True)]
        layouts = made_layouts(options)
        total = sum(option.seconds for option in options)
        for need in needed(options):
            conversion = self.conversions.between(self.program.values[need.value], layouts[need.value], need.layout)
            if conversion is None:
                return float("inf")
            total += conversion.seconds
        return total


def made_layouts(options: Iterable[Option]) -> Mapping[str, Layout]:
    """How each tensor is made."""
    return {value: layout for option in options for value, layout in option.makes}


def needed(options: Iterable[Option]) -> list[Need]:
    """What is asked for, each once, in the order of the program."""
    return list(dict.fromkeys(need for option in options for need in option.needs))
