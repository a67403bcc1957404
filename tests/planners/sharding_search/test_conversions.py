"""Conversions between layouts: what they move, what they cost, and that there are no cheaper ones."""

from itertools import product

import pytest
from small_programs import machine

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.planners.sharding_search.conversions import Conversions
from lagom_overlap.planners.sharding_search.mesh_layouts import Held, Layout, SearchMesh, layouts_of, local_bytes
from lagom_overlap.workload.tensor_program import Value

W, P = Held.WHOLE, Held.PARTIAL
TENSOR = Value(name="t", shape=(1024, 4096), element_bytes=2)


def between(shape: tuple[int, ...], before: Layout, after: Layout) -> list[tuple[CollectiveKind, int, int]]:
    cluster, times = machine(2)
    found = Conversions(SearchMesh(shape), cluster, times).between(TENSOR, before, after)
    assert found is not None
    collectives = [step.collective for step in found.steps if step.collective is not None]
    return [(c.kind, c.num_bytes, c.num_ranks) for c in collectives]


@pytest.mark.parametrize(
    ("before", "after", "kind", "num_bytes"),
    [
        ((0,), (W,), CollectiveKind.ALL_GATHER, 8 << 20),
        ((P,), (W,), CollectiveKind.ALL_REDUCE, 8 << 20),
        ((P,), (1,), CollectiveKind.REDUCE_SCATTER, 8 << 20),
        ((0,), (1,), CollectiveKind.ALL_TO_ALL, 1 << 20),
    ],
)
def test_one_collective_does_what_one_can(before: Layout, after: Layout, kind: CollectiveKind, num_bytes: int) -> None:
    assert between((8,), before, after) == [(kind, num_bytes, 8)]


def test_cutting_what_is_whole_costs_nothing() -> None:
    assert between((8,), (W,), (1,)) == []
    assert between((2, 4), (W, W), (0, 0)) == []


def test_a_finished_tensor_does_not_become_parts_of_a_sum() -> None:
    cluster, times = machine()
    conversions = Conversions(SearchMesh((8,)), cluster, times)
    assert conversions.between(TENSOR, (W,), (P,)) is None
    assert conversions.between(TENSOR, (0,), (P,)) is None


def test_a_sum_over_both_mesh_dimensions_is_one_collective_over_all_ranks() -> None:
    assert between((2, 4), (P, P), (W, W)) == [(CollectiveKind.ALL_REDUCE, 8 << 20, 8)]


def test_what_two_mesh_dimensions_cut_is_gathered_from_the_inside() -> None:
    """Rows cut twice, wanted cut by the second mesh dimension alone: the finer cut is undone first."""
    steps = between((2, 4), (0, 0), (W, 0))
    assert [kind for kind, _, _ in steps] in ([CollectiveKind.ALL_GATHER], [CollectiveKind.ALL_GATHER] * 2)
    assert steps[-1][1] in (8 << 20, 4 << 20)


def test_every_layout_is_reached_from_every_other_and_no_detour_is_cheaper() -> None:
    """The triangle inequality over all layouts of a matrix on a 2 x 2 mesh."""
    cluster, times = machine()
    conversions = Conversions(SearchMesh((2, 2)), cluster, times)
    layouts = layouts_of(TENSOR, SearchMesh((2, 2)))
    assert len(layouts) == 9
    cost = {}
    for before, after in product(layouts, layouts):
        found = conversions.between(TENSOR, before, after)
        assert found is not None
        cost[before, after] = found.seconds
    for a, b, c in product(layouts, repeat=3):
        assert cost[a, c] <= cost[a, b] + cost[b, c] + 1e-15


def test_groups_of_the_first_mesh_dimension_go_between_nodes() -> None:
    cluster, _ = machine(2)
    mesh = SearchMesh((2, 8))
    assert mesh.ranks_of((0,)) == (0, 8)
    assert (mesh.num_nodes_of((0,), cluster), mesh.num_nodes_of((1,), cluster)) == (2, None)
    assert mesh.ranks_of((0, 1)) == tuple(range(16))


def test_bytes_on_a_rank_are_those_of_its_part() -> None:
    assert local_bytes(TENSOR, (0, P), SearchMesh((2, 4))) == 4 << 20


@pytest.mark.parametrize("shape", [(1,), (2, 2, 2), (0, 4), ()])
def test_a_mesh_has_one_or_two_dimensions_of_two_or_more_ranks(shape: tuple[int, ...]) -> None:
    with pytest.raises(JobError, match="must be one or two dimensions of at least 2 ranks"):
        SearchMesh(shape)
