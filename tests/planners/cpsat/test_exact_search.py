from random import Random

import pytest

pytest.importorskip("ortools", reason="needs the extra plan (ortools)")

from random_graphs import random_graph, shortest_by_enumeration

from lagom_overlap.planners.cpsat import Block, BlockMode, improve_by_windows, odd_even, solve_block, solve_graph
from lagom_overlap.planners.cpsat.windows import Ordered, solve_window
from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.modulo_schedule import ModuloKernel, modulo_schedule, steady_state
from lagom_overlap.planners.schedule import check, lower_bound, simulate
from lagom_overlap.planners.schedule.incumbent import Incumbent


def test_solving_a_small_graph_whole_finds_what_enumeration_finds() -> None:
    for seed in range(12):
        graph = random_graph(Random(seed), 8, num_resources=2 + seed % 2)
        program = simulate(graph, range(8))
        found, proved = solve_graph(graph, program, bound=lower_bound(graph), deadline=Deadline(3000.0))
        check(graph, found)
        assert found.makespan == proved == shortest_by_enumeration(graph)


def test_windows_never_make_an_order_longer() -> None:
    for seed in range(6):
        graph = random_graph(Random(seed), 60, num_resources=3)
        ordered = Ordered.of(graph, range(60))
        for begin in (0, 15, 30, 45):
            made = solve_window(ordered, begin, begin + 15, deadline=Deadline(3000.0))
            if made is not None:
                check(graph, made.schedule)
                assert made.schedule.makespan <= ordered.schedule.makespan
                ordered = made


def test_a_window_over_everything_is_the_whole_problem() -> None:
    graph = random_graph(Random(3), 9)
    made = solve_window(Ordered.of(graph, range(9)), 0, 9, deadline=Deadline(3000.0))
    assert made is not None
    assert made.schedule.makespan == shortest_by_enumeration(graph)


def test_windows_reach_the_shortest_schedule_of_a_small_graph() -> None:
    graph = random_graph(Random(8), 9)
    incumbent = Incumbent(lower_bound(graph), Deadline(20.0))
    incumbent.offer(simulate(graph, range(9)), "program order")
    improve_by_windows(graph, incumbent, size=9)
    assert incumbent.best.makespan == shortest_by_enumeration(graph)


def test_rounds_with_heads_and_tails_are_monotone_and_isolated_rounds_return_their_best() -> None:
    graph = random_graph(Random(1), 80, num_resources=2)
    before = simulate(graph, range(80)).makespan
    told: list[int] = []
    order = odd_even(
        graph,
        range(80),
        mode=BlockMode.HEADS_TAILS,
        block_size=20,
        deadline=Deadline(3000.0),
        on_round=told.append,
    )
    assert [before, *told] == sorted([before, *told], reverse=True)
    assert simulate(graph, order).makespan == told[-1]
    told.clear()
    order = odd_even(graph, range(80), block_size=20, deadline=Deadline(3000.0), on_round=told.append)
    assert simulate(graph, order).makespan == min([before, *told])


def test_isolated_and_heads_tails_agree_when_the_block_is_the_whole_graph() -> None:
    graph = random_graph(Random(2), 9)
    lengths = {
        simulate(
            graph, odd_even(graph, range(9), mode=mode, block_size=9, num_rounds=1, deadline=Deadline(3000.0))
        ).makespan
        for mode in BlockMode
    }
    assert lengths == {shortest_by_enumeration(graph)}


def test_a_block_that_cannot_end_in_time_has_no_solution() -> None:
    graph = random_graph(Random(0), 4)
    assert solve_block(graph, Block(tasks=(0, 1, 2, 3), upper=1), deadline=Deadline(3000.0)) is None


def test_a_kernel_of_two_tasks_that_feed_each_other_has_the_interval_of_its_cycle() -> None:
    # compute 3 -> gather 4 -> the next layer's compute: a cycle of 7 over one layer.
    kernel = ModuloKernel(ticks=(3, 4), resource=(0, 1), arcs=((0, 1, 0), (1, 0, 1)))
    assert kernel.bound == 7
    steady = steady_state(kernel, Deadline(20.0))
    assert steady is not None
    assert steady.interval == 7


def test_a_gather_ahead_of_its_layer_needs_only_the_load() -> None:
    kernel = ModuloKernel(ticks=(5, 4), resource=(0, 1), arcs=((1, 0, 0), (0, 0, 1)))
    steady = modulo_schedule(kernel, kernel.bound, Deadline(10.0))
    assert steady is not None
    assert steady.interval == 5
    assert steady.starts[0] >= steady.starts[1] + 4
