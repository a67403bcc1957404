from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import permutations
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.planners.centauri.layer_tier import FirstGradient, LayerCosts, first_gradient, t1_s, t2_s
from lagom_overlap.planners.centauri.leaf import allowed_meshes, factorisations
from lagom_overlap.planners.centauri.model_tier import (
    GradientLaunch,
    ModelCosts,
    breadth_first,
    depth_first,
    exposed_s,
    launch,
)
from lagom_overlap.planners.centauri.operation import CommPart, OperationCosts, Parts, algorithm_1, end_s
from lagom_overlap.planners.centauri.primitives import PricedSubstitution, substitution
from lagom_overlap.workload import CommOp, Iteration, Op
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.steps import Substitute

SECONDS = st.floats(0.0, 10.0)


def test_factorisations_are_ordered_and_complete() -> None:
    assert set(factorisations(8)) == {(2, 4), (4, 2), (2, 2, 2)}
    assert set(factorisations(12, 2)) == {(2, 6), (6, 2), (3, 4), (4, 3)}


@pytest.mark.parametrize(
    ("ranks", "nodes", "meshes"),
    [(16, 2, [(2, 8)]), (32, 4, [(4, 8)]), (8, 1, []), (8, 8, []), (12, 3, [(3, 4)])],
)
def test_topology_leaves_nodes_by_ranks_of_a_node(ranks: int, nodes: int, meshes: list[tuple[int, ...]]) -> None:
    assert allowed_meshes(ranks, nodes) == meshes


def _costs(
    comm: float, chain: float, free: float, inter: float = 0.0, mesh: tuple[int, int] = (1, 1)
) -> OperationCosts:
    return OperationCosts(comm_s=comm, chain_s=chain, free_s=free, inter_s=inter, num_nodes=mesh[0], in_node=mesh[1])


ALGORITHM_1 = [
    # comm, chain, free, inter, mesh -> parts, shares; every branch by hand
    (_costs(1.0, 5.0, 1.0), Parts.WHOLE, [1]),
    (_costs(1.0, 5.0, 2.0, 0.1, (2, 8)), Parts.WHOLE, [1]),
    (_costs(10.0, 5.0, 3.0, 2.0, (2, 8)), Parts.INTER_FIRST, [Fraction(1, 8), Fraction(7, 8)]),
    (_costs(10.0, 40.0, 0.5, 1.0, (2, 8)), Parts.INTRA_FIRST, [Fraction(1, 2), Fraction(1, 2)]),
    (_costs(10.0, 5.0, 0.5, 1.0, (2, 8)), Parts.INTRA_FIRST_FINER, [Fraction(8, 16), Fraction(1, 16), Fraction(7, 16)]),
    (_costs(10.0, 5.0, 0.0), Parts.EVEN, [Fraction(1, 8)] * 8),
    (_costs(10.0, 5.0, 4.0), Parts.EVEN, [Fraction(1, 3)] * 3),  # ceil(2.5)
    (_costs(10.0, 5.0, 9.0), Parts.EVEN, [Fraction(1, 2)] * 2),  # never one chunk
    (_costs(10.0, 5.0, 0.1), Parts.EVEN, [Fraction(1, 8)] * 8),  # at most eight
    (_costs(10.0, 5.0, 5.0, 1.0, (16, 1)), Parts.EVEN, [Fraction(1, 2)] * 2),  # one rank a node: not grouped
]


@pytest.mark.parametrize(("costs", "parts", "shares"), ALGORITHM_1)
def test_algorithm_1_takes_every_branch(costs: OperationCosts, parts: Parts, shares: list[Fraction]) -> None:
    choice = algorithm_1(costs)
    assert (choice.parts, list(choice.shares)) == (parts, shares)
    assert sum(choice.shares) == 1


def test_the_printed_ratio_would_not_split_what_is_barely_longer() -> None:
    assert algorithm_1(_costs(10.0, 5.0, 9.0), printed=True).parts is Parts.WHOLE


def test_an_end_is_the_two_streams_worked_by_hand() -> None:
    """Two halves of 2 s on the link, 3 s of chain, 1 s of free work: free to 1, first half 2..3.5, second 4..5.5."""
    halves = [CommPart(0, 2.0, 0.5), CommPart(0, 2.0, 0.5)]
    assert end_s(halves, 3.0, 1.0) == 5.5
    assert end_s([CommPart(0, 4.0, 1.0)], 3.0, 1.0) == 7.0


def test_parts_on_two_links_run_together() -> None:
    looped = [CommPart(0, 2.0, 0.0), CommPart(1, 1.0, 0.5, 0), CommPart(0, 2.0, 0.0), CommPart(1, 1.0, 0.5, 2)]
    assert end_s(looped, 0.0, 0.0) == 5.0


layers = st.builds(
    LayerCosts,
    weight_gather_s=SECONDS,
    activation_gather_s=SECONDS,
    data_gradient_s=SECONDS,
    weight_gradient_s=SECONDS,
    activation_scatter_s=SECONDS,
    weight_scatter_s=SECONDS,
    others_s=SECONDS,
)


@given(layers)
def test_data_gradients_first_is_best_without_parameters_on_the_wire(costs: LayerCosts) -> None:
    bare = LayerCosts(
        activation_gather_s=costs.activation_gather_s,
        data_gradient_s=costs.data_gradient_s,
        weight_gradient_s=costs.weight_gradient_s,
        activation_scatter_s=costs.activation_scatter_s,
        others_s=costs.others_s,
    )
    assert t1_s(bare) <= t2_s(bare) + 1e-9


@given(layers)
def test_weight_gradients_first_is_best_without_activations_on_the_wire_if_scatters_are_short(
    costs: LayerCosts,
) -> None:
    bare = LayerCosts(
        weight_gather_s=costs.weight_gather_s,
        data_gradient_s=costs.data_gradient_s,
        weight_gradient_s=costs.weight_gradient_s,
        weight_scatter_s=min(costs.weight_scatter_s, costs.data_gradient_s),
        others_s=costs.others_s,
    )
    assert t2_s(bare) <= t1_s(bare) + 1e-9


def test_without_that_condition_the_claim_is_false() -> None:
    costs = LayerCosts(data_gradient_s=1.0, weight_scatter_s=5.0, others_s=4.0)
    assert t2_s(costs) > t1_s(costs)
    assert first_gradient(costs) is FirstGradient.DATA


_COMPUTATIONS = ("data_gradient", "weight_gradient", "others")
_COLLECTIVES = ("weight_gather", "activation_gather", "activation_scatter", "weight_scatter")
_NEEDS = {
    "data_gradient": ("weight_gather",),
    "weight_gradient": ("activation_gather",),
    "activation_scatter": ("data_gradient",),
    "weight_scatter": ("weight_gradient",),
    "others": ("activation_scatter",),
}
_PARAMETER_COLLECTIVES = ("weight_gather", "weight_scatter")


def best_order_s(costs: LayerCosts, *, two_links: bool = False) -> float:
    """The shortest order of a layer's operators on in-order streams: one for computations, one per link."""
    seconds = {name: getattr(costs, f"{name}_s") for name in (*_COMPUTATIONS, *_COLLECTIVES)}
    orders = [
        _makespan(seconds, computations, collectives, two_links)
        for computations in permutations(_COMPUTATIONS)
        for collectives in permutations(_COLLECTIVES)
    ]
    return min(orders)


def _makespan(
    seconds: dict[str, float], computations: Sequence[str], collectives: Sequence[str], two_links: bool
) -> float:
    """Infinite where the streams wait for each other."""
    queues = [list(computations)]
    if two_links:
        queues += [[name for name in collectives if name in _PARAMETER_COLLECTIVES]]
        queues += [[name for name in collectives if name not in _PARAMETER_COLLECTIVES]]
    else:
        queues += [list(collectives)]
    ends: dict[str, float] = {}
    free = [0.0] * len(queues)
    moved = True
    while moved:
        moved = False
        for number, queue in enumerate(queues):
            while queue and all(need in ends for need in _NEEDS.get(queue[0], ())):
                name = queue.pop(0)
                start = max([free[number], *(ends[need] for need in _NEEDS.get(name, ()))])
                ends[name] = free[number] = start + seconds[name]
                moved = True
    return max(ends.values()) if not any(queues) else float("inf")


@given(layers)
@settings(max_examples=40, deadline=None)
def test_the_best_order_is_never_longer_than_the_formulas(costs: LayerCosts) -> None:
    assert best_order_s(costs, two_links=True) <= min(t1_s(costs), t2_s(costs)) + 1e-9
    assert best_order_s(costs, two_links=True) <= best_order_s(costs) + 1e-9


def _model(**changed: float) -> ModelCosts:
    base = {
        "gather_s": 7.0,
        "scatter_s": 9.0,
        "forward_s": 2.0,
        "backward_s": 4.0,
        "activation_bytes": 10,
        "memory_bytes": 1000,
        "num_micro_batches": 16,
    }
    return ModelCosts(**(base | changed))  # type: ignore[arg-type]


def test_launches_are_the_closed_form_where_it_holds() -> None:
    """Relaxed: L1 = min(ceil(C_AG / C_fw), M // m, mb)."""
    assert launch(_model()) == GradientLaunch(4, 3, 0.0)
    assert launch(_model(memory_bytes=25)) == GradientLaunch(2, 2, 4.0)
    assert launch(_model(num_micro_batches=3)) == GradientLaunch(3, 3, 1.0)


@given(
    gather=st.integers(0, 30),
    scatter=st.integers(0, 30),
    forward=st.integers(1, 5),
    memory=st.integers(1, 12),
    batches=st.integers(2, 12),
    strict=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_launches_are_the_best_of_all(
    *, gather: int, scatter: int, forward: int, memory: int, batches: int, strict: bool
) -> None:
    costs = _model(
        gather_s=gather,
        scatter_s=scatter,
        forward_s=forward,
        backward_s=2 * forward,
        memory_bytes=memory * 10,
        num_micro_batches=batches,
    )
    found = launch(costs, strict=strict)
    allowed = [
        (a, b)
        for a in range(1, batches + 1)
        for b in range(1, batches + 1)
        if max(a, b) <= memory and (not strict or a + b <= batches)
    ]
    assert (found.forward, found.backward) in allowed
    assert found.exposed_s == min(exposed_s(costs, a, b) for a, b in allowed)


def test_a_pipeline_launches_at_least_its_depth_in_multiples_where_interleaved() -> None:
    """Fig. 7 of the paper: 16 micro-batches, depth 4, eight of them suffice."""
    costs = _model(pipeline=4, interleaved=True, gather_s=14.0, scatter_s=30.0)
    assert (launch(costs).forward, launch(costs).backward) == (8, 8)
    held = [found.held_bytes(costs) // costs.activation_bytes for found in (depth_first(costs), breadth_first(costs))]
    assert (*held, launch(costs).held_bytes(costs) // costs.activation_bytes) == (4, 16, 8)  # 4x, 16x, 8x
    assert depth_first(costs).exposed_s > launch(costs).exposed_s == breadth_first(costs).exposed_s == 0
    assert launch(_model(pipeline=4, gather_s=0.0, scatter_s=0.0)) == GradientLaunch(4, 4, 0.0)


def test_the_printed_constraint_contradicts_the_papers_evaluation() -> None:
    """mb = 6 micro-batches, "overlapping micro-batches to 6": impossible with L1 + L2 <= mb."""
    costs = _model(gather_s=100.0, scatter_s=200.0, num_micro_batches=6)
    assert (launch(costs).forward, launch(costs).backward) == (6, 6)
    strict = launch(costs, strict=True)
    assert strict.forward + strict.backward <= 6


def test_memory_that_holds_too_little_is_refused_by_how_much() -> None:
    with pytest.raises(JobError, match="4 micro-batches need 40 bytes, memory has 25: 15 bytes too many"):
        launch(_model(pipeline=4, memory_bytes=25))


def test_several_outer_axes_are_pods_of_nodes_and_never_mix_links() -> None:
    meshes = allowed_meshes(64, 8, several_outer=True)
    assert sorted(meshes) == [(2, 4, 8), (4, 2, 8), (8, 8)]
    for mesh in meshes:
        assert prod(mesh) == 64
        for axis in range(len(mesh)):
            others = [k for k in range(len(mesh)) if k != axis]
            members = [r for r in range(64) if all((r // prod(mesh[k + 1 :])) % mesh[k] == 0 for k in others)]
            assert len({rank // 8 for rank in members}) in (1, len(members))  # in one node, or each in its own


@dataclass(frozen=True, slots=True)
class _Wire:
    """Rings of (n - 1) steps: latency per step and the bytes of one rank's part over a rate."""

    latency_s: float = 1e-5
    rate: float = 1e10

    def seconds(self, op: Op) -> float:
        assert isinstance(op, CommOp)
        call = op.collective
        steps = {CollectiveKind.ALL_REDUCE: 2}.get(call.kind, 1) * (call.num_ranks - 1)
        return steps * self.latency_s + call.wire_bytes / self.rate


def priced(kind: CollectiveKind, num_bytes: int, num_ranks: int, wire: _Wire) -> PricedSubstitution:
    found = substitution(CommOp(name="c", collective=Collective(kind, num_bytes, num_ranks)), wire)
    assert found is not None
    return found


@pytest.mark.parametrize("kind", [CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER])
def test_what_table_2_ticks_moves_a_rank_s_own_part_too(kind: CollectiveKind) -> None:
    """A large tensor, 64 ranks, no latency: S over (P - 1) / P S."""
    rooted = priced(kind, 1 << 30, 64, _Wire(latency_s=0.0))
    assert rooted.seconds / rooted.whole_s == pytest.approx(64 / 63)
    assert not rooted.pays


def test_an_all_reduce_is_its_halves() -> None:
    halves = priced(CollectiveKind.ALL_REDUCE, 1 << 30, 64, _Wire(latency_s=0.0))
    assert halves.seconds == pytest.approx(halves.whole_s)
    assert halves.pays


def test_rooted_ways_stop_scaling_with_the_number_of_devices() -> None:
    """A broadcast from each of P roots pays P times a ring's latency: section 3.1.1."""
    few, many = (priced(CollectiveKind.ALL_GATHER, 1 << 24, ranks, _Wire()) for ranks in (2, 64))
    assert many.seconds / many.whole_s > few.seconds / few.whole_s


@pytest.mark.parametrize("num_bytes", [12, 14, 3])
def test_rooted_ways_are_priced_as_they_are_rewritten(num_bytes: int) -> None:
    """Uneven shares, too; a share of nothing is no way."""
    comm = CommOp(name="c", collective=Collective(CollectiveKind.ALL_GATHER, num_bytes, 4))
    found = priced(CollectiveKind.ALL_GATHER, num_bytes, 4, _Wire())
    if num_bytes < 4:
        assert not found.pays
        return
    made = rewritten(Iteration("one", (comm,), is_dataflow=True), (Substitute("c", found.into),))
    assert found.seconds == pytest.approx(sum(_Wire().seconds(op) for op in made.ops))
