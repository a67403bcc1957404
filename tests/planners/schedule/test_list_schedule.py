"""The C library against the same algorithms in Python: equal schedules, task by task."""

import sys
import threading
from pathlib import Path
from random import Random

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # list_schedule_oracle

import list_schedule_oracle as oracle
from random_graphs import random_graph

from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.schedule import Schedule, TaskGraph
from lagom_overlap.planners.schedule.generation import Kind, ScheduleGeneration

GENERATORS = {Kind.SERIAL: oracle.serial, Kind.PARALLEL: oracle.parallel}


def _priorities(random: Random, num: int) -> list[float]:
    """Often equal, negative, huge, or a zero of either sign."""
    return [random.choice((random.gauss(0, 1), random.randint(-2, 2), -0.0, 1e300)) for _ in range(num)]


def test_schedules_are_those_of_the_python_version() -> None:
    for seed in range(200):
        random = Random(seed)
        graph = random_graph(random, random.randint(1, 90), 1 + seed % 3)
        priority = _priorities(random, len(graph))
        for kind, generator in GENERATORS.items():
            made = ScheduleGeneration(graph).schedule(kind, priority)
            assert made == generator(oracle.Side.forward(graph), priority)


def test_improvement_is_that_of_the_python_version() -> None:
    for seed in range(60):
        random = Random(seed)
        graph = random_graph(random, random.randint(1, 90), 1 + seed % 3)
        forward, backward = oracle.Side.forward(graph), oracle.Side.backward(graph)
        first = oracle.serial(forward, _priorities(random, len(graph)))
        for ahead, generator in GENERATORS.items():
            for back, other in GENERATORS.items():
                expected = oracle.improved(first, forward, backward, generators=(generator, other), max_rounds=7)
                assert ScheduleGeneration(graph).improved(first, (ahead, back), max_rounds=7) == expected


def test_arcs_against_program_order_are_kept() -> None:
    made = random_graph(Random(3), 40)
    alone = [task for task in range(40) if not made.preds[task] and not made.succs[task]]
    last = [task for task in range(20, 40) if task not in alone and not made.succs[task]]
    graph = made.with_arcs([(last[0], alone[0]), (last[1], alone[0])])
    assert graph.topological != tuple(range(40))
    assert ScheduleGeneration(graph).schedule(Kind.PARALLEL, range(40)) == oracle.parallel(
        oracle.Side.forward(graph), range(40)
    )


def test_improvement_ends_at_the_target_and_at_the_deadline() -> None:
    graph = random_graph(Random(1), 60)
    generation = ScheduleGeneration(graph)
    late = Schedule(tuple(start + 1000 for start in generation.schedule(Kind.SERIAL, range(60)).starts), 0)
    makespan = max(start + ticks for start, ticks in zip(late.starts, graph.ticks, strict=True))
    assert generation.improved(late, target=makespan).starts == late.starts
    assert generation.improved(late, deadline=Deadline(-1.0)).starts == late.starts
    assert generation.improved(late).makespan < makespan


def test_threads_share_a_graph() -> None:
    graph = random_graph(Random(2), 300, 3)
    generation = ScheduleGeneration(graph)
    wanted = [generation.schedule(Kind(seed % 2), _priorities(Random(seed), 300)) for seed in range(40)]
    found: dict[int, Schedule] = {}

    def work(first: int) -> None:
        for seed in range(first, 40, 2):
            found[seed] = generation.schedule(Kind(seed % 2), _priorities(Random(seed), 300))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[seed] for seed in range(40)] == wanted


def test_priorities_that_are_no_numbers_or_too_few_are_refused() -> None:
    generation = ScheduleGeneration(random_graph(Random(0), 3))
    for wrong in ([1.0, 2.0], [1.0, float("nan"), 2.0]):
        with pytest.raises(ValueError, match="must be 3 numbers"):
            generation.schedule(Kind.SERIAL, wrong)


def test_a_graph_without_tasks_has_an_empty_schedule() -> None:
    empty = TaskGraph(names=(), ticks=(), resource=(), preds=(), resources=("compute",), tick_s=1.0)
    generation = ScheduleGeneration(empty)
    assert generation.improved(generation.schedule(Kind.SERIAL, [])) == Schedule((), 0)
