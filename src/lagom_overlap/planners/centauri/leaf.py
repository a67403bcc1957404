"""Leaves of a collective's tree: every way to take it apart with the chain next to it, and when each would end.

Primitive, then group, then workload (Centauri, Fig. 4; spec, planners 2.1 to 2.4). A reduce-scatter is the mirror of an
all-gather: the chain lies before it, time runs backward. All-reduces were replaced before, where that scales.

A group is taken apart along a mesh over its ranks, if the topology allows it (section 3.1.2; spec, planners 2.2). A
rank's index k in a mesh [N1 .. Nd] is (r // prod(N_k+1 .. N_d)) % N_k; its k-th sub-group holds the ranks that differ
from it in index k only. Pruned are meshes with a sub-group that mixes link classes (some ranks share a node, some do
not), and, unless the links inside a node are known to bear it, meshes that cut a node finer than the node.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.planners.base import OpTimes
from lagom_overlap.planners.centauri.operation import (
    MAX_CHUNKS,
    ORDERS,
    CommPart,
    OperationChoice,
    OperationCosts,
    Parts,
    algorithm_1,
    end_s,
    even,
)
from lagom_overlap.planners.context import context_of, next_to
from lagom_overlap.planners.step_index import StepIndex
from lagom_overlap.workload import CommOp, CompOp, Gather
from lagom_overlap.workload.rewrite.partition import granularity, partition_steps
from lagom_overlap.workload.rewrite.pieces import joined, piece
from lagom_overlap.workload.rewrite.steps import ChainLink, PartitionGroups, Rewrite, Split

MAX_DIMENSIONS = 3
"""Of a mesh over a group: nodes, and two within one. Chosen; more only add latencies."""


def factorisations(size: int, max_dimensions: int = MAX_DIMENSIONS) -> Iterator[tuple[int, ...]]:
    """The ordered factorisations of `size` in at least two factors of at least 2."""

    def grow(rest: int, dimensions: int) -> Iterator[tuple[int, ...]]:
        yield (rest,)
        if dimensions > 1:
            for first in range(2, rest // 2 + 1):
                if rest % first == 0:
                    for others in grow(rest // first, dimensions - 1):
                        yield (first, *others)

    for mesh in grow(size, max_dimensions):
        if len(mesh) > 1:
            yield mesh


def allowed_meshes(num_ranks: int, num_nodes: int, *, several_outer: bool = False) -> list[tuple[int, ...]]:
    """The meshes left for a group that spans that many nodes evenly, ranks in order; normally [nodes, rest].

    With `several_outer` nodes may have two axes, [pods, nodes of a pod, rest]: their links are alike, but a ring over
    each axis has fewer steps than one over all nodes.
    """
    in_node = num_ranks // num_nodes
    return [
        mesh
        for mesh in factorisations(num_ranks)
        if not any(_mixes(mesh, axis, in_node) for axis in range(len(mesh)))
        and _inner_axes(mesh, in_node) <= 1
        and len(mesh) - _inner_axes(mesh, in_node) <= (2 if several_outer else 1)
    ]


def _mixes(mesh: tuple[int, ...], axis: int, in_node: int) -> bool:
    stride = prod(mesh[axis + 1 :])
    return stride < in_node < stride * mesh[axis]


def _inner_axes(mesh: tuple[int, ...], in_node: int) -> int:
    """Axes whose sub-groups lie in one node."""
    return sum(prod(mesh[axis:]) <= in_node for axis in range(len(mesh)))


_SAME_DIGITS = 7
"""Seconds to 0.1 us: independent computations of like layers differ by rounding only."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A way to run a collective: the rewrites it takes and when its chain would end (s)."""

    choice: OperationChoice
    end_s: float
    link_s: float
    rewrites: tuple[Rewrite, ...] = ()
    chain: tuple[ChainLink, ...] = ()


@dataclass(frozen=True, slots=True)
class _Neighbours:
    """A collective's axis and the chain that is cut with it."""

    axis: int
    chain: tuple[ChainLink, ...]


class Leaves:
    """The leaves of an iteration's collectives; `taken` are computations that another collective's chain has.

    Without `chains` only groups are partitioned, without `groups` only workloads.
    """

    def __init__(
        self,
        index: StepIndex,
        times: OpTimes,
        num_nodes_of: Callable[[CommOp], int],
        *,
        chains: bool = True,
        groups: bool = True,
    ) -> None:
        self._index, self._times, self._num_nodes_of = index, times, num_nodes_of
        self._chains, self._groups = chains, groups
        self.taken: set[str] = set()
        self._known: dict[object, OperationChoice] = {}

    def choose(self, comm: CommOp, free_s: float, *, paper: bool, link_weight: float = 0.0) -> Leaf:
        """The paper's leaf, or the one that ends first; the whole collective if it ends as early.

        `link_weight` adds that share of the time that links are busy: what ends no sooner may leave more to others.
        """
        neighbours = self._neighbours(comm, free_s)
        meshes = self._meshes(comm)
        whole = self._leaf(comm, OperationChoice(Parts.WHOLE), neighbours, free_s, meshes)
        if not comm.collective.kind.traits.is_in_parts:
            choices = [even(n) for n in range(2, MAX_CHUNKS + 1)]
        else:
            choices = self._choices(meshes)
        if paper:
            choices = [algorithm_1(self._costs(comm, neighbours, free_s, meshes))]
        alike = self._signature(comm, neighbours, free_s)
        if alike in self._known:
            choices = [self._known[alike]]
        best = whole
        for choice in choices:
            leaf = self._leaf(comm, choice, neighbours, free_s, meshes)
            if leaf.rewrites and (paper or _score(leaf, link_weight) < _score(best, link_weight)):
                best = leaf
        self._known[alike] = best.choice
        self.taken |= {link.op for link in best.chain}
        return best

    def _signature(self, comm: CommOp, neighbours: _Neighbours, free_s: float) -> object:
        """Equal for collectives of like layers: they take the same leaf."""
        chain = []
        for link in neighbours.chain:
            op = self._index.ops[link.op]
            assert isinstance(op, CompOp), op.name
            chain.append((op.work, link.axis, len(self._index.followers[link.op])))
        return comm.collective, neighbours.axis, tuple(chain), round(free_s, _SAME_DIGITS)

    def _choices(self, meshes: Sequence[tuple[int, ...]]) -> list[OperationChoice]:
        choices = [even(n) for n in range(2, MAX_CHUNKS + 1)]
        for mesh in meshes[:1]:
            choices += [
                OperationChoice(parts, granularity(CollectiveKind.ALL_GATHER, mesh, order))
                for parts, order in ORDERS.items()
                if self._chains or parts is not Parts.INTRA_FIRST_FINER
            ]
            choices += [OperationChoice(Parts.LOOPED, (Fraction(1, n),) * n) for n in (2, 4, 8) if n <= MAX_CHUNKS]
        for mesh in meshes[1:]:
            choices += [
                OperationChoice(parts, granularity(CollectiveKind.ALL_GATHER, mesh, order), mesh)
                for parts in (Parts.INTER_FIRST, Parts.INTRA_FIRST)
                for order in (_order(parts, mesh),)
            ]
        return choices

    def _meshes(self, comm: CommOp) -> list[tuple[int, ...]]:
        """Meshes of a collective that has nodes and ranks in them: [nodes, in node], then [pods, nodes, in node]."""
        nodes, ranks = self._num_nodes_of(comm), comm.collective.num_ranks
        if not self._groups or not 1 < nodes < ranks:
            return []
        return sorted(allowed_meshes(ranks, nodes, several_outer=True), key=len)

    def _neighbours(self, comm: CommOp, free_s: float) -> _Neighbours:
        """Of the collective's axes the one with the shortest chain that covers it, else with the longest."""
        if comm.shards is None or not self._chains:
            return _Neighbours(0, ())
        need = max(0.0, self._times.seconds(comm) - free_s)
        gathers = comm.collective.kind is not CollectiveKind.REDUCE_SCATTER
        best, key = _Neighbours(0, ()), (True, 0.0)
        for axis, combine in enumerate(comm.shards.combine):
            if not isinstance(combine, Gather):
                continue
            context = context_of(self._index, comm, axis, self._times.seconds, need)
            links = self._untaken(context.after, False) if gathers else self._untaken(context.before, True)
            covered = self._chain_s(links)
            rank_of = (covered < need, covered if covered >= need else -covered)
            if rank_of < key:
                best, key = _Neighbours(axis, links), rank_of
        return best

    def _chain_s(self, links: Sequence[ChainLink]) -> float:
        return sum(self._times.seconds(self._index.ops[link.op]) for link in links)

    def _untaken(self, links: tuple[ChainLink, ...], from_end: bool) -> tuple[ChainLink, ...]:
        return next_to(links, lambda link: link.op not in self.taken, from_end)

    def _costs(
        self, comm: CommOp, neighbours: _Neighbours, free_s: float, meshes: Sequence[tuple[int, ...]]
    ) -> OperationCosts:
        """The inputs of Algorithm 1."""
        comm_s, chain_s = self._times.seconds(comm), self._chain_s(neighbours.chain)
        chainable = comm.collective.kind.traits.is_in_parts
        if not meshes or not chainable:
            return OperationCosts(comm_s=comm_s, chain_s=chain_s, free_s=free_s)
        mesh = meshes[0]
        scatters = comm.collective.kind is CollectiveKind.REDUCE_SCATTER
        order = ORDERS[Parts.INTER_FIRST][::-1] if scatters else ORDERS[Parts.INTER_FIRST]
        steps = partition_steps(comm, PartitionGroups(comm.name, mesh, order))
        inter_s = self._times.seconds(steps[order.index(0)])
        return OperationCosts(
            comm_s=comm_s, chain_s=chain_s, free_s=free_s, inter_s=inter_s, num_nodes=mesh[0], in_node=mesh[1]
        )

    def _leaf(
        self,
        comm: CommOp,
        choice: OperationChoice,
        neighbours: _Neighbours,
        free_s: float,
        meshes: Sequence[tuple[int, ...]],
    ) -> Leaf:
        """A choice with its rewrites; without any if nothing next to it can be cut so."""
        scatters = comm.collective.kind is CollectiveKind.REDUCE_SCATTER
        shares = choice.shares
        chain = self._divisible(neighbours.chain, shares, scatters)
        outside_s = self._chain_s([link for link in neighbours.chain if link not in chain])
        parts, rewrites = self._parts(comm, choice, neighbours.axis, chain, meshes)
        if choice.parts is Parts.WHOLE or not rewrites:
            parts, chain = [CommPart(0, self._times.seconds(comm), 1.0)], ()
            return Leaf(choice, end_s(parts, self._chain_s(neighbours.chain), free_s), parts[0].seconds)
        chain_s = self._chain_s(chain)
        cut_s = self._cut_s(comm, chain, choice)
        end = end_s(parts, chain_s, free_s, cut_s / len(shares))
        return Leaf(choice, end + outside_s, sum(part.seconds for part in parts), rewrites, chain)

    def _divisible(
        self, links: tuple[ChainLink, ...], shares: Sequence[Fraction], from_end: bool
    ) -> tuple[ChainLink, ...]:
        def is_cut_evenly(link: ChainLink) -> bool:
            shards = self._index.ops[link.op].shards
            return shards is not None and all((shards.sizes[link.axis] * s).denominator == 1 for s in shares)

        return next_to(links, is_cut_evenly, from_end)

    def _cut_s(self, comm: CommOp, chain: tuple[ChainLink, ...], choice: OperationChoice) -> float:
        """What pieces and joins take beyond the whole operators."""
        shares = choice.shares
        in_one = not chain and choice.parts in (Parts.INTER_FIRST, Parts.INTRA_FIRST)
        members = dict.fromkeys((*(() if in_one else (comm.name,)), *(link.op for link in chain)))
        total = 0.0
        for link in chain:
            op = self._index.ops[link.op]
            below = Fraction(0)
            for share in shares:
                total += self._times.seconds(piece(op, link.axis, (below, below + share)))
                below += share
            total -= self._times.seconds(op)
        for name in members:
            op = self._index.ops[name]
            if any(follower not in members for follower in self._index.followers[name]):
                total += self._times.seconds(joined(op, (), "compute"))
        return max(0.0, total)

    def _parts(
        self,
        comm: CommOp,
        choice: OperationChoice,
        axis: int,
        chain: tuple[ChainLink, ...],
        meshes: Sequence[tuple[int, ...]],
    ) -> tuple[list[CommPart], tuple[Rewrite, ...]]:
        """The parts of a collective in the order of an all-gather, and the rewrites that make them."""
        seconds = self._times.seconds
        scatters = comm.collective.kind is CollectiveKind.REDUCE_SCATTER
        if choice.parts is Parts.WHOLE:
            return [], ()
        if choice.parts in ORDERS:
            mesh = choice.mesh or meshes[0]
            order = _order(choice.parts, mesh)
            step = PartitionGroups(comm.name, mesh, order[::-1] if scatters else order, axis, chain)
            if chain and comm.shards is not None and comm.shards.combine[axis] != Gather(0):
                return [], ()
            steps = partition_steps(comm, step)
            ordered = steps[::-1] if scatters else steps
            after: tuple[int | None, ...] = (None, *range(len(order) - 1))
            if choice.parts is Parts.INTRA_FIRST_FINER:
                after = (None, None, 1)
            innermost = len(mesh) - 1
            parts = [
                CommPart(int(order[n] == innermost), seconds(one), float(choice.shares[n]), after[n])
                for n, one in enumerate(ordered)
            ]
            return parts, (step,)
        num_chunks = len(choice.shares)
        if comm.shards is None or comm.shards.sizes[axis] % num_chunks or not chain:
            return [], ()
        split = Split(comm.name, axis, num_chunks, chain if scatters else (), () if scatters else chain)
        part = piece(comm, axis, (Fraction(0), Fraction(1, num_chunks)))
        assert isinstance(part, CommOp), comm.name
        if choice.parts is Parts.EVEN:
            return [CommPart(0, seconds(part), 1 / num_chunks)] * num_chunks, (split,)
        order = (1, 0) if scatters else (0, 1)
        inner = [PartitionGroups(f"{comm.name}#{k}", meshes[0], order) for k in range(num_chunks)]
        steps = partition_steps(part, PartitionGroups(part.name, meshes[0], order))
        ordered = steps[::-1] if scatters else steps
        parts = []
        for number in range(num_chunks):
            parts.append(CommPart(0, seconds(ordered[0]), 0.0))
            parts.append(CommPart(1, seconds(ordered[1]), 1 / num_chunks, 2 * number))
        return parts, (split, *inner)


def _order(parts: Parts, mesh: tuple[int, ...]) -> tuple[int, ...]:
    """Axes in the order in which an all-gather runs over them: the outermost first, or last."""
    if len(mesh) == 2:
        return ORDERS[parts]
    axes = tuple(range(len(mesh)))
    return axes if parts is Parts.INTER_FIRST else axes[::-1]


def _score(leaf: Leaf, link_weight: float) -> float:
    return leaf.end_s + link_weight * leaf.link_s
