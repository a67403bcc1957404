"""A part of an operator along one of its shard axes: the same work in sum, the same names of dimensions."""

from dataclasses import replace
from fractions import Fraction
from math import ceil
from typing import Final

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.workload.ops import Attention, CommOp, CompOp, Gemm, Kernel, MemoryBound, Op, Work
from lagom_overlap.workload.sharding import Reduce, ShardSpec

JOIN_MOVES: Final = 2
"""A joined tensor is read and written once."""
ADD_MOVES: Final = 3
"""An addition reads two tensors and writes one."""
JOIN_SUFFIX: Final = "#join"
"""What is added to an operator's name for the copy, or the additions, that join its pieces."""


def check_axis(op: Op, axis: int, shares: tuple[Fraction, ...]) -> ShardSpec:
    """The shard axes of an operator that is to be cut in `shares` (which sum to 1) along `axis`.

    Raises:
        JobError: if it cannot be cut there.
    """
    if op.shards is None:
        raise JobError(f"{op.name}: cannot be cut, nothing is known about its shard axes")
    if not 0 <= axis < len(op.shards.sizes):
        raise JobError(f"{op.name}: shard axis is {axis}, must be 0 to {len(op.shards.sizes) - 1}")
    size = op.shards.sizes[axis]
    if any((size * share).denominator != 1 for share in shares):
        parts = f"{len(shares)} equal parts" if len(set(shares)) == 1 else "parts " + ", ".join(map(str, shares))
        raise JobError(f"{op.name}: axis {axis} has {size} elements, which cannot be cut in {parts}")
    return op.shards


def piece(op: Op, axis: int, bounds: tuple[Fraction, Fraction]) -> Op:
    """The part of an operator from share to share of an axis; names, waits and sources are the whole operator's."""
    shards = op.shards
    assert shards is not None, op.name
    share = bounds[1] - bounds[0]
    sizes = list(shards.sizes)
    sizes[axis] = int(sizes[axis] * share)
    cut = replace(shards, sizes=tuple(sizes))
    if isinstance(op, CommOp):
        collective = replace(op.collective, num_bytes=_part(op.name, op.collective.num_bytes, bounds))
        return replace(op, collective=collective, shards=cut)
    return replace(op, work=_work_part(op, axis, bounds), shards=cut)


def _part(name: str, total: int, bounds: tuple[Fraction, Fraction]) -> int:
    """The whole numbers between two shares of `total`; parts that touch add up to it."""
    part = int(total * bounds[1]) - int(total * bounds[0])
    if part < 1:
        raise JobError(f"{name}: {total} cannot be cut so finely")
    return part


def _work_part(op: CompOp, axis: int, bounds: tuple[Fraction, Fraction]) -> Work:
    match op.work:
        case Gemm() as gemm:
            field = _gemm_dim(op, axis)
            return replace(gemm, **{field: _exact(op, getattr(gemm, field), bounds)})  # type: ignore[arg-type]  # m, n or k
        case Attention() as attention:
            assert op.shards is not None, op.name
            whole_batches = op.shards.sizes[axis] == attention.batch
            if whole_batches:
                return replace(attention, batch=_exact(op, attention.batch, bounds))
            return replace(attention, num_heads=_exact(op, attention.num_heads, bounds))
        case MemoryBound() as memory:
            return replace(memory, num_bytes=_part(op.name, memory.num_bytes, bounds))
        case Kernel() as kernel:
            return replace(kernel, num_blocks=_part(op.name, kernel.num_blocks, bounds))


def _gemm_dim(op: CompOp, axis: int) -> str:
    """Which of m, n, k an axis of a product is: k where pieces are summed, m where the first input has it, else n."""
    assert op.shards is not None, op.name
    if isinstance(op.shards.combine[axis], Reduce):
        return "k"
    return "m" if op.shards.inputs and axis in op.shards.inputs[0].axes else "n"


def _exact(op: CompOp, total: int, bounds: tuple[Fraction, Fraction]) -> int:
    share = total * (bounds[1] - bounds[0])
    if share.denominator != 1 or share < 1:
        raise JobError(f"{op.name}: {total} cannot be cut in parts of {bounds[1] - bounds[0]}")
    return int(share)


def output_bytes(op: Op) -> int:
    """Bytes of what an operator makes; of memory-bound kernels half of what they move, which is a guess."""
    if isinstance(op, CommOp):
        return _collective_output_bytes(op.collective)
    match op.work:
        case Gemm() as gemm:
            return gemm.m * gemm.n * gemm.batch * gemm.element_bytes
        case Attention() as a:
            return a.batch * a.seq_len * a.num_heads * a.head_dim * a.element_bytes
        case MemoryBound(num_bytes):
            return max(1, num_bytes // 2)
        case Kernel() as kernel:
            return max(1, ceil(kernel.num_blocks * kernel.block_bytes / 2))


def _collective_output_bytes(collective: Collective) -> int:
    if collective.kind is CollectiveKind.REDUCE_SCATTER:
        return max(1, collective.num_bytes // collective.num_ranks)
    return collective.num_bytes


def joined(op: Op, pieces: tuple[str, ...], stream: str, *, num_sums: int = 0) -> CompOp:
    """The copy that makes one tensor of the pieces' outputs; or the additions, where `num_sums` pieces are summed."""
    moves = ADD_MOVES * (num_sums - 1) if num_sums else JOIN_MOVES
    return CompOp(
        name=op.name + JOIN_SUFFIX,
        work=MemoryBound(moves * output_bytes(op)),
        stream=stream,
        deps=pieces,
        origin=op.origin,
    )
