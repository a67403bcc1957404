"""The integer program against every combination, and against shardings that are known to be best."""

from collections import Counter
from dataclasses import replace
from itertools import product
from math import prod
from random import Random

import pytest

pytest.importorskip("ortools", reason="needs the extra plan")

from small_programs import Program, machine, mlp_forward, mlp_training, problem_of

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.predict import predict
from lagom_overlap.planners.sharding_search.emit import emit
from lagom_overlap.planners.sharding_search.held_memory import TensorLifetimes
from lagom_overlap.planners.sharding_search.integer_program import FoundSharding, choose_sharding
from lagom_overlap.planners.sharding_search.mesh_layouts import Held, Layout
from lagom_overlap.planners.sharding_search.sharding_problem import ShardingProblem, made_layouts
from lagom_overlap.workload.tensor_program import TensorProgram, ValueKind

TICKS_S = 1e-6
"""A hundred roundings to the search's tick."""


def combinations(problem: ShardingProblem) -> list[tuple[int, ...]]:
    count = prod(len(node.options) for node in problem.nodes)
    assert count <= 60_000, count
    return list(product(*(range(len(node.options)) for node in problem.nodes)))


def random_program(seed: int) -> TensorProgram:
    """Three or four calls that share tensors."""
    random = Random(seed)
    program = Program()
    size = [random.choice((512, 2048, 8192)) for _ in range(3)]
    x = program.given("x", size[0], size[1], parameter=False)
    a = program.given("a", size[1], size[2])
    first = program.product("first", x, a)
    if random.random() < 0.5:
        first = program.pointwise("act", first)
    last = program.product("second", first, program.given("b", size[2], size[1]))
    if random.random() < 0.5:
        last = program.pointwise(
            "sum", last, program.product("other", x, program.given("c", size[1], size[1])), linear=True
        )
    return program.done(last)


@pytest.mark.parametrize("seed", range(6))
def test_no_combination_is_cheaper_than_the_one_found(seed: int) -> None:
    problem = problem_of(random_program(seed), 4)
    found = choose_sharding(problem, deadline=Deadline(3000.0))
    assert found.is_optimal
    assert found.seconds == pytest.approx(min(problem.seconds(c) for c in combinations(problem)), abs=TICKS_S)


def test_no_combination_is_cheaper_on_a_mesh_of_two_dimensions() -> None:
    problem = problem_of(mlp_forward(256, 2048), 2, 2)
    nodes = tuple(replace(node, options=node.options[:: 3 if len(node.options) > 9 else 1]) for node in problem.nodes)
    fewer = replace(problem, nodes=nodes)
    found = choose_sharding(fewer, deadline=Deadline(3000.0))
    assert found.seconds == pytest.approx(min(fewer.seconds(c) for c in combinations(fewer)), abs=TICKS_S)


@pytest.mark.parametrize("share", [0.8, 0.5, 0.35])
def test_no_combination_that_fits_the_memory_is_cheaper(share: float) -> None:
    problem = problem_of(random_program(1), 4)
    lifetimes = TensorLifetimes(problem)
    limit = int(share * lifetimes.peak(choose_sharding(problem).choice)[0])
    fitting = [c for c in combinations(problem) if lifetimes.peak(c)[0] <= limit]
    best = min((problem.seconds(c) for c in fitting), default=float("inf"))
    if best == float("inf"):
        with pytest.raises(JobError, match="too much"):
            choose_sharding(problem, memory_limit_bytes=limit)
        return
    found = choose_sharding(problem, memory_limit_bytes=limit)
    assert found.peak_bytes <= limit
    assert best - TICKS_S <= found.seconds <= best * 1.02 + TICKS_S  # KiB are rounded up in the program


def layouts(found: FoundSharding) -> dict[str, Layout]:
    options = [node.options[number] for node, number in zip(found.problem.nodes, found.choice, strict=True)]
    return dict(made_layouts(options))


def kinds(found: FoundSharding) -> Counter[CollectiveKind]:
    return Counter(comm.collective.kind for comm in emit(found, name="small").iteration.comms)


def test_a_pair_of_products_on_few_tokens_is_cut_as_megatron_cuts_it() -> None:
    """Columns of the first matrix, rows of the second, one all-reduce (Megatron-LM, arXiv 1909.08053, section 3)."""
    found = choose_sharding(problem_of(mlp_forward(128, 8192), 8))
    assert found.is_optimal
    at = layouts(found)
    assert (at["up"], at["down"]) == ((1,), (0,))
    assert (at["first"], at["gelu"], at["second"]) == ((1,), (1,), (Held.PARTIAL,))
    assert kinds(found) == {CollectiveKind.ALL_REDUCE: 1}


def test_many_tokens_and_small_matrices_are_data_parallel() -> None:
    """No activation moves; only the gradients are summed."""
    found = choose_sharding(problem_of(mlp_training(1 << 17, 512), 8))
    at = layouts(found)
    assert [at[name] for name in ("first", "gelu", "second", "back")] == [(0,)] * 4
    assert [at[name] for name in ("grad_up", "grad_down")] == [(Held.PARTIAL,)] * 2
    moved = [comm.collective.num_bytes for comm in emit(found, name="small").iteration.comms]
    assert max(moved) <= 4 * 512 * 512 * 2


def test_a_memory_limit_turns_data_parallelism_into_sharded_parameters_and_optimizer() -> None:
    """ZeRO: whole parameters and state do not fit, so they are cut and gathered; gradients are reduce-scattered."""
    problem = problem_of(mlp_training(1 << 17, 2048), 8)
    free = choose_sharding(problem)
    assert all(layouts(free)[name] == (0,) for name in ("first", "second"))
    values = problem.program.values
    activations = sum(v.num_bytes for v in values.values() if v.kind is ValueKind.MADE and v.shape[0] == 1 << 17) // 8
    parameters = sum(v.num_bytes for v in values.values() if v.kind is ValueKind.PARAMETER)
    limit = min(activations + 2 * parameters, int(0.97 * free.peak_bytes))
    tight = choose_sharding(problem, memory_limit_bytes=limit)
    assert tight.peak_bytes <= limit < free.peak_bytes
    assert tight.seconds >= free.seconds - TICKS_S
    at = layouts(tight)
    assert all(isinstance(at[name][0], int) for name in ("up.new", "down.new"))
    found = kinds(tight)
    assert found[CollectiveKind.REDUCE_SCATTER] >= 2
    assert found[CollectiveKind.ALL_GATHER] >= 2


def test_what_does_not_fit_at_all_is_refused_with_what_is_missing() -> None:
    problem = problem_of(mlp_training(1 << 17, 512), 8)
    with pytest.raises(JobError, match=r"memory_limit is 1\.0 MB: the leanest sharding .* 8 ranks takes .* too much"):
        choose_sharding(problem, memory_limit_bytes=1 << 20)


@pytest.mark.parametrize("program", [mlp_training(4096, 4096), mlp_training(1 << 15, 1024), random_program(3)])
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_the_emitted_step_takes_what_the_search_counted(program: TensorProgram, shape: tuple[int, ...]) -> None:
    """Operators one after the other under the same times: computing and conversions, nothing else and nothing twice."""
    found = choose_sharding(problem_of(program, *shape), deadline=Deadline(3000.0))
    step = emit(found, name="small").iteration
    _, times = machine()
    assert sum(times.seconds(op) for op in step.ops) == pytest.approx(found.seconds, rel=1e-9)


def test_the_emitted_step_holds_no_more_than_the_search_counted() -> None:
    found = choose_sharding(problem_of(mlp_training(1 << 15, 1024), 4))
    capture = emit(found, name="small")
    cluster, times = machine()
    problem = PlanProblem(iteration=capture.iteration, cluster=cluster, times=times, groups=capture.groups)
    assert predict(problem).peak_bytes <= found.peak_bytes * 1.001


def test_merging_trivial_calls_costs_nothing_where_they_only_follow() -> None:
    program = Program()
    x = program.given("x", 4096, 4096, parameter=False)
    inner = program.product("first", x, program.given("up", 4096, 16384))
    for name in ("squared", "scaled", "gated"):
        inner = program.pointwise(name, inner)
    done = program.done(program.product("second", inner, program.given("down", 16384, 4096)))
    merged, apart = problem_of(done, 4), problem_of(done, 4, merge=False)
    assert [node.name for node in merged.nodes] == ["up", "down", "first", "squared", "second", "results"]
    assert len(apart.nodes) == len(merged.nodes) + 2
    assert choose_sharding(merged).seconds == pytest.approx(choose_sharding(apart).seconds, abs=TICKS_S)


def test_a_tensor_that_three_products_read_is_gathered_once() -> None:
    """Everything is cut along columns: the first product's output must be whole for the three that read it."""
    program = Program()
    x = program.given("x", 4096, 4096, parameter=False)
    made = program.product("made", x, program.given("w", 4096, 4096))
    outs = [program.product(f"out{i}", made, program.given(f"w{i}", 4096, 4096)) for i in range(3)]
    problem = problem_of(program.done(*outs), 4)
    by_columns = [[(node.name, (1,)) in option.makes for option in node.options] for node in problem.nodes[:-1]]
    choice = (*(flags.index(True) for flags in by_columns), 0)
    step = emit(FoundSharding(problem=problem, choice=choice, is_optimal=False, peak_bytes=0), name="small").iteration
    gathers = [comm for comm in step.comms if comm.collective.kind is CollectiveKind.ALL_GATHER]
    assert len(gathers) == 1 + len(outs)  # the shared one, and each result
    readers = [op for op in step.computations if gathers[0].name in op.deps]
    assert len(readers) == 3
