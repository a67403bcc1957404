import gzip
import json
import os
from collections import Counter
from pathlib import Path

import pytest

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.workload import Attention, CommOp, CompOp, Gemm, Iteration, find_overlap_groups
from lagom_overlap.workload.fsdp import fsdp_iteration
from lagom_overlap.workload.models import load_model

TOKENS = 2 * 2048
CAPTURES = {"phi-2": "out_hf_phi2", "llama-3-8b": "out_hf_llama3", "mpt-7b": "out_hf_mpt"}


def step(name: str = "phi-2", **changes: int) -> Iteration:
    settings = {"num_ranks": 8, "micro_batch": 2, "seq_len": 2048} | changes
    return fsdp_iteration(load_model(name), **settings)


def gemm_flops(iteration: Iteration, phase: str) -> float:
    return sum(
        op.work.flops for op in iteration.computations if isinstance(op.work, Gemm) and op.name.startswith(phase)
    )


def captured(name: str) -> list[dict[str, object]]:
    beside = Path(__file__).parents[2].parent / "shared" / "data"
    path = Path(os.environ.get("LAGOM_SHARED_DATA", beside)) / "captures" / f"{CAPTURES[name]}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"captured steps are absent: {path.name} in $LAGOM_SHARED_DATA/captures")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", list(CAPTURES))
def test_products_cost_two_flops_per_parameter_and_token_forward_and_four_backward(name: str) -> None:
    model, iteration = load_model(name), step(name)
    used = model.num_layers * model.layer_matrix_params + model.embedding_params
    assert gemm_flops(iteration, "fwd") == 2 * used * TOKENS
    assert gemm_flops(iteration, "bwd") == 4 * used * TOKENS


@pytest.mark.parametrize("name", list(CAPTURES))
def test_attention_costs_the_causal_half_of_four_b_h_s2_d(name: str) -> None:
    model = load_model(name)
    per_layer = 0.5 * 4 * 2 * model.num_heads * 2048**2 * model.head_dim
    attention = [op.work.flops for op in step(name).computations if isinstance(op.work, Attention)]
    assert sum(attention) == pytest.approx((1 + 2.5) * model.num_layers * per_layer)


def test_phi_2_moves_the_bytes_of_a_captured_fsdp2_step() -> None:
    # PyTorch 2.13 FSDP2 capture of HF Phi-2: bf16 gathers of 157,342,720 bytes a layer, fp32 reductions of twice that.
    sizes = Counter((op.collective.kind, op.collective.num_bytes) for op in step(gradient_element_bytes=4).comms)
    assert sizes[CollectiveKind.ALL_GATHER, 157_342_720] == 64
    assert sizes[CollectiveKind.REDUCE_SCATTER, 314_685_440] == 32


@pytest.mark.parametrize("name", list(CAPTURES))
def test_bytes_and_flops_are_those_of_the_captured_step(name: str) -> None:
    rows = captured(name)
    iteration = step(name, num_ranks=16, micro_batch=1, gradient_element_bytes=4)
    # MPT's attention is eager, so the capture counts its products in full; fused kernels count nothing there.
    eager = 32 * 4 * 32 * 2048**2 * 128 if name == "mpt-7b" else 0
    assert gemm_flops(iteration, "fwd") + eager == sum(row["flops"] for row in rows if not row["bw"])  # type: ignore[misc]
    assert gemm_flops(iteration, "bwd") + 2 * eager == sum(row["flops"] for row in rows if row["bw"])  # type: ignore[misc]
    gathers = [row["out_bytes"] for row in rows if row["op"] == "c10d._allgather_base_.default"]
    reduces = [row["out_bytes"] * 16 for row in rows if row["op"] == "c10d._reduce_scatter_base_.default"]  # type: ignore[operator]
    ours: dict[CollectiveKind, list[int]] = {kind: [] for kind in CollectiveKind}
    for op in iteration.comms:
        ours[op.collective.kind].append(op.collective.num_bytes)
    layer_gather, layer_reduce = Counter(gathers).most_common(1)[0], Counter(reduces).most_common(1)[0]
    assert Counter(ours[CollectiveKind.ALL_GATHER])[layer_gather[0]] == layer_gather[1] == 64  # type: ignore[index]
    assert Counter(ours[CollectiveKind.REDUCE_SCATTER])[layer_reduce[0]] == layer_reduce[1] == 32  # type: ignore[index]
    # Embedding and head: one root unit there, two units here; the gradients' sum is the same.
    assert sum(ours[CollectiveKind.REDUCE_SCATTER]) == sum(reduces)  # type: ignore[arg-type]


def test_phi_2_on_eight_gpus_has_the_papers_two_dominant_patterns() -> None:
    groups = sorted(find_overlap_groups(step()), key=lambda group: -group.count)
    forward, backward = groups[:2]
    assert [comm.collective.kind for comm in forward.comms] == [CollectiveKind.ALL_GATHER]
    assert forward.count == 31
    assert {op.name.split(".")[0] for op in forward.computations} == {"fwd"}
    assert sorted(comm.collective.kind for comm in backward.comms) == [
        CollectiveKind.ALL_GATHER,
        CollectiveKind.REDUCE_SCATTER,
    ]
    assert backward.count == 30
    assert {op.name.split(".")[0] for op in backward.computations} == {"bwd"}
    assert all(group.count == 1 for group in groups[2:])
    assert forward.starts_after == (0,)
    assert backward.starts_after == (0, 0)


def test_the_two_patterns_hold_about_nine_tenths_of_the_work_as_the_paper_says() -> None:
    iteration = step()
    total = sum(op.work.flops for op in iteration.computations if isinstance(op.work, Gemm | Attention))
    dominant = sum(
        group.count * sum(op.work.flops for op in group.computations if isinstance(op.work, Gemm | Attention))
        for group in find_overlap_groups(iteration)
        if group.count > 1
    )
    assert dominant / total == pytest.approx(0.9, abs=0.03)  # section 4.3: "approximately 90 %"


def test_a_backward_layer_runs_beside_the_reduction_above_and_the_gather_below() -> None:
    group = next(g for g in find_overlap_groups(step()) if any(op.name == "bwd.layer30.qkv_d" for op in g.computations))
    assert group.comm_names == ("bwd.layer31.reduce", "bwd.layer29.gather")


@pytest.mark.parametrize("name", list(CAPTURES))
@pytest.mark.parametrize("prefetch", [1, 2, 5, 40])
def test_every_layer_waits_for_its_own_gather_and_is_reduced_once(name: str, prefetch: int) -> None:
    iteration = step(name, prefetch=prefetch)
    first = {}
    for op in iteration.computations:
        first.setdefault(op.name.rsplit(".", 1)[0], op)
    for i in range(32):
        for phase in ("fwd", "bwd"):
            assert first[f"{phase}.layer{i}"].deps == (f"{phase}.layer{i}.gather",)
    reduced = [op.name for op in iteration.comms if op.collective.kind is CollectiveKind.REDUCE_SCATTER]
    assert len(set(reduced)) == len(reduced) == 32 + (1 if name == "mpt-7b" else 2)
    assert all(op.communicator == "fsdp" and op.stream == "comm" for op in iteration.comms)


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_at_most_prefetch_layers_are_gathered_ahead(prefetch: int) -> None:
    # A gather that may start when unit k starts is of unit k + prefetch: its dependency is unit k - 1's last operator.
    by_name = {op.name: op for op in step(prefetch=prefetch).ops}
    gather = by_name[f"fwd.layer{10 + prefetch}.gather"]
    assert isinstance(gather, CommOp)
    assert gather.deps == ("fwd.layer9.add",)
    again = by_name[f"bwd.layer{10 - prefetch}.gather"]
    assert again.deps == ("bwd.layer11.norm_d",)


def test_operators_are_issued_in_the_order_of_the_captured_step() -> None:
    names = [op.name for op in step().ops]
    inner = [n for n in names if n in ("bwd.layer11.norm_d", "bwd.layer11.reduce", "bwd.layer9.gather")]
    assert inner == ["bwd.layer11.norm_d", "bwd.layer11.reduce", "bwd.layer9.gather"]
    assert isinstance(step().ops[0], CompOp)


@pytest.mark.parametrize("field", ["micro_batch", "seq_len", "prefetch", "element_bytes", "gradient_element_bytes"])
def test_a_count_below_one_is_refused_by_name(field: str) -> None:
    with pytest.raises(JobError, match=f"fsdp: {field} is 0, must be at least 1"):
        step(**{field: 0})


def test_one_rank_has_nothing_to_shard() -> None:
    with pytest.raises(JobError, match="ranks is 1, must be at least 2"):
        step(num_ranks=1)
