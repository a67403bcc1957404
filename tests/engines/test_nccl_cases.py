"""What a self-test asks: every setting once, the worth first, chunks only where NCCL asks for them."""

import pytest

from lagom_overlap.collective import Algorithm, CollectiveKind, Protocol
from lagom_overlap.engines.nccl.cases import Depth, calls, configs
from lagom_overlap.units import KIB, MIB

RING_LL, TREE, NVLS = (
    (Algorithm.RING, Protocol.LL),
    (Algorithm.TREE, Protocol.SIMPLE),
    (Algorithm.NVLS, Protocol.SIMPLE),
)


def test_every_size_of_what_training_calls_comes_before_any_detail() -> None:
    planned = list(calls(num_ranks=2))
    assert len(planned) == len(set(planned)) == 3 * 3 * 5
    first = planned[:9]
    assert {depth for depth, _, _ in first} == {Depth.WAYS}
    assert {num_bytes for _, _, num_bytes in first} == {MIB, 16 * MIB, 128 * MIB}
    rare = {CollectiveKind.BROADCAST, CollectiveKind.REDUCE}
    assert not rare & {kind for _, kind, _ in planned[:27]}
    assert {kind for _, kind, _ in planned[27:]} == rare


@pytest.mark.parametrize("num_ranks", [2, 3, 6, 7, 8])
def test_every_rank_has_an_equal_part_of_every_size(num_ranks: int) -> None:
    for _, _, num_bytes in calls(num_ranks):
        assert num_bytes % num_ranks == 0
        assert num_bytes // num_ranks % 2 == 0  # bf16


def test_the_depths_together_ask_every_way_for_every_count_and_chunk_once() -> None:
    asked = [each for depth in Depth for each in configs(depth, {RING_LL, TREE, NVLS}, 6)]
    assert len(asked) == len(set(asked))
    for algorithm, protocol in (RING_LL, TREE, NVLS):
        mine = [each for each in asked if (each.algorithm, each.protocol) == (algorithm, protocol)]
        assert {each.num_channels for each in mine if each.chunk_bytes is None} == {1, 2, 4, 8, 16, 32}
    chunks = {each.chunk_bytes for each in asked if (each.algorithm, each.protocol) == TREE} - {None}
    assert max(chunk or 0 for chunk in chunks) == 2 * MIB  # beyond its buffer: that it is clamped is to be seen
    assert {each.chunk_bytes for each in asked if each.algorithm is Algorithm.NVLS} - {None} == {
        size * KIB for size in (16, 32, 64, 128)
    }


def test_a_release_that_asks_no_tuner_for_chunks_is_asked_for_none() -> None:
    assert not any(each.chunk_bytes for depth in Depth for each in configs(depth, {RING_LL, TREE}, 5))
