"""The clock against cases worked by hand, a simulation in small steps, and the event simulation of `lagom simulate`."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from random import Random

import pytest

from lagom_emulate.clock import INSTANT, Clock, Operation, Work
from lagom_overlap.sim.core import EventGraph

KERNEL, LONG_KERNEL = Work(kind=-1), Work(kind=-2)


def collective(num_members: int) -> Work:
    return Work(kind=0, held_kind=1, num_members=num_members)


def set_times(kinds: tuple[int, ...]) -> list[float]:
    """Kernels take 100 (kind -1) or 300 ns, half as long again beside a moving collective, a tenth beside a held one.

    A collective takes 200 ns, twice that beside a kernel.
    """
    computing = sum(kind < 0 for kind in kinds)
    stretch = 1.0 + 0.5 * kinds.count(0) + 0.1 * kinds.count(1)
    alone = {-1: 100.0, -2: 300.0}
    return [alone[kind] * stretch * computing if kind < 0 else 200.0 * (2.0 if computing else 1.0) for kind in kinds]


@dataclass
class Given:
    """An operation for a test: owner (and GPU), stream, work, issue, number of the one it waits for."""

    owner: int
    stream: int
    work: Work
    issue_ns: float = 0.0
    after: int | None = None
    instance: tuple[str, int] | None = None
    scale: float = 1.0


def run(given: Sequence[Given]) -> list[tuple[float, float]]:
    clock = Clock(set_times)
    operations = [
        Operation(g.owner, number + 1, g.owner, g.work, g.issue_ns, g.scale, stream=g.stream)
        for number, g in enumerate(given)
    ]
    for g, operation in zip(given, operations, strict=True):
        after = None if g.after is None else operations[g.after]
        clock.submit(operation, after=after, instance=g.instance)
    while clock.next_ns() < inf:
        clock.step()
    return [(operation.start_ns, operation.end_ns) for operation in operations]


def test_operations_of_a_stream_follow_each_other_and_their_issue() -> None:
    assert run([Given(0, 0, KERNEL), Given(0, 0, KERNEL, issue_ns=50), Given(0, 0, KERNEL, issue_ns=500)]) == [
        (0, 100),
        (100, 200),
        (500, 600),
    ]


def test_what_a_process_had_queued_behind_its_kernel_does_not_run_once_it_has_died() -> None:
    """Its member of a collective never comes, and the peer's kernel waits for it, as on GPUs."""
    clock = Clock(set_times)
    kernel, member, peer = (
        Operation(0, 1, 0, KERNEL, 0.0),
        Operation(0, 2, 0, collective(2), 0.0),
        Operation(1, 1, 1, collective(2), 0.0),
    )
    clock.submit(kernel)
    clock.submit(member, instance=("dp", 0))
    clock.submit(peer, instance=("dp", 0))
    assert clock.step() == []
    assert (kernel.start_ns, peer.start_ns) == (0.0, 0.0)
    clock.leave(0)
    while clock.next_ns() < inf:
        clock.step()
    assert kernel.end_ns == 100.0
    assert (member.start_ns, peer.has_ended, clock.missing(peer)) == (-1.0, False, 1)


def test_kernels_on_two_streams_take_turns() -> None:
    # Both at half rate until 200; the long one has done 100 of its 300 then and goes on alone.
    assert run([Given(0, 0, KERNEL), Given(0, 1, LONG_KERNEL)]) == [(0, 200), (0, 400)]


def test_a_wait_for_another_stream_holds_what_follows() -> None:
    given = [Given(0, 0, KERNEL), Given(0, 1, INSTANT, after=0), Given(0, 1, KERNEL)]
    assert run(given) == [(0, 100), (100, 100), (100, 200)]


def test_a_copy_takes_its_time_whatever_runs() -> None:
    assert run([Given(0, 0, LONG_KERNEL), Given(0, 1, Work(fixed_ns=120.0), issue_ns=10)]) == [(0, 300), (10, 130)]


def test_a_collective_holds_its_sms_while_it_waits_and_ends_at_once_on_all_members() -> None:
    both = collective(2)
    given = [
        Given(0, 1, both, instance=("c", 0)),  # alone from 0; the other member comes at 100
        Given(0, 0, LONG_KERNEL),  # beside the held one: 330 as a whole, 100/330 done at 100
        Given(1, 0, KERNEL),
        Given(1, 0, both, instance=("c", 0)),
    ]
    # From 100 on the kernel takes 450 as a whole, the collective 400 on GPU 0, which is the slower member.
    kernel_end = 100 + (1 - 100 / 330) * 450
    end = kernel_end + (1 - (kernel_end - 100) / 400) * 200
    found = run(given)
    assert found[1] == (0, pytest.approx(kernel_end))
    assert found[0] == (0, pytest.approx(end))
    assert found[3] == (100, found[0][1])


def test_a_straggler_stretches_its_own_work_only() -> None:
    assert run([Given(0, 0, KERNEL, scale=1.5), Given(1, 0, KERNEL)]) == [(0, 150), (0, 100)]


def test_collectives_of_one_communicator_are_told_apart_by_their_number() -> None:
    both = collective(2)
    given = [Given(owner, 0, both, instance=("c", number)) for owner in (0, 1) for number in (0, 1)]
    assert run(given) == [(0, 200), (200, 400)] * 2


@pytest.mark.parametrize("seed", range(20))
def test_a_graph_of_one_gpu_is_the_event_simulation_of_lagom_simulate(seed: int) -> None:
    random = Random(seed)
    num_streams, given, waits, last = 3, [], [], {}
    for number in range(40):
        stream = random.randrange(num_streams)
        after = random.randrange(number) if number and random.random() < 0.5 else None
        instance = None
        work = random.choice((KERNEL, LONG_KERNEL))
        if stream == 2:
            work, instance = collective(1), ("c", number)
        given.append(Given(0, stream, work, after=after, instance=instance))
        waits.append(sorted({n for n in (last.get(stream), after) if n is not None}))
        last[stream] = number

    def in_key_order(kinds: tuple[int, ...]) -> list[float]:
        times = dict(zip(sorted(kinds), set_times(tuple(sorted(kinds))), strict=True))
        return [times[kind] for kind in kinds]

    from array import array

    starts, ends = EventGraph(waits, in_key_order).run(array("i", [g.work.kind for g in given]))
    assert run(given) == [
        (pytest.approx(s, abs=1e-6), pytest.approx(e, abs=1e-6)) for s, e in zip(starts, ends, strict=True)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_several_gpus_agree_with_a_simulation_in_small_steps(seed: int) -> None:
    given = random_job(Random(seed), num_gpus=3, num_operations=24)
    for (start, end), (near_start, near_end) in zip(run(given), in_small_steps(given, 0.25), strict=True):
        assert start == pytest.approx(near_start, abs=12)
        assert end == pytest.approx(near_end, abs=12)


def random_job(random: Random, num_gpus: int, num_operations: int) -> list[Given]:
    """Kernels on two streams per GPU, collectives on a third, in one order on all GPUs."""
    given, numbers, seen = [], iter(range(1000)), {gpu: [] for gpu in range(num_gpus)}
    while len(given) < num_operations:
        if random.random() < 0.3:
            number = next(numbers)
            for gpu in range(num_gpus):
                after = random.choice(seen[gpu]) if seen[gpu] and random.random() < 0.7 else None
                seen[gpu].append(len(given))
                given.append(Given(gpu, 2, collective(num_gpus), 10.0 * gpu, after, ("c", number)))
            continue
        gpu = random.randrange(num_gpus)
        after = random.choice(seen[gpu]) if seen[gpu] and random.random() < 0.3 else None
        seen[gpu].append(len(given))
        issue_ns = random.choice((0.0, 70.0, 400.0))
        given.append(Given(gpu, random.randrange(2), random.choice((KERNEL, LONG_KERNEL)), issue_ns, after))
    return given


def in_small_steps(given: Sequence[Given], step_ns: float) -> list[tuple[float, float]]:
    """The same rules, written down again without events: every running operation moves by a small step at a time."""
    starts, ends, left = [-1.0] * len(given), [-1.0] * len(given), [g.scale for g in given]
    before = [
        max((m for m in range(n) if (given[m].owner, given[m].stream) == (g.owner, g.stream)), default=None)
        for n, g in enumerate(given)
    ]
    members = [[m for m, other in enumerate(given) if other.instance == g.instance] for g in given]
    now = 0.0
    while min(ends) < 0.0:
        for n, g in enumerate(given):
            earlier = [m for m in (before[n], g.after) if m is not None]
            if starts[n] < 0.0 and g.issue_ns <= now and all(ends[m] >= 0.0 for m in earlier):
                starts[n] = now
        rates = {}
        for gpu in {g.owner for g in given}:
            active = [n for n, g in enumerate(given) if g.owner == gpu and starts[n] >= 0.0 > ends[n]]
            held = {n for n in active if given[n].instance and any(starts[m] < 0.0 for m in members[n])}
            kinds = sorted((1 if n in held else given[n].work.kind, n) for n in active)
            times = set_times(tuple(kind for kind, _ in kinds))
            rates |= {n: 1.0 / t for (_, n), t in zip(kinds, times, strict=True) if n not in held}
        now += step_ns
        for n in rates:
            same = members[n] if given[n].instance else [n]
            left[n] -= step_ns * min(rates[m] for m in same)
        for n in rates:
            if left[n] <= 1e-9:
                ends[n] = now
    return list(zip(starts, ends, strict=True))
