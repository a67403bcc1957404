"""The event simulation against one written a second time in exact fractions, and closed forms by hand."""

import ctypes
import random
from array import array
from collections.abc import Sequence
from fractions import Fraction

import pytest

from lagom_overlap.sim import core
from lagom_overlap.sim.core import EventGraph, Holds


def exact(
    waits: Sequence[Sequence[int]],
    kinds: Sequence[int],
    set_times: core.SetTimes,
    behind: dict[tuple[int, int], Fraction],
) -> list[Fraction]:
    """The end of every operator: progress of each in fractions, whatever happens next found by trying all."""
    left = [Fraction(1)] * len(waits)
    ends: dict[int, Fraction] = {}
    begun: dict[int, tuple[int, Fraction] | None] = {}
    now = Fraction(0)
    while len(ends) < len(waits):
        running = [n for n, earlier in enumerate(waits) if n not in ends and all(e in ends for e in earlier)]
        running.sort(key=lambda n: (kinds[n] < 0, n))
        comp = next((n for n in running if kinds[n] < 0), None)
        for n in running:
            if n not in begun:
                share = None if comp is None or kinds[n] < 0 else behind.get((kinds[n], kinds[comp]))
                begun[n] = None if share is None else (comp, share)

        def waiting(n: int) -> bool:
            held = begun[n]
            return held is not None and held[0] not in ends and left[held[0]] > held[1]

        active = [n for n in running if not waiting(n)]
        times = dict(zip(active, map(Fraction, set_times(tuple(kinds[n] for n in active))), strict=True))
        steps = [left[n] * times[n] for n in active]
        steps += [(left[begun[n][0]] - begun[n][1]) * times[begun[n][0]] for n in running if n not in active]
        step = min(steps)
        now += step
        for n in active:
            left[n] -= step / times[n]
            if not left[n]:
                ends[n] = now
    return [ends[n] for n in range(len(waits))]


def drawn_times(seed: int) -> core.SetTimes:
    """Whole seconds of an operator by its set: a pure function, in 1/64 so that ties happen."""

    def times(kinds: tuple[int, ...]) -> list[float]:
        return [random.Random(f"{seed} {kinds} {place}").randint(1, 192) / 64 for place in range(len(kinds))]

    return times


@pytest.mark.parametrize("seed", range(60))
def test_any_graph_runs_as_in_exact_fractions(seed: int) -> None:
    rng = random.Random(seed)
    num = rng.randint(1, 14)
    waits = [rng.sample(range(n), min(n, rng.randint(0, 2))) for n in range(num)]
    kinds = [rng.randint(-2, 2) for _ in range(num)]
    times = drawn_times(seed)
    _, ends = EventGraph(waits, times).run(array("i", kinds))
    assert list(ends) == pytest.approx([float(end) for end in exact(waits, kinds, times, {})], rel=1e-9)


@pytest.mark.parametrize("seed", range(60))
def test_collectives_behind_a_computation_begin_where_its_share_is_done(seed: int) -> None:
    """Two streams, as groups have them; every pair of kinds has a share of its own."""
    rng = random.Random(seed)
    num_comms, num_comps = rng.randint(1, 4), rng.randint(1, 6)
    waits = [[n - 1] if n else [] for n in range(num_comms)]
    waits += [[num_comms + n - 1] if n else [] for n in range(num_comps)]
    kinds = [rng.randint(0, 1) for _ in range(num_comms)] + [rng.randint(-2, -1) for _ in range(num_comps)]
    shares = {(comm, -1 - comp): Fraction(rng.randint(0, 4), 4) for comm in (0, 1) for comp in (0, 1)}
    holds = Holds(2)
    for comm in (0, 1):
        holds.add_comm([(float(shares[comm, -1 - comp]),) * 2 for comp in (0, 1)])
    times = drawn_times(seed)
    _, ends = EventGraph(waits, times).run(array("i", kinds), holds)
    assert list(ends) == pytest.approx([float(end) for end in exact(waits, kinds, times, shares)], rel=1e-9)


def test_a_collective_issued_with_a_computation_and_one_issued_within_it_wait_for_shares_of_their_own() -> None:
    """A computation of 4 s; 1 s each: at its start until 3/4 are left, within it until 1/4 is."""
    holds = Holds(1)
    holds.add_comm([(0.75, 0.25)])
    graph = EventGraph([[], [], [0]], lambda kinds: [1.0 if kind >= 0 else 4.0 for kind in kinds])
    starts, ends = graph.run(array("i", [0, -1, 0]), holds)
    assert list(starts) == [0.0, 0.0, 2.0]
    assert list(ends) == [2.0, 4.0, 4.0]


def test_a_set_is_asked_for_once_however_many_there_are() -> None:
    asked: list[tuple[int, ...]] = []

    def times(kinds: tuple[int, ...]) -> list[float]:
        asked.append(kinds)
        return [1.0 + abs(kind) for kind in kinds]

    graph = EventGraph([[], []], times)
    for _ in range(2):
        for first in range(70):
            for second in range(70):
                _, ends = graph.run(array("i", [first, -1 - second]))
                assert list(ends) == pytest.approx([1.0 + first, 2.0 + second])
    assert len(asked) == len(set(asked)) > 70 * 70


def test_the_structures_are_as_large_as_the_library_s() -> None:
    """The library asserts the same at compile time."""
    assert ctypes.sizeof(core._Graph) == 32
    assert ctypes.sizeof(core._Holds) == 24


def test_an_empty_graph_has_no_ends() -> None:
    assert list(EventGraph([], lambda kinds: []).run(array("i"))[1]) == []
