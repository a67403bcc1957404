"""A short version of a graph: a few layers of the first microbatches, to try things on.

Tasks that are left out hand on what they wait for, so that the layers kept follow each other as the whole ones do.
"""

from collections import Counter
from collections.abc import Collection
from typing import Final

from lagom_overlap.plan.schedule.graph import TaskGraph
from lagom_overlap.workload import Iteration

MAX_LAYERS: Final = 8
NUM_MICROBATCHES: Final = 3
ENOUGH_TASKS: Final = 2000
"""Layers beyond those that make so many tasks are left out, but for two."""


def contracted(graph: TaskGraph, keep: Collection[int]) -> tuple[TaskGraph, tuple[int, ...]]:
    """The graph of the tasks kept, in program order, and their numbers in the whole one."""
    kept = tuple(sorted(keep))
    inside = set(kept)
    place = {task: number for number, task in enumerate(kept)}
    ahead: dict[int, frozenset[int]] = {}  # of a task left out: the last tasks kept before it
    preds: dict[int, frozenset[int]] = {}
    for task in graph.topological:
        found: set[int] = set()
        for pred in graph.preds[task]:
            found |= {pred} if pred in inside else ahead[pred]
        (preds if task in inside else ahead)[task] = frozenset(found)
    short = TaskGraph(
        names=tuple(graph.names[task] for task in kept),
        ticks=tuple(graph.ticks[task] for task in kept),
        resource=tuple(graph.resource[task] for task in kept),
        preds=tuple(tuple(sorted(place[pred] for pred in preds[task])) for task in kept),
        resources=graph.resources,
        tick_s=graph.tick_s,
    )
    return short, kept


def short_version(iteration: Iteration, graph: TaskGraph) -> tuple[TaskGraph, tuple[int, ...]]:
    """The first layers and microbatches of a graph, with everything that belongs to no layer but computes."""
    sizes = Counter(op.origin.layer for op in iteration.ops if op.origin.microbatch < NUM_MICROBATCHES)
    layers: list[int] = []
    for layer in sorted(layer for layer in sizes if layer is not None)[:MAX_LAYERS]:
        if len(layers) < 2 or sum(sizes[known] for known in layers) < ENOUGH_TASKS:
            layers.append(layer)
    keep = [
        task
        for task, op in enumerate(iteration.ops)
        if op.origin.microbatch < NUM_MICROBATCHES and (op.origin.layer is None or op.origin.layer in layers)
    ]
    return contracted(graph, keep)
