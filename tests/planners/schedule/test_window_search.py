"""Window search against enumeration, and against itself with the same seed."""

import threading
from random import Random

from random_graphs import random_graph, shortest_by_enumeration

from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.schedule import Schedule, TaskGraph, check, lower_bound
from lagom_overlap.planners.schedule.generation import Kind, ScheduleGeneration
from lagom_overlap.planners.schedule.incumbent import Incumbent
from lagom_overlap.planners.schedule.window_search import WindowSearch, race


def _random_schedule(graph: TaskGraph, seed: int) -> Schedule:
    return ScheduleGeneration(graph).schedule(
        Kind.SERIAL, [Random(f"{seed} {task}").random() for task in range(len(graph))]
    )


def test_sweeps_in_both_directions_keep_every_arc_and_never_lengthen() -> None:
    for seed in range(40):
        graph = random_graph(Random(seed), 2 + seed * 5, 1 + seed % 3)
        search, schedule = WindowSearch(graph), _random_schedule(graph, seed)
        for number in range(6):
            made = search.swept(
                schedule,
                size=3 + seed % 30,
                num_tries=20,
                seed=number,
                deadline=Deadline(3000.0),
                is_backward=number % 2 == 1,
            )
            check(graph, made)
            assert made.makespan <= schedule.makespan
            schedule = made


def test_a_window_as_long_as_the_graph_finds_the_shortest_schedule_of_most_small_graphs() -> None:
    hits = 0
    for seed in range(40):
        graph = random_graph(Random(seed), 8)
        made = WindowSearch(graph).swept(
            _random_schedule(graph, seed), size=8, num_tries=2000, seed=3, deadline=Deadline(3000.0)
        )
        shortest = shortest_by_enumeration(graph)
        assert made.makespan >= shortest
        hits += made.makespan == shortest
    assert hits >= 39


def test_windows_shorten_an_order_of_many_of_them() -> None:
    graph = random_graph(Random(1), 600, 2)
    worst = _random_schedule(graph, 0)
    made = WindowSearch(graph).swept(worst, size=60, num_tries=100, seed=0, deadline=Deadline(3000.0))
    assert made.makespan < worst.makespan


def test_a_race_offers_legal_schedules_and_is_the_same_for_the_same_seed() -> None:
    graph = random_graph(Random(5), 300, 3)
    schedules = [_random_schedule(graph, seed) for seed in range(6)]
    found = []
    for _ in range(2):
        incumbent = Incumbent(lower_bound(graph), Deadline(3000.0))
        race(graph, schedules, incumbent, deadline=incumbent.deadline, seed=4)
        check(graph, incumbent.best)
        found.append(incumbent.best)
    assert found[0] == found[1]
    assert found[0].makespan <= min(schedule.makespan for schedule in schedules)


def test_a_race_without_time_changes_nothing() -> None:
    graph = random_graph(Random(2), 50)
    first = _random_schedule(graph, 0)
    incumbent = Incumbent(1, Deadline(-1.0))
    incumbent.offer(first, "first")
    race(graph, [first], incumbent, deadline=incumbent.deadline)
    assert incumbent.best == first


def test_a_sweep_that_is_stopped_ends_with_what_it_has() -> None:
    graph = random_graph(Random(3), 3000, 2)
    search, schedule = WindowSearch(graph), _random_schedule(graph, 0)
    timer = threading.Timer(0.05, search.stop)
    timer.start()
    made = search.swept(schedule, size=500, num_tries=1_000_000, seed=0, deadline=Deadline(1e6))
    timer.join()
    check(graph, made)
    assert made.makespan <= schedule.makespan


def test_graphs_of_one_task_or_none_are_left_alone() -> None:
    for num in (0, 1):
        graph = TaskGraph(
            names=("a",) * num, ticks=(3,) * num, resource=(0,) * num, preds=((),) * num, resources=("c",), tick_s=1.0
        )
        schedule = Schedule((0,) * num, 3 * num)
        assert WindowSearch(graph).swept(schedule, size=60, num_tries=5, seed=0, deadline=Deadline(1.0)) == schedule
