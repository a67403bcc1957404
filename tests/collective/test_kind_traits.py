"""What `KindTraits` says of each kind, against collectives played out with numbers on a ring or a chain of ranks."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.cost.nccl.bandwidth import num_steps
from lagom_overlap.nccl_plugin.table_layout import KINDS

PART = 3
"""Elements of one rank's part."""
Values = NDArray[np.int64]
Played = tuple[list[Values], int, int]
"""Each rank's result, steps, and elements that the busiest rank sent."""


def _gather(given: list[Values]) -> Played:
    n = len(given)
    parts: list[dict[int, Values]] = [{rank: given[rank]} for rank in range(n)]
    for step in range(n - 1):
        sent = [parts[rank][(rank - step) % n] for rank in range(n)]
        for rank in range(n):
            parts[(rank + 1) % n][(rank - step) % n] = sent[rank]
    return [np.concatenate([own[part] for part in range(n)]) for own in parts], n - 1, (n - 1) * PART


def _scatter(given: list[Values]) -> Played:
    n = len(given)
    held = [[*np.split(own, n)] for own in given]
    for step in range(n - 1):
        sent = [held[rank][(rank - step - 1) % n] for rank in range(n)]
        for rank in range(n):
            place = (rank - step - 1) % n
            held[(rank + 1) % n][place] = held[(rank + 1) % n][place] + sent[rank]
    return [held[rank][rank] for rank in range(n)], n - 1, (n - 1) * PART


def _all_reduce(given: list[Values]) -> Played:
    scattered, first, sent = _scatter(given)
    whole, second, more = _gather(scattered)
    return whole, first + second, sent + more


def _exchange(given: list[Values]) -> Played:
    n = len(given)
    held = [np.split(own, n) for own in given]
    return [np.concatenate([held[peer][rank] for peer in range(n)]) for rank in range(n)], n - 1, (n - 1) * PART


def _broadcast(given: list[Values]) -> Played:
    return [given[0]] * len(given), len(given), given[0].size


def _reduce(given: list[Values]) -> Played:
    return [np.sum(given, axis=0), *given[1:]], len(given), given[0].size


def _send(given: list[Values]) -> Played:
    return [given[-1], *given[:-1]], 1, given[0].size


PLAYED: dict[CollectiveKind, Callable[[list[Values]], Played]] = {
    CollectiveKind.ALL_GATHER: _gather,
    CollectiveKind.REDUCE_SCATTER: _scatter,
    CollectiveKind.ALL_REDUCE: _all_reduce,
    CollectiveKind.ALL_TO_ALL: _exchange,
    CollectiveKind.BROADCAST: _broadcast,
    CollectiveKind.REDUCE: _reduce,
    CollectiveKind.SEND_RECV: _send,
}


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("kind", CollectiveKind)
def test_traits_are_what_the_collective_does(kind: CollectiveKind, num_ranks: int) -> None:
    traits, whole = kind.traits, num_ranks * PART
    # One bit a rank: what was only moved has one, what was added several.
    given = [np.full(PART if traits.takes_part else whole, 1 << rank) for rank in range(num_ranks)]
    result, steps, sent = PLAYED[kind]([own.copy() for own in given])
    assert result[0].size == (PART if traits.leaves_part else whole)
    assert Collective(kind, whole, num_ranks).wire_bytes == pytest.approx(sent)
    assert any(int(value).bit_count() > 1 for value in result[0]) is traits.adds
    if kind in KINDS:
        assert num_steps(kind, num_ranks) == steps


def test_each_kind_has_its_row() -> None:
    assert set(PLAYED) == set(CollectiveKind)
    assert all(kind.traits is kind.traits for kind in CollectiveKind)
    rooted = {kind for kind in CollectiveKind if kind.traits.is_rooted}
    assert rooted == {CollectiveKind.BROADCAST, CollectiveKind.REDUCE}
    # NCCL's table of tuned kinds is of those that are no sends and receives.
    assert set(KINDS) == {kind for kind in CollectiveKind if not kind.traits.is_point_to_point}
