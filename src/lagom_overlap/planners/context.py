"""Which computations can be cut with a collective: the context of a decomposition, along one tensor dimension.

Concerto's search (ASPLOS 2025; spec, planners section 1.6), which is Centauri's chain of dependent computations too
(section 2.3): breadth first from the collective, towards what reads its result or what makes its input, as long as the
shard axes meet. Mended as the specification says: it stops when what was found covers the collective, not before it
begins; an operator is visited once; all its neighbours in the context must meet it along one axis; the context stays
convex. Operators whose pieces would be summed are left out.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

from lagom_overlap.planners.step_index import StepIndex
from lagom_overlap.workload import CommOp, CompOp, Gather, Op
from lagom_overlap.workload.rewrite.steps import ChainLink


@dataclass(frozen=True, slots=True)
class Context:
    """A collective's shard axis with the chains before and after it that can be cut along it."""

    before: tuple[ChainLink, ...]
    after: tuple[ChainLink, ...]


def context_of(index: StepIndex, comm: CommOp, axis: int, seconds: Callable[[Op], float], enough_s: float) -> Context:
    """The longest chains whose computations each take no more than needed to cover `enough_s`."""
    if comm.shards is None or not isinstance(comm.shards.combine[axis], Gather):
        return Context((), ())
    return Context(
        _before(index, comm, axis, seconds, enough_s),
        _after(index, comm, axis, seconds, enough_s),
    )


def _after(
    index: StepIndex, comm: CommOp, axis: int, seconds: Callable[[Op], float], enough_s: float
) -> tuple[ChainLink, ...]:
    """Successors, in program order."""
    axes = {comm.name: axis}
    covered = 0.0
    queue = [(index.place[name], name) for name in index.followers[comm.name]]
    seen = {name for _, name in queue}
    heapq.heapify(queue)
    while queue and covered < enough_s:
        place, name = heapq.heappop(queue)
        op = index.ops[name]
        if not isinstance(op, CompOp):
            continue
        axis_of_op = _axis_from_inputs(index, op, axes)
        if axis_of_op is None or not _is_convex_after(index, op, axes, place):
            continue
        axes[name] = axis_of_op
        covered += seconds(op)
        for follower in index.followers[name]:
            if follower not in seen:
                seen.add(follower)
                heapq.heappush(queue, (index.place[follower], follower))
    return tuple(ChainLink(name, axis_of_op) for name, axis_of_op in axes.items() if name != comm.name)


def _axis_from_inputs(index: StepIndex, op: Op, axes: dict[str, int]) -> int | None:
    """The one axis along which an operator meets what it reads in the context, and puts its pieces side by side."""
    if op.shards is None:
        return None
    described = {use.source for use in op.shards.inputs}
    if any(dep in axes and dep not in described for dep in op.deps):
        return None
    axes_found: set[int | None] = set()
    for use in op.shards.inputs:
        if use.source in axes:
            source = index.ops[use.source].shards
            assert source is not None, use.source
            combine = source.combine[axes[use.source]]
            inside = isinstance(combine, Gather) and combine.dim < len(use.axes)
            axes_found.add(use.axes[combine.dim] if inside and isinstance(combine, Gather) else None)
    axis = axes_found.pop() if len(axes_found) == 1 else None
    return axis if axis is not None and isinstance(op.shards.combine[axis], Gather) else None


def _is_convex_after(index: StepIndex, op: Op, axes: dict[str, int], place: int) -> bool:
    """No operator outside of the context lies between it and `op`."""
    leaving = [f for name in axes for f in index.followers[name] if f not in axes and f != op.name]
    outside = {name for name in leaving if index.place[name] < place} | index.reached(leaving, place)
    return not any(dep in outside for dep in op.deps)


def _before(
    index: StepIndex, comm: CommOp, axis: int, seconds: Callable[[Op], float], enough_s: float
) -> tuple[ChainLink, ...]:
    """Predecessors, in program order."""
    axes = {comm.name: axis}
    covered = 0.0
    queue = [(-index.place[dep], dep) for dep in comm.deps]
    seen = {name for _, name in queue}
    heapq.heapify(queue)
    while queue and covered < enough_s:
        _, name = heapq.heappop(queue)
        op = index.ops[name]
        if not isinstance(op, CompOp):
            continue
        axis_of_op = _axis_from_readers(index, op, axes)
        if axis_of_op is None or not _is_convex_before(index, op, axes, index.place[comm.name]):
            continue
        axes[name] = axis_of_op
        covered += seconds(op)
        for dep in op.deps:
            if dep not in seen:
                seen.add(dep)
                heapq.heappush(queue, (-index.place[dep], dep))
    del axes[comm.name]
    return tuple(ChainLink(name, axis_of_op) for name, axis_of_op in reversed(axes.items()))


def _axis_from_readers(index: StepIndex, op: Op, axes: dict[str, int]) -> int | None:
    """The one axis whose pieces are what the readers in the context take piece by piece."""
    if op.shards is None:
        return None
    dims: set[int | None] = set()
    for name in index.followers[op.name]:
        if name not in axes:
            continue
        reader = index.ops[name].shards
        uses = [use for use in reader.inputs if use.source == op.name] if reader is not None else []
        if not uses:
            return None
        dims.update(use.axes.index(axes[name]) if axes[name] in use.axes else None for use in uses)
    dim = dims.pop() if len(dims) == 1 else None
    if dim is None:
        return None
    return next((axis for axis, combine in enumerate(op.shards.combine) if combine == Gather(dim)), None)


def _is_convex_before(index: StepIndex, op: Op, axes: dict[str, int], last: int) -> bool:
    leaving = [name for name in index.followers[op.name] if name not in axes]
    outside = {name for name in leaving if index.place[name] <= last} | index.reached(leaving, last)
    return not any(name in axes for name in outside)


def divisible(index: StepIndex, links: tuple[ChainLink, ...], num_chunks: int, from_end: bool) -> tuple[ChainLink, ...]:
    """The links next to the collective that can be cut in that many pieces, as `next_to`."""

    def is_cut_evenly(link: ChainLink) -> bool:
        shards = index.ops[link.op].shards
        return shards is not None and shards.sizes[link.axis] % num_chunks == 0

    return next_to(links, is_cut_evenly, from_end)


def next_to(links: tuple[ChainLink, ...], may: Callable[[ChainLink], bool], from_end: bool) -> tuple[ChainLink, ...]:
    """The links next to the collective that may be taken; beyond the first that may not, none is.

    `from_end` says that the collective follows the links.
    """
    taken = tuple(takewhile(may, reversed(links) if from_end else links))
    return taken[::-1] if from_end else taken
