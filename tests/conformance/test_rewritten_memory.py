"""What a rewritten step holds against the storages of the graph that the engine makes of it."""

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch
from graph_memory import C10D, held_in_order, predicted_peak
from torch import distributed as dist

from lagom_overlap.capturing.fake_world import fake_world
from lagom_overlap.engines.fx.apply import apply_rewrites, name_operators
from lagom_overlap.engines.fx.process_groups import ProcessGroups
from lagom_overlap.engines.fx.program import capture_step
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.steps import (
    ChainLink,
    Fuse,
    PartitionGroups,
    Rewrite,
    Split,
    Substitute,
    Substitution,
)

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]

RANKS = 4
AG, RS, AR, A2A = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single"
Shapes = list[tuple[int, ...]]


def _group() -> str:
    return dist.group.WORLD.group_name


def _gather(x):
    return C10D.wait_tensor(C10D.all_gather_into_tensor(x, RANKS, _group()))


def _scatter(x):
    return C10D.wait_tensor(C10D.reduce_scatter_tensor(x, "sum", RANKS, _group()))


def _reduced(x):
    return C10D.wait_tensor(C10D.all_reduce(x, "sum", _group()))


def _exchanged(x):
    return C10D.wait_tensor(C10D.all_to_all_single(x, [16] * RANKS, [16] * RANKS, _group()))


def gathered_alone(w):
    return (_gather(w).sum(),)


def gathered_and_returned(w):
    return (_gather(w),)


def gathered_for_two(x, w):
    whole = _gather(w)
    return ((whole @ x).sum(), torch.relu(whole).sum())


def gathered_and_added(w, other):
    return ((_gather(w) + torch.relu(other)).sum(),)


def two_gathers(w, v):
    return ((_gather(w) * 2).sum(), (_gather(v) * 2).sum())


def four_gathers(a, b, c, d):
    return tuple((_gather(each) * 2).sum() for each in (a, b, c, d))


def product_scattered(x, w, v):
    return (torch.relu(_scatter(torch.relu(x @ v) @ w)).sum(),)


def product_returned_in_parts(x, w):
    return (_scatter(torch.relu(x) @ w),)


def two_scatters(x):
    return ((_scatter(torch.relu(x)) * 2).sum(), (_scatter(torch.relu(x) * 2) * 2).sum())


def product_reduced(x, w, v):
    reduced = torch.relu(_reduced(torch.relu(x) @ w))
    return ((reduced @ v).sum(), (reduced * 2).sum())


def two_reductions(x, w):
    return ((_reduced(torch.relu(x)) * 2).sum(), (_reduced(torch.relu(w)) * 2).sum())


def exchanged(x, w):
    rows = x @ w
    return (torch.relu(_exchanged(rows)).sum(), torch.relu(rows).sum())


def _links(*links: tuple[str, int]) -> tuple[ChainLink, ...]:
    return tuple(ChainLink(op, axis) for op, axis in links)


SHARD, PRODUCT = [(16, 32)], [(64, 32), (32, 16), (32, 32)]
EXACT: list[tuple[Callable[..., object], Shapes, Rewrite]] = [
    (gathered_alone, SHARD, Split(AG, 0, 2)),
    (gathered_alone, SHARD, Split(AG, 1, 2)),
    (gathered_alone, SHARD, Substitute(AG, Substitution.BROADCASTS)),
    (gathered_and_returned, SHARD, Split(AG, 0, 4)),
    (gathered_and_returned, SHARD, Substitute(AG, Substitution.BROADCASTS)),
    (gathered_for_two, [(32, 8), (16, 32)], Split(AG, 0, 2, (), _links(("mm", 0)))),
    (gathered_for_two, [(32, 8), (16, 32)], PartitionGroups(AG, (2, 2), (0, 1), 0, _links(("mm", 0)))),
    (gathered_and_added, [(16, 32), (64, 32)], Split(AG, 0, 2, (), _links(("add", 0)))),
    (gathered_and_added, [(16, 32), (64, 32)], Split(AG, 1, 2, (), _links(("add", 1)))),
    (gathered_and_added, [(16, 32), (64, 32)], PartitionGroups(AG, (2, 2), (0, 1), 0, _links(("add", 0)))),
    (two_gathers, [(16, 32), (16, 16)], Fuse((AG, f"{AG}_1"))),
    (product_scattered, PRODUCT, Split(RS, 0, 2, _links(("mm_1", 0)))),
    (product_scattered, PRODUCT, Split(RS, 0, 2, _links(("mm_1", 0), ("relu", 0), ("mm", 0)))),
    (product_scattered, PRODUCT, PartitionGroups(RS, (2, 2), (0, 1), 0, _links(("mm_1", 0)))),
    (two_scatters, [(64, 32)], Fuse((RS, f"{RS}_1"))),
    (product_reduced, [(64, 32), (32, 16), (16, 8)], Split(AR, 0, 2, _links(("mm", 0)), _links(("relu_1", 0)))),
    (two_reductions, [(64, 32), (16, 32)], Fuse((AR, f"{AR}_1"))),
    (exchanged, PRODUCT[:2], Split(A2A, 0, 2)),
    (exchanged, PRODUCT[:2], PartitionGroups(A2A, (2, 2), (0, 1))),
]
MOST: list[tuple[Callable[..., object], Shapes, Rewrite]] = [
    (gathered_alone, SHARD, PartitionGroups(AG, (2, 2), (0, 1))),
    (gathered_alone, SHARD, PartitionGroups(AG, (2, 2), (1, 0))),
    (product_scattered, PRODUCT, Split(RS, 0, 2, _links(("mm_1", 0), ("relu", 0)))),
    (product_returned_in_parts, PRODUCT[:2], Split(RS, 0, 2)),
    (product_returned_in_parts, PRODUCT[:2], Split(RS, 1, 2)),
    (product_returned_in_parts, PRODUCT[:2], PartitionGroups(RS, (2, 2), (0, 1))),
    (product_returned_in_parts, PRODUCT[:2], PartitionGroups(RS, (2, 2), (1, 0))),
    (product_returned_in_parts, PRODUCT[:2], Substitute(RS, Substitution.REDUCES)),
    (product_returned_in_parts, PRODUCT[:2], Split("mm", 1, 2)),
]
"""What is released within an operator is counted to its end: more than the graph holds, never less."""


def _peaks(function: Callable[..., object], shapes: Shapes, *steps: Rewrite) -> tuple[int, int]:
    """Predicted and held, bytes; the same before the rewrite."""
    with fake_world(RANKS):
        captured = capture_step(function, tuple(map(torch.zeros, shapes)), name=function.__name__)
        graph = captured.graph_module.graph
        name_operators(graph, captured.iteration)
        assert predicted_peak(captured.iteration, graph) == held_in_order(graph)
        made = apply_rewrites(captured.graph_module, captured.iteration, steps, ProcessGroups()).graph
    return predicted_peak(rewritten(captured.iteration, steps), made), held_in_order(made)


@pytest.mark.parametrize(("function", "shapes", "step"), EXACT)
def test_a_rewritten_step_holds_what_its_graph_holds(function, shapes, step) -> None:
    predicted, held = _peaks(function, shapes, step)
    assert predicted == held


@pytest.mark.parametrize(("function", "shapes", "step"), MOST)
def test_a_rewritten_step_is_never_predicted_to_hold_less_than_its_graph(function, shapes, step) -> None:
    predicted, held = _peaks(function, shapes, step)
    assert held <= predicted <= 2 * held


@pytest.mark.parametrize("num_fusions", [1, 2, 3])
def test_what_was_fused_is_fused_again(num_fusions) -> None:
    """As Concerto does; a copy of inputs is no result that somebody copies out."""
    names = [AG, *(f"{AG}_{number}" for number in (1, 2, 3))]
    steps = [Fuse((AG + "+1" * number, names[number + 1])) for number in range(num_fusions)]
    predicted, held = _peaks(four_gathers, [(16, 32), (16, 16), (16, 8), (16, 24)], *steps)
    assert predicted == held
