"""Shardings over a rectangle to begin with: those of its lines, which are small programs and solved in seconds.

Over all ranks as one line, a choice becomes the same choice on both dimensions; over each dimension alone, the two
choices together. What the rectangle does not offer so is done as the first dimension alone would have it, or as the
second, or not at all; what then cannot be had is left out by whoever takes the starts.
"""

from collections.abc import Sequence
from math import prod

from lagom_overlap.plan.sharding_search.choice import Sharding
from lagom_overlap.plan.sharding_search.layouts import Held, Placement
from lagom_overlap.plan.sharding_search.problem import Node, ShardingProblem


def lines_of(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The lines of a rectangle: all its ranks, and each dimension alone, equal ones once."""
    return tuple(dict.fromkeys(((prod(shape),), *((size,) for size in shape))))


def starts_from(problem: ShardingProblem, lines: dict[tuple[int, ...], Sharding]) -> list[tuple[int, ...]]:
    """Combinations of a rectangle's problem made of what was found of its lines."""
    shape = problem.mesh.shape
    everywhere = [(prod(shape),)] * len(shape)
    found = []
    for sources in (everywhere, [(size,) for size in shape]):
        if all(source in lines for source in sources):
            found.append(_together(problem, [_chosen(lines[source]) for source in sources]))
    return found


Chosen = dict[str, Placement]


def _chosen(line: Sharding) -> Chosen:
    """What a line does with each call, and how it holds each parameter, by name."""
    chosen: Chosen = {}
    for node, number in zip(line.problem.nodes, line.choice, strict=True):
        option = node.options[number]
        for call, strategy in zip(node.calls, option.strategies, strict=True):
            chosen[call.name] = strategy.choices[0]
        if not node.calls:
            chosen |= {value: layout[0] for value, layout in option.makes}
    return chosen


def _together(problem: ShardingProblem, lines: Sequence[Chosen]) -> tuple[int, ...]:
    """The options nearest to what the lines do, one for all nodes of a kind."""
    taken: dict[object, int] = {}
    choice = []
    for node in problem.nodes:
        if node.kind not in taken:
            taken[node.kind] = _nearest(node, [line.get(node.name, Held.WHOLE) for line in lines])
        choice.append(taken[node.kind])
    return tuple(choice)


def _nearest(node: Node, wanted: Sequence[Placement]) -> int:
    """The option that does what is wanted on the most mesh dimensions, the first ones before others."""

    def agreement(number: int) -> tuple[int, list[bool]]:
        option = node.options[number]
        does = option.strategies[0].choices if node.calls else option.makes[0][1] if option.makes else ()
        same = [one == other for one, other in zip(does, wanted, strict=False)]
        return sum(same), same

    return max(range(len(node.options)), key=agreement)
