# ruff: noqa: E402  # without torch the file is skipped before it imports what needs torch
import pytest

torch = pytest.importorskip("torch")

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.engines.buffers import allocate, clear, expected, fill, pattern

pytestmark = pytest.mark.torch
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def value(rank: int, index: int) -> int:
    return (31 * index + 7919 * rank) % 65521


def by_hand(kind: str, num_elements: int, num_ranks: int, rank: int) -> list[int]:
    """What MPI's definitions give, element by element."""
    part = num_elements // num_ranks
    ranks = range(num_ranks)
    if kind == "all_gather":
        return [value(peer, index) for peer in ranks for index in range(part)]
    if kind == "all_to_all":
        return [value(peer, rank * part + index) for peer in ranks for index in range(part)]
    if kind == "reduce_scatter":
        return [sum(value(peer, rank * part + index) for peer in ranks) for index in range(part)]
    return [sum(value(peer, index) for peer in ranks) for index in range(num_elements)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_expected_answer_is_the_definition_of_the_collective(kind: str, num_ranks: int) -> None:
    num_elements = num_ranks * 35
    collective = Collective(CollectiveKind(kind), 4 * num_elements, num_ranks)
    for rank in range(num_ranks):
        assert expected(collective, rank).tolist() == by_hand(kind, num_elements, num_ranks, rank)


def test_the_pattern_goes_on_beyond_its_period() -> None:
    long = pattern(3, 5, 140_000)
    assert [int(long[i]) for i in (0, 65521, 139_999)] == [value(3, 5), value(3, 65526), value(3, 140_004)]


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_have_the_sizes_of_the_definition_and_no_right_answer_before_the_call(kind: str) -> None:
    collective = Collective(CollectiveKind(kind), 4 * 12, 3)
    buffers = allocate(collective)
    sizes = {"all_gather": (4, 12), "reduce_scatter": (12, 4), "all_reduce": (12, 12), "all_to_all": (12, 12)}
    assert (buffers.source.numel(), buffers.target.numel()) == sizes[kind]
    fill(collective, 1, buffers)
    right = torch.equal(buffers.target, expected(collective, 1))
    assert not right
    clear(buffers)
    assert not buffers.source.any()
    assert not buffers.target.any()
