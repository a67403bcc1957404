"""Exchanges of a pipeline's stages: which transfers Megatron-LM makes at once, and which of them a stage waits for.

Source: megatron-core 0.16.1, `core/pipeline_parallel/schedules.py` and `p2p_communication.py`, against whose schedules
`benchmarks/megatron_exchanges.py` holds the order below. Without interleaving a stage waits for every exchange: what it
sends to a neighbour and receives from it travels at once. Interleaved, an exchange has both directions of both
neighbours; with `overlap_p2p_comm` only those of warm-up and flush are waited for (`overlap_p2p_comm_warmup_flush`,
off by default, lets go on too).

A transfer begins when both its ends have reached their exchange. Those of one exchange that go the same way, as between
two stages, take turns; others have a link's direction to themselves.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from lagom_overlap.sim.pipeline import Pass, SlotRun, SlotTimes
from lagom_overlap.workload.parallel import ParallelLayout, PipelineSchedule, Slot, stage_slots
from lagom_overlap.workload.parallel.schedule import num_warm_up


@dataclass(frozen=True, slots=True)
class StageExchange:
    """Results that a stage sends or receives at once, by the passes that made them; it `waits` or goes on."""

    passes: tuple[Pass, ...]
    waits: bool = True


Program = tuple[Slot | StageExchange, ...]
"""What a stage does, in order."""


@lru_cache(maxsize=64)  # as `stage_slots`
def stage_program(layout: ParallelLayout, rank: int) -> Program:
    """The slots and exchanges of a stage; exchanges of nothing are left out."""
    slots = stage_slots(layout, rank)
    is_interleaved = layout.schedule is PipelineSchedule.INTERLEAVED
    make = _interleaved if is_interleaved else _plain
    steps = make(_Stage(layout, rank, slots))
    return tuple(step for step in steps if isinstance(step, Slot) or step.passes)


class _Stage:
    """A stage's forwards and backwards by their number, and what it sends and receives about them."""

    def __init__(self, layout: ParallelLayout, rank: int, slots: Sequence[Slot]) -> None:
        self._layout, self._rank = layout, rank
        self.slots = {way: [slot for slot in slots if slot.forward is way] for way in (True, False)}
        self.num = len(self.slots[True])
        self.num_warm_up = num_warm_up(layout, rank)
        self.goes_on = layout.overlap_p2p

    def made(self, number: int, *, forward: bool) -> tuple[Pass, ...]:
        """The result that goes to a neighbour; nothing from the last chunk, nor from the first one's backward."""
        own = Pass.of(self.slots[forward][number], self._rank, self._layout.pipeline)
        return (own,) if 0 <= own.after().chunk < self._layout.num_chunks else ()

    def needed(self, number: int, *, forward: bool) -> tuple[Pass, ...]:
        """The result that a slot of its own needs from a neighbour."""
        own = Pass.of(self.slots[forward][number], self._rank, self._layout.pipeline)
        before = own.before()
        return (before,) if 0 <= before.chunk < self._layout.num_chunks else ()

    def next_needed(self, number: int, *, forward: bool) -> tuple[Pass, ...]:
        """What it receives after a slot (`recv_tensor_from_previous_stage`): what the next slot needs.

        The stage that leads, the first one in forward and the last in backward, receives what the other end of the
        pipeline makes meanwhile, which is that many slots behind.
        """
        behind = self._layout.pipeline - 1
        if self._rank != (0 if forward else behind):
            return self.needed(number + 1, forward=forward)
        if number < behind:
            return ()
        return self._other_end.made(number - behind, forward=forward)

    @cached_property
    def _other_end(self) -> "_Stage":
        rank = self._layout.pipeline - 1 - self._rank
        return _Stage(self._layout, rank, stage_slots(self._layout, rank))


def _plain(stage: _Stage) -> Iterator[Slot | StageExchange]:
    """1F1B: with the next stage around a forward, with the one before around a backward."""
    num, warm_up = stage.num, stage.num_warm_up
    for number in range(warm_up):
        yield StageExchange(stage.needed(number, forward=True))
        yield stage.slots[True][number]
        yield StageExchange(stage.made(number, forward=True))
    if warm_up < num:
        yield StageExchange(stage.needed(warm_up, forward=True))
    for number in range(warm_up, num):
        done = number - warm_up
        yield stage.slots[True][number]
        yield StageExchange((*stage.made(number, forward=True), *stage.needed(done, forward=False)))
        yield stage.slots[False][done]
        following = () if number == num - 1 else stage.needed(number + 1, forward=True)
        yield StageExchange((*stage.made(done, forward=False), *following))
    for number in range(num - warm_up, num):
        yield StageExchange(stage.needed(number, forward=False))
        yield stage.slots[False][number]
        yield StageExchange(stage.made(number, forward=False))


def _interleaved(stage: _Stage) -> Iterator[Slot | StageExchange]:
    """Behind every slot of the warm-up and the flush, and behind every pair in between."""
    num, warm_up = stage.num, stage.num_warm_up
    yield StageExchange(stage.needed(0, forward=True))
    for number in range(warm_up):
        yield stage.slots[True][number]
        following = () if number == num - 1 else stage.next_needed(number, forward=True)
        forwards, first = (*stage.made(number, forward=True), *following), stage.needed(0, forward=False)
        if number < warm_up - 1 or warm_up == num:
            yield StageExchange(forwards)
        elif stage.goes_on:
            yield StageExchange(forwards)
            yield StageExchange(first, waits=False)
        else:
            yield StageExchange((*forwards, *first))
    if warm_up == num:
        yield StageExchange(stage.needed(0, forward=False))
    for number in range(warm_up, num):
        done = number - warm_up
        following = () if number == num - 1 else stage.next_needed(number, forward=True)
        forwards = (*stage.made(number, forward=True), *following)
        backwards = (*stage.made(done, forward=False), *stage.next_needed(done, forward=False))
        yield stage.slots[True][number]
        if stage.goes_on:
            yield StageExchange(forwards, waits=False)
        yield stage.slots[False][done]
        yield StageExchange(backwards, waits=False) if stage.goes_on else StageExchange((*forwards, *backwards))
    for number in range(num - warm_up, num):
        yield stage.slots[False][number]
        following = () if number == num - 1 else stage.next_needed(number, forward=False)
        yield StageExchange((*stage.made(number, forward=False), *following))


def run_programs(programs: Sequence[Program], times: Sequence[SlotTimes]) -> tuple[tuple[SlotRun, ...], ...]:
    """Who runs when, per stage; `programs` and `times`, without what sending takes, are by stage.

    Raises:
        ValueError: if the programs wait for each other in a circle.
    """
    num_stages = len(programs)
    first_ends: dict[Pass, float] = {}  # when the first of a transfer's two ends has reached it
    arrived: dict[Pass, float] = {}
    clocks, places, is_open = [0.0] * num_stages, [0] * num_stages, [False] * num_stages
    runs: list[list[SlotRun]] = [[] for _ in range(num_stages)]
    last = num_stages * len(times[0].forward_s) - 1
    ready = list(range(num_stages))
    while ready:
        rank = ready.pop()
        while places[rank] < len(programs[rank]):
            step = programs[rank][places[rank]]
            if isinstance(step, Slot):
                now = Pass.of(step, rank, num_stages)
                is_own = now.chunk == (0 if now.forward else last)  # begins here, or turns round
                if not is_own and now.before() not in arrived:
                    break
                start_s = clocks[rank] if is_own else max(clocks[rank], arrived[now.before()])
                clocks[rank] = start_s + times[rank].of(step)
                runs[rank].append(SlotRun(rank, step, start_s, clocks[rank]))
            else:
                if not is_open[rank]:
                    is_open[rank] = True
                    ends_s = _ends_s(step, clocks[rank], times, first_ends)
                    arrived |= ends_s
                    stages = (num % num_stages for each in ends_s for num in (each.chunk, each.after().chunk))
                    ready += (stage for stage in stages if stage != rank)
                if step.waits:
                    if not all(each in arrived for each in step.passes):
                        break
                    clocks[rank] = max(clocks[rank], *(arrived[each] for each in step.passes))
                is_open[rank] = False
            places[rank] += 1
    if any(place < len(program) for place, program in zip(places, programs, strict=True)):
        raise ValueError("the stages' programs wait for each other in a circle")
    return tuple(map(tuple, runs))


def _ends_s(
    step: StageExchange, now_s: float, times: Sequence[SlotTimes], first_ends: dict[Pass, float]
) -> dict[Pass, float]:
    """When those transfers of an exchange arrive whose other end is there, too; the others' first end is here."""
    num_stages = len(times)
    ways = [(each.chunk % num_stages, each.after().chunk % num_stages) for each in step.passes]
    ends_s = {}
    for each, way in zip(step.passes, ways, strict=True):
        if each in first_ends:
            ends_s[each] = max(first_ends[each], now_s) + ways.count(way) * times[way[0]].transfer_s
        else:
            first_ends[each] = now_s
    return ends_s
