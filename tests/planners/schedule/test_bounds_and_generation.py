from itertools import permutations
from random import Random

import pytest
from random_graphs import RESOURCES, random_graph, shortest_by_enumeration

from lagom_overlap.errors import JobError
from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.schedule import (
    Schedule,
    TaskGraph,
    bounds_of,
    check,
    decode,
    lower_bound,
    overlap_of,
    simulate,
)
from lagom_overlap.planners.schedule.bounds import preemptive_one_machine
from lagom_overlap.planners.schedule.generation import Kind, ScheduleGeneration
from lagom_overlap.planners.schedule.incumbent import Incumbent, PlanProgress
from lagom_overlap.planners.schedule.portfolio import run_portfolio


def _graph(ticks: list[int], resource: list[int], preds: list[tuple[int, ...]]) -> TaskGraph:
    return TaskGraph(
        names=tuple("abcdefghij"[: len(ticks)]),
        ticks=tuple(ticks),
        resource=tuple(resource),
        preds=tuple(preds),
        resources=RESOURCES[:2],
        tick_s=1e-6,
    )


def test_a_gather_hidden_under_a_product_leaves_the_makespan_of_the_computations() -> None:
    # a(4) and b(3) compute; c(3) communicates during a, b waits for it.
    graph = _graph([4, 3, 3], [0, 0, 1], [(), (0, 2), ()])
    schedule = simulate(graph, [2, 0, 1])
    assert schedule == Schedule((0, 4, 0), 7)
    assert lower_bound(graph) == 7
    assert overlap_of(graph, schedule).exposed_s == pytest.approx(0)


def test_one_stream_for_two_links_runs_their_collectives_one_after_the_other() -> None:
    graph = TaskGraph(
        names=("intra", "inter"),
        ticks=(5, 5),
        resource=(1, 2),
        preds=((), ()),
        resources=RESOURCES,
        tick_s=1e-6,
    )
    assert simulate(graph, [0, 1]).makespan == 5
    assert simulate(graph, [0, 1], streams=[0, 0]).makespan == 10


def test_jacksons_bound_of_a_worked_example() -> None:
    # (head, ticks, tail): the second preempts nothing but waits; 0-4 first, 4-6 second, then tail 5.
    assert preemptive_one_machine([(0, 4, 1), (1, 2, 5)]) == 8
    assert preemptive_one_machine([]) == 0


def test_the_bound_never_exceeds_the_shortest_schedule_and_generators_never_undercut_it() -> None:
    for seed in range(60):
        graph = random_graph(Random(seed), 7, num_resources=1 + seed % 3)
        shortest = shortest_by_enumeration(graph)
        found = bounds_of(graph)
        assert found.best <= shortest
        assert max(found.critical_path, *found.one_machine) == found.best
        generation = ScheduleGeneration(graph)
        for kind in Kind:
            made = generation.schedule(kind, [Random(seed).random() for _ in range(7)])
            check(graph, made)
            better = generation.improved(made)
            check(graph, better)
            assert shortest <= better.makespan <= made.makespan


def test_the_portfolio_finds_the_shortest_schedule_of_most_small_graphs() -> None:
    graphs = [random_graph(Random(seed), 8) for seed in range(40)]
    shortest = [shortest_by_enumeration(graph) for graph in graphs]
    found = []
    for graph in graphs:
        incumbent = Incumbent(lower_bound(graph), Deadline(10.0))
        run_portfolio(graph, incumbent, incumbent.deadline)
        check(graph, incumbent.best)
        found.append(incumbent.best.makespan)
    assert all(f >= s for f, s in zip(found, shortest, strict=True))
    assert sum(f == s for f, s in zip(found, shortest, strict=True)) >= 36


def test_every_priority_is_offered_where_no_time_is_left() -> None:
    """On a large step making the graph may take the whole budget; the schedules are a fraction of it."""
    for seed in range(10):
        graph = random_graph(Random(seed), 60)
        incumbent = Incumbent(0, Deadline(1e-9))
        made = run_portfolio(graph, incumbent, incumbent.deadline)
        assert len(made) == 11
        assert incumbent.best.makespan == min(schedule.makespan for schedule in made)


def test_a_decoded_order_runs_like_its_schedule_or_better() -> None:
    for seed in range(40):
        graph = random_graph(Random(seed), 30, num_resources=3)
        made = ScheduleGeneration(graph).schedule(Kind.SERIAL, [Random(seed).random() for _ in range(30)])
        issued = simulate(graph, decode(graph, made))
        check(graph, issued)
        assert issued.makespan <= made.makespan


def test_a_communication_that_starts_within_a_computation_is_issued_before_it() -> None:
    graph = _graph([2, 6, 3], [1, 0, 1], [(), (), (0,)])
    assert decode(graph, Schedule((0, 0, 2), 6)) == (0, 2, 1)


def test_an_order_that_issues_a_task_before_what_it_waits_for_is_refused() -> None:
    graph = _graph([1, 1], [0, 0], [(), (0,)])
    with pytest.raises(ValueError, match="'b' is issued before 'a'"):
        simulate(graph, [1, 0])
    with pytest.raises(ValueError, match="issued twice"):
        simulate(graph, [0, 0])
    with pytest.raises(ValueError, match="1 of 2"):
        simulate(graph, [0])


@pytest.mark.parametrize(
    ("starts", "makespan", "words"),
    [
        ((0, 2), 5, "starts before 'a' has ended"),
        ((0, 3), 4, "says 4"),
        ((-1, 3), 5, "before time 0"),
        ((0,), 3, "1 of 2 tasks"),
    ],
)
def test_a_wrong_schedule_does_not_pass_the_check(starts: tuple[int, ...], makespan: int, words: str) -> None:
    graph = _graph([3, 2], [0, 1], [(), (0,)])
    with pytest.raises(ValueError, match=words):
        check(graph, Schedule(starts, makespan))


def test_two_tasks_at_once_on_a_resource_do_not_pass_the_check() -> None:
    graph = _graph([3, 2], [0, 0], [(), ()])
    with pytest.raises(ValueError, match="overlap on compute"):
        check(graph, Schedule((0, 2), 4))


def test_a_cycle_is_named() -> None:
    with pytest.raises(JobError, match=r"cycle: (a -> b|b -> a)"):
        _graph([1, 1, 1], [0, 0, 0], [(1,), (0,), (0,)])


def test_arcs_against_program_order_are_sorted() -> None:
    graph = _graph([1, 2], [0, 0], [(1,), ()])
    assert graph.topological == (1, 0)
    assert simulate(graph, graph.topological).starts == (2, 0)


def test_enumeration_agrees_with_permutations_on_a_single_resource() -> None:
    graph = random_graph(Random(5), 5, num_resources=1)
    best = min(
        simulate(graph, order).makespan
        for order in permutations(range(5))
        if all(order.index(p) < order.index(t) for t in range(5) for p in graph.preds[t])
    )
    assert best == shortest_by_enumeration(graph)


def test_progress_is_told_with_bound_and_only_shorter_schedules_are_taken() -> None:
    told: list[PlanProgress] = []
    incumbent = Incumbent(5, Deadline(10.0), on_progress=told.append)
    assert incumbent.offer(Schedule((0,), 9), "first")
    assert not incumbent.offer(Schedule((0,), 9), "equal")
    assert incumbent.offer(Schedule((0,), 5), "best")
    assert [(p.found_by, p.makespan, p.bound) for p in told] == [("first", 9, 5), ("best", 5, 5)]
    assert incumbent.is_done
