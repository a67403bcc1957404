"""What a search over a rectangle begins with, and what it says where time ends it before a proof."""

from dataclasses import replace
from random import Random

import pytest
from small_programs import machine, mlp_forward, mlp_training, problem_of
from test_sharding_choice import TICKS_S, random_program

from lagom_overlap.errors import JobError
from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.sharding_search.emit import emit
from lagom_overlap.planners.sharding_search.integer_program import FoundSharding, choose_sharding
from lagom_overlap.planners.sharding_search.mesh_layouts import Held
from lagom_overlap.planners.sharding_search.search import lines_of, search_sharding, starts_from
from lagom_overlap.workload import Gemm

PROGRAMS = {"forward": mlp_forward(4096, 2048), "training": mlp_training(4096, 2048), "random": random_program(2)}


def test_the_lines_of_a_rectangle_are_all_its_ranks_and_each_dimension_once():
    assert lines_of((2, 8)) == ((16,), (2,), (8,))
    assert lines_of((4, 4)) == ((16,), (4,))


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("shape", [(2, 2), (2, 4)])
def test_starts_can_be_had_and_the_optimum_is_no_dearer(name, shape):
    problem = problem_of(PROGRAMS[name], *shape)
    lines = {line: choose_sharding(problem_of(PROGRAMS[name], *line)) for line in lines_of(shape)}
    costs = [problem.seconds(start) for start in starts_from(problem, lines)]
    assert min(costs) < float("inf")
    best = choose_sharding(problem, deadline=Deadline(3000.0))
    assert best.is_optimal
    assert best.seconds <= min(costs) + TICKS_S


def test_a_line_on_both_dimensions_shares_products_out_as_the_line_does():
    program = mlp_training(1 << 17, 512)
    line = choose_sharding(problem_of(program, 8))
    problem = problem_of(program, 2, 4)
    (start,) = starts_from(problem, {(8,): line})
    does = {
        node.name: node.options[k].strategies[0].choices
        for node, k in zip(line.problem.nodes, line.choice, strict=True)
        if node.calls
    }
    products = [
        (node.options[number].strategies[0].choices, does[node.name])
        for node, number in zip(problem.nodes, start, strict=True)
        if node.calls and isinstance(node.calls[0].work, Gemm)
    ]
    assert len(products) == 5
    for both, (one,) in products:
        assert one is not Held.WHOLE
        assert both == (one, one)


@pytest.mark.parametrize("seed", range(4))
def test_a_bound_is_no_dearer_than_the_optimum_however_early_the_search_ends(seed):
    problem = problem_of(mlp_training(2048 << seed % 2, 1024), 2, 2 << seed // 2)
    optimum = choose_sharding(problem, deadline=Deadline(3000.0))
    assert optimum.is_optimal
    assert optimum.gap == 0.0
    for limit_s in (0.0, 0.02, 0.1):
        found = choose_sharding(problem, deadline=Deadline(limit_s), seed=Random(seed).randrange(99))
        assert found.bound_s <= optimum.seconds + TICKS_S
        assert optimum.seconds <= found.seconds + TICKS_S
        assert 0.0 <= found.gap <= 1.0
        assert optimum.seconds >= found.seconds * (1.0 - found.gap) - TICKS_S


def test_without_time_the_start_is_the_answer_and_its_step_says_how_far_it_may_be():
    program = PROGRAMS["training"]
    problem = problem_of(program, 2, 4)
    start = choose_sharding(problem_of(program, 8))
    (mapped,) = starts_from(problem, {(8,): start})
    found = choose_sharding(problem, starts=[mapped], deadline=Deadline(0.0))
    assert not found.is_optimal
    assert found.seconds <= problem.seconds(mapped) + TICKS_S
    (note,) = emit(found, name="early").notes
    assert "how far it may be from it is not known" in note
    assert (
        "another may be 25.0 % cheaper, no more"
        in emit(replace(found, bound_s=0.75 * found.seconds), name="early").notes[0]
    )


def test_a_search_over_a_rectangle_gives_a_sharding_that_fits_or_says_that_none_does():
    cluster, times = machine()
    search = {"mesh_shape": (2, 4), "cluster": cluster, "times": times}
    program = mlp_training(1 << 14, 2048)
    free = search_sharding(program, **search)
    assert isinstance(free, FoundSharding)
    assert free.is_optimal
    limit = int(0.95 * free.peak_bytes)
    tight = search_sharding(program, memory_limit_bytes=limit, **search)
    assert tight.peak_bytes <= limit
    assert tight.seconds >= free.seconds - TICKS_S
    with pytest.raises(JobError, match="too much"):
        search_sharding(program, memory_limit_bytes=1000, **search)
