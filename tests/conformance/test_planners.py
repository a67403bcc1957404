"""What every planner owes on steps of each kind of parallelism: same work, legal order, memory, the bound.

That results are equal is shown by running plans: tests/engines.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import load_preset
from lagom_overlap.planners.base import Plan, Planner, PlanProblem
from lagom_overlap.planners.baselines import ProgramOrder
from lagom_overlap.planners.centauri.planner import Centauri
from lagom_overlap.planners.centauri.planner import from_options as centauri_options
from lagom_overlap.planners.centauri.planner import paper as centauri_paper
from lagom_overlap.planners.concerto.planner import Concerto
from lagom_overlap.planners.concerto.planner import from_options as concerto_options
from lagom_overlap.planners.concerto.planner import paper as concerto_paper
from lagom_overlap.planners.deadline import SearchBudget
from lagom_overlap.planners.exact import adds_numbers
from lagom_overlap.planners.joint import Joint
from lagom_overlap.planners.megatron import baselines
from lagom_overlap.planners.megatron.planner import Megatron
from lagom_overlap.planners.megatron.planner import from_options as megatron_options
from lagom_overlap.planners.ours import Ours
from lagom_overlap.planners.predict import predict
from lagom_overlap.planners.schedule import check, lower_bound
from lagom_overlap.planners.times import ModelTimes, origin_name
from lagom_overlap.workload import CommOp, Gemm, Iteration, MemoryBound, Op
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel import ParallelLayout
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.step import Unit, program_step


class JointOnModel:
    """`joint` needs the cost model's times: it alone knows contention."""

    def plan(self, problem: PlanProblem) -> Plan:
        times = ModelTimes(ContentionModel(problem.cluster, load_profile("plausible")))
        return Joint().plan(replace(problem, times=times))


PLANNERS: dict[str, Callable[[], Planner]] = {
    "program_order": ProgramOrder,
    "ours": Ours,
    "megatron": Megatron,
    "ddp": baselines.ddp,
    "zero1": baselines.zero1,
    "zero2": baselines.zero2,
    "zero3": baselines.zero3,
    "out_of_order": baselines.OutOfOrder,
    "centauri": Centauri,
    "centauri_paper": centauri_paper,
    "concerto": Concerto,
    "concerto_paper": concerto_paper,
    "joint": JointOnModel,
}
MODEL = TransformerModel(
    name="tiny", num_layers=2, hidden=128, ffn=256, num_heads=8, num_kv_heads=8, head_dim=16, vocab=512, gated=True
)
EXPERTS = replace(MODEL, name="tiny-moe", num_experts=8, experts_per_token=2)
STEPS: dict[str, tuple[TransformerModel, dict[str, object], Unit]] = {
    "fsdp": (MODEL, {"data": 16, "zero_stage": 3, "global_batch": 16}, Unit.LAYER),
    "fsdp by matrix": (MODEL, {"data": 16, "zero_stage": 3, "global_batch": 16}, Unit.MATRIX),
    "data parallel": (MODEL, {"data": 16, "global_batch": 32}, Unit.LAYER),
    "tensor parallel": (MODEL, {"tensor": 8, "micro_batch": 2, "global_batch": 2}, Unit.LAYER),
    "sequence parallel": (MODEL, {"tensor": 8, "sequence_parallel": True, "data": 2, "global_batch": 2}, Unit.LAYER),
    "experts": (EXPERTS, {"data": 8, "expert": 8, "global_batch": 16}, Unit.LAYER),
}


@dataclass(frozen=True)
class Times:
    """A microsecond of launch, rates of a small machine."""

    def seconds(self, op: Op) -> float:
        if isinstance(op, CommOp):
            return 5e-6 + op.collective.wire_bytes / 1e10
        if isinstance(op.work, Gemm):
            return 1e-6 + op.work.flops / 5e12
        return 1e-6 + (op.work.num_bytes / 1e12 if isinstance(op.work, MemoryBound) else op.work.flops / 5e12)


def _problem(name: str) -> PlanProblem:
    model, layout, unit = STEPS[name]
    step = program_step(
        model,
        ParallelLayout(**layout),  # type: ignore[arg-type]
        seq_len=64,
        gpus_per_node=8,
        unit=unit,
    )
    return PlanProblem(iteration=step, cluster=load_preset("a100_hdr1"), times=Times(), budget_s=0.2)


def _flops(step: Iteration) -> float:
    return sum(op.work.flops for op in step.computations if not isinstance(op.work, MemoryBound))


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("step", STEPS)
def test_a_plan_keeps_the_work_the_data_flow_and_the_bound(planner: str, step: str) -> None:
    problem = _problem(step)
    plan = PLANNERS[planner]().plan(problem)
    before, after = problem.iteration, plan.iteration
    assert rewritten(before, plan.rewrites) == after
    assert _flops(after) == _flops(before)
    known = dict.fromkeys(op.name for op in before.ops)
    parts = {part for op in after.ops for part in (op.name, *_members(op.name, plan))}
    assert {origin_name(part, known) for part in parts} == set(known)
    predicted = predict(problem, after)
    check(predicted.graph, predicted.schedule)
    assert predicted.schedule.makespan >= lower_bound(predicted.graph)
    assert plan.lower_bound_s > 0


def _members(name: str, plan: object) -> tuple[str, ...]:
    """Collectives that were fused into one of that name, seen through every fusion."""
    steps = {f"{s.comms[0]}+{len(s.comms) - 1}": s.comms for s in plan.rewrites if hasattr(s, "comms")}  # type: ignore[attr-defined]
    members = steps.get(name, ())
    return (*members, *(part for member in members for part in _members(member, plan)))


@pytest.mark.parametrize("planner", [name for name in PLANNERS if not name.startswith(("concerto", "ours", "joint"))])
def test_the_same_problem_has_the_same_plan(planner: str) -> None:
    """All ranks plan alike: their collectives come in one order (three depend on the time they are given)."""
    problem = replace(_problem("sequence parallel"), budget_s=60.0)
    assert PLANNERS[planner]().plan(problem) == PLANNERS[planner]().plan(problem)


@pytest.mark.parametrize("step", ["fsdp", "sequence parallel"])
@pytest.mark.parametrize("planner", [name for name in PLANNERS if not name.startswith("joint")])
def test_the_same_problem_and_work_have_the_same_plan(planner: str, step: str) -> None:
    problem = replace(_problem(step), work=SearchBudget(0.3))
    assert PLANNERS[planner]().plan(problem) == PLANNERS[planner]().plan(problem)


@pytest.mark.parametrize("planner", [name for name in PLANNERS if name.startswith("joint")])
def test_who_counts_no_work_refuses_it(planner: str) -> None:
    with pytest.raises(JobError, match="joint counts no work"):
        PLANNERS[planner]().plan(replace(_problem("fsdp"), work=SearchBudget(0.3)))


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_memory_limit_nothing_fits_in_is_refused_by_how_much(planner: str) -> None:
    problem = replace(_problem("fsdp"), memory_limit_bytes=10_000)
    with pytest.raises(JobError, match=r"memory_limit is 10000 bytes.*\d+ bytes too many"):
        PLANNERS[planner]().plan(problem)


@pytest.mark.parametrize("planner", ["ours", "centauri", "concerto", "joint"])
def test_a_memory_limit_is_kept(planner: str) -> None:
    problem = _problem("fsdp")
    lean = predict(problem, Megatron().plan(problem).iteration).peak_bytes
    limited = replace(problem, memory_limit_bytes=lean)
    assert predict(limited, PLANNERS[planner]().plan(limited).iteration).peak_bytes <= lean


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("step", ["data parallel", "sequence parallel", "fsdp by matrix"])
def test_an_exact_plan_leaves_every_sum_as_it_is(planner: str, step: str) -> None:
    problem = replace(_problem(step), exact=True)
    plan = PLANNERS[planner]().plan(problem)

    def sums(found: Iteration) -> set[tuple[str, object]]:
        return {(op.name, op.collective) for op in found.comms if adds_numbers(op)}

    assert sums(plan.iteration) == sums(problem.iteration)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: centauri_options(mode="best"), "best"),
        (lambda: concerto_options(cost="free"), "free"),
        (lambda: concerto_options(num_rounds=-1), "num_rounds is -1"),
        (lambda: megatron_options(tensor_overlap="all"), "all"),
    ],
)
def test_an_option_that_is_not_offered_is_refused(make: Callable[[], Planner], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make()
