"""A step whose gradients are reduced in the type in which parameters travel, in place of one of twice the size.

FSDP2 copies gradients into one buffer of the reduction's type, scatters it, and the optimizer reads the parts. In the
smaller type the copy writes and the collective moves half the bytes, and a cast of the part follows on the same stream
(PyTorch 2.13 and 2.15, `_fsdp_collectives.py`, `foreach_reduce`). Results change: sums are rounded to the smaller type.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from lagom_overlap.workload import Buffer, CommOp, CompOp, Iteration, MemoryBound, Op
from lagom_overlap.workload.ops import data_deps
from lagom_overlap.workload.streams import REDUCE_SCATTER

_COPIES_IN: Final = ("fsdp.chunk_cat", "fsdp.chunk_cat_mixed_dtype")
"""Of PyTorch up to 2.14, and of 2.15, which reads each gradient in its own type."""
_CAST: Final = "aten._to_copy"


def is_reduced_in_more(iteration: Iteration) -> bool:
    """Whether every reduction of the step is a reduce-scatter of gradients that were copied into twice their type."""
    return bool(_scatters(iteration))


def in_param_dtype(iteration: Iteration) -> Iteration:
    """The step with half the bytes per gradient, and a cast behind each reduction; as it is where that cannot be."""
    scatters = _scatters(iteration)
    if not scatters:
        return iteration
    casts = {scatter: scatter.rpartition(".")[0] + ".to_copy" for scatter in scatters}
    written = {scatters[op.name]: op.collective.num_bytes for op in iteration.comms if op.name in scatters}
    ops: list[Op] = []
    for op in iteration.ops:
        if op.name in scatters:
            ops += _scatter_and_cast(op, casts[op.name])
            continue
        rewritten = replace(op, deps=tuple(casts.get(dep, dep) for dep in op.deps))
        if op.name in scatters.values() and isinstance(rewritten, CompOp) and isinstance(rewritten.work, MemoryBound):
            rewritten = replace(
                rewritten, work=replace(rewritten.work, num_bytes=rewritten.work.num_bytes - written[op.name] // 2)
            )
        ops.append(rewritten)
    return replace(iteration, ops=tuple(ops), buffers=tuple(_buffers(iteration, scatters, casts)))


def casts_behind(iteration: Iteration) -> dict[str, str]:
    """The cast behind each reduction that has one."""
    ops = {op.name: op for op in iteration.ops}
    return {
        needed[0]: op.name
        for op in iteration.computations
        if op.stream == REDUCE_SCATTER and op.origin.kernel == _CAST and len(needed := data_deps(op, ops)) == 1
    }


def _scatter_and_cast(op: Op, cast: str) -> tuple[Op, Op]:
    assert isinstance(op, CommOp), op.name
    half = replace(op, collective=replace(op.collective, num_bytes=op.collective.num_bytes // 2))
    part = op.collective.num_bytes // op.collective.num_ranks
    work = MemoryBound(part // 2 + part)
    origin = replace(op.origin, kernel=_CAST)
    return half, CompOp(name=cast, work=work, stream=op.stream, deps=(op.name,), origin=origin)


def _buffers(iteration: Iteration, scatters: dict[str, str], casts: dict[str, str]) -> Iterator[Buffer]:
    for buffer in iteration.buffers:
        if buffer.maker in scatters.values() and set(buffer.users) <= set(scatters):
            yield replace(buffer, num_bytes=buffer.num_bytes // 2)
        elif buffer.maker in casts:
            yield replace(buffer, num_bytes=buffer.num_bytes // 2, users=(casts[buffer.maker],))
            yield replace(buffer, name=f"{casts[buffer.maker]}:cast", maker=casts[buffer.maker])
        else:
            yield buffer


def _scatters(iteration: Iteration) -> dict[str, str]:
    """The copy into each reduction; nothing if one of them is no plain reduce-scatter of twice the gradients' type."""
    ops = {op.name: op for op in iteration.ops}
    scatters: dict[str, str] = {}
    for op in iteration.comms:
        if op.stream != REDUCE_SCATTER:
            continue
        needed = data_deps(op, ops)
        copy = ops[needed[0]] if len(needed) == 1 else None
        if (
            not isinstance(copy, CompOp)
            or copy.origin.kernel not in _COPIES_IN
            or not isinstance(copy.work, MemoryBound)
        ):
            return {}
        written = op.collective.num_bytes
        read = copy.work.num_bytes - written  # a few gradients, of norms, may be of the larger type
        most = 1.5 * written if copy.origin.kernel == _COPIES_IN[1] else written
        if not written <= 2 * read <= most:
            return {}
        scatters[op.name] = copy.name
    reads_on = [op for op in iteration.comms if any(dep in scatters for dep in op.deps)]
    return {} if reads_on else scatters
