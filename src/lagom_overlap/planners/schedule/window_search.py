"""Window search: orders of issue improved part by part, several at a time, the least promising given up first.

A sweep (csrc/lagom_window_search.c) goes over an order in windows and tries some hundred schedules of each, the rest of
the order kept: never worse (spec, planners section 1.3; there by CP-SAT, a thousand times slower). One sweep goes along
the arcs, the next against them, which moves idle time the other way. Which start ends shortest is not known at first:
all of them run with few tries, half of them go on with more. They are ranked by what they would reach if they gained as
much again.
"""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from lagom_overlap.planners.deadline import Deadline, is_interrupted
from lagom_overlap.planners.schedule.generation import ScheduleGeneration
from lagom_overlap.planners.schedule.graph import Schedule, TaskGraph
from lagom_overlap.planners.schedule.incumbent import Incumbent
from lagom_overlap.planners.schedule.library import GraphArrays, library, schedule_of

NUM_THREADS: Final = 2
"""Windows searched at once. Bounds what planning takes of a machine."""
_LOOK_S: Final = 0.05
"""Seconds between two looks at whether the user wants to end."""
_SIZES: Final = (120, 120, 60, 240)
"""Tasks of a window, round by round."""
_ROUNDS: Final = ((8, 40), (4, 100), (2, 300))
"""How many orders run in a round, and the tries per window; the last one is repeated, with more tries when dull."""
_LEAST_GAIN: Final = 1e-5
"""Rounds that shorten no order by more than this share are dull."""
_MAX_DULL: Final = 4
"""Rounds without a better order before the race ends."""

Made = TypeVar("Made")


class WindowSearch:
    """Sweeps over schedules of one graph; `stop` ends the sweeps that run."""

    def __init__(self, graph: TaskGraph) -> None:
        self._arrays = GraphArrays(graph)
        self._num = len(graph)
        self._stop = ctypes.c_int(0)

    def stop(self) -> None:
        """Ends sweeps, from any thread."""
        self._stop.value = 1

    def swept(
        self, schedule: Schedule, *, size: int, num_tries: int, seed: int, deadline: Deadline, is_backward: bool = False
    ) -> Schedule:
        """The schedule after one sweep of windows of `size` tasks: as short or shorter; so far as it came in time.

        The first windows are shorter, by an amount that the seed says, so that windows begin elsewhere in every sweep.
        """
        starts = np.array(schedule.starts, np.int64)
        if self._num < 2:
            return schedule
        ends = starts + self._arrays.ticks
        order = np.lexsort((-starts, -ends) if is_backward else (ends, starts)).astype(np.int32)
        size = min(size, self._num)
        graph = self._arrays.backward if is_backward else self._arrays.forward
        swept_order = np.zeros(self._num, np.int64)
        steps = ctypes.c_int64(deadline.left_steps)
        makespan = library().lls_sweep(
            *(graph, size, max(1, size * (1 + seed % 4) // 4), num_tries, seed, deadline.clock_s),
            *(ctypes.addressof(each) for each in (steps, self._stop)),
            *(order.ctypes.data, swept_order.ctypes.data),
        )
        deadline.spend(steps.value)
        return schedule_of(makespan, makespan - swept_order - self._arrays.ticks if is_backward else swept_order)


@dataclass(slots=True)
class _Runner:
    """An order in the race, until when it runs in this round, and what the last round gained (ticks)."""

    schedule: Schedule
    ends: Deadline
    gain: int = 0

    @property
    def promise(self) -> int:
        """What it would reach if it gained as much again."""
        return self.schedule.makespan - self.gain


def race(
    graph: TaskGraph, schedules: Sequence[Schedule], incumbent: Incumbent, *, deadline: Deadline, seed: int = 0
) -> None:
    """Sweeps over the schedules until the target, the deadline, or until nothing is gained any more.

    Offers each round's shortest. The same for the same seed, unless the clock ends it.
    """
    search, generation = WindowSearch(graph), ScheduleGeneration(graph)
    distinct = {schedule.makespan: schedule for schedule in reversed(schedules)}
    runners = [_Runner(distinct[makespan], deadline) for makespan in sorted(distinct)]
    dull = number = 0
    while runners and dull < _MAX_DULL and not incumbent.is_done and deadline.left_s > 0:
        num_runners, num_tries = _ROUNDS[min(number, len(_ROUNDS) - 1)]
        runners = sorted(runners, key=lambda runner: runner.promise)[:num_runners]
        num_tries *= 1 + 2 * dull
        for runner, ends in zip(runners, deadline.parts(len(runners)), strict=True):
            runner.ends = ends

        def run(runner: _Runner, number: int = number, num_tries: int = num_tries) -> Schedule:
            schedule = runner.schedule
            for is_backward in (False, True):
                schedule = search.swept(
                    schedule,
                    size=_SIZES[number % len(_SIZES)],
                    num_tries=num_tries,
                    seed=seed + 2 * number + is_backward,
                    deadline=runner.ends,
                    is_backward=is_backward,
                )
            return generation.improved(schedule, max_rounds=2, deadline=runner.ends)

        results = run_concurrently(run, runners, search.stop)
        deadline.join([runner.ends for runner in runners])
        dull += 1
        for runner, schedule in zip(runners, results, strict=True):
            runner.gain = runner.schedule.makespan - schedule.makespan
            runner.schedule = schedule
            if runner.gain > _LEAST_GAIN * schedule.makespan:
                dull = 0
            incumbent.offer(schedule, "window search")
        number += 1


def run_concurrently(work: Callable[[_Runner], Made], items: Sequence[_Runner], stop: Callable[[], None]) -> list[Made]:
    """The work of all items on threads, in their order; `stop` is called when the user wants to end."""
    with ThreadPoolExecutor(max_workers=NUM_THREADS) as pool:
        futures: list[Future[Made]] = [pool.submit(work, item) for item in items]
        try:
            while wait_for(futures, timeout=_LOOK_S).not_done:
                if is_interrupted():
                    stop()
        except BaseException:
            stop()
            raise
        return [future.result() for future in futures]
