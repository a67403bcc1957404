"""Attention in windows and mixtures in every second layer: products by brute force over tiles, biases by hand."""

from dataclasses import replace

import pytest

from lagom_overlap.workload import Attention, Gemm, MemoryBound, Phase
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.models import TransformerModel, load_model
from lagom_overlap.workload.parallel import ParallelLayout, plan_stages
from lagom_overlap.workload.step import build_step, load_rules

FSDP2 = load_rules("fsdp2")
MEGATRON = load_rules("megatron")

OSS = replace(load_model("gpt-oss-20b"), num_layers=2)
TILE = 128


def step(model: TransformerModel, seq_len: int) -> IssuedStep:
    return build_step(model, ParallelLayout(), seq_len=seq_len, rules=MEGATRON)


def attention(built: IssuedStep, name: str) -> Attention:
    work = next(op.work for op in built.iteration.computations if op.name == name)
    assert isinstance(work, Attention)
    return work


def tiles_met(seq_len: int, window: int) -> int:
    """Pairs of a tile of queries and a tile of keys of which one query sees one key."""
    pairs = {
        (query // TILE, key // TILE) for query in range(seq_len) for key in range(max(0, query - window + 1), query + 1)
    }
    return len(pairs)


@pytest.mark.parametrize(("seq_len", "window"), [(2048, 128), (4096, 128), (4096, 300), (1024, 4096)])
def test_a_window_costs_the_tiles_that_it_meets(seq_len: int, window: int) -> None:
    built = step(replace(OSS, window=window), seq_len)
    flops = attention(built, "mb0.layer0.attention").flops
    most = 4 * 64 * 64 * TILE**2 * tiles_met(seq_len, window)
    whole = attention(built, "mb0.layer1.attention").flops
    assert whole == 0.5 * 4 * 64 * 64 * seq_len**2
    if window >= seq_len:
        assert flops == whole
    else:  # the first rows see fewer tiles than all others
        assert most <= flops <= most * (1 + 2 * window / seq_len)
    assert attention(built, "mb0.layer0.attention_d").flops == pytest.approx(2.5 * flops)


def test_every_second_layer_is_windowed() -> None:
    model = load_model("gpt-oss-120b")
    assert [str(kind) for kind in model.layer_kinds[:3]] == ["window+experts", "attention+experts", "window+experts"]
    assert len(model.layer_kinds) == 36


def test_biases_of_experts_get_their_gradients_from_the_rows_that_visit_them() -> None:
    built = build_step(OSS, ParallelLayout(zero_stage=3), seq_len=1024, rules=FSDP2)
    works = {op.name: op.work for op in built.iteration.computations}
    up, down = works["mb0.layer0.expert_up_b"], works["mb0.layer0.expert_down_b"]
    assert isinstance(up, MemoryBound)
    assert isinstance(down, MemoryBound)
    assert (up.num_bytes, down.num_bytes) == (2 * 4 * 1024 * 2 * 2880, 2 * 4 * 1024 * 2880)
    assert "mb0.layer0.residual2_b" not in works
    assert "mb0.layer0.qkv_b" in works


def test_dense_and_mixed_layers_alternate_with_a_width_each() -> None:
    model = replace(load_model("llama-4-maverick"), num_layers=2)
    built = step(model, 1024)
    works = {op.name: op.work for op in built.iteration.computations if op.origin.phase is Phase.FORWARD}
    dense, shared, routed = (works[f"mb0.layer{name}"] for name in ("0.up", "1.up", "1.expert_up"))
    assert [work.n for work in (dense, shared, routed) if isinstance(work, Gemm)] == [2 * 16384, 2 * 8192, 2 * 8192]
    assert "mb0.layer0.router" not in works


def test_stages_hold_the_parameters_of_their_own_layers() -> None:
    model = load_model("llama-4-maverick")
    layout = ParallelLayout(pipeline=4, data=8, expert=8, global_batch=8)
    stages = plan_stages(model, layout)
    experts = 24 * 128 * 3 * 5120 * 8192
    held = sum(stage.num_params - stage.num_expert_params for stage in stages)
    assert held == model.num_params - experts - 5120  # the last norm stands with neither
    assert sum(stage.num_expert_params for stage in stages) == experts // 8


def test_fsdp2_gathers_each_layers_own_matrices() -> None:
    model = replace(load_model("llama-4-maverick"), num_layers=2)
    layout = ParallelLayout(data=8, expert=8, zero_stage=3, global_batch=8)
    built = build_step(model, layout, seq_len=512, rules=FSDP2)
    gathers = {op.name: op.collective.num_bytes for op in built.iteration.comms if op.name.endswith(".gather")}
    dense, mixed = (model.params_of(kind) for kind in model.layer_kinds)
    assert gathers["mb0.layer0.gather"] == 2 * dense.total
    assert gathers["mb0.layer1.gather"] == 2 * (mixed.total - mixed.experts)
