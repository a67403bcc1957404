"""From one layout of a tensor to another: the cheapest collectives, priced by the planner's times.

One step changes one mesh dimension (or all of them alike): an all-gather makes whole what is cut, an all-reduce or a
reduce-scatter finishes a sum, an all-to-all cuts along another dimension, and to cut what is whole costs nothing. The
shortest path of such steps is found exactly (Dijkstra over the few layouts there are). A tensor dimension that two mesh
dimensions cut is gathered from the inside out.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.hardware import Cluster
from lagom_overlap.planners.base import OpTimes
from lagom_overlap.planners.sharding_search.mesh_layouts import Held, Layout, Placement, SearchMesh, local_bytes
from lagom_overlap.workload import CommOp
from lagom_overlap.workload.tensor_program import Value


@dataclass(frozen=True, slots=True)
class ConversionStep:
    """One change of layout; `collective` is None where every rank only drops what it does not need.

    `dims` are the mesh dimensions that it runs over.
    """

    before: Layout
    after: Layout
    dims: tuple[int, ...]
    collective: Collective | None


@dataclass(frozen=True, slots=True)
class Conversion:
    """The steps from one layout to another, and their seconds one after the other."""

    seconds: float
    steps: tuple[ConversionStep, ...]


@dataclass(frozen=True, slots=True)
class Conversions:
    """The cheapest conversions on one mesh; asked for again, an answer is looked up."""

    mesh: SearchMesh
    cluster: Cluster
    times: OpTimes
    _known: dict[object, dict[Layout, Conversion]] = field(default_factory=dict, compare=False, repr=False)

    def between(self, value: Value, before: Layout, after: Layout) -> Conversion | None:
        """The cheapest conversion; None where there is none (a finished tensor does not become parts of a sum)."""
        key = (value.shape, value.element_bytes, before)
        if key not in self._known:
            self._known[key] = self._from(value, before)
        return self._known[key].get(after)

    def _from(self, value: Value, start: Layout) -> dict[Layout, Conversion]:
        conversions: dict[Layout, Conversion] = {}
        queue: list[tuple[float, int, Layout, tuple[ConversionStep, ...]]] = [(0.0, 0, start, ())]
        number = 0
        while queue:
            seconds, _, layout, steps = heapq.heappop(queue)
            if layout in conversions:
                continue
            conversions[layout] = Conversion(seconds, steps)
            for step in self._steps(value, layout):
                if step.after not in conversions:
                    number += 1
                    heapq.heappush(queue, (seconds + self._seconds(step), number, step.after, (*steps, step)))
        return conversions

    def _seconds(self, step: ConversionStep) -> float:
        if step.collective is None:
            return 0.0
        return self.times.seconds(CommOp(name="conversion", collective=step.collective))

    def _steps(self, value: Value, layout: Layout) -> Iterator[ConversionStep]:
        for dim, place in enumerate(layout):
            for after in (*range(len(value.shape)), Held.WHOLE):
                changed = (*layout[:dim], after, *layout[dim + 1 :])
                if after != place and self._is_innermost(layout, dim, place) and self._fits(value, changed, dim):
                    yield self._step(value, layout, changed, (dim,))
        if len(layout) > 1 and len(set(layout)) == 1:
            everywhere = tuple(range(len(layout)))
            for after in (*range(len(value.shape)), Held.WHOLE):
                changed = (after,) * len(layout)
                if changed != layout and self._fits(value, changed, None):
                    yield self._step(value, layout, changed, everywhere)

    @staticmethod
    def _is_innermost(layout: Layout, dim: int, place: Placement) -> bool:
        """Nothing cuts the same tensor dimension more finely."""
        return not isinstance(place, int) or place not in layout[dim + 1 :]

    def _fits(self, value: Value, layout: Layout, dim: int | None) -> bool:
        """The cut along mesh dimension `dim` (None: all) divides the tensor and is the finest of its dimension."""
        after = layout[dim or 0]
        if not isinstance(after, int):
            return True
        cuts = prod(n for place, n in zip(layout, self.mesh.shape, strict=True) if place == after)
        return value.shape[after] % cuts == 0 and (dim is None or after not in layout[dim + 1 :])

    def _step(self, value: Value, before: Layout, made: Layout, dims: tuple[int, ...]) -> ConversionStep:
        place, after = before[dims[0]], made[dims[0]]
        if place is Held.WHOLE:
            return ConversionStep(before, made, dims, None)
        if place is Held.PARTIAL:
            kind = CollectiveKind.ALL_REDUCE if after is Held.WHOLE else CollectiveKind.REDUCE_SCATTER
            num_bytes = local_bytes(value, before, self.mesh)
        elif after is Held.WHOLE:
            kind, num_bytes = CollectiveKind.ALL_GATHER, local_bytes(value, made, self.mesh)
        else:
            kind, num_bytes = CollectiveKind.ALL_TO_ALL, local_bytes(value, before, self.mesh)
        ranks = prod(self.mesh.shape[dim] for dim in dims)
        nodes = self.mesh.num_nodes_of(dims, self.cluster)
        return ConversionStep(before, made, dims, Collective(kind, max(1, num_bytes), ranks, nodes))
