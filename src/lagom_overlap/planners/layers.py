"""The repeated layers of a step: which tasks are the same operator of another layer or microbatch.

A row is a layer's forward or backward part in one microbatch, its tasks in program order. Rows of one phase with the
same number of tasks repeat each other, task by task.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from lagom_overlap.planners.schedule.graph import TaskGraph
from lagom_overlap.workload import Iteration, Phase

MIN_LAYERS: Final = 4
"""Fewer repeat too little for a steady state."""


class LayerPass(StrEnum):
    """The direction in which a row runs through the layers."""

    FORWARD = "forward"
    BACKWARD = "backward"


_PASS_OF: Final = {
    Phase.FORWARD: LayerPass.FORWARD,
    Phase.BACKWARD: LayerPass.BACKWARD,
    Phase.WEIGHT_GRAD: LayerPass.BACKWARD,
    Phase.RECOMPUTE: LayerPass.BACKWARD,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStage:
    """The rows of one pass that run together: `rows[i]` has a row per microbatch of one layer, in order of execution.

    `microbatches` are their numbers. All rows are equally long; a row of another length is left out of its stage.
    """

    run: LayerPass
    microbatches: tuple[int, ...]
    rows: tuple[tuple[tuple[int, ...], ...], ...]


def stages_of(iteration: Iteration, graph: TaskGraph) -> tuple[LayerStage, ...]:
    """The stages of a step in program order; none if too few layers repeat.

    Microbatches that do not wait for each other run two by two.
    """
    rows: dict[tuple[LayerPass, int, int], list[int]] = defaultdict(list)
    for task, op in enumerate(iteration.ops):
        run = _PASS_OF.get(op.origin.phase) if op.origin.phase is not None else None
        if run is not None and op.origin.layer is not None:
            rows[run, op.origin.microbatch, op.origin.layer].append(task)
    pairs = _together(graph, rows)
    stages = []
    for run in LayerPass:
        lengths = Counter(len(tasks) for (row_run, _, _), tasks in rows.items() if row_run is run)
        usual = max(lengths, key=lambda length: (lengths[length], length), default=0)
        for microbatches in pairs:
            layers = sorted({layer for row_run, batch, layer in rows if row_run is run and batch in microbatches})
            if run is LayerPass.BACKWARD:
                layers.reverse()
            whole = [[tuple(rows.get((run, batch, layer), ())) for batch in microbatches] for layer in layers]
            kept = tuple(tuple(parts) for parts in whole if all(len(part) == usual for part in parts))
            if len(kept) >= MIN_LAYERS:
                stages.append(LayerStage(run=run, microbatches=microbatches, rows=kept))
    return tuple(sorted(stages, key=lambda stage: stage.rows[0][0][0]))


def _together(graph: TaskGraph, rows: dict[tuple[LayerPass, int, int], list[int]]) -> list[tuple[int, ...]]:
    """Microbatches in pairs where the second does not wait for the first, else alone."""
    batches = sorted({batch for _, batch, _ in rows})
    together: list[tuple[int, ...]] = []
    while batches:
        first = batches.pop(0)
        if batches and not _waits(graph, _tasks_of(rows, batches[0]), _tasks_of(rows, first)):
            together.append((first, batches.pop(0)))
        else:
            together.append((first,))
    return together


def _tasks_of(rows: dict[tuple[LayerPass, int, int], list[int]], batch: int) -> list[int]:
    return [task for (_, row_batch, _), tasks in rows.items() if row_batch == batch for task in tasks]


def _waits(graph: TaskGraph, tasks: Sequence[int], others: Sequence[int]) -> bool:
    """Some of the tasks wait for some of the others, on any path."""
    behind = [False] * len(graph)
    for task in others:
        behind[task] = True
    for task in graph.topological:
        if not behind[task]:
            behind[task] = any(behind[pred] for pred in graph.preds[task])
    return any(behind[task] for task in tasks)
