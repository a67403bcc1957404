"""`PartitionGroups` applied: a collective over the axes of a mesh, one after the other (Centauri, tree level 2).

What each step moves, S the whole tensor, W the ranks (spec, planners section 2.2): an all-gather grows by the size of
each axis in turn, a reduce-scatter shrinks by it, everything else moves S over every axis. In three steps (`TWICE`) the
last all-gather moves only what the outer axis brought, (N1 - 1) N2 S / W, besides what is there already; a
reduce-scatter mirrors it.

Nodes of a sub-group: with g ranks of the group in a node, an axis of size n and stride s lies in one node if n s <= g,
has a node for each rank if s >= g, and n s / g nodes otherwise. Where `num_nodes` of the collective is unknown, the
innermost axis has consecutive ranks and every other axis a node for each rank: meshes that mix the two are pruned by
the planner.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.workload.ops import CommOp
from lagom_overlap.workload.rewrite.chain import checked_chain, compute_stream, member_pieces
from lagom_overlap.workload.rewrite.draft import Draft, Replacement
from lagom_overlap.workload.rewrite.pieces import joined, output_bytes
from lagom_overlap.workload.rewrite.steps import TWICE, PartitionGroups, Split
from lagom_overlap.workload.sharding import Gather


def granularity(kind: CollectiveKind, mesh: tuple[int, ...], order: tuple[int, ...]) -> tuple[Fraction, ...]:
    """The share of the whole that each step brings (all-gather) or takes in (reduce-scatter); they sum to 1.

    Inner axis first, then the outer: [N2 / W, 1 - N2 / W]; outer first: [N1 / W, 1 - N1 / W]; `TWICE`:
    [N2 / W, (N1 - 1) / W, 1 - (N1 + N2 - 1) / W]; a reduce-scatter's steps are the mirror of the gather's.
    """
    world = prod(mesh)
    scatters = kind is CollectiveKind.REDUCE_SCATTER
    if order == TWICE:
        outer, inner = mesh
        shares = [Fraction(inner, world), Fraction(outer - 1, world), Fraction(world - outer - inner + 1, world)]
    else:
        have, shares = 1, []
        for axis in reversed(order) if scatters else order:
            shares.append(Fraction(have * mesh[axis] - (have if shares else 0), world))
            have *= mesh[axis]
    return tuple(reversed(shares)) if scatters else tuple(shares)


def apply_partition(draft: Draft, step: PartitionGroups) -> None:
    """Puts one collective per step in the place of a collective.

    Raises:
        JobError: if the mesh does not fit the group, the kind has no parts, or the chain is not legal.
    """
    comm = draft.comm(step.comm)
    call = comm.collective
    if call.num_ranks != step.num_ranks:
        raise JobError(f"{comm.name}: mesh {list(step.mesh)} has {step.num_ranks} ranks, the group {call.num_ranks}")
    if call.kind is CollectiveKind.SEND_RECV:
        raise JobError(f"{comm.name}: is {call.kind}, which has no groups to partition")
    if (step.chain or step.order == TWICE) and not call.kind.traits.is_in_parts:
        chainable = " and ".join(kind for kind in CollectiveKind if kind.traits.is_in_parts)
        raise JobError(f"{comm.name}: is {call.kind}; only {chainable} bring their result in parts")
    steps = partition_steps(comm, step)
    if not step.chain:
        draft.replace({comm.name: _whole(draft, step, steps, draft.followers(comm.name), step.order == TWICE)})
        return
    _apply_with_chain(draft, step, comm, steps)


def _apply_with_chain(draft: Draft, step: PartitionGroups, comm: CommOp, steps: tuple[CommOp, ...]) -> None:
    gathers = comm.collective.kind is CollectiveKind.ALL_GATHER
    chain = checked_chain(
        draft,
        comm.name,
        step.axis,
        before=() if gathers else step.chain,
        after=step.chain if gathers else (),
        shares=granularity(comm.collective.kind, step.mesh, step.order),
        cuts_comm=False,
    )
    assert comm.shards is not None, comm.name
    if comm.shards.combine[step.axis] != Gather(0):
        raise JobError(f"{comm.name}: groups bring parts of dimension 0, axis {step.axis} does not run over it")

    def name_of(member: str, number: int) -> str:
        return steps[number].name if member == comm.name else piece_name(member, number)

    outside = [follower for follower in draft.followers(comm.name) if follower not in chain.axes]
    pieces = {name: member_pieces(draft, name, chain, name_of) for name in chain.axes if name != comm.name}
    if gathers:
        pieces[comm.name] = _whole(draft, step, steps, outside, in_parts=True)
    else:
        waits = [dep for dep in comm.deps if dep in chain.axes]
        others = tuple(dep for dep in comm.deps if dep not in waits)
        fed = tuple(
            replace(
                one,
                deps=(
                    *others,
                    *(d for d in one.deps if d not in comm.deps),
                    *(piece_name(dep, number) for dep in waits),
                ),
            )
            for number, one in enumerate(steps)
        )
        pieces[comm.name] = _whole(draft, step, fed, outside, in_parts=step.order == TWICE)
    draft.replace(pieces)


def _whole(
    draft: Draft, step: PartitionGroups, steps: tuple[CommOp, ...], outside: Sequence[str], in_parts: bool
) -> Replacement:
    """The steps, and where others need the result that several of them bring, its join."""
    comm = draft.comm(step.comm)
    shares = tuple(Fraction(output_bytes(one), output_bytes(comm)) for one in steps)
    copied = _copied_bytes(draft, comm, shares, is_natural=step.order[0] == 0)
    if not in_parts or not outside:
        return Replacement(steps, (steps[-1].name,), made=shares, copied_bytes=copied)
    join = joined(comm, tuple(one.name for one in steps), compute_stream(draft, comm, outside))
    return Replacement(steps, (join.name,), join, made=shares, copied_bytes=copied)


def _copied_bytes(draft: Draft, comm: CommOp, shares: tuple[Fraction, ...], is_natural: bool) -> tuple[int, ...]:
    """What each step copies: blocks in the order of the ranks, after the last gather and before every scatter.

    `is_natural` says that the first step's blocks lie so already.
    """
    num_bytes = draft.bytes_made(comm.name)
    if comm.collective.kind is CollectiveKind.ALL_GATHER:
        return (*(0 for _ in shares[1:]), num_bytes)
    if comm.collective.kind is CollectiveKind.REDUCE_SCATTER:
        read = (Fraction(0 if is_natural else comm.collective.num_ranks), *shares[:-1])
        return tuple(int(num_bytes * share) for share in read)
    return ()


def partition_steps(comm: CommOp, step: PartitionGroups) -> tuple[CommOp, ...]:
    """The collectives that take a collective's place, as they are executed."""
    call, order = comm.collective, step.order
    twice = order == TWICE
    scatters = call.kind is CollectiveKind.REDUCE_SCATTER
    rest = (0 if scatters else 2) if twice else None
    moved = _twice_bytes(call, step.mesh) if twice else _bytes(call, step.mesh, order)
    stages: list[CommOp] = []
    for number, axis in enumerate(order):
        name = f"{comm.name}/g{axis}" + ("r" if number == rest else "")
        follows = number == (1 if scatters else 2) if twice else number > 0
        stages.append(
            replace(
                comm,
                name=name,
                collective=_sub_collective(call, step.mesh, axis, max(1, moved[number])),
                communicator=f"{comm.communicator}/g{axis}",
                deps=(stages[-1].name,) if follows else comm.deps,
                shards=None,
            )
        )
    return tuple(stages)


def _bytes(call: Collective, mesh: tuple[int, ...], order: tuple[int, ...]) -> list[int]:
    """The whole tensor of each step, as `Collective.num_bytes` means it."""
    stage_bytes = call.num_bytes // call.num_ranks if call.kind is CollectiveKind.ALL_GATHER else call.num_bytes
    moved = []
    for axis in order:
        if call.kind is CollectiveKind.ALL_GATHER:
            stage_bytes *= mesh[axis]
        moved.append(stage_bytes)
        if call.kind is CollectiveKind.REDUCE_SCATTER:
            stage_bytes //= mesh[axis]
    return moved


def _twice_bytes(call: Collective, mesh: tuple[int, ...]) -> list[int]:
    outer, inner = mesh
    share = call.num_bytes // call.num_ranks
    moved = [inner * share, outer * share, (outer - 1) * inner * share]
    return moved[::-1] if call.kind is CollectiveKind.REDUCE_SCATTER else moved


def _sub_collective(call: Collective, mesh: tuple[int, ...], axis: int, num_bytes: int) -> Collective:
    size, stride = mesh[axis], prod(mesh[axis + 1 :])
    if call.num_nodes is None:
        nodes = None if stride == 1 else size
    else:
        in_node = call.num_ranks // call.num_nodes
        nodes = 1 if size * stride <= in_node else min(size, max(1, size * stride // in_node))
    if nodes is not None and size % nodes:
        raise JobError(f"axis {axis} of mesh {list(mesh)} spreads {size} ranks unevenly over nodes")
    return Collective(call.kind, num_bytes, size, nodes)


def piece_name(op: str, number: int) -> str:
    """The name of a piece."""
    return f"{op}#{number}"


def apply_split(draft: Draft, split: Split) -> None:
    """Cuts the members; piece k of one waits for piece k of what it reads.

    Raises:
        JobError: if the chain is not legal.
    """
    shares = [Fraction(1, split.num_chunks)] * split.num_chunks
    chain = checked_chain(draft, split.comm, split.axis, before=split.before, after=split.after, shares=shares)
    draft.replace({name: member_pieces(draft, name, chain, piece_name) for name in chain.axes})
