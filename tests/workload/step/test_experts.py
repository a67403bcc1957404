"""What a mixture of experts moves besides its products, by dispatcher: counted by hand, and drawn at random."""

import random
from dataclasses import replace
from typing import Any

import pytest
from eager_operators import watched

from lagom_overlap.collective import Collective, CollectiveKind, distinct
from lagom_overlap.errors import JobError
from lagom_overlap.workload import CommOp, Gemm, MemoryBound
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.iteration import graph_digest
from lagom_overlap.workload.models import load_model
from lagom_overlap.workload.ops import Access
from lagom_overlap.workload.overlap import find_overlap_groups
from lagom_overlap.workload.parallel import Dispatcher, ParallelLayout
from lagom_overlap.workload.precision import Precision, ProductFormat
from lagom_overlap.workload.step import build_step, load_rules

QWEN = replace(load_model("qwen3-30b-a3b"), num_layers=1)  # 128 experts, 8 per token, hidden 2048
SEQ, ROWS = 4096, 8 * 4096
LAYOUT = ParallelLayout(data=8, expert=8, global_batch=8)
BF16, MXFP8 = Precision(), Precision(products=ProductFormat.MXFP8)
MOVES = ("permute", "sort", "pad", "unpad", "unsort", "unpermute")


def built(
    dispatcher: Dispatcher, precision: Precision = BF16, layout: ParallelLayout = LAYOUT, framework: str = "megatron"
) -> IssuedStep:
    layout = replace(layout, dispatcher=dispatcher)
    return build_step(QWEN, layout, seq_len=SEQ, rules=load_rules(framework), precision=precision)


def moved(step: IssuedStep, suffix: str = "") -> dict[str, float]:
    """Bytes of each move per column, in rows of 2 bytes that are read or written."""
    works = {op.name.rpartition(".")[2]: op.work for op in step.iteration.computations}
    found = {name: works.get(name + suffix) for name in MOVES}
    return {name: work.num_bytes / (2 * QWEN.hidden) for name, work in found.items() if isinstance(work, MemoryBound)}


@pytest.mark.parametrize("suffix", ["", "_d"])
def test_an_all_to_all_permutes_sorts_and_in_fp8_pads(suffix: str) -> None:
    # A token is read once and written 8 times; every other move reads and writes every row.
    plain = {"permute": SEQ + ROWS, "sort": 2 * ROWS, "unsort": 2 * ROWS, "unpermute": SEQ + ROWS}
    assert moved(built(Dispatcher.ALL_TO_ALL), suffix) == plain
    padded = {"pad": 2 * ROWS, "unpad": 2 * ROWS}
    assert moved(built(Dispatcher.ALL_TO_ALL, MXFP8), suffix) == plain | padded


@pytest.mark.parametrize("suffix", ["", "_d"])
def test_a_capacity_needs_no_padding_and_adds_rows_by_atomics(suffix: str) -> None:
    rows = {"permute": 2 * ROWS, "sort": 2 * ROWS, "unsort": 2 * ROWS, "unpermute": 3 * ROWS}
    assert moved(built(Dispatcher.CAPACITY, MXFP8), suffix) == rows


def test_merged_rows_are_spread_over_the_experts_where_they_arrive() -> None:
    arrived = SEQ * 8 * (1 - (7 / 8) ** 8)
    found = moved(built(Dispatcher.MERGED, MXFP8))
    assert found.pop("permute") < SEQ  # what prepares the kernel, no token
    assert found == pytest.approx({"sort": arrived + ROWS, "unsort": arrived + ROWS})


def test_one_expert_per_rank_has_nothing_to_sort() -> None:
    alone = replace(QWEN, num_experts=8, experts_per_token=2)
    step = build_step(alone, LAYOUT, seq_len=SEQ, rules=load_rules("megatron"))
    assert set(moved(step)) == {"permute", "unpermute"}


def test_moves_and_casts_rearrange_and_nothing_else_does() -> None:
    step = built(Dispatcher.ALL_TO_ALL, MXFP8)
    rearranging = {
        op.name.rpartition(".")[2].removesuffix("_d")
        for op in step.iteration.computations
        if isinstance(op.work, MemoryBound) and op.work.access is Access.REARRANGE
    }
    casts = {f"{name}_cast" for name in ("qkv", "out", "expert_up", "expert_down")}
    assert rearranging == casts | set(MOVES)


def test_other_frameworks_move_rows_by_indices() -> None:
    step = built(Dispatcher.ALL_TO_ALL, MXFP8, replace(LAYOUT, zero_stage=3), "torchtitan")
    assert moved(step) == {"permute": 2 * ROWS, "unpermute": 2 * ROWS}


@pytest.mark.parametrize(("ranks", "nodes"), [(8, 1), (16, 2), (64, 8)])
def test_merged_rows_on_the_wire_are_those_of_drawn_tokens(ranks: int, nodes: int) -> None:
    draw, tokens, sent = random.Random(3), 4000, 0
    for _ in range(tokens):
        drawn = [draw.randrange(ranks) for _ in range(8)]
        sent += len({rank * nodes // ranks for rank in drawn} if nodes > 1 else set(drawn))
    layout = ParallelLayout(data=ranks, expert=ranks, global_batch=ranks)
    placed = built(Dispatcher.MERGED, layout=layout).on_nodes_of(ranks // nodes)
    calls = {op.collective for op in placed.iteration.comms if op.communicator == "ep"}
    (call,) = calls
    assert call.num_bytes / (SEQ * QWEN.hidden * 2) == pytest.approx(sent / tokens, rel=0.02)
    assert not call.is_nccl
    assert placed.on_nodes_of(ranks // nodes) == placed  # placing twice merges once


@pytest.mark.parametrize("before", [2, 4, 8, 16, 64])
@pytest.mark.parametrize("after", [4, 8, 64])
def test_a_merged_step_placed_again_is_the_one_placed_there_at_once(before: int, after: int) -> None:
    step = built(Dispatcher.MERGED, layout=ParallelLayout(data=64, expert=64, global_batch=64))
    assert step.on_nodes_of(before).on_nodes_of(after) == step.on_nodes_of(after)
    assert graph_digest(step.on_nodes_of(before).iteration) == graph_digest(step.iteration)


def test_what_is_not_nccls_is_in_no_overlap_group() -> None:
    layout = replace(LAYOUT, global_batch=16, overlap_experts=True)
    groups = {
        dispatcher: {comm.communicator for group in find_overlap_groups(step.iteration) for comm in group.comms}
        for dispatcher in (Dispatcher.ALL_TO_ALL, Dispatcher.MERGED)
        for step in [built(dispatcher, layout=layout)]
    }
    assert groups[Dispatcher.ALL_TO_ALL] - groups[Dispatcher.MERGED] == {"ep"}


def test_an_ordinary_collective_is_merged_nowhere() -> None:
    call = Collective(CollectiveKind.ALL_TO_ALL, 1 << 20, 16)
    assert call.merged_over(2) == call
    assert call.is_nccl


def test_every_place_is_hit_in_the_end() -> None:
    assert distinct(1, 8) == 1.0
    assert distinct(8, 1) == pytest.approx(1.0)
    assert distinct(8, 1000) == pytest.approx(8.0)


def test_merging_needs_ranks_to_send_to() -> None:
    with pytest.raises(JobError, match=r"parallel\.dispatcher is merged, must be all_to_all or capacity"):
        ParallelLayout(data=8, global_batch=8, dispatcher=Dispatcher.MERGED)


def test_comms_of_a_merged_dispatcher_are_all_to_alls_of_the_expert_group() -> None:
    comms = [
        op for op in built(Dispatcher.MERGED).iteration.comms if isinstance(op, CommOp) and op.communicator == "ep"
    ]
    assert [op.name.rpartition(".")[2] for op in comms] == ["dispatch", "combine", "combine_d", "dispatch_d"]
    assert {op.collective.kind for op in comms} == {CollectiveKind.ALL_TO_ALL}


def test_tensor_parallelism_shares_out_the_products_of_experts_whole_or_cut() -> None:
    def expert_flops(layout: ParallelLayout) -> float:
        step = build_step(QWEN, layout, seq_len=SEQ, rules=load_rules("megatron"))
        products = [op for op in step.iteration.computations if isinstance(op.work, Gemm) and ".expert_" in op.name]
        return sum(op.work.flops for op in products if isinstance(op.work, Gemm))

    cut = ParallelLayout(data=4, tensor=2, expert=4, global_batch=4, sequence_parallel=True)
    alone = expert_flops(replace(LAYOUT, data=4, expert=4, global_batch=4))
    assert expert_flops(cut) * 2 == pytest.approx(alone)
    assert expert_flops(replace(cut, expert=8, whole_experts=True)) * 2 == pytest.approx(alone)


def test_experts_that_are_cut_gather_and_scatter_the_rows_of_their_ranks() -> None:
    cut = ParallelLayout(data=4, tensor=2, expert=4, global_batch=4, sequence_parallel=True)
    step = build_step(QWEN, cut, seq_len=SEQ, rules=load_rules("megatron"))
    found = {
        op.name.rpartition(".")[2]: (op.collective.kind, op.collective.num_bytes)
        for op in step.iteration.comms
        if op.communicator == "tp" and ("dispatch" in op.name or "combine" in op.name)
    }
    num_bytes = ROWS * QWEN.hidden * 2
    assert found == {
        "dispatch_gather": (CollectiveKind.ALL_GATHER, num_bytes),
        "combine_scatter": (CollectiveKind.REDUCE_SCATTER, num_bytes),
        "combine_d_gather": (CollectiveKind.ALL_GATHER, num_bytes),
        "dispatch_d_scatter": (CollectiveKind.REDUCE_SCATTER, num_bytes),
    }


@pytest.mark.parametrize("whole", [False, True])
def test_ranks_with_the_same_tokens_send_a_share_and_gather_what_comes_back(whole: bool) -> None:
    """DeepSpeed's order: drop, all-to-all, (gather, experts, all-reduce, drop,) all-to-all, gather; and backward."""
    layout = ParallelLayout(data=4, tensor=2, expert=8 if whole else 4, global_batch=4, whole_experts=whole)
    step = build_step(QWEN, layout, seq_len=SEQ, rules=load_rules("deepspeed"))
    found = [
        (op.name.rpartition(".")[2], op.collective.kind, op.collective.num_bytes)
        for op in step.iteration.comms
        if "dispatch" in op.name or "combine" in op.name
    ]
    every = ROWS * QWEN.hidden * 2
    gather, reduce, exchange = CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_TO_ALL
    expected = [
        ("dispatch", exchange, every // 2),
        ("dispatch_gather", gather, every),
        ("combine_reduce", reduce, every),
        ("combine", exchange, every // 2),
        ("combine_gather", gather, every),
        ("combine_d", exchange, every // 2),
        ("combine_d_gather", gather, every),
        ("dispatch_d_reduce", reduce, every),
        ("dispatch_d", exchange, every // 2),
        ("dispatch_d_gather", gather, every),
    ]
    cut_alone = {"dispatch_gather", "combine_reduce", "combine_d_gather", "dispatch_d_reduce"}
    assert found == [row for row in expected if not (whole and row[0] in cut_alone)]


def test_megatron_trains_no_experts_with_tensor_but_without_sequence_parallelism() -> None:
    with pytest.raises(JobError, match=r"parallel\.sequence_parallel is false, must be true: Megatron-LM"):
        built(Dispatcher.ALL_TO_ALL, layout=ParallelLayout(data=4, tensor=2, expert=4, global_batch=4))


def test_nvfp4_packs_two_elements_and_reads_for_two_greatest_elements() -> None:
    # Read for the greatest elements, by rows and by columns: 2 bytes each; written twice with 4.5 bits.
    nvfp4 = Precision(products=ProductFormat.NVFP4)
    works = {
        op.name.rpartition(".")[2]: op.work for op in built(Dispatcher.MERGED, nvfp4).iteration.computations
    }  # of one micro-batch
    cast, product = works["expert_up_cast_d"], works["expert_up_d"]
    assert isinstance(cast, MemoryBound)
    assert isinstance(product, Gemm)
    assert cast.num_bytes == int(6 + 2 * 4.5 / 8) * ROWS * 2 * QWEN.ffn
    assert (product.element_bytes, product.packed, product.result_bytes) == (1, 2, 2)
    assert works["router"].packed == 1  # type: ignore[union-attr]
    with pytest.raises(JobError, match="nvfp4"):
        built(Dispatcher.MERGED, nvfp4, replace(LAYOUT, zero_stage=3), "torchtitan")


def test_last_layers_and_named_matrices_multiply_in_other_formats() -> None:
    precision = Precision(
        products=ProductFormat.NVFP4,
        others=(("qkv", ProductFormat.PARAMETER), ("out", ProductFormat.MXFP8)),
        wide_layers=1,
    )
    model = replace(QWEN, num_layers=2)
    step = build_step(model, LAYOUT, seq_len=SEQ, rules=load_rules("megatron"), precision=precision)
    found = {op.name: op.work for op in step.iteration.computations if isinstance(op.work, Gemm)}
    formats = {
        name: (found[f"mb0.layer{name}"].element_bytes, found[f"mb0.layer{name}"].packed)
        for name in ("0.qkv", "0.out", "0.expert_up", "1.qkv", "1.out", "1.expert_up")
    }
    assert formats == {
        "0.qkv": (2, 1), "0.out": (1, 1), "0.expert_up": (1, 2),
        "1.qkv": (2, 1), "1.out": (2, 1), "1.expert_up": (2, 1),
    }  # fmt: skip


def test_fused_experts_leave_out_the_activation_and_its_casts() -> None:
    def names(layout: ParallelLayout) -> set[str]:
        step = built(Dispatcher.MERGED, MXFP8, layout)
        return {op.name.rpartition(".")[2] for op in step.iteration.computations if op.origin.layer is not None}

    gone = names(LAYOUT) - names(replace(LAYOUT, fused_experts=True))
    assert gone == {"expert_act", "expert_act_d", "expert_down_cast", "expert_up_cast_d"}
    assert names(replace(LAYOUT, fused_experts=True)) < names(LAYOUT)


def test_whole_experts_need_ranks_to_be_shared_out_over() -> None:
    with pytest.raises(JobError, match=r"whole_experts needs expert of at least 2 with tensor = 2"):
        ParallelLayout(data=4, tensor=2, global_batch=4, whole_experts=True)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"fused_experts": True}, "fused_experts"), ({"dispatcher": Dispatcher.CAPACITY}, "capacity")],
)
def test_what_other_frameworks_do_not_have_is_refused(options: dict[str, Any], named: str) -> None:
    layout = replace(LAYOUT, zero_stage=3, **options)
    with pytest.raises(JobError, match=f"{named} is modelled for Megatron-LM; the framework is torchtitan"):
        build_step(QWEN, layout, seq_len=SEQ, rules=load_rules("torchtitan"))


def test_one_rank_counts_its_rows_by_three_launches() -> None:
    def launches(layout: ParallelLayout) -> int:
        works = {
            op.name.rpartition(".")[2]: op.work
            for op in built(Dispatcher.ALL_TO_ALL, layout=layout).iteration.computations
        }
        work = works["permute"]
        assert isinstance(work, MemoryBound)
        return work.num_launches

    assert (launches(LAYOUT), launches(ParallelLayout(global_batch=1))) == (4 + 14, 4 + 3)


@pytest.mark.parametrize(("dispatcher", "fp32"), [(Dispatcher.MERGED, True), (Dispatcher.ALL_TO_ALL, False)])
@pytest.mark.torch
def test_biases_and_clamps_of_experts_move_what_eager_pytorch_does(dispatcher: Dispatcher, fp32: bool) -> None:
    import torch

    rows, columns, seen = 64, 512, [0.0, 0.0]

    def see(_: Any, tensors: list[torch.Tensor]) -> None:
        whole = [each for each in tensors if each.numel() >= rows // 2 * columns and 0 not in each.stride()]
        seen[0] += sum(each.numel() * each.element_size() for each in whole) / (rows * columns)
        seen[1] += bool(whole)

    def counted(made: Any) -> tuple[float, float]:
        seen[:] = [0.0, 0.0]
        with watched(see):
            result = made()
        return result, tuple(seen)  # type: ignore[return-value]

    def clamped(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return torch.cat((gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)), -1)

    def biased(x: torch.Tensor, weights: torch.Tensor, biases: list[torch.Tensor]) -> torch.Tensor:
        parts = zip(x.split(rows // 2), biases, weights.split(rows // 2), strict=True)
        return torch.cat([part + bias * weight for part, bias, weight in parts]).to(x.dtype)

    half = torch.bfloat16
    x = torch.randn(rows, 2 * columns, dtype=half, requires_grad=True)
    y, forward = counted(lambda: clamped(x))
    gradient = torch.ones_like(y)
    _, backward = counted(lambda: y.backward(gradient))

    wide = torch.randn(rows, columns, dtype=half, requires_grad=True)
    weights = torch.rand(rows, 1, dtype=torch.float32 if fp32 else half, requires_grad=True)
    biases = [torch.randn(columns, dtype=half, requires_grad=True) for _ in range(2)]
    z, added = counted(lambda: biased(wide, weights, biases))
    gradient = torch.ones_like(z)
    _, added_d = counted(lambda: z.backward(gradient))

    model = replace(load_model("gpt-oss-20b"), num_layers=1, pattern="attention+experts", window=0)
    layout = replace(LAYOUT, dispatcher=dispatcher)
    step = build_step(model, layout, seq_len=SEQ, rules=load_rules("megatron"), precision=BF16)
    works = {op.name.rpartition(".")[2]: op.work for op in step.iteration.computations}
    per_column = 4 * SEQ * model.ffn
    expected = {
        "expert_act_clamp": forward, "expert_act_d_clamp": backward, "expert_bias": added, "expert_bias_d": added_d,
    }  # fmt: skip
    for name, (num_bytes, _) in expected.items():
        work = works[name]
        assert isinstance(work, MemoryBound)
        assert work.num_bytes == num_bytes * per_column, name
    # Half of the experts were drawn: two of a rank's four.
    assert works["expert_act_clamp"].num_launches == forward[1]  # type: ignore[union-attr]
    assert works["expert_act_d_clamp"].num_launches == backward[1]  # type: ignore[union-attr]
    fused = build_step(model, replace(layout, fused_experts=True), seq_len=SEQ, rules=load_rules("megatron"))
    assert not [op for op in fused.iteration.computations if "clamp" in op.name or "expert_bias" in op.name]
