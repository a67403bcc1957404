"""The bound of two chains against enumeration of all schedules."""

from random import Random

from random_graphs import RESOURCES, random_graph, shortest_by_enumeration

from lagom_overlap.planners.schedule import TaskGraph, lower_bound
from lagom_overlap.planners.schedule.bounds import two_chain_bound


def _graph(ticks: list[int], resource: list[int], preds: list[tuple[int, ...]]) -> TaskGraph:
    return TaskGraph(
        names=tuple(f"t{task}" for task in range(len(ticks))),
        ticks=tuple(ticks),
        resource=tuple(resource),
        preds=tuple(preds),
        resources=RESOURCES,
        tick_s=1e-6,
    )


def test_two_chains_that_alternate_leave_the_resource_idle_that_both_are_away_from() -> None:
    """Compute 1, link 3, compute 1, twice: the link alone holds 6, compute before and after it 1 each."""
    graph = _graph([1, 3, 1, 1, 3, 1], [0, 1, 0, 0, 1, 0], [(), (0,), (1,), (), (3,), (4,)])
    assert shortest_by_enumeration(graph) == 8
    assert two_chain_bound(graph) <= 8


def test_the_bound_never_exceeds_the_shortest_schedule_and_is_the_better_one_at_times() -> None:
    better = 0
    for seed in range(100):
        random = Random(seed)
        half = random.randint(3, 4)
        num = 2 * half
        ticks = [random.randint(1, 9) for _ in range(num)]
        resource = [task % half % 2 for task in range(num)]
        preds: list[tuple[int, ...]] = [() if task in {0, half} else (task - 1,) for task in range(num)]
        for task in range(random.randint(0, 1)):  # what hangs on the ends of the chains, as gradients do
            ticks.append(random.randint(1, 9))
            resource.append(0)
            preds.append((half - 1 if task else num - 1,))
        graph = _graph(ticks, resource, preds)
        bound = two_chain_bound(graph)
        assert bound <= shortest_by_enumeration(graph)
        better += bound > lower_bound(graph)
    assert better >= 10


def test_graphs_of_another_shape_have_no_such_bound() -> None:
    one = _graph([1, 2], [0, 1], [(), (0,)])
    assert two_chain_bound(one) == 0
    for seed in range(40):
        graph = random_graph(Random(seed), 7)
        assert two_chain_bound(graph) <= shortest_by_enumeration(graph)
