"""Cuts across collectives: quick graphs against rewritten steps, and plans that use them."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

pytest.importorskip("ortools", reason="needs the extra plan (ortools)")

from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.hardware import load_preset
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.deadline import SearchBudget
from lagom_overlap.planners.ours import Ours
from lagom_overlap.planners.ours.cut_search import chain_types
from lagom_overlap.planners.ours.cuts import Cut, Cutter, OpType, cuts_of, op_types, splits_of
from lagom_overlap.planners.predict import predict
from lagom_overlap.planners.schedule import check, task_graph
from lagom_overlap.planners.times import ModelTimes
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel import ParallelLayout
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.steps import Split
from lagom_overlap.workload.step import program_step


def _problem(num_layers: int = 2, preset: str = "a100_dgx", **fields: object) -> PlanProblem:
    """A tensor- and sequence-parallel step: gathers before products, scatters after them."""
    model = TransformerModel(
        name="gpt",
        num_layers=num_layers,
        hidden=4096,
        ffn=16384,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        vocab=1024,
        gated=False,
    )
    layout = ParallelLayout(tensor=8, micro_batch=2, global_batch=2, sequence_parallel=True)
    cluster = load_preset(preset)
    step = program_step(model, layout, seq_len=2048, gpus_per_node=8)
    times = ModelTimes(ContentionModel(cluster, load_profile("plausible")))
    return replace(PlanProblem(iteration=step, cluster=cluster, times=times, work=SearchBudget(3.0)), **fields)  # type: ignore[arg-type]


def assert_quick_is_real(problem: PlanProblem, cuts: Mapping[str, Cut]) -> None:
    quick = Cutter(problem).graph(task_graph(problem), cuts)
    real = task_graph(problem, rewritten(problem.iteration, splits_of(cuts)))
    assert sorted(quick.names) == sorted(real.names)
    place = {name: number for number, name in enumerate(real.names)}
    for task, name in enumerate(quick.names):
        other = place[name]
        assert quick.ticks[task] == real.ticks[other], name
        assert quick.resource[task] == real.resource[other], name
        assert {quick.names[p] for p in quick.preds[task]} == {real.names[p] for p in real.preds[other]}, name


def test_the_quick_graph_of_every_chain_is_that_of_the_rewritten_step() -> None:
    problem = _problem()
    kinds = chain_types(problem, Cutter(problem))
    assert kinds
    assert all(kind.is_chain for kind in kinds)
    for kind in kinds:
        for factor in (2, 4):
            cuts = cuts_of(problem.iteration, {kind: factor})
            assert cuts
            assert_quick_is_real(problem, cuts)


def test_chains_and_single_operators_are_cut_together_and_nothing_twice() -> None:
    problem = _problem()
    singles = [kind for kind in op_types(problem.iteration, exact=False) if Cutter(problem).can(kind, 2)]
    factors: dict[OpType, int] = dict.fromkeys((*singles, *chain_types(problem, Cutter(problem))), 2)
    cuts = cuts_of(problem.iteration, factors)
    members = [member for name, cut in cuts.items() for member in cut.axes(name)]
    assert len(members) == len(set(members))
    assert {bool(cut.before or cut.after) for cut in cuts.values()} == {True, False}
    assert_quick_is_real(problem, cuts)


def test_an_exact_plan_cuts_no_chain_of_a_sum() -> None:
    problem = _problem(exact=True)
    ops = problem.iteration.ops
    for kind in chain_types(problem, Cutter(problem)):
        assert all(ops[task].collective.kind == "all_gather" for task in kind.tasks)  # type: ignore[union-attr]


def test_a_plan_hides_a_collective_that_everything_waits_for() -> None:
    """In a chain of products and collectives nothing else is there to run: only pieces can overlap."""
    problem = _problem(num_layers=1, preset="a40_nvlink")
    whole, cut = Ours(split=False).plan(problem), Ours().plan(problem)
    after = predict(problem, cut.iteration)
    check(after.graph, after.schedule)
    assert any(isinstance(step, Split) and (step.before or step.after) for step in cut.rewrites)
    assert after.schedule.makespan < predict(problem, whole.iteration).schedule.makespan
    assert rewritten(problem.iteration, cut.rewrites) == cut.iteration
