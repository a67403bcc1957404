"""The papers' workloads: counts of operators, bytes and FLOPs against closed forms; Table 2 as printed."""

from dataclasses import replace

import pytest

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.papers.workloads import (
    PaperStrategy,
    domino_iteration,
    dual_batch_iteration,
    load_table2,
    paper_step,
)
from lagom_overlap.papers.workloads.megatron_notes import (
    gather_iteration,
    gradient_iteration,
    notes_parts,
    tensor_iteration,
)
from lagom_overlap.workload import Gemm, find_overlap_groups
from lagom_overlap.workload.iteration import Iteration
from lagom_overlap.workload.models import load_model
from lagom_overlap.workload.parallel import Recompute


def gemm_flops(iteration: Iteration) -> float:
    return sum(op.work.flops for op in iteration.computations if isinstance(op.work, Gemm))


def test_table_2_has_the_printed_batches_on_both_clusters() -> None:
    rows = {(w.model, w.strategy, w.degree): (w.micro_batch, w.global_batch) for w in load_table2()}
    assert len(load_table2()) == 2 * len(rows) == 28
    for model, micro in (("phi-2", 2), ("llama-3-8b", 1), ("mpt-7b", 1)):
        assert rows[model, PaperStrategy.FSDP, 8] == (micro, 16)
        assert rows[model, PaperStrategy.FSDP, 16] == (micro, 32)
    for model, micro, batch in (("phi-2", 8, 512), ("llama-3-8b", 4, 256), ("mpt-7b", 2, 256)):
        assert rows[model, PaperStrategy.TP, 1] == rows[model, PaperStrategy.TP, 2] == (micro, batch)
    for model in ("deepseek-moe-16b", "olmoe-1b-7b"):
        assert rows[model, PaperStrategy.EP, 8] == (2, 16)


def test_recomputation_is_for_expert_parallelism_only() -> None:
    with pytest.raises(JobError, match="only expert parallelism"):
        replace(load_table2()[0], recompute=Recompute.FULL)


def test_steps_are_what_the_global_batch_leaves_for_one_rank() -> None:
    steps = {(w.name, w.cluster): w.num_steps for w in load_table2()}
    assert steps["phi-2 FSDP 16", "a40_pcie"] == 1
    assert steps["llama-3-8b FSDP 8", "a40_nvlink"] == 2
    assert steps["phi-2 TP 8 x DP 1", "a40_nvlink"] == 64
    assert steps["phi-2 TP 8 x DP 2", "a40_nvlink"] == 32
    assert steps["olmoe-1b-7b EP 8", "a40_pcie"] == 1


@pytest.mark.parametrize("name", ["phi-2", "llama-3-8b", "mpt-7b"])
def test_domino_computes_six_flops_per_parameter_and_token_over_its_ranks(name: str) -> None:
    model = load_model(name)
    iteration = domino_iteration(model, tensor=8, micro_batch=4, seq_len=512)
    params = model.num_layers * model.layer_matrix_params + model.vocab * model.hidden
    assert gemm_flops(iteration) == pytest.approx(6 * params * 4 * 512 / 8, rel=1e-9)


def test_domino_reduces_each_half_after_attention_and_mlp_both_ways() -> None:
    model = load_model("phi-2")
    iteration = domino_iteration(model, tensor=8, micro_batch=8, seq_len=2048)
    assert len(iteration.comms) == 8 * model.num_layers + 2
    assert {op.collective.kind for op in iteration.comms} == {CollectiveKind.ALL_REDUCE}
    assert {op.collective.num_bytes for op in iteration.comms} == {4 * 2048 * 2560 * 2}


@pytest.mark.parametrize("name", ["deepseek-moe-16b", "olmoe-1b-7b"])
def test_dual_batches_exchange_every_layer_four_times_and_compute_active_parameters(name: str) -> None:
    model = load_model(name)
    iteration = dual_batch_iteration(model, expert=8, micro_batch=2, seq_len=2048)
    assert len(iteration.comms) == 8 * model.num_layers
    assert {op.collective.num_bytes for op in iteration.comms} == {2048 * model.experts_per_token * 2048 * 2}
    params = model.num_layers * model.active_layer_params + model.vocab * model.hidden
    # A router's backward is left out: 4 of its 6 FLOPs per parameter and token.
    router = model.num_layers * model.num_experts * model.hidden
    assert gemm_flops(iteration) == pytest.approx((6 * params - 4 * router) * 4096, rel=1e-9)


def test_a_layer_that_runs_forward_again_dispatches_again_and_costs_its_forward() -> None:
    """Full recomputation: 8 in place of 6 FLOPs per parameter and token, one exchange more per layer and half."""
    model = load_model("olmoe-1b-7b")
    plain, again = (
        dual_batch_iteration(model, expert=8, micro_batch=2, seq_len=256, recompute=recompute)
        for recompute in (False, True)
    )
    assert len(again.comms) - len(plain.comms) == 2 * model.num_layers
    layers = model.num_layers * model.active_layer_params
    assert gemm_flops(again) - gemm_flops(plain) == pytest.approx(2 * layers * 512, rel=1e-9)


@pytest.mark.parametrize(
    "iteration",
    [
        domino_iteration(load_model("phi-2"), tensor=8, micro_batch=2, seq_len=256),
        dual_batch_iteration(load_model("olmoe-1b-7b"), expert=8, micro_batch=2, seq_len=256),
    ],
    ids=["domino", "dual batch"],
)
def test_a_half_waits_for_its_own_collectives_only_and_computes_beside_the_others(iteration: Iteration) -> None:
    comms = {op.name for op in iteration.comms}
    for op in iteration.computations:
        for dep in op.deps:
            assert dep not in comms or dep.rsplit(".", 1)[1] == op.name.rsplit(".", 1)[1]
    overlapped = sum(group.count * len(group.comms) for group in find_overlap_groups(iteration))
    assert overlapped >= len(comms) - 2


def test_layouts_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(JobError, match="micro_batch is 3, must be even"):
        domino_iteration(load_model("phi-2"), tensor=8, micro_batch=3, seq_len=256)
    with pytest.raises(JobError, match=r"tensor is 7.*heads \(32\)"):
        domino_iteration(load_model("phi-2"), tensor=7, micro_batch=2, seq_len=256)
    with pytest.raises(JobError, match="'phi-2'"):
        dual_batch_iteration(load_model("phi-2"), expert=8, micro_batch=2, seq_len=256)
    with pytest.raises(JobError, match="splits is 3"):
        tensor_iteration(notes_parts(load_model("llama-3-70b"), 1), splits=3)


def test_gradients_follow_the_last_step_unless_they_are_reduced_in_it() -> None:
    for workload in load_table2():
        step = paper_step(workload)
        model = load_model(workload.model)
        if workload.strategy is PaperStrategy.FSDP or workload.name.endswith("DP 1"):
            assert step.gradients is None
        elif workload.strategy is PaperStrategy.TP:
            assert step.gradients is not None
            assert step.gradients.num_bytes == model.num_params // 8 * 2
        else:
            experts = model.num_layers * model.expert_layer_params
            assert step.gradients is not None
            assert step.gradients.num_bytes == (model.num_params - experts) * 2


def test_the_notes_layer_moves_ten_activations_and_its_stage_twenty_buckets() -> None:
    parts = notes_parts(load_model("llama-3-70b"), 1)
    whole, cut = tensor_iteration(parts), tensor_iteration(parts, splits=4)
    assert len(whole.comms) == 10
    assert sum(op.collective.num_bytes for op in whole.comms) == 10 * 2048 * 8192 * 2
    assert sum(op.collective.num_bytes for op in cut.comms) == 10 * 2048 * 8192 * 2
    assert gemm_flops(whole) == pytest.approx(gemm_flops(cut))
    gradients = gradient_iteration(parts, num_layers=20, data=4)
    gathers = gather_iteration(parts, num_layers=20, data=4)
    assert len(gradients.comms) == len(gathers.comms) == 20
    assert gradients.comms[0].collective.num_bytes == 2 * gathers.comms[0].collective.num_bytes


@pytest.mark.parametrize(
    ("size", "hidden", "heads", "layers"),
    [("small", 4096, 32, 18), ("medium", 5120, 40, 15), ("big", 6656, 52, 30), ("large", 8192, 64, 8)],
)
def test_centauris_sizes_are_those_of_its_table_4(size: str, hidden: int, heads: int, layers: int) -> None:
    model = load_model(f"centauri-llama-{size}")
    assert (model.hidden, model.num_heads, model.num_layers) == (hidden, heads, layers)
    assert model.num_heads * model.head_dim == hidden
    assert model.ffn == -(-(8 * hidden // 3) // 256) * 256
