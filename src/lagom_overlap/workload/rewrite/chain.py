"""A collective and the operators that are cut with it: what makes them a legal chain, and their pieces.

Members are the collective, operators before it that make its input, operators after it that read its output. All are
cut along axes that meet: where a member reads another one, the dimension along which the pieces of the other one's
output lie is the one that its own axis runs over. Pieces of a sum are no part of anything, so a summed operator ends a
chain. The members are convex: no path leaves them and comes back.

A computation can be cut alone, without a collective: then its pieces may be summed too.

Which elements piece k holds: where the collective gathers or scatters the axis, the k-th part of *every rank's* block,
elsewhere the k-th part of the whole. Every member's pieces follow the collective's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from math import ceil, prod

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.workload.ops import CommOp, CompOp, Gemm, Op
from lagom_overlap.workload.rewrite.draft import Draft, Replacement, renamed_source
from lagom_overlap.workload.rewrite.pieces import check_axis, joined, piece
from lagom_overlap.workload.rewrite.steps import ChainLink
from lagom_overlap.workload.sharding import Combine, Gather, Reduce, TensorUse

PieceName = Callable[[str, int], str]
"""(member, piece) -> the name of the operator that holds it."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Members of a cut, by name, each with its axis; `bounds` are the pieces' shares of the axis, from 0 to 1."""

    comm: str
    axes: dict[str, int]
    bounds: tuple[Fraction, ...]

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """The size of each piece, relative to the whole."""
        return tuple(stop - start for start, stop in pairwise(self.bounds))


def checked_chain(
    draft: Draft,
    comm: str,
    axis: int,
    *,
    before: Sequence[ChainLink],
    after: Sequence[ChainLink],
    shares: Sequence[Fraction],
    cuts_comm: bool = True,
) -> Chain:
    """The chain of a collective, after everything that could make it illegal was refused.

    `cuts_comm` says that the collective itself is cut in the same shares.

    Raises:
        JobError: if an operator is unknown, not divisible, not connected, meets another one along other axes, or the
            chain is not convex.
    """
    if before or after:
        draft.comm(comm)
    axes = {link.op: link.axis for link in before} | {comm: axis} | {link.op: link.axis for link in after}
    if len(axes) != len(before) + len(after) + 1:
        raise JobError(f"{comm}: an operator occurs twice in its chain")
    bounds = [Fraction(0)]
    for share in shares:
        bounds.append(bounds[-1] + share)
    chain = Chain(comm, axes, tuple(bounds))
    for name, member_axis in axes.items():
        op = draft.op(name)
        if name != comm and not isinstance(op, CompOp):
            raise JobError(f"{comm}: {name!r} is a collective, a chain holds computations")
        check_axis(op, member_axis, chain.shares if name != comm or cuts_comm else ())
        _check_meets(draft.op(name), chain, draft)
    _check_connected(draft, chain, [link.op for link in before], [link.op for link in after])
    _check_convex(draft, chain)
    return chain


def _combine(op: Op, chain: Chain) -> Combine:
    return check_axis(op, chain.axes[op.name], ()).combine[chain.axes[op.name]]


def _check_meets(op: Op, chain: Chain, draft: Draft) -> None:
    """Refuses a member that reads another one across its pieces."""
    assert op.shards is not None, op.name
    described = {use.source for use in op.shards.inputs}
    for dep in op.deps:
        if dep in chain.axes and dep not in described:
            raise JobError(f"{op.name}: waits for {dep!r}, but its shard axes do not say how it reads it")
    for use in op.shards.inputs:
        if use.source not in chain.axes:
            continue
        combine = _combine(draft.op(use.source), chain)
        if isinstance(combine, Reduce):
            raise JobError(f"{op.name}: reads {use.source!r}, whose pieces are summed: a chain cannot go on there")
        axis = use.axes[combine.dim] if combine.dim < len(use.axes) else None
        if axis != chain.axes[op.name]:
            raise JobError(
                f"{op.name}: reads dimension {combine.dim} of {use.source!r} along its axis {axis}, "
                f"but is cut along axis {chain.axes[op.name]}"
            )


def _check_connected(draft: Draft, chain: Chain, before: Sequence[str], after: Sequence[str]) -> None:
    for name in after:
        if not any(dep in chain.axes and dep not in before for dep in draft.op(name).deps):
            raise JobError(f"{chain.comm}: {name!r} does not follow it in the chain")
    ahead = {*before, chain.comm}
    for name in before:
        if not any(follower in ahead for follower in draft.followers(name)):
            raise JobError(f"{chain.comm}: {name!r} does not lead to it in the chain")
    if isinstance(draft.op(chain.comm), CommOp) and isinstance(_combine(draft.op(chain.comm), chain), Reduce):
        raise JobError(f"{chain.comm}: its pieces along axis {chain.axes[chain.comm]} are no parts of its result")


def _check_convex(draft: Draft, chain: Chain) -> None:
    last = max(draft.key(name) for name in chain.axes)
    leaving = [f for name in chain.axes for f in draft.followers(name) if f not in chain.axes and draft.key(f) < last]
    outside = [*leaving, *draft.between(leaving, last)]
    for name in outside:
        back = [follower for follower in draft.followers(name) if follower in chain.axes]
        if back:
            raise JobError(f"{chain.comm}: the chain is not convex: {back[0]!r} waits for {name!r} outside of it")


def member_pieces(draft: Draft, name: str, chain: Chain, piece_of: PieceName) -> Replacement:
    """The pieces of one member, each waiting for the same piece of the members that it reads.

    Outside of the chain it is known by its join, which copies the pieces into one tensor or adds them up.
    """
    op, axis = draft.op(name), chain.axes[name]
    assert op.shards is not None, name
    combine = op.shards.combine[axis]
    pieces: list[Op] = []
    for number, bounds in enumerate(pairwise(chain.bounds)):
        part = piece(op, axis, bounds)
        shards = part.shards
        for dep in op.deps:
            if dep in chain.axes:
                shards = renamed_source(shards, dep, piece_of(dep, number))
        deps = [piece_of(dep, number) if dep in chain.axes else dep for dep in op.deps]
        pieces.append(replace(part, name=piece_of(name, number), deps=tuple(dict.fromkeys(deps)), shards=shards))
    names = tuple(part.name for part in pieces)
    copied = tuple(ceil(_copied_bytes(draft, op, chain) * share) for share in chain.shares)
    outside = [follower for follower in draft.followers(name) if follower not in chain.axes]
    is_summed = isinstance(combine, Reduce)
    sizes = (Fraction(1),) * len(names) if is_summed else chain.shares  # what is summed is as large as the whole
    if not outside and not is_summed:
        return Replacement(tuple(pieces), (names[-1],), made=sizes, copied_bytes=copied)
    stream = compute_stream(draft, op, outside)
    join = joined(op, names, stream, num_sums=len(names) if is_summed else 0)
    return Replacement(tuple(pieces), (join.name,), join, made=sizes, copied_bytes=copied)


def _copied_bytes(draft: Draft, op: Op, chain: Chain) -> int:
    """Bytes of what an operator's pieces, together, copy of whole tensors: parts that do not lie in one piece.

    These are parts of every rank's block, and what a collective is to read of another dimension than the first. Inputs
    of the step are known by the sizes of a product's axes alone, and by a collective's bytes.
    """
    assert op.shards is not None, op.name
    axis = chain.axes[op.name]
    in_blocks = _reads_blocks(draft, op, chain)
    return sum(
        draft.bytes_made(use.source) or _given_bytes(op, use)
        for use in op.shards.inputs
        if use.source not in chain.axes and axis in use.axes
        if (in_blocks if use.axes.index(axis) == 0 else isinstance(op, CommOp))
    )


def _given_bytes(op: Op, use: TensorUse) -> int:
    if isinstance(op, CommOp):
        gathers = op.collective.kind is CollectiveKind.ALL_GATHER
        return op.collective.num_bytes // (op.collective.num_ranks if gathers else 1)
    if not isinstance(op.work, Gemm) or op.shards is None:
        return 0
    return op.work.element_bytes * prod(op.shards.sizes[axis] for axis in use.axes if axis is not None)


def _reads_blocks(draft: Draft, op: Op, chain: Chain) -> bool:
    """Whether pieces of what an operator reads are parts of every rank's block of the first dimension."""
    comm = draft.op(chain.comm)
    if not isinstance(comm, CommOp) or comm.shards is None or comm.shards.combine[chain.axes[chain.comm]] != Gather(0):
        return False
    kind = comm.collective.kind
    if kind is CollectiveKind.ALL_GATHER:
        return draft.key(op.name) > draft.key(comm.name)
    if kind is CollectiveKind.REDUCE_SCATTER:
        return draft.key(op.name) <= draft.key(comm.name)
    return kind is CollectiveKind.ALL_TO_ALL


def compute_stream(draft: Draft, op: Op, followers: Sequence[str]) -> str:
    """Where a copy of an operator's result runs: with the first computation that needs it."""
    ops = [op, *(draft.op(name) for name in followers)]
    return next((comp.stream for comp in ops if isinstance(comp, CompOp)), "compute")
