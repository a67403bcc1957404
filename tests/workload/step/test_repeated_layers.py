"""Layers that share their operators, against every layer built anew and against the whole step simulated."""

from dataclasses import replace

import pytest

from lagom_overlap.cost.operators import load_framework, load_operators
from lagom_overlap.cost.profile import load_profile
from lagom_overlap.hardware import load_preset
from lagom_overlap.sim.columns import Columns
from lagom_overlap.sim.framework import FrameworkModel
from lagom_overlap.workload.models import load_model
from lagom_overlap.workload.ops import CommOp, Phase
from lagom_overlap.workload.parallel import Dispatcher, ParallelLayout, PipelineSchedule, Recompute
from lagom_overlap.workload.parallel.layout import RecomputeModule
from lagom_overlap.workload.precision import DType, Precision, ProductFormat
from lagom_overlap.workload.step import StepBuilder, build, load_rules
from lagom_overlap.workload.step.layer import LayerOps
from lagom_overlap.workload.step.model_chunk import Chunk
from lagom_overlap.workload.step.stage_build import StageBuild
from lagom_overlap.workload.step.tape import layer_ops

FP8 = Precision(DType.BF16, DType.BF16, DType.FP32, ProductFormat.FP8)
BATCHES = 4
INTERLEAVED = {"schedule": PipelineSchedule.INTERLEAVED, "chunks": 2}
CASES = {
    "FSDP2": ("fsdp2", "llama-3-8b", {"data": 8, "zero_stage": 3}),
    "FSDP2 with hybrid sharding and prefetch": (
        "fsdp2", "phi-2", {
            "data": 8, "zero_stage": 3, "replicate": 2, "forward_prefetch": 2, "kept_units": 3, "reduce_buffers": 2,
        },
    ),
    "torchtitan, parts of products, FP8": (
        "torchtitan", "llama-3-8b", {
            "data": 2, "tensor": 4, "zero_stage": 2, "sequence_parallel": True, "recompute": Recompute.PRODUCTS,
        },
    ),
    "compiled, FP8": (
        "torchtitan_compiled", "llama-3-8b", {"data": 8, "zero_stage": 3, "recompute": Recompute.PRODUCTS},
    ),
    "compiled, every second layer recomputed, FP8": (
        "torchtitan_blocks", "llama-3-8b", {"data": 2, "zero_stage": 3, "recompute": Recompute.LAYERS},
    ),
    "compiled, parts of products, FP8": (
        "torchtitan_compiled", "llama-3-8b", {
            "data": 2, "tensor": 4, "zero_stage": 3, "sequence_parallel": True, "overlap_tensor": True,
        },
    ),
    "compiled, FP8 by rows": ("torchtitan_compiled", "llama-3-8b", {"data": 8, "zero_stage": 3}),
    "compiled, tensor parallelism, FP8 by rows": (
        "torchtitan_compiled", "llama-3-8b", {
            "data": 2, "tensor": 4, "zero_stage": 3, "sequence_parallel": True, "recompute": Recompute.PRODUCTS,
        },
    ),
    "every second layer recomputed, context parallelism": (
        "torchtitan_compiled", "llama-3-8b", {
            "data": 2, "context": 2, "zero_stage": 3, "recompute": Recompute.LAYERS,
        },
    ),
    "buckets that close within layers": (
        "ddp", "phi-2", {"data": 8, "overlap_gradients": True, "bucket_bytes": 10_000_000},
    ),
    "Megatron's chunks, user buffers, FP8": (
        "megatron", "llama-3-8b", INTERLEAVED | {
            "pipeline": 4, "tensor": 2, "data": 4, "zero_stage": 1, "sequence_parallel": True, "overlap_tensor": True,
            "overlap_gradients": True, "overlap_p2p": True,
        },
    ),
    "DeepSpeed, gradients added by kernels": ("deepspeed", "gpt-5b", {"data": 4, "zero_stage": 2}),
    "experts of another micro-batch's turn": (
        "megatron", "qwen3-30b-a3b", {
            "data": 8, "expert": 8, "zero_stage": 1, "overlap_experts": True, "overlap_gradients": True,
            "whole_experts": True, "dispatcher": Dispatcher.MERGED,
        },
    ),
    "latent attention, two kinds of layer, multi-token prediction": (
        "megatron", "deepseek-v3", {
            "data": 8, "expert": 8, "tensor": 2, "sequence_parallel": True, "whole_experts": True,
            "recompute": Recompute.SELECTIVE, "recompute_modules": (RecomputeModule.MLA_UP_PROJ, RecomputeModule.MLP),
        },
    ),
    "one multi-token prediction repeated": (
        "megatron", "nemotron-3-super-120b-a12b", {"data": 8, "expert": 8, "zero_stage": 1, "overlap_gradients": True},
    ),
    "Mamba layers": ("fsdp2", "nemotron-h-8b", {"data": 4, "zero_stage": 3, "recompute": Recompute.FULL}),
}  # fmt: skip


class LayerByLayer(StageBuild):
    """Issues every layer's operators themselves, in every micro-batch."""

    def _layer_forward(self, chunk: Chunk, layer: int, batch: int, inputs: dict[int, str], x: str) -> str:
        units, kind = chunk.units[layer], chunk.kinds[layer]
        self._issuer.before(units, Phase.FORWARD, batch)
        ops = layer_ops(kind)(self.graph, self.shape, layer=layer, batch=batch, weights=chunk.weights[layer], kind=kind)
        ops.silent = chunk.silent_in(layer)
        self._announce(ops, units, batch)
        inputs[layer] = ops  # type: ignore[assignment]  # what the backward below is called with
        made = ops.forward(x)
        self._issuer.after_forward(units)
        return made

    def _layer_backward(self, chunk: Chunk, layer: int, batch: int, x: LayerOps, gradient: str) -> str:  # type: ignore[override]
        self._issuer.before(chunk.units[layer], Phase.BACKWARD, batch)
        x.recompute()
        made = x.backward(gradient)
        self._after(chunk.units[layer], batch)
        return made


EIGHT_LAYERS = ("llama-3-8b", "phi-2", "gpt-5b", "qwen3-30b-a3b", "deepseek-v3")
"""Of these models the first eight layers have all kinds that the whole one has."""


def builder(case: str, *, is_whole: bool = False) -> StepBuilder:
    framework, name, degrees = CASES[case]
    model = load_model(name)
    if name in EIGHT_LAYERS and not is_whole:
        model = replace(model, num_layers=8)
    layout = ParallelLayout(global_batch=BATCHES * degrees["data"], **degrees)
    precision = None
    if "FP8" in case:
        precision = replace(FP8, products=ProductFormat.FP8_ROWWISE) if "by rows" in case else FP8
    return StepBuilder(model, layout, seq_len=2048, rules=load_rules(framework), precision=precision)


@pytest.mark.parametrize("case", CASES)
def test_layers_that_share_operators_make_the_step_of_layers_built_one_by_one(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = {0, CASES[case][2].get("pipeline", 1) - 1}
    shared = [builder(case).rolled(rank).unrolled() for rank in stages]
    monkeypatch.setattr(build, "StageBuild", LayerByLayer)
    anew = [builder(case).rolled(rank).unrolled() for rank in stages]
    for one, other in zip(shared, anew, strict=True):
        assert one.iteration.ops == other.iteration.ops
        assert one == other


@pytest.mark.parametrize("case", CASES)
def test_a_rolled_step_runs_as_its_whole_one_to_the_last_bit(case: str) -> None:
    framework = CASES[case][0]
    cluster = load_preset("h100_dgx", 8)
    operators = load_operators(cluster.gpu).in_training()
    price = FrameworkModel.of(cluster, load_profile("plausible"), operators, load_framework(framework))
    rolled = builder(case).rolled().placed_on(cluster)
    whole = rolled.unrolled()
    assert whole == builder(case).rolled().unrolled().placed_on(cluster)
    assert price.host_s(Columns(rolled)).tolist() == price.host_s(Columns(whole.iteration)).tolist()
    together = price.simulator(rolled).run_as(lambda op: None)
    assert together == price.simulator(whole.iteration, waits=whole.waits).run({})


def test_equal_layers_are_one_object() -> None:
    """Of 34 units (32 layers, embedding, head) each is gathered twice and reduced once in a micro-batch."""
    step = builder("FSDP2", is_whole=True).rolled()
    assert len({id(op) for op in step.ops}) < len(step.ops) / 10
    assert sum(isinstance(op, CommOp) for op in step.ops) == BATCHES * 34 * 3
