from dataclasses import replace

import pytest

from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import load_preset
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.baselines import ProgramOrder
from lagom_overlap.planners.concerto.planner import Concerto, paper
from lagom_overlap.planners.deadline import SearchBudget
from lagom_overlap.planners.predict import predict
from lagom_overlap.planners.times import ModelTimes, ShapeTimes
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel import ParallelLayout
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.steps import Split
from lagom_overlap.workload.step import Unit, program_step

MODEL = TransformerModel(
    name="gpt",
    num_layers=1,
    hidden=4096,
    ffn=16384,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    vocab=1024,
    gated=False,
)


def problem(unit: Unit = Unit.LAYER, **layout: object) -> PlanProblem:
    cluster = load_preset("a100_dgx")
    step = program_step(
        MODEL,
        ParallelLayout(**layout),  # type: ignore[arg-type]
        seq_len=2048,
        gpus_per_node=8,
        unit=unit,
    )
    times = ModelTimes(ContentionModel(cluster, load_profile("plausible")))
    return PlanProblem(iteration=step, cluster=cluster, times=times, work=SearchBudget(3.0))


TENSOR = {"tensor": 8, "micro_batch": 2, "global_batch": 2}
SEQUENCE = TENSOR | {"sequence_parallel": True}


def _makespan(found: PlanProblem, planner: Concerto) -> int:
    return predict(found, planner.plan(found).iteration).schedule.makespan


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TENSOR, SEQUENCE])
def test_the_ablation_is_monotone(layout: dict[str, int]) -> None:
    """Table 3's shape: program order >= S >= S + AD."""
    found = problem(**layout)
    program = predict(found, ProgramOrder().plan(found).iteration).schedule.makespan
    scheduled = _makespan(found, Concerto(decompose=False, fuse=False))
    cut = _makespan(found, Concerto(fuse=False))
    assert program >= scheduled >= cut


@pytest.mark.slow
def test_tensor_parallel_collectives_are_cut_with_their_products() -> None:
    found = problem(**SEQUENCE)
    plan = Concerto(fuse=False).plan(found)
    splits = [step for step in plan.rewrites if isinstance(step, Split)]
    assert splits
    assert all(step.before or step.after for step in splits)
    assert rewritten(found.iteration, plan.rewrites) == plan.iteration


@pytest.mark.slow
def test_fusion_takes_latency_away_from_gathered_matrices() -> None:
    """Table 4's mechanism: fewer, larger collectives; never a longer step."""
    found = problem(Unit.MATRIX, data=8, zero_stage=3, global_batch=8)
    plain = Concerto(decompose=False, fuse=False)
    plan = Concerto(decompose=False).plan(found)
    assert len(plan.iteration.comms) <= len(found.iteration.comms)
    assert predict(found, plan.iteration).schedule.makespan <= _makespan(found, plain) * 1.001


@pytest.mark.slow
def test_the_paper_runs_to_the_letter() -> None:
    plan = paper().plan(problem(**TENSOR))
    assert plan.planner == "concerto"
    assert plan.notes


@pytest.mark.slow
def test_memory_is_kept() -> None:
    found = problem(Unit.MATRIX, data=8, zero_stage=3, global_batch=8)
    program = predict(found, ProgramOrder().plan(found).iteration)
    limited = replace(found, memory_limit_bytes=program.peak_bytes)
    plan = Concerto(decompose=False).plan(limited)
    assert predict(limited, plan.iteration).peak_bytes <= program.peak_bytes


def test_contention_needs_a_cost_model() -> None:
    found = problem(**TENSOR)
    with pytest.raises(JobError, match="contention needs times of the cost model"):
        Concerto(contention=True).plan(replace(found, times=ShapeTimes({}, found.times)))
