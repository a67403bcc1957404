"""Sends and receives that wait for each other in a circle, against queues whose heads are matched by hand."""

import json
from random import Random

import pytest
from scripted import Rank, ToyPrices

from lagom_emulate.clock import Operation
from lagom_emulate.coordinator import Coordinator

Program = list[list[tuple[int, int]]]
"""For each rank the pairs (from, to) that it takes part in, in its order."""


def issued(program: Program, *, streams: bool = False) -> tuple[Coordinator, list[Operation]]:
    """All of a program on one stream a rank, or on one for each pair; time has passed as far as it can."""
    ended: list[Operation] = []
    coordinator = Coordinator(ToyPrices(), ended.append)
    for number, own in enumerate(program):
        coordinator.hello(number, 0)
        rank = Rank(number)
        counts: dict[tuple[int, int], int] = {}
        for pair in own:
            counts[pair] = counts.get(pair, 0) + 1
            call = {
                "collective": {
                    "comm": "c",
                    "kind": "send_recv",
                    "bytes": 8_000_000,
                    "num_ranks": 2,
                    "rank": int(pair[1] == number),
                }
            }
            text = json.dumps({"comm": f"c/{pair[0]}>{pair[1]}", "members": 2, "ns": 200} | call)
            rank.op(coordinator, 1 + pair[0] if streams else 1, text, instance=counts[pair])
        rank.finish(coordinator)
    coordinator.advance()
    return coordinator, ended


def left_by_hand(program: Program) -> int:
    """How many ends of transfers never happen where a transfer runs once both sides' queues have come to it."""
    queues = [list(own) for own in program]
    moved = True
    while moved:
        moved = False
        for pair in {own[0] for own in queues if own}:
            if all(queues[rank] and queues[rank][0] == pair for rank in pair):
                for rank in pair:
                    queues[rank].pop(0)
                moved = True
    return sum(map(len, queues))


@pytest.mark.parametrize("seed", range(60))
def test_there_is_a_circle_where_queues_by_hand_never_empty(seed: int) -> None:
    random = Random(seed)
    program: Program = [[] for _ in range(random.randint(2, 5))]
    for _ in range(random.randint(1, 8)):
        pair = tuple(random.sample(range(len(program)), 2))
        for rank in pair:
            program[rank].append((pair[0], pair[1]))
    for own in program:
        for _ in range(random.randint(0, 2)):
            at = random.randrange(len(own) + 1)
            own[at : at + 2] = own[at : at + 2][::-1]
    coordinator, ended = issued(program)
    left = left_by_hand(program)
    assert len(ended) == sum(map(len, program)) - left
    assert bool(coordinator.describe_circle()) == (left > 0)


def test_a_circle_of_sends_is_named_and_receives_on_a_stream_of_their_own_end_it() -> None:
    """PyTorch's deferred receives of four interleaved stages: each sends on before it takes what is sent to it."""
    program = [[(rank, (rank + 1) % 4), ((rank + 3) % 4, rank)] for rank in range(4)]
    coordinator, _ = issued(program)
    assert coordinator.describe_circle() == (
        "deadlock, none comes to its next call: rank 0 sends 8.0 MB to rank 1, rank 1 sends 8.0 MB to rank 2, "
        "rank 2 sends 8.0 MB to rank 3, rank 3 sends 8.0 MB to rank 0"
    )
    coordinator, ended = issued(program, streams=True)
    assert coordinator.describe_circle() == ""
    assert len(ended) == 8


def test_who_waits_for_a_call_that_is_still_to_come_is_in_no_circle() -> None:
    coordinator, _ = issued([[(0, 1)], [(1, 2)], [(0, 2)]])
    assert coordinator.describe_circle() == ""
