"""Layouts that cannot be built are refused with the key, its value and what is allowed."""

import re
from dataclasses import replace

import pytest

from lagom_overlap.errors import JobError
from lagom_overlap.hardware import load_preset
from lagom_overlap.workload.models import load_model
from lagom_overlap.workload.parallel import ParallelLayout, ParallelTable, PipelineSchedule
from lagom_overlap.workload.parallel.layout_check import check_layout
from lagom_overlap.workload.parallel.stage import chunk_layers, plan_stages

GOOD = ParallelLayout(tensor=8, pipeline=4, data=2, micro_batch=1, global_batch=16)


def test_the_degrees_multiply_to_gpus_and_the_batches_divide_to_micro_batches() -> None:
    assert GOOD.num_gpus == 64
    assert GOOD.num_micro_batches == 8


def test_an_empty_table_of_a_job_file_is_the_default_layout_with_overlapped_gradients() -> None:
    """docs/formats.md: `overlap_gradients` is true unless the job says otherwise, everything else is off or 1."""
    assert ParallelTable().layout() == ParallelLayout(overlap_gradients=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor": 0}, "parallel.tensor is 0, must be at least 1"),
        ({"global_batch": 15}, "parallel.global_batch is 15, must be a multiple of micro_batch x data = 1 x 2 = 2"),
        ({"zero_stage": 4}, "parallel.zero_stage is 4, must be 0 to 3"),
        ({"overlap_parameters": True}, "overlap_parameters needs zero_stage = 1 and overlap_gradients = true"),
        ({"overlap_parameters": True, "zero_stage": 2}, "as Megatron-LM does, not 2 and false"),
        ({"overlap_parameters": True, "zero_stage": 1, "overlap_gradients": False}, "not 1 and false"),
        ({"data": 1 << 16, "global_batch": 1 << 16}, "are 2097152 GPUs, at most 1048576"),
        ({"schedule": PipelineSchedule.INTERLEAVED}, "pipeline = 4 and chunks = 1; both must be at least 2"),
        (
            {"schedule": PipelineSchedule.INTERLEAVED, "chunks": 2, "global_batch": 12},
            "6 micro-batches, must be a multiple",
        ),
        ({"chunks": 2}, "parallel.chunks is 2, must be 1 unless schedule is interleaved"),
        ({"tensor": 1, "sequence_parallel": True}, "sequence_parallel needs tensor of at least 2"),
        ({"global_batch": 10**7}, "5000000 micro-batches through 4 model chunks are 20000000 forwards"),
        ({"expert": 4}, "parallel.expert is 4, must divide parallel.data = 2"),
        ({"pipeline": 1, "tables_as_layers": True}, "tables_as_layers needs pipeline of at least 2"),
        ({"overlap_experts": True}, "needs expert and micro-batches of at least 2, not 1 and 8"),
        ({"expert": 2, "global_batch": 2, "overlap_experts": True}, "at least 2, not 2 and 1"),
    ],
)
def test_degrees_that_contradict_each_other_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(JobError, match=re.escape(words)):
        replace(GOOD, **changes)


@pytest.mark.parametrize(
    ("changes", "model", "seq_len", "words"),
    [
        ({"data": 4}, "gpt-175b", 2048, "8 x 4 x 4 = 128 GPUs, but cluster 'a100_dgx' has 64 (8 x 8)"),
        ({"tensor": 5, "data": 1}, "gpt-175b", 2048, "5 x 4 x 1 = 20 GPUs"),
        ({"pipeline": 2, "data": 4}, "gpt-530b", 2048, "parallel.pipeline x chunks = 2 x 1 = 2, must divide"),
        (
            {"tables_as_layers": True},
            "gpt-175b",
            2048,
            "layers (96) and 2 for tables_as_layers",
        ),
        ({"sequence_parallel": True}, "gpt-175b", 2049, "must divide seq_len (2049)"),
        ({"expert": 2}, "gpt-175b", 2048, "parallel.expert is 2, must be 1: model 'gpt-175b' has no experts"),
    ],
)
def test_layouts_that_do_not_fit_model_or_cluster_are_refused(
    changes: dict[str, object], model: str, seq_len: int, words: str
) -> None:
    with pytest.raises(JobError, match=re.escape(words)):
        check_layout(load_model(model), replace(GOOD, **changes), load_preset("a100_dgx", 8), seq_len)


def test_tensor_parallelism_must_divide_heads_and_key_value_heads() -> None:
    layout = ParallelLayout(tensor=16, data=1, pipeline=1)
    check_layout(load_model("llama-3-70b"), layout, load_preset("a100_dgx", 2), 2048)
    with pytest.raises(JobError, match=re.escape("must divide the model's heads (32)")):
        check_layout(load_model("llama-3-8b"), replace(layout, tensor=24), load_preset("a100_dgx", 3), 2048)


def test_tables_that_count_as_layers_leave_the_first_and_last_chunk_one_layer_fewer() -> None:
    # Megatron-LM's --account-for-embedding-in-pipeline-split: Llama 3.1 405B has 126 layers, its recipes 8 x 8 chunks.
    model = load_model("llama-3-405b")
    layout = ParallelLayout(
        tensor=8, pipeline=8, micro_batch=1, global_batch=8, schedule=PipelineSchedule.INTERLEAVED, chunks=8,
        tables_as_layers=True,
    )  # fmt: skip
    chunks = chunk_layers(model, layout)
    assert [len(layers) for layers in chunks] == [1, *[2] * 62, 1]
    assert [layer for layers in chunks for layer in layers] == list(range(126))
    stages = plan_stages(model, layout)
    assert [stage.num_layers for stage in stages] == [15, *[16] * 6, 15]
    even = ParallelLayout(pipeline=3, data=1, micro_batch=1, global_batch=1)
    assert [len(layers) for layers in chunk_layers(model, even)] == [42, 42, 42]
