"""Where an all-gather can slide through operators (Centauri, section 3.1.1): TP becomes SP, DP becomes ZeRO-1 and 2.

Behind an all-reduce every rank computes the same. What follows and keeps the first dimension's rows apart may work on a
rank's own rows, up to the next operator that needs them all: after a row-parallel product that is residual, norm and
activation, after a gradient's reduction the optimizer. One `Slide` per communicator takes all that can.

Left out: products (whose parts a library may compute with another kernel), and operators that draw random numbers.
"""

from collections.abc import Iterable, Mapping

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.workload import CommOp, CompOp, Iteration, MemoryBound
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.steps import ChainLink, Slide
from lagom_overlap.workload.sharding import Gather

_RANDOM = ("bernoulli", "dropout", "exponential", "normal", "rand", "uniform")
"""In the names of kernels that draw; the engine refuses any other by PyTorch's own tag."""


def evolutions(iteration: Iteration) -> tuple[Slide, ...]:
    """One step for each communicator with all-reduces behind which something can work on parts; each can be applied."""
    states = []
    by_group: dict[str, list[CommOp]] = {}
    for op in iteration.comms:
        if op.collective.kind is CollectiveKind.ALL_REDUCE and op.collective.num_ranks > 1:
            by_group.setdefault(op.communicator, []).append(op)
    for comms in by_group.values():
        links = _behind(iteration, comms)
        reached = _reached(iteration, comms, links)
        step = Slide(reached, tuple(links.values())) if links and reached else None
        if step is not None and _can(iteration, step):
            states.append(step)
    return tuple(states)


def _behind(iteration: Iteration, comms: Iterable[CommOp]) -> dict[str, ChainLink]:
    """What can work on parts, in program order; whoever's result leaves along another dimension is dropped again."""
    barred: set[str] = set()
    kept = {buffer.maker for buffer in iteration.buffers if not buffer.users}
    while True:
        links, dims = _grown(iteration, comms, barred)
        outside = dict.fromkeys(dims, False)
        read = dict.fromkeys(dims, 0)
        for op in iteration.ops:
            for dep in op.deps:
                if dep in dims:
                    read[dep] += 1
                    outside[dep] |= op.name not in links
        bad = {name for name in links if dims[name] and (outside[name] or not read[name] or name in kept)}
        if not bad:
            return links
        barred |= bad


def _grown(
    iteration: Iteration, comms: Iterable[CommOp], barred: set[str]
) -> tuple[dict[str, ChainLink], dict[str, int]]:
    dims = {op.name: 0 for op in comms}
    num_ranks = next(iter(comms)).collective.num_ranks
    links: dict[str, ChainLink] = {}
    for op in iteration.ops:
        if op.name in barred or not isinstance(op, CompOp) or not isinstance(op.work, MemoryBound):
            continue
        axis = _axis(op, dims, num_ranks)
        if axis is not None and op.shards is not None:
            combine = op.shards.combine[axis]
            assert isinstance(combine, Gather), op.name
            links[op.name], dims[op.name] = ChainLink(op.name, axis), combine.dim
    return links, dims


def _axis(op: CompOp, dims: Mapping[str, int], num_ranks: int) -> int | None:
    """The one axis along which the operator reads parts; None if there is none."""
    reads = [dep for dep in op.deps if dep in dims]
    if op.shards is None or not reads or any(word in op.origin.kernel for word in _RANDOM):
        return None
    axes = set()
    for dep in reads:
        uses = [use for use in op.shards.inputs if use.source == dep]
        if not uses or any(dims[dep] >= len(use.axes) for use in uses):
            return None
        axes |= {use.axes[dims[dep]] for use in uses}
    axis = axes.pop() if len(axes) == 1 else None
    if axis is None or not isinstance(op.shards.combine[axis], Gather) or op.shards.sizes[axis] % num_ranks:
        return None
    return axis


def _reached(iteration: Iteration, comms: Iterable[CommOp], links: Mapping[str, ChainLink]) -> tuple[str, ...]:
    """The all-reduces that one of the operators reads."""
    read = {dep for op in iteration.ops if op.name in links for dep in op.deps}
    return tuple(op.name for op in comms if op.name in read)


def _can(iteration: Iteration, step: Slide) -> bool:
    try:
        rewritten(iteration, (step,))
    except JobError:
        return False
    return True
