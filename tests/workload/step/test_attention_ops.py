"""Rotary positions that YaRN scales and attention in MXFP8: counted by PyTorch itself, and by hand."""

from dataclasses import replace
from typing import Any

import pytest
from eager_operators import watched

from lagom_overlap.workload import Attention, CompOp, Issuer, MemoryBound
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.models import TransformerModel, load_model
from lagom_overlap.workload.ops import Access
from lagom_overlap.workload.parallel import ParallelLayout
from lagom_overlap.workload.precision import MIXED, Precision, ProductFormat
from lagom_overlap.workload.step import build_step, load_rules

OSS = replace(load_model("gpt-oss-20b"), num_layers=2)  # a window, then all keys; 64 and 8 heads of 64 columns
DEEPSEEK = load_model("deepseek-v3")
SEQ, TURNED = 2048, (64 + 8) * 64
NARROW = Precision(products=ProductFormat.MXFP8, attention=ProductFormat.MXFP8)


def built(model: TransformerModel = OSS, framework: str = "megatron", precision: Precision = MIXED) -> IssuedStep:
    return build_step(model, ParallelLayout(), seq_len=SEQ, rules=load_rules(framework), precision=precision)


def ops(step: IssuedStep, layer: int = 0) -> dict[str, CompOp]:
    return {op.name.rpartition(".")[2]: op for op in step.iteration.computations if op.origin.layer == layer}


def attention(step: IssuedStep, name: str, layer: int = 0) -> Attention:
    work = ops(step, layer)[name].work
    assert isinstance(work, Attention)
    return work


def memory(step: IssuedStep, name: str) -> MemoryBound:
    work = ops(step)[name].work
    assert isinstance(work, MemoryBound)
    return work


@pytest.mark.torch
def test_angles_that_are_scaled_move_what_eager_pytorch_does() -> None:
    import torch

    length, heads, columns = 16, 8, 64
    size, seen = length * heads * columns, [0.0, 0.0]

    def see(function: Any, tensors: list[torch.Tensor]) -> None:
        large = [each for each in tensors if each.numel() >= size // 2]
        # Zeros are written, not read and written: the result of `new_zeros` has its source among the arguments.
        large = large[-1:] if "zeros" in str(function) else large
        seen[0] += sum(each.numel() * each.element_size() for each in large) / size
        seen[1] += bool(large)

    def counted(run: Any) -> tuple[Any, float, float]:
        seen[:] = [0.0, 0.0]
        with watched(see):
            made = run()
        return made, seen[0], seen[1]

    def turned(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        turning, rest = x[..., :columns], x[..., columns:]
        first, second = turning.chunk(2, -1)
        made = turning * cosines + torch.cat((-second, first), -1) * sines
        return torch.cat((made, rest), -1)

    x = torch.randn(length, 1, heads, columns, dtype=torch.bfloat16, requires_grad=True)
    angles = torch.randn(length, 1, 1, columns, dtype=torch.bfloat16)
    y, forward, num_forward = counted(lambda: turned(x, angles.cos(), angles.sin()))
    gradient = torch.ones_like(y)
    _, backward, num_backward = counted(lambda: y.backward(gradient))

    step = built()
    for suffix, num_bytes, launches in (("", forward, num_forward), ("_d", backward, num_backward)):
        streamed, cut = memory(step, f"rotary{suffix}"), memory(step, f"rotary{suffix}_halves")
        assert (streamed.access, cut.access) == (Access.STREAM, Access.REARRANGE)
        assert streamed.num_bytes + cut.num_bytes == num_bytes * SEQ * TURNED, suffix
        assert streamed.num_launches + cut.num_launches == 2 * launches, suffix  # queries and keys
        assert ops(step)[f"rotary{suffix}"].origin.issuer is Issuer.EAGER


@pytest.mark.parametrize(
    ("model", "framework"), [(replace(OSS, scaled_rotary=False), "megatron"), (OSS, "megatron_deepspeed")]
)
def test_other_angles_take_one_fused_kernel(model: TransformerModel, framework: str) -> None:
    step = built(model, framework)
    assert memory(step, "rotary") == memory(step, "rotary_d") == MemoryBound(4 * SEQ * TURNED)
    assert "rotary_halves" not in ops(step)


def test_attention_in_mxfp8_casts_and_makes_all_products_of_a_window_in_backward() -> None:
    wide, narrow = built(), built(precision=NARROW)
    assert attention(narrow, "attention") == replace(attention(wide, "attention"), narrow=True)
    pairs = 4.0 * 64 * SEQ**2 * 64
    assert attention(wide, "attention_d").flops == pytest.approx(2.5 * 0.5 * pairs * 2 * 256 / SEQ)  # two tiles of keys
    assert attention(narrow, "attention_d").flops == 2.5 * pairs
    assert attention(narrow, "attention_d", 1).flops == attention(wide, "attention_d", 1).flops == 2.5 * 0.5 * pairs
    # Read 2, written by rows and by columns; 64 heads of queries and 8 each of keys and values.
    assert memory(narrow, "attention_cast") == MemoryBound(4 * SEQ * (64 + 8 + 8) * 64, Access.REARRANGE)
    assert memory(narrow, "attention_d_cast") == MemoryBound(4 * SEQ * 64 * 64, Access.REARRANGE)
    assert "attention_cast" not in ops(wide)


def test_latent_attention_casts_queries_and_keys_that_are_wider_than_values() -> None:
    model = replace(
        DEEPSEEK, num_layers=1, pattern="latent+mlp", num_experts=0, experts_per_token=0, shared_ffn=0, mtp_layers=0
    )
    narrow = built(model, precision=NARROW)
    assert memory(narrow, "attention_cast").num_bytes == 4 * SEQ * 128 * (192 + 192 + 128)
    assert memory(narrow, "attention_d_cast").num_bytes == 4 * SEQ * 128 * 128


def test_a_head_in_mxfp8_is_cast_and_others_leave_it_alone() -> None:
    mxfp8 = ProductFormat.MXFP8
    plain, head = (built(precision=Precision(products=mxfp8, others=others)) for others in ((), (("logits", mxfp8),)))

    def logits(step: IssuedStep) -> list[tuple[str, int]]:
        return [
            (op.name.rpartition(".")[2], getattr(op.work, "element_bytes", 0))
            for op in step.iteration.computations
            if op.name.rpartition(".")[2].startswith("logits")
        ]

    assert logits(plain) == [("logits", 2), ("logits_d", 2), ("logits_w", 2)]
    assert logits(head) == [("logits_cast", 0), ("logits", 1), ("logits_cast_d", 0), ("logits_d", 1), ("logits_w", 1)]


def test_a_window_is_as_wide_on_each_rank_of_a_ring() -> None:
    def first(context: int) -> list[Attention]:
        layout = ParallelLayout(context=context)
        step = build_step(OSS, layout, seq_len=SEQ, rules=load_rules("megatron"), precision=MIXED)
        return [attention(step, "attention", layer) for layer in (0, 1)]

    (window, every), (window_of_two, every_of_two) = first(1), first(2)
    assert window_of_two.reach == window.reach == 2 * 2 * 128  # two tiles, twice the keys of a query
    assert (every.reach, every_of_two.reach) == (SEQ, SEQ / 2)
    assert window_of_two.flops == window.flops / 2
