from dataclasses import dataclass, replace

import pytest

from lagom_overlap.errors import JobError
from lagom_overlap.hardware import load_preset
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.megatron import baselines
from lagom_overlap.planners.megatron.mechanisms import MegatronFlags, TensorOverlap, default_bucket_elements
from lagom_overlap.planners.megatron.planner import Megatron, MegatronRole, Roles, bucket_sizes
from lagom_overlap.planners.predict import predict
from lagom_overlap.planners.step_index import StepIndex
from lagom_overlap.workload import CommOp, CompOp, Gemm, Iteration, MemoryBound, Op, Phase
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel import ParallelLayout
from lagom_overlap.workload.step import program_step

DENSE = TransformerModel(
    name="tiny", num_layers=4, hidden=256, ffn=1024, num_heads=8, num_kv_heads=8, head_dim=32, vocab=512, gated=False
)
EXPERTS = replace(DENSE, name="tiny-moe", num_experts=8, experts_per_token=2, ffn=256)


@dataclass(frozen=True)
class Times:
    """Rates: operations, memory, wires; a microsecond of launch."""

    flops: float = 1e13
    wire: float = 1e10

    def seconds(self, op: Op) -> float:
        if isinstance(op, CommOp):
            return 5e-6 + op.collective.wire_bytes / self.wire
        if isinstance(op.work, Gemm):
            return 1e-6 + op.work.flops / self.flops
        return 1e-6 + (op.work.num_bytes / 1e12 if isinstance(op.work, MemoryBound) else op.work.flops / self.flops)


def problem(model: TransformerModel = DENSE, times: Times = Times(), **layout: object) -> PlanProblem:
    step = program_step(
        model,
        ParallelLayout(**layout),  # type: ignore[arg-type]
        seq_len=256,
        gpus_per_node=8,
    )
    return PlanProblem(iteration=step, cluster=load_preset("a100_dgx"), times=times)


def makespan(found: PlanProblem, flags: MegatronFlags) -> float:
    return predict(found, Megatron(flags).plan(found).iteration).overlap.makespan_s


def _stream(step: Iteration, name: str) -> str:
    return next(op.stream for op in step.ops if op.name == name)


def test_the_bucket_rule_is_the_larger_of_forty_million_and_a_million_per_rank() -> None:
    assert [default_bucket_elements(n) for n in (1, 40, 64)] == [40_000_000, 40_000_000, 64_000_000]


def test_a_bucket_is_closed_once_it_holds_enough() -> None:
    assert bucket_sizes([3, 3, 3, 9, 1], 6) == [[0, 1], [2, 3], [4]]


def test_gradients_travel_by_bucket_as_soon_as_they_are_there() -> None:
    found = problem(data=8, global_batch=8)
    step = Megatron(MegatronFlags(bucket_elements=1_500_000)).plan(found).iteration
    reduces = [op.name for op in step.comms if op.communicator == "dp"]
    assert any("+" in name for name in reduces)
    places = {op.name: number for number, op in enumerate(step.ops)}
    assert places[reduces[0]] < max(place for name, place in places.items() if name.endswith("_d"))


def test_without_overlap_gradients_come_after_backward_on_the_computations_stream() -> None:
    found = problem(data=8, global_batch=8)
    step = Megatron(MegatronFlags(overlap_grad_reduce=False)).plan(found).iteration
    places = {op.name: number for number, op in enumerate(step.ops)}
    reduces = [op.name for op in step.comms]
    assert min(places[name] for name in reduces) > max(places[n] for n in places if n.endswith(("_d", "_w")))
    assert {_stream(step, name) for name in reduces} == {"compute"}


def test_other_pipeline_ranks_have_one_bucket() -> None:
    step = Megatron(MegatronFlags(is_first_stage=False)).plan(problem(data=8, global_batch=8)).iteration
    assert len(step.comms) == 1


def test_one_gather_is_launched_ahead() -> None:
    """Spec 3.2: the gather of bucket k + 1 is launched when the wait for bucket k returns."""
    found = problem(data=8, zero_stage=3, global_batch=8)
    step = Megatron().plan(found).iteration
    ops = {op.name: op for op in step.ops}
    second, first = ops["mb0.layer1.gather"], "mb0.layer0.gather"
    assert first in second.deps
    assert "mb0.head.embed" in second.deps  # the last operator before the first user of bucket 0


def test_bulk_pairs_are_the_right_way_round() -> None:
    """The gather of the saved input during the input's gradient, the scatter of that during the weight's."""
    found = problem(tensor=4, sequence_parallel=True, micro_batch=2, global_batch=2)
    step = Megatron().plan(found).iteration
    order = [op.name for op in step.ops]
    layer = [name for name in order if name.startswith("mb0.layer1.up_") and name.endswith(("_w", "_d"))]
    assert layer == ["mb0.layer1.up_gather_w", "mb0.layer1.up_d", "mb0.layer1.up_reduce_d", "mb0.layer1.up_w"]
    assert _stream(step, "mb0.layer1.up_gather_w") == _stream(step, "mb0.layer1.up_reduce_d") == "tensor"
    assert _stream(step, "mb0.layer1.mlp_gather") == "compute"
    spans = predict(found, step)
    start = dict(zip(spans.graph.names, spans.schedule.starts, strict=True))
    ticks = dict(zip(spans.graph.names, spans.graph.ticks, strict=True))
    gather, data = "mb0.layer1.up_gather_w", "mb0.layer1.up_d"
    assert start[gather] < start[data] + ticks[data]
    assert start[data] < start[gather] + ticks[gather]


def test_the_printed_bulk_pairs_would_wait_for_themselves() -> None:
    """The notes overlap the gather with the weight's product and the scatter with the input's: each needs the other."""
    step = problem(tensor=4, sequence_parallel=True, micro_batch=2, global_batch=2).iteration
    ops = {op.name: op for op in step.ops}
    assert "mb0.layer1.up_gather_w" in ops["mb0.layer1.up_w"].deps
    assert "mb0.layer1.up_d" in ops["mb0.layer1.up_reduce_d"].deps


def test_input_gradients_are_all_reduced_beside_the_weights_product() -> None:
    found = problem(tensor=4, micro_batch=2, global_batch=2)
    assert makespan(found, MegatronFlags()) < makespan(found, MegatronFlags(tensor_overlap=TensorOverlap.NONE))


def test_pieces_hide_what_bulk_leaves_in_forward() -> None:
    found = problem(tensor=4, sequence_parallel=True, micro_batch=16, global_batch=16)
    whole, cut = (
        makespan(found, MegatronFlags(tensor_overlap=kind)) for kind in (TensorOverlap.BULK, TensorOverlap.PIPELINED)
    )
    assert cut < whole
    step = Megatron(MegatronFlags(tensor_overlap=TensorOverlap.PIPELINED)).plan(found).iteration
    names = {op.name for op in step.ops}
    assert {f"mb0.layer0.mlp_gather#{k}" for k in range(4)} | {f"mb0.layer0.up#{k}" for k in range(4)} <= names


def test_exchanges_of_one_micro_batch_run_beside_the_other() -> None:
    found = problem(EXPERTS, data=8, expert=8, micro_batch=4, global_batch=64)
    plain, combined = MegatronFlags(), MegatronFlags(overlap_experts=True)
    assert makespan(found, combined) < makespan(found, plain)
    order = [op.name for op in Megatron(combined).plan(found).iteration.ops]
    pair = ["mb0.layer1.combine_d", "mb1.layer2.attention", "mb0.layer1.expert_down_d", "mb1.layer2.dispatch"]
    pair += ["mb0.layer1.dispatch_d", "mb1.layer2.expert_up", "mb1.layer2.combine", "mb0.layer1.attention_d"]
    assert sorted(pair, key=order.index) == pair


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"data": 8, "expert": 8, "global_batch": 8}, "at least 2 micro-batches"),
        ({"data": 8, "global_batch": 16}, "needs a mixture of experts"),
    ],
)
def test_combined_schedules_need_experts_and_two_micro_batches(layout: dict[str, int], message: str) -> None:
    model = EXPERTS if "expert" in layout else DENSE
    with pytest.raises(JobError, match=message):
        Megatron(MegatronFlags(overlap_experts=True)).plan(problem(model, **layout))


def test_roles_tell_megatrons_mechanisms_apart() -> None:
    step = problem(tensor=4, sequence_parallel=True, data=2, zero_stage=3, micro_batch=2, global_batch=4).iteration
    roles = Roles.find(StepIndex(step)).of
    assert roles["mb0.layer0.gather"] is MegatronRole.PARAMETER
    assert roles["mb0.layer0.scatter"] is MegatronRole.GRADIENT
    assert roles["mb0.layer0.up_gather_w"] is MegatronRole.SAVED_INPUT
    assert roles["mb0.layer0.up_reduce_d"] is MegatronRole.INPUT_GRADIENT
    assert roles["mb0.layer0.mlp_gather"] is MegatronRole.ACTIVATION


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"rs_dgrad": True}, "rs_dgrad needs tensor_overlap 'pipelined'"),
        ({"bucket_elements": 0}, "bucket_elements is 0, must be at least 1"),
        ({"delay_weight_grad": True}, "delay_weight_grad needs overlap_experts"),
        ({"tensor_splits": 1}, "tensor_splits is 1, must be at least 2"),
    ],
)
def test_switches_that_exclude_each_other_are_refused(flags: dict[str, bool], message: str) -> None:
    with pytest.raises(JobError, match=message):
        MegatronFlags(**flags)  # type: ignore[arg-type]


def test_speed_up_never_exceeds_the_cap_of_overlap() -> None:
    """Centauri 5.4: at most min(1 / a, 1 / (1 - a)), a the share of communication in the serial step."""
    for wire in (1e9, 1e10, 1e11):
        found = problem(data=8, zero_stage=3, global_batch=8, times=Times(wire=wire))
        plan = predict(found, Megatron(MegatronFlags(bucket_elements=1)).plan(found).iteration).overlap
        serial = plan.computation_s + plan.communication_s
        share = plan.communication_s / serial
        assert serial / plan.makespan_s <= min(1 / share, 1 / (1 - share)) + 1e-9


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3"])
def test_baselines_keep_their_names(name: str) -> None:
    found = problem(data=8, zero_stage=3, global_batch=8)
    assert getattr(baselines, name)().plan(found).planner == name


def test_baselines_overlap_in_the_order_of_their_stages() -> None:
    found = problem(data=8, zero_stage=3, global_batch=8)
    first, second, third = (
        predict(found, planner().plan(found).iteration).overlap.makespan_s
        for planner in (baselines.zero1, baselines.zero2, baselines.zero3)
    )
    assert first >= second >= third


def test_out_of_order_is_never_worse_than_buckets_in_order() -> None:
    found = problem(data=8, global_batch=8, times=Times(wire=2e9))
    plain, delayed = baselines.ddp().plan(found), baselines.OutOfOrder().plan(found)
    assert delayed.planner == "out_of_order"
    assert predict(found, delayed.iteration).schedule.makespan <= predict(found, plain.iteration).schedule.makespan


def test_too_little_memory_is_refused_by_how_much() -> None:
    found = problem(data=8, zero_stage=3, global_batch=8)
    with pytest.raises(JobError, match=r"megatron's plan needs \d+: \d+ bytes too many"):
        Megatron().plan(replace(found, memory_limit_bytes=1000))


def test_weights_gradients_are_the_ones_that_are_delayed() -> None:
    step = problem(data=2, global_batch=2).iteration
    assert all(op.name.endswith("_w") for op in step.ops if op.origin.phase is Phase.WEIGHT_GRAD)


def test_a_bucket_ends_where_the_host_waits_for_its_reductions() -> None:
    """The device is waited for between micro-batches: what the second reduces is in no bucket of the first."""
    found = problem(data=8, zero_stage=3, global_batch=16)
    ops = found.iteration.ops
    first, second = ([op for op in ops if op.name.startswith(f"mb{batch}.")] for batch in (0, 1))
    wait = CompOp(name="synchronize", work=MemoryBound(1), deps=tuple(op.name for op in first), is_host_read=True)
    rest = [op for op in ops if op not in first and op not in second]
    held = replace(found.iteration, ops=(*first, wait, *second, *rest))
    step = Megatron().plan(replace(found, iteration=held)).iteration
    buckets = [op.name for op in step.comms if "scatter" in op.name and "+" in op.name]
    assert {name[:3] for name in buckets} == {"mb0", "mb1"}
    assert len(buckets) == 2
