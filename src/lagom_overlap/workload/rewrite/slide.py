"""`Slide` applied: reduce-scatters, operators on this rank's part, all-gathers of what leaves (Centauri, 3.1.1)."""

from dataclasses import replace
from fractions import Fraction

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.workload.ops import CommOp, CompOp, Op
from lagom_overlap.workload.rewrite.draft import Draft, Replacement, renamed_source
from lagom_overlap.workload.rewrite.pieces import check_axis, output_bytes, piece
from lagom_overlap.workload.rewrite.steps import Slide
from lagom_overlap.workload.sharding import Gather


def part_name(op: str) -> str:
    """The operator on this rank's part."""
    return f"{op}/part"


def scatter_name(comm: str) -> str:
    """What an all-reduce becomes."""
    return f"{comm}.rs"


def gather_name(step: Slide, name: str) -> str:
    """The all-gather of what leaves: of an all-reduce of the step, or of one of its operators."""
    return f"{name}.ag" if name in step.comms else f"{step.comms[0]}.ag.{name}"


def apply_slide(draft: Draft, step: Slide) -> None:
    """Puts parts in the places of wholes.

    Raises:
        JobError: if a collective is no all-reduce or of other ranks than the first, or an operator does not read its
            inputs along its axis.
    """
    comms = [draft.comm(name) for name in step.comms]
    first = comms[0]
    for comm in comms:
        if comm.collective.kind is not CollectiveKind.ALL_REDUCE:
            raise JobError(f"{comm.name}: is {comm.collective.kind}, only an all_reduce slides")
        if (comm.communicator, comm.collective.num_ranks) != (first.communicator, first.collective.num_ranks):
            raise JobError(f"{comm.name}: runs over {comm.communicator!r}, {first.name!r} over {first.communicator!r}")
    num_ranks = first.collective.num_ranks
    dims = dict.fromkeys(step.comms, 0)
    axes = {link.op: link.axis for link in step.ops}
    for link in sorted(step.ops, key=lambda one: draft.key(draft.op(one.op).name)):
        dims[link.op] = _checked(draft.op(link.op), link.axis, num_ranks, {**axes, **dims}, dims)
    new_name = {name: scatter_name(name) for name in step.comms} | {name: part_name(name) for name in axes}
    replacements = {}
    for name, part_of_name in new_name.items():
        op = draft.op(name)
        part = _scatter(op) if isinstance(op, CommOp) else piece(op, axes[name], (Fraction(0), Fraction(1, num_ranks)))
        shards = part.shards
        for dep in op.deps:
            shards = renamed_source(shards, dep, new_name.get(dep, dep))
        deps = tuple(dict.fromkeys(new_name.get(dep, dep) for dep in op.deps)) if name in axes else op.deps
        part = replace(part, name=part_of_name, deps=deps, shards=shards)
        is_whole = draft.outlives(name) or any(reader not in new_name for reader in draft.followers(name))
        if is_whole and dims[name]:
            raise JobError(f"{name}: its parts lie along dimension {dims[name]}, but it is read whole")
        gathers = (_gather(draft, step, op, first, part_of_name),) if is_whole else ()
        result = gathers[0].name if gathers else part_of_name
        replacements[name] = Replacement((part, *gathers), (result,), num_parts=num_ranks)
    draft.replace(replacements)


def _checked(op: Op, axis: int, num_ranks: int, members: dict[str, int], dims: dict[str, int]) -> int:
    """The dimension of the operator's result along which its parts lie."""
    if not isinstance(op, CompOp):
        raise JobError(f"{op.name}: is a collective, computations slide")
    shards = check_axis(op, axis, (Fraction(1, num_ranks),) * num_ranks)
    combine = shards.combine[axis]
    if not isinstance(combine, Gather):
        raise JobError(f"{op.name}: its pieces along axis {axis} are summed, so it cannot work on a part")
    reads = [dep for dep in op.deps if dep in members]
    if not reads:
        raise JobError(f"{op.name}: reads nothing that lies in parts")
    for dep in reads:
        uses = [use for use in shards.inputs if use.source == dep]
        if dep not in dims or not uses or any(dims[dep] >= len(u.axes) or u.axes[dims[dep]] != axis for u in uses):
            raise JobError(f"{op.name}: does not read {dep!r} along its axis {axis}")
    return combine.dim


def _scatter(comm: CommOp) -> CommOp:
    return replace(comm, collective=replace(comm.collective, kind=CollectiveKind.REDUCE_SCATTER), shards=None)


def _gather(draft: Draft, step: Slide, op: Op, like: CommOp, part: str) -> CommOp:
    """The whole of a result, for what outside of the step's operators, or after the training step, reads it."""
    num_bytes = draft.bytes_made(op.name) or output_bytes(op)
    collective = replace(like.collective, kind=CollectiveKind.ALL_GATHER, num_bytes=num_bytes)
    name = gather_name(step, op.name)
    return replace(like, name=name, collective=collective, deps=(part,), origin=op.origin, shards=None)
