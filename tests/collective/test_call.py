import pytest

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.errors import JobError


def ring_all_gather_bytes(num_ranks: int, part_bytes: int) -> int:
    """Bytes that rank 0 sends when every rank passes each part on until all have all."""
    holds = [{rank} for rank in range(num_ranks)]
    sent = 0
    for step in range(num_ranks - 1):
        for rank in range(num_ranks):
            holds[(rank + 1) % num_ranks].add((rank - step) % num_ranks)
        sent += part_bytes
    assert all(len(parts) == num_ranks for parts in holds)
    return sent


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 16])
def test_wire_bytes_are_those_of_a_ring_played_through(num_ranks: int) -> None:
    gathered = ring_all_gather_bytes(num_ranks, part_bytes=1000)
    total = 1000 * num_ranks
    for kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER):
        assert Collective(kind, total, num_ranks).wire_bytes == pytest.approx(gathered)
    # An all-reduce is a reduce-scatter followed by an all-gather.
    assert Collective(CollectiveKind.ALL_REDUCE, total, num_ranks).wire_bytes == pytest.approx(2 * gathered)


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_an_all_to_all_sends_every_part_but_its_own(num_ranks: int) -> None:
    sends = sum(1000 for peer in range(num_ranks) if peer != 0)
    assert Collective(CollectiveKind.ALL_TO_ALL, 1000 * num_ranks, num_ranks).wire_bytes == pytest.approx(sends)


@pytest.mark.parametrize("kind", [CollectiveKind.BROADCAST, CollectiveKind.REDUCE, CollectiveKind.SEND_RECV])
def test_the_rest_sends_its_buffer_once(kind: CollectiveKind) -> None:
    assert Collective(kind, 4096, 8).wire_bytes == 4096


def test_an_empty_or_lonely_collective_is_refused() -> None:
    with pytest.raises(JobError, match="all_gather: bytes is -5, must be at least 1"):
        Collective(CollectiveKind.ALL_GATHER, -5, 8)
    with pytest.raises(JobError, match="all_gather: ranks is 1, must be at least 2"):
        Collective(CollectiveKind.ALL_GATHER, 5, 1)
