from dataclasses import dataclass, replace

import pytest

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import load_preset
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.baselines import ProgramOrder
from lagom_overlap.planners.centauri.planner import Centauri, paper
from lagom_overlap.planners.predict import predict
from lagom_overlap.workload import CommOp, Gemm, MemoryBound, Op, TransformerModel
from lagom_overlap.workload.parallel import ParallelLayout
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.steps import PartitionGroups, Split, Substitute
from lagom_overlap.workload.step import Unit, program_step

MODEL = TransformerModel(
    name="tiny", num_layers=3, hidden=512, ffn=2048, num_heads=8, num_kv_heads=8, head_dim=64, vocab=1024, gated=False
)


@dataclass(frozen=True)
class Times:
    """A node's links ten times as fast as the network, which the eight ranks of a node share."""

    network: float = 2e9

    def seconds(self, op: Op) -> float:
        if isinstance(op, CommOp):
            call = op.collective
            nodes = call.num_nodes or 1
            rate = 2e11 if nodes == 1 else self.network * call.num_ranks / nodes
            return 1e-5 + call.wire_bytes / rate
        if isinstance(op.work, Gemm):
            return 1e-6 + op.work.flops / 5e12
        return 1e-6 + (op.work.num_bytes / 1e12 if isinstance(op.work, MemoryBound) else op.work.flops / 5e12)


def problem(unit: Unit = Unit.LAYER, times: Times = Times(), **layout: object) -> PlanProblem:
    step = program_step(
        MODEL,
        ParallelLayout(**layout),  # type: ignore[arg-type]
        seq_len=256,
        gpus_per_node=8,
        unit=unit,
    )
    return PlanProblem(iteration=step, cluster=load_preset("a100_hdr1"), times=times, prefetch=12)


FSDP = {"data": 16, "zero_stage": 3, "micro_batch": 4, "global_batch": 64}
DP = {"data": 16, "micro_batch": 4, "global_batch": 64}
ZERO1 = {"data": 16, "zero_stage": 1, "micro_batch": 1, "global_batch": 96}


@pytest.mark.parametrize("layout", [FSDP, DP, ZERO1])
@pytest.mark.parametrize("unit", list(Unit))
def test_the_plan_is_never_longer_than_the_program(layout: dict[str, int], unit: Unit) -> None:
    found = problem(unit, **layout)
    before = predict(found, ProgramOrder().plan(found).iteration).schedule.makespan
    plan = Centauri().plan(found)
    assert predict(found, plan.iteration).schedule.makespan <= before
    assert rewritten(found.iteration, plan.rewrites) == plan.iteration


def test_groups_are_partitioned_between_and_inside_nodes() -> None:
    plan = Centauri().plan(problem(**FSDP))
    parts = [step for step in plan.rewrites if isinstance(step, PartitionGroups)]
    assert parts
    assert {step.mesh for step in parts} == {(2, 8)}
    streams = {op.stream for op in plan.iteration.comms}
    assert streams == {"comm", "comm_intra"}


def test_all_reduces_become_scatters_and_gathers() -> None:
    plan = paper().plan(problem(**DP))
    assert any(isinstance(step, Substitute) for step in plan.rewrites)
    assert not any(op.collective.kind is CollectiveKind.ALL_REDUCE for op in plan.iteration.comms)


def test_the_paper_cuts_the_products_beside_a_gathered_matrix() -> None:
    plan = paper().plan(problem(Unit.MATRIX, **FSDP))
    chains = [s.chain for s in plan.rewrites if isinstance(s, PartitionGroups)]
    chains += [s.after for s in plan.rewrites if isinstance(s, Split)]
    assert any(chains)


def test_micro_batches_are_launched_together_to_hide_parameters() -> None:
    plan = Centauri().plan(problem(times=Times(network=2e8), **ZERO1))
    order = [op.name for op in plan.iteration.ops]
    assert order.index("mb1.layer0.qkv") < order.index("mb0.layer2.qkv")


def test_layers_alike_take_the_same_leaf() -> None:
    rewrites = paper().plan(problem(Unit.MATRIX, **FSDP)).rewrites
    kinds = {}
    for step in rewrites:
        if isinstance(step, PartitionGroups) and "gather" in step.comm and ".layer" in step.comm:
            layer, what = step.comm.split(".")[1:]
            kinds.setdefault(what, {})[layer] = (step.order, len(step.chain))
    inner = [set(by_layer.values()) for by_layer in kinds.values() if len(by_layer) == 3]
    assert inner
    assert all(len(found) == 1 for found in inner)


def test_exact_plans_change_no_order_of_reduction() -> None:
    plan = Centauri().plan(replace(problem(**DP), exact=True))
    assert not any(isinstance(step, Substitute | PartitionGroups | Split) for step in plan.rewrites)


def test_too_little_memory_is_refused_by_how_much() -> None:
    with pytest.raises(JobError, match="bytes too many"):
        Centauri().plan(replace(problem(**FSDP), memory_limit_bytes=1_000_000))
