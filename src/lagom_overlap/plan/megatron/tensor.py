"""Tensor-parallel collectives in pieces beside pieces of the product next to them (userbuffers, `--tp-comm-overlap`).

Forward: a gather with the column-parallel product after it, a scatter with the row-parallel product before it;
backward: the gather of the output's gradient with the product for the input's, and with `rs_dgrad` the scatter of the
input's gradient with the product that makes it. A chain of s pieces takes about T / s and the longer of the two chains.
"""

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.plan.context import divisible
from lagom_overlap.plan.megatron.roles import Role, Roles
from lagom_overlap.plan.step_index import StepIndex
from lagom_overlap.workload import CompOp, Gather, Gemm, Phase
from lagom_overlap.workload.rewrite.steps import ChainLink, Split


def pipelined(index: StepIndex, roles: Roles, num_splits: int, rs_dgrad: bool) -> list[Split]:
    """A split for every gather and scatter that has a product beside it whose rows divide."""
    found = []
    for name in roles.names(Role.ACTIVATION) + (roles.names(Role.INPUT_GRADIENT) if rs_dgrad else []):
        comm = index.ops[name]
        assert not isinstance(comm, CompOp), name
        kind = comm.collective.kind
        if comm.shards is None or comm.shards.sizes[0] % num_splits or comm.shards.combine[0] != Gather(0):
            continue
        gathers = kind is CollectiveKind.ALL_GATHER
        if not gathers and kind is not CollectiveKind.REDUCE_SCATTER:
            continue
        beside = index.followers[name] if gathers else list(comm.deps)
        products = [link for link in (_rows_of(index, n) for n in beside) if link is not None]
        links = divisible(index, tuple(products[:1]), num_splits, from_end=not gathers)
        if links:
            found.append(Split(name, 0, num_splits, () if gathers else links, links if gathers else ()))
    return found


def _rows_of(index: StepIndex, name: str) -> ChainLink | None:
    """A product cut by rows; weights' gradients sum over them and are left out."""
    op = index.ops[name]
    if not isinstance(op, CompOp) or not isinstance(op.work, Gemm) or op.origin.phase is Phase.WEIGHT_GRAD:
        return None
    return ChainLink(name, 0) if op.shards is not None and op.shards.combine[0] == Gather(0) else None
