"""Context parallelism, FP8 products, parts of tensor parallelism, eager kernels and torchtitan's recomputation."""

from dataclasses import replace
from typing import Any

import pytest
from eager_operators import watched

from lagom_overlap.errors import JobError
from lagom_overlap.workload import Attention, CommOp, CompOp, Gemm, MemoryBound, Phase
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.models import load_model
from lagom_overlap.workload.parallel import ParallelLayout, Recompute
from lagom_overlap.workload.precision import Precision, ProductFormat
from lagom_overlap.workload.step import build_step, load_rules
from lagom_overlap.workload.step.traffic import Traffic, load_counts

EAGER = load_counts("traffic", "eager", Traffic)
PLAIN = load_counts("traffic", "plain", Traffic)

LLAMA = replace(load_model("llama-3-8b"), num_layers=2)
SEQ = 4096
ALONE = ParallelLayout(micro_batch=2, global_batch=2)


def built(layout: ParallelLayout, framework: str = "torchtitan", precision: Precision | None = None) -> IssuedStep:
    return build_step(LLAMA, layout, seq_len=SEQ, rules=load_rules(framework), precision=precision)


def works(step: IssuedStep, kind: type, phase: Phase | None = None) -> list[object]:
    return [
        op.work
        for op in step.iteration.computations
        if isinstance(op.work, kind) and phase in (None, op.origin.phase) and op.origin.layer is not None
    ]


def flops(step: IssuedStep, phase: Phase | None = None) -> float:
    products = [*works(step, Gemm, phase), *works(step, Attention, phase)]
    return sum(work.flops for work in products)  # type: ignore[attr-defined]


def test_context_ranks_share_all_work_evenly_and_carry_every_key_and_value() -> None:
    cut = built(replace(ALONE, context=4, zero_stage=3))
    assert flops(cut) * 4 == pytest.approx(flops(built(ALONE)))
    carried = [
        op.collective for op in cut.iteration.comms if op.communicator == "cp" and op.origin.phase is Phase.FORWARD
    ]
    assert [call.num_ranks for call in carried] == [4, 4]
    # torchtitan repeats keys and values to all heads before attention (repeat_kv).
    assert carried[0].num_bytes == 2 * (2 * SEQ) * LLAMA.num_heads * LLAMA.head_dim * 2
    assert {op.collective.num_ranks for op in cut.iteration.comms if op.communicator == "fsdp"} == {4}


def test_fp8_products_have_one_byte_operands_and_pay_for_their_casts() -> None:
    plain, cast = built(ALONE), built(ALONE, precision=Precision(products=ProductFormat.FP8))
    assert {work.element_bytes for work in works(cast, Gemm)} == {1}  # type: ignore[attr-defined]
    head = [op.work for op in cast.iteration.computations if op.name == "mb0.head.logits"]
    assert head[0].element_bytes == 2  # type: ignore[union-attr]
    assert {work.element_bytes for work in works(cast, Attention)} == {2}  # type: ignore[attr-defined]
    # Results are bf16, and FP32 where they are added to a buffer of gradients.
    assert {work.result_bytes for work in works(cast, Gemm)} == {2}  # type: ignore[attr-defined]
    fused = built(ALONE, "megatron", Precision(products=ProductFormat.FP8))
    for phase, num_bytes in ((Phase.FORWARD, 2), (Phase.BACKWARD, 2), (Phase.WEIGHT_GRAD, 8)):
        assert {work.result_bytes for work in works(fused, Gemm, phase)} == {num_bytes}  # type: ignore[attr-defined]
    moved = [sum(w.num_bytes for w in works(step, MemoryBound)) for step in (plain, cast)]  # type: ignore[attr-defined]
    # Forward inputs and backward gradients of four matrices and the matrices once, 8 bytes each.
    h, tokens = LLAMA.hidden, 2 * SEQ
    inputs = h + LLAMA.attention_columns + h + LLAMA.ffn
    outputs = LLAMA.qkv_columns + h + 2 * LLAMA.ffn + h
    assert moved[1] - moved[0] == 2 * 8 * (tokens * (inputs + outputs) + LLAMA.layer_matrix_params)


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
def test_transformer_engine_casts_a_matrix_once_in_a_step(recompute: Recompute) -> None:
    layout = replace(ALONE, global_batch=3 * ALONE.global_batch, recompute=recompute)
    plain, cast = (
        built(layout, "megatron", precision) for precision in (Precision(), Precision(products=ProductFormat.FP8))
    )
    moved = [sum(w.num_bytes for w in works(step, MemoryBound)) for step in (plain, cast)]  # type: ignore[attr-defined]
    h, tokens = LLAMA.hidden, 2 * SEQ
    inputs = h + LLAMA.attention_columns + h + LLAMA.ffn
    outputs = LLAMA.qkv_columns + h + 2 * LLAMA.ffn + h
    read = inputs * (1 if recompute is Recompute.NONE else 2) + outputs
    # Read as bf16, written as FP8 by rows and by columns: 4 bytes each.
    assert moved[1] - moved[0] == 2 * 4 * (3 * tokens * read + LLAMA.layer_matrix_params)


def test_the_operator_mode_recomputes_keys_the_output_and_half_of_the_mlps_first_product() -> None:
    step = built(replace(ALONE, recompute=Recompute.PRODUCTS))
    h, tokens = LLAMA.hidden, 2 * SEQ
    keys = LLAMA.num_kv_heads * LLAMA.head_dim
    assert flops(step, Phase.RECOMPUTE) == 2 * 2 * tokens * h * (keys + LLAMA.attention_columns + LLAMA.ffn)
    assert not works(step, Attention, Phase.RECOMPUTE)


def test_every_second_layer_is_recomputed_whole() -> None:
    half, whole = (built(replace(ALONE, recompute=mode)) for mode in (Recompute.LAYERS, Recompute.FULL))
    assert flops(half, Phase.RECOMPUTE) * 2 == flops(whole, Phase.RECOMPUTE)


def test_in_parts_a_products_gather_does_not_hold_it_back() -> None:
    layout = replace(ALONE, tensor=4, sequence_parallel=True)
    for overlap in (False, True):
        step = built(replace(layout, overlap_tensor=overlap))
        ops = {op.name: op for op in step.iteration.ops}
        product = next(op for op in ops.values() if op.name == "mb0.layer0.qkv_q")
        assert isinstance(product, CompOp)
        held = {*product.deps, *step.waits.get(product.name, ())}
        assert ("mb0.layer0.attention_gather" in held or "mb0.layer0.attention_gather_move" in held) is not overlap
        gathers = [op for op in ops.values() if isinstance(op, CommOp) and op.name == "mb0.layer0.attention_gather"]
        assert gathers[0].collective.num_bytes == 2 * (2 * SEQ) * LLAMA.hidden


def test_compiled_kernels_move_less_than_eager_ones_and_multiply_the_same() -> None:
    eager, compiled = built(ALONE), built(ALONE, "torchtitan_compiled")
    assert flops(eager) == flops(compiled)
    norms = [
        next(op.work.num_bytes for op in step.iteration.computations if op.name == "mb0.layer0.norm")  # type: ignore[union-attr]
        for step in (eager, compiled)
    ]
    assert norms == [36 * 2 * SEQ * LLAMA.hidden, 4 * 2 * SEQ * LLAMA.hidden]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"context": 3, "zero_stage": 3}, "must divide seq_len"),
        ({"context": 2, "flash_attention": False, "zero_stage": 3}, "must be 1 without flash_attention"),
        ({"overlap_tensor": True}, "needs sequence_parallel"),
        ({"recompute": Recompute.PRODUCTS, "flash_attention": False}, "parallel.recompute is products"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(JobError, match=words):
        built(replace(ALONE, **changes))  # type: ignore[arg-type]


def products_in(step: IssuedStep, layer: int = 1) -> dict[str, int]:
    """Products by what they are for, of one layer."""
    made = [op for op in step.iteration.computations if isinstance(op.work, Gemm) and op.origin.layer == layer]
    backward = [op for op in made if op.origin.phase in (Phase.BACKWARD, Phase.WEIGHT_GRAD)]
    again = [op for op in made if op.origin.phase is Phase.RECOMPUTE]
    return {"forward": len(made) - len(backward) - len(again), "again": len(again), "backward": len(backward)}


@pytest.mark.torch
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_block_has_the_products_and_sums_that_pytorch_runs(recomputes: bool) -> None:
    import torch
    from torch import nn
    from torch.nn import functional
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.checkpoint import checkpoint

    rows, hidden, ffn = 6, 8, 12

    class Block(nn.Module):  # the Linear layers of torchtitan's TransformerBlock; norms that are one kernel
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
            self.gate, self.up = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
            self.down, self.norm, self.norm2 = (
                nn.Linear(ffn, hidden, bias=False),
                nn.LayerNorm(hidden),
                nn.LayerNorm(hidden),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n = self.norm(x)
            x = x + self.out(torch.softmax(self.q(n) * self.k(n), -1) * self.v(n))
            n = self.norm2(x)
            return x + self.down(functional.silu(self.gate(n)) * self.up(n))

    seen: list[tuple[str, tuple[int, ...]]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = function(*args, **(kwargs or {}))
            seen.append((function.overloadpacket.__name__, tuple(out.shape) if torch.is_tensor(out) else ()))
            return out

    block, x = Block(), torch.randn(rows, hidden, requires_grad=True)
    with Watch():
        y = checkpoint(block, x, use_reentrant=False) if recomputes else block(x)
        in_forward = seen.copy()
        y.backward(torch.ones_like(y))
    in_backward = seen[len(in_forward) :]
    forward, both = (sum(name == "mm" for name, _ in part) for part in (in_forward, in_backward))

    layout = replace(ALONE, recompute=Recompute.FULL) if recomputes else ALONE
    found = products_in(built(layout))
    assert found == {"forward": forward, "again": both - found["backward"], "backward": 14}
    if recomputes:
        assert found["again"] == 6  # the last product's result is read by nobody in backward
        return
    # Sums of gradients in one layer: 6 bytes per element of the hidden size each.
    step = built(ALONE)
    sums = {op.name: op.work.num_bytes for op in step.iteration.computations if isinstance(op.work, MemoryBound)}
    size = 6 * 2 * SEQ * LLAMA.hidden
    modelled = sum(sums[f"mb0.layer1.{part}"] for part in ("qkv_d_sum", "up_d_sum", "norm_add_d", "norm2_add_d")) / size
    num_sums = sum(name in ("add", "add_") and shape == (rows, hidden) for name, shape in in_backward)
    assert modelled == num_sums


def launches_of(step: IssuedStep, layer: int = 1) -> dict[str, int]:
    """Kernels of a layer's memory-bound operators, by part."""
    prefix = f"mb0.layer{layer}."
    return {
        op.name.removeprefix(prefix): op.work.num_launches
        for op in step.iteration.computations
        if isinstance(op.work, MemoryBound) and op.name.startswith(prefix)
    }


def test_sums_of_gradients_are_kernels_in_eager_pytorch_and_a_part_of_the_reader_where_compiled() -> None:
    # q, k and v: two additions; gate and up: one.
    eager, compiled = (launches_of(built(ALONE, name)) for name in ("torchtitan", "torchtitan_compiled"))
    assert [eager[f"{name}_d_sum"] for name in ("qkv", "up")] == [2, 1]
    assert [compiled[f"{name}_d_sum"] for name in ("qkv", "up")] == [0, 0]


@pytest.mark.parametrize(
    ("framework", "expected"),
    [
        # A Linear each: forward one input and three or two matrices, backward as many gradients as matrices.
        ("torchtitan", {"qkv": (4, 6), "out": (2, 2), "up": (3, 4), "down": (2, 2)}),
        # One product for all: its operand and, forward, its matrix with the transpose that backward reads.
        ("megatron", {"qkv": (2, 1), "out": (2, 1), "up": (2, 1), "down": (2, 1)}),
    ],
)
def test_every_matrix_and_operand_is_cast_by_kernels_of_its_own(
    framework: str, expected: dict[str, tuple[int, int]]
) -> None:
    found = launches_of(built(ALONE, framework, Precision(products=ProductFormat.FP8)))
    assert {name: (found[f"{name}_cast"], found[f"{name}_cast_d"]) for name in expected} == expected


def rms_norm(x: Any) -> Any:
    """torchtitan's RMSNorm (Dec 2024), with a scale of ones."""
    import torch

    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return scaled.type_as(x) * torch.ones(x.shape[-1], dtype=x.dtype, requires_grad=True)


def swiglu(gate: Any, up: Any) -> Any:
    from torch.nn import functional

    return functional.silu(gate) * up


def swiglu_of_one_product(both: Any) -> Any:
    gate, up = both.chunk(2, -1)
    return swiglu(gate, up)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("function", "widths", "modelled"),
    [
        (rms_norm, [1], EAGER.norm),
        (swiglu, [1, 1], EAGER.gated),
        (swiglu_of_one_product, [2], PLAIN.gated),
    ],
)
def test_eager_traffic_is_that_of_the_operators_that_pytorch_runs(
    function: Any, widths: list[int], modelled: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    import torch

    rows, columns = 64, 512
    seen: list[int] = []

    def see(_: Any, tensors: list[torch.Tensor]) -> None:
        whole = [each for each in tensors if each.numel() >= rows * columns and 0 not in each.stride()]
        seen.append(sum(each.numel() * each.element_size() for each in whole) // (rows * columns))

    inputs = [torch.randn(rows, width * columns, dtype=torch.bfloat16, requires_grad=True) for width in widths]
    with watched(see):
        made = function(*inputs)
    forward = seen.copy()
    gradient = torch.ones_like(made)
    seen.clear()
    with watched(see):
        made.backward(gradient)
    assert [[num for num in found if num] for found in (forward, seen)] == [
        [num for num in kernels if num] for kernels in modelled
    ]


@pytest.mark.torch
def test_a_loss_that_is_cut_moves_what_the_operators_of_pytorchs_loss_parallel_do() -> None:
    import torch
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import loss_parallel
    from torch.nn import functional
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    rows, columns = 64, 512
    few = {"gather", "index_put_", "empty_strided"}  # an element of a row, or none
    seen: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if any(each.__name__ in ("DTensor", "AsyncCollectiveTensor") for each in types):
                return NotImplemented
            out = function(*args, **(kwargs or {}))
            name = function._schema.name.removeprefix("aten::")
            read = () if name == "zeros_like" else (args, kwargs)
            tensors = [each for each in tree_leaves((read, out)) if type(each) is torch.Tensor]
            if not function.is_view and name not in few and not any(each.is_meta for each in tensors):
                whole = [each for each in tensors if each.numel() >= rows * columns]
                seen.append(sum(each.numel() * each.element_size() for each in whole) // (rows * columns))
            return out

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        logits = torch.randn(rows, columns, dtype=torch.bfloat16, requires_grad=True)
        target = torch.randint(0, 2 * columns, (rows,))
        with Watch(), loss_parallel():
            whole = DTensor.from_local(logits, mesh, [Shard(1)], run_check=False)
            loss = functional.cross_entropy(whole.float(), target)
            forward = sum(seen)
            seen.clear()
            loss.backward()
    finally:
        dist.destroy_process_group()
    assert (forward, sum(seen)) == EAGER.cut_loss


@pytest.mark.parametrize(("tensor", "per_logit"), [(1, (22, 26)), (2, (38, 38))])
def test_the_loss_of_plain_pytorch_is_another_where_the_vocabulary_is_cut(
    tensor: int, per_logit: tuple[int, int]
) -> None:
    ops = {op.name: op for op in built(replace(ALONE, tensor=tensor), "fsdp2").iteration.computations}
    found = [ops[name].work for name in ops if name.endswith((".loss", ".loss_d"))]
    logits = 2 * SEQ * LLAMA.vocab // tensor
    assert [work.num_bytes for work in found] == [num_bytes * logits for num_bytes in per_logit]  # type: ignore[union-attr]


def test_who_runs_eager_pytorch_pays_for_every_kernel_of_swiglu() -> None:
    moved = 2 * SEQ * LLAMA.ffn
    expected = {"fsdp2": (10, 26), "fsdp1": (10, 26), "ddp": (10, 26), "torchtitan": (10, 18), "megatron": (6, 10)}
    for framework, per_column in {**expected, "torchtitan_compiled": (6, 10)}.items():
        ops = {op.name: op for op in built(ALONE, framework).iteration.computations}
        found = [ops[f"mb0.layer1.{part}"].work.num_bytes for part in ("act", "act_d")]  # type: ignore[union-attr]
        assert found == [num_bytes * moved for num_bytes in per_column], framework
    assert [launches_of(built(ALONE, "fsdp2"))[part] for part in ("act", "act_d")] == [2, 4]


def test_torchtitan_repeats_keys_and_values_for_every_head_and_turns_complex_numbers_outside_of_inductor() -> None:
    tokens, width = 2 * SEQ, LLAMA.head_dim
    turned = tokens * (LLAMA.num_heads + LLAMA.num_kv_heads) * width
    for framework in ("torchtitan", "torchtitan_blocks", "torchtitan_compiled"):
        for layout in (ALONE, replace(ALONE, recompute=Recompute.PRODUCTS)):
            ops = {op.name: op.work for op in built(layout, framework).iteration.computations}
            found = {
                part: ops[f"mb0.layer1.{part}"].num_bytes  # type: ignore[union-attr]
                for part in ("repeat", "repeat_again", "repeat_d", "rotary", "rotary_again", "rotary_d")
                if layout is not ALONE or not part.endswith("again")
            }
            # Keys and values: each is read once and written for every head, and backward the other way round.
            assert {part: found[part] for part in found if "repeat" in part} == {
                part: 2 * 2 * turned for part in found if "repeat" in part
            }
            # To FP32, the complex product, back.
            assert {found[part] for part in found if "rotary" in part} == {(6 + 8 + 6) * turned}
    plain = {op.name for op in built(ALONE, "fsdp2").iteration.computations}
    assert "mb0.layer1.repeat" not in plain


def test_torchtitan_of_2024_compiles_no_loss_and_runs_adamw_tensor_by_tensor() -> None:
    logits = 2 * SEQ * LLAMA.vocab
    sharded = replace(ALONE, data=2, zero_stage=3, global_batch=4)
    expected = {"torchtitan": (22, 26, 84), "torchtitan_blocks": (22, 26, 84), "torchtitan_compiled": (4, 4, 28)}
    for framework, (forward, backward, per_parameter) in expected.items():
        ops = {op.name: op.work for op in built(ALONE, framework).iteration.computations}
        found = [ops[name].num_bytes for name in ops if name.endswith((".loss", ".loss_d"))]  # type: ignore[union-attr]
        assert found == [forward * logits, backward * logits], framework
        assert load_rules(framework).optimizer_bytes == per_parameter
    step = built(sharded, "torchtitan_blocks")
    updates = [op.work.num_bytes for op in step.iteration.computations if op.name.endswith("update")]  # type: ignore[union-attr]
    assert sum(updates) == pytest.approx(84 * LLAMA.num_params / 2, rel=0.01)


def test_fp8_is_gathered_where_the_cast_comes_first() -> None:
    layout = replace(ALONE, tensor=4, sequence_parallel=True)
    plain, cast = built(layout), built(layout, precision=Precision(products=ProductFormat.FP8))
    whole = 2 * (2 * SEQ) * LLAMA.hidden
    for step, gathered in ((plain, whole), (cast, whole // 2)):
        sizes = {op.name: op.collective.num_bytes for op in step.iteration.comms if ".layer1." in op.name}
        for gather in ("attention_gather", "mlp_gather", "attention_gather_d", "mlp_gather_d"):
            assert sizes[f"mb0.layer1.{gather}"] == gathered
        for reduction in ("attention_reduce", "mlp_reduce", "qkv_reduce_d", "up_reduce_d"):
            assert sizes[f"mb0.layer1.{reduction}"] == whole
    # One greatest element for all that ranks hold in parts: forward four operands and seven matrices, backward seven
    # gradients.
    scales = [op for op in cast.iteration.comms if op.collective.num_bytes == 4 and ".layer1." in op.name]
    assert [sum(op.origin.phase is phase for op in scales) for phase in (Phase.FORWARD, Phase.BACKWARD)] == [11, 7]


def test_fp8_operands_are_cast_again_for_the_gradients_of_weights() -> None:
    # torchao keeps FP8 inputs and matrices for backward, so that a recomputed block casts all four inputs again.
    layout = replace(ALONE, tensor=4, sequence_parallel=True)
    h, tokens, ffn = LLAMA.hidden, 2 * SEQ, LLAMA.ffn // 4
    matrices = LLAMA.layer_matrix_params // 4
    inputs = {"qkv": tokens // 4 * h, "out": tokens * h // 4, "up": tokens // 4 * h, "down": tokens * ffn}
    per_element = 5  # maximum 2 and cast 3
    for mode in (Recompute.FULL, Recompute.PRODUCTS):
        step = built(replace(layout, recompute=mode), precision=Precision(products=ProductFormat.FP8))
        ops = {op.name: op.work for op in step.iteration.computations}
        found = {name: ops[f"mb0.layer1.{name}_cast_again"].num_bytes for name in inputs}  # type: ignore[union-attr]
        assert sum(found.values()) == per_element * (sum(inputs.values()) + matrices), mode
        assert found["down"] == per_element * (inputs["down"] + h * ffn)


def test_who_reads_several_products_waits_for_all_of_them() -> None:
    step = built(ALONE, "torchtitan_compiled")
    ops = {op.name: op for op in step.iteration.ops}
    parts = {f"mb0.layer1.qkv_{part}" for part in "qkv"}
    assert parts <= set(ops["mb0.layer1.rotary"].deps)
    assert {"mb0.layer1.up_gate", "mb0.layer1.up_up"} <= set(ops["mb0.layer1.act"].deps)
    weights = {f"mb0.layer1.{part}" for part in ("qkv_w_q", "qkv_w_k", "qkv_w_v", "up_w_gate", "up_w_up")}
    sharded = built(replace(ALONE, data=2, zero_stage=3, global_batch=4))
    readers = {dep for op in sharded.iteration.ops for dep in op.deps if op.origin.phase is not Phase.WEIGHT_GRAD}
    assert weights <= readers
