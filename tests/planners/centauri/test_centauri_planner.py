from dataclasses import dataclass, replace

import pytest

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import load_preset
from lagom_overlap.planners.base import OpTimes, PlanProblem
from lagom_overlap.planners.baselines import ProgramOrder
from lagom_overlap.planners.centauri.costs import layer_costs
from lagom_overlap.planners.centauri.layer_tier import FirstGradient, t1_s, t2_s
from lagom_overlap.planners.centauri.leaf import allowed_meshes
from lagom_overlap.planners.centauri.planner import Centauri, paper
from lagom_overlap.planners.deadline import SearchBudget
from lagom_overlap.planners.predict import predict
from lagom_overlap.planners.step_index import StepIndex
from lagom_overlap.workload import CommOp, CompOp, Gemm, Iteration, MemoryBound, Op
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel import ParallelLayout
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.steps import PartitionGroups, Split, Substitute, Substitution
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


def test_each_layer_takes_the_order_that_its_own_costs_say() -> None:
    """Eq. 1 layer by layer: the first layer's parameters travel for nothing, so its data gradients come first."""
    found = problem(Unit.LAYER, **{**FSDP, "tensor": 2})
    mixed = replace(found, times=_FreeParameters(found.times, layer=0))
    index = StepIndex(mixed.iteration)
    costs = layer_costs(mixed, index)
    by_hand = {
        layer: FirstGradient.DATA if t1_s(held) <= t2_s(held) else FirstGradient.WEIGHT for layer, held in costs.items()
    }
    assert set(by_hand.values()) == set(FirstGradient)
    notes = paper().plan(mixed).notes
    counts = {first: list(by_hand.values()).count(first) for first in FirstGradient}
    assert any(f"data in {counts[FirstGradient.DATA]} layers" in note for note in notes)


@dataclass(frozen=True)
class _FreeParameters:
    """Times with one layer's parameter collectives next to free."""

    usual: OpTimes
    layer: int

    def seconds(self, op: Op) -> float:
        is_free = isinstance(op, CommOp) and op.communicator == "fsdp" and op.origin.layer == self.layer
        return 1e-9 if is_free else self.usual.seconds(op)


@pytest.mark.parametrize("left_out", ["primitive", "group", "workload", "layer_tier", "model_tier"])
def test_a_dimension_or_tier_that_is_left_out_is_not_used(left_out: str) -> None:
    found = problem(Unit.MATRIX, **FSDP) if left_out != "primitive" else problem(**DP)
    plan = Centauri(**{left_out: False}).plan(found)
    kinds = {type(step) for step in plan.rewrites}
    without = {"primitive": {Substitute}, "group": {PartitionGroups}, "workload": {Split}}.get(left_out, set())
    assert not kinds & without
    if left_out == "layer_tier":
        assert "gradients first: as the program" in plan.notes
    before = predict(found, ProgramOrder().plan(found).iteration).schedule.makespan
    assert predict(found, plan.iteration).schedule.makespan <= before


def test_a_stage_of_a_pipeline_launches_at_least_its_depth() -> None:
    """Eq. 2 with L >= p (Fig. 7b): one micro-batch would do for these gathers, four are launched."""
    found = problem(times=Times(network=2e12), **ZERO1)
    assert any("together: 1 forward, 1 backward" in note for note in paper().plan(found).notes)
    deep = paper().plan(replace(found, pipeline=4))
    assert any("together: 4 forward, 4 backward" in note for note in deep.notes)
    assert "as Megatron-LM's --microbatch-group-size-per-virtual-pipeline-stage: 4" in deep.notes
    assert [note.split(":")[0] for note in deep.notes[-3:]] == ["launched so", "depth first", "breadth first"]


def test_one_micro_batch_stands_for_all_of_a_stage() -> None:
    """A job's step has one; Eq. 2 counts what the iteration runs, and the depth is the least."""
    one = replace(problem(**{**ZERO1, "global_batch": 16}), pipeline=4, num_micro_batches=16)
    notes = paper().plan(one).notes
    assert any("together: 1 forward, 1 backward" in note for note in notes)  # of the one that is there
    (group,) = (int(note.split(": ")[1]) for note in notes if "group-size" in note)
    assert 4 <= group <= 16
    tight = replace(one, cluster=replace(one.cluster, gpu=replace(one.cluster.gpu, memory_bytes=1)))
    assert any("4 micro-batches need" in note for note in paper().plan(tight).notes)
    found = problem(**ZERO1)
    with pytest.raises(JobError, match="pipeline is 0"):
        replace(found, pipeline=0)


def test_many_nodes_are_taken_as_pods_where_steps_of_a_ring_count() -> None:
    """32 nodes: a ring over all has 31 steps, over [4, 8] it has 3 + 7; small gathers are all latency."""
    step = program_step(
        MODEL, ParallelLayout(data=256, zero_stage=3, micro_batch=1, global_batch=256), seq_len=64, gpus_per_node=8
    )
    found = PlanProblem(
        iteration=step, cluster=load_preset("a100_hdr1", 32), times=_ByStep(), prefetch=12, work=SearchBudget(200.0)
    )
    meshes = {s.mesh for s in Centauri(workload=False).plan(found).rewrites if isinstance(s, PartitionGroups)}
    assert any(len(mesh) == 3 for mesh in meshes)
    best = min(sum(n - 1 for n in mesh) for mesh in allowed_meshes(256, 32, several_outer=True))
    assert min(sum(n - 1 for n in mesh) for mesh in meshes) == best


@dataclass(frozen=True)
class _ByStep:
    """A collective costs its ring's steps; computation next to nothing."""

    def seconds(self, op: Op) -> float:
        return 1e-5 * (op.collective.num_ranks - 1) if isinstance(op, CommOp) else 1e-7


class RootedTimes:
    """A scatter or gather of the whole: 10 ms; to or from one root: 2 ms; a computation: 5 ms."""

    def seconds(self, op: Op) -> float:
        if not isinstance(op, CommOp):
            return 5e-3
        return 2e-3 if op.collective.kind in (CollectiveKind.REDUCE, CollectiveKind.BROADCAST) else 10e-3


def rooted_problem(num_ranks: int, *, exact: bool = False) -> PlanProblem:
    """A product, its scatter, an update, its gather, a reader: nothing overlaps, 35 ms."""

    def comm(name: str, kind: CollectiveKind, dep: str) -> CommOp:
        return CommOp(name=name, collective=Collective(kind, 1 << 20, num_ranks), communicator="dp", deps=(dep,))

    def comp(name: str, *deps: str) -> CompOp:
        return CompOp(name=name, work=MemoryBound(1 << 20), deps=deps)

    ops = (
        comp("product"),
        comm("scatter", CollectiveKind.REDUCE_SCATTER, "product"),
        comp("update", "scatter"),
        comm("gather", CollectiveKind.ALL_GATHER, "update"),
        comp("reader", "gather"),
    )
    step = Iteration("rooted", ops, is_dataflow=True)
    return PlanProblem(iteration=step, cluster=load_preset("a100_hdr1"), times=RootedTimes(), exact=exact)


@pytest.mark.parametrize(
    ("num_ranks", "exact", "replaced", "step_ms"),
    [
        (2, False, {"scatter": Substitution.REDUCES, "gather": Substitution.BROADCASTS}, 15 + 2 * 2 * 2),
        (4, False, {"scatter": Substitution.REDUCES, "gather": Substitution.BROADCASTS}, 15 + 2 * 4 * 2),
        (4, True, {"gather": Substitution.BROADCASTS}, 15 + 10 + 4 * 2),  # reduces may add in another order
        (8, False, {}, 35),  # 16 ms for 10
    ],
)
def test_rooted_primitives_are_taken_where_they_are_priced_shorter(
    num_ranks: int, exact: bool, replaced: dict[str, Substitution], step_ms: float
) -> None:
    found = rooted_problem(num_ranks, exact=exact)
    plan = Centauri().plan(found)
    assert {step.comm: step.into for step in plan.rewrites if isinstance(step, Substitute)} == replaced
    assert predict(found, plan.iteration).overlap.makespan_s == pytest.approx(step_ms * 1e-3, rel=1e-3)
    kept = Centauri(primitive=False).plan(found)
    assert not any(isinstance(step, Substitute) for step in kept.rewrites)
