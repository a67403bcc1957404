"""FSDP2 in a pipeline: what is gathered, added and reduced when, against PyTorch itself and by hand."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from forked_python import run_ranks
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.workload import CommOp, CompOp, Gemm, Phase
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.models import load_model
from lagom_overlap.workload.parallel import ParallelLayout, PipelineSchedule
from lagom_overlap.workload.parallel.memory import stage_memory
from lagom_overlap.workload.parallel.stage import plan_stages
from lagom_overlap.workload.precision import DType, Precision
from lagom_overlap.workload.step import build_step, load_rules
from lagom_overlap.workload.streams import ALL_GATHER_COPY_IN, COMPUTE

LAYERS, BATCHES = 3, 3
MODEL = load_model("llama-3-8b")
INNER = ParallelLayout(data=2, pipeline=3, zero_stage=2, micro_batch=1, global_batch=2 * BATCHES)


def inner_stage(layout: ParallelLayout, framework: str = "fsdp2", precision: Precision | None = None) -> IssuedStep:
    """The step of a stage without tables."""
    model = replace(MODEL, num_layers=LAYERS * layout.pipeline * layout.chunks)
    return build_step(model, layout, seq_len=2048, rules=load_rules(framework), rank=1, precision=precision)


def collectives(step: IssuedStep) -> list[str]:
    kinds = {CollectiveKind.ALL_GATHER: "gather", CollectiveKind.REDUCE_SCATTER: "scatter"}
    return [kinds[op.collective.kind] for op in step.iteration.comms if op.collective.kind in kinds]


@pytest.mark.torch
@pytest.mark.gloo
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_a_stage_gathers_and_reduces_as_often_as_in_pytorch(tmp_path: Path, zero_stage: int) -> None:
    pytest.importorskip("torch")
    script = Path(__file__).parent / "pipelined_fsdp2.py"
    run_ranks(script, [str(tmp_path), "whole" if zero_stage == 2 else "freed"], 4)
    ran = json.loads((tmp_path / "0.json").read_text(encoding="utf-8"))
    counted = Counter(name for name in ran if name != "product")
    step = inner_stage(replace(INNER, zero_stage=zero_stage))
    assert Counter(collectives(step)) == counted
    # Nothing is reduced before the last product, and nothing is computed between the reductions.
    assert ran[-LAYERS:] == ["scatter"] * LAYERS
    ops = list(step.iteration.ops)
    last = max(place for place, op in enumerate(ops) if isinstance(op, CompOp) and isinstance(op.work, Gemm))
    scatters = [place for place, op in enumerate(ops) if isinstance(op, CommOp) and op.name.endswith("scatter")]
    assert min(scatters) > last


def test_every_forward_has_the_gathers_behind_it_wait_even_if_it_gathers_nothing() -> None:
    """`_fsdp_state.py`, `_root_pre_forward`: the gather streams wait for the current stream in every forward.

    The first backward leaves parameters whole, so the second forward gathers nothing, but frees them.
    """
    ops = inner_stage(replace(INNER, zero_stage=3)).issued.ops
    first = [op for op in ops if op.stream == COMPUTE and op.origin.microbatch == 0]
    last = [op.name for op in first if op.origin.phase is not Phase.OPTIMIZER][-1]
    gathers = [op for op in ops if op.stream == ALL_GATHER_COPY_IN and op.origin.microbatch == 1]
    assert {op.origin.phase for op in gathers} == {Phase.BACKWARD}
    assert last in gathers[0].deps


@pytest.mark.parametrize(
    ("gradient", "added", "copied"),
    [(DType.BF16, 6 + 10 * (BATCHES - 1), 8), (DType.FP32, 12 * (BATCHES - 1), 8)],
)
def test_whole_gradients_are_cast_once_and_then_added_in_fp32(gradient: DType, added: int, copied: int) -> None:
    """Cast 2 + 4 bytes per parameter, added 2 + 4 + 4, copied 4 + 4; FP32 gradients need no cast and add 4 + 4 + 4."""
    step = inner_stage(INNER, precision=Precision(gradient, gradient, DType.FP32))
    moved = Counter[str]()
    for op in step.iteration.computations:
        for part in ("accumulate", "reduce_copy_in"):
            if op.name.endswith(part):
                moved[part] += int(op.work.num_bytes)  # type: ignore[union-attr]
    num_params = LAYERS * MODEL.layer_params
    assert moved["accumulate"] == num_params * added
    assert moved["reduce_copy_in"] == num_params * copied


def test_each_chunk_of_an_interleaved_stage_is_reduced_behind_its_own_last_backward() -> None:
    layout = replace(INNER, schedule=PipelineSchedule.INTERLEAVED, chunks=2)
    ops = list(inner_stage(layout).iteration.ops)
    order = [op.origin.layer for op in ops if isinstance(op, CommOp) and op.name.endswith("scatter")]
    own = [layer for layer in dict.fromkeys(op.origin.layer for op in ops) if layer is not None]
    assert order == [*own[LAYERS:], *own[:LAYERS]]


def test_one_gpu_holds_whole_parameters_and_gradients_in_a_pipeline() -> None:
    """By hand for an inner stage: 2 and 4 bytes per parameter whole, 12 of the optimizer for a half of them."""
    model = replace(MODEL, num_layers=LAYERS * INNER.pipeline)
    for zero_stage in (2, 3):
        layout, rules = replace(INNER, zero_stage=zero_stage), load_rules("fsdp2")
        stage = plan_stages(model, layout)[1]
        memory = stage_memory(model, layout, stage, 2048, rules.precision, stays_whole=rules.stays_whole(layout))
        num_params = LAYERS * model.layer_params
        assert (memory.parameter_bytes, memory.gradient_bytes) == (2 * num_params, 4 * num_params)
        assert memory.optimizer_bytes == 12 * num_params // 2


@pytest.mark.parametrize("framework", ["deepspeed", "megatron_deepspeed"])
def test_deepspeeds_pipelines_shard_optimizers_alone(framework: str) -> None:
    with pytest.raises(JobError, match=r"parallel.zero_stage is 2, must be at most 1 with pipeline = 3"):
        inner_stage(INNER, framework)
