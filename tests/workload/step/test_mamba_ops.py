"""Mamba-2 layers and latent mixtures: products by the scan's equations, bytes by mamba_ssm's kernels, cuts by hand."""

from dataclasses import replace

import pytest

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.workload import Gemm, MemoryBound, Phase
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.layer_kinds import scan_flops
from lagom_overlap.workload.models import TransformerModel, load_model
from lagom_overlap.workload.ops import Work
from lagom_overlap.workload.parallel import ParallelLayout, Recompute, plan_stages
from lagom_overlap.workload.step import build_step, load_rules

FSDP2 = load_rules("fsdp2")
MEGATRON = load_rules("megatron")

SEQ = 4096
HYBRID = replace(load_model("nemotron-h-8b"), num_layers=2)  # a Mamba layer, an MLP
SUPER = replace(load_model("nemotron-3-super-120b-a12b").with_mtp(0), num_layers=2, pattern="mamba experts attention")
ALONE = ParallelLayout()


def step(model: TransformerModel = HYBRID, layout: ParallelLayout = ALONE, seq_len: int = SEQ) -> IssuedStep:
    return build_step(model, layout, seq_len=seq_len, rules=MEGATRON)


def works(built: IssuedStep, *phases: Phase) -> dict[str, Work]:
    phases = phases or tuple(Phase)
    return {op.name.partition(".")[2]: op.work for op in built.iteration.computations if op.origin.phase in phases}


def flops(found: dict[str, Work], start: str) -> float:
    return sum(work.flops for name, work in found.items() if name.startswith(start) and isinstance(work, Gemm))


def test_the_scans_products_are_those_of_the_chunked_recurrence() -> None:
    """The einsums of arXiv 2405.21060, Listing 1, counted for one chunk."""
    m = replace(HYBRID.mamba, num_heads=4, head_dim=8, state_dim=16, num_groups=2, chunk=32)  # type: ignore[type-var]
    heads, groups, chunk, width, state = 4, 2, 32, 8, 16
    scores = groups * chunk * chunk * state  # C B^T of each group
    within = heads * chunk * chunk * width  # times x
    made = heads * chunk * width * state  # a chunk's state
    read = heads * chunk * state * width  # C times the state before
    by_hand = 2 * (scores + within + made + read) / chunk
    assert scan_flops(m) == by_hand
    model = replace(HYBRID, mamba=m, hidden=64, ffn=64, vocab=64)
    found = works(step(model, seq_len=128), Phase.FORWARD)
    names = ("layer0.chunk_", "layer0.pass")
    assert sum(flops(found, name) for name in names) == 128 * by_hand
    # Small products in a kernel of the scan's own, priced by its rate; the projections around it are cuBLAS's.
    chunked = {name for name, work in found.items() if isinstance(work, Gemm) and work.chunked}
    assert chunked == {name for name, work in found.items() if isinstance(work, Gemm) and ".chunk_" in name}
    assert len(chunked) == 3


def test_projections_around_the_scan_are_two_matrices() -> None:
    found = works(step())
    columns = 2 * 8192 + 2 * 8 * 128 + 128
    for tail in ("", "_d", "_w"):
        assert flops(found, f"layer0.mamba_in{tail}") >= 2 * SEQ * 4096 * columns
    wide, out = found["layer0.mamba_in"], found["layer0.out"]
    assert isinstance(wide, Gemm)
    assert isinstance(out, Gemm)
    assert (wide.m, wide.n, wide.k) == (SEQ, columns, 4096)
    assert (out.m, out.n, out.k) == (SEQ, 4096, 8192)


def test_backward_does_again_all_but_the_scan_and_makes_every_operands_gradient() -> None:
    found = works(step(), Phase.BACKWARD)
    chunks, heads, groups = SEQ // 128, 128, 8
    product = (
        2.0 * 128 * 64 * 128 * chunks * heads
    )  # any of chunk x width x state of all heads; chunk equals state here
    scores = 2.0 * 128 * 128 * 128 * chunks * groups
    again = {"chunk_state_re": product, "chunk_scores_re": scores}
    gradients = {
        "chunk_state_d": product, "chunk_scan_d": 2 * product, "chunk_b_d": product, "chunk_c_d": product,
        "chunk_scores_d": product, "chunk_steps_d": product, "scores_b_d": scores, "scores_c_d": scores,
    }  # fmt: skip
    for name, count in (again | gradients).items():
        work = found[f"layer0.{name}"]
        assert isinstance(work, Gemm)
        assert work.flops == count, name
    assert "layer0.conv_re" in found
    assert "layer0.chunk_scan_re" not in found


def test_memory_bound_kernels_move_what_is_counted() -> None:
    found = works(step())
    convolved = 8192 + 2 * 8 * 128
    by_hand = {
        "conv": 4 * convolved, "conv_d": 6 * convolved, "steps": 10 * 128, "steps_d": 18 * 128, "scan_gate": 4 * 8192,
        "scan_gate_d": 12 * 8192, "mamba_norm": 4 * 8192, "pass_states": 6 * 8192,  # a state of 128 for 128 tokens
    }  # fmt: skip
    for name, each in by_hand.items():
        work = found[f"layer0.{name}"]
        assert isinstance(work, MemoryBound)
        assert work.num_bytes == each * SEQ, name
    gate = found["layer0.scan_gate"]
    assert isinstance(gate, MemoryBound)
    assert gate.num_launches == 0  # in the scan's kernel


@pytest.mark.parametrize(("micro_batch", "copies"), [(1, 0), (2, 4)])
def test_batches_of_several_sequences_are_transposed(micro_batch: int, copies: int) -> None:
    layout = ParallelLayout(micro_batch=micro_batch, global_batch=micro_batch)
    assert sum("mamba_turn" in name for name in works(step(layout=layout))) == copies


def test_tensor_parallelism_cuts_heads_groups_and_columns() -> None:
    layout = ParallelLayout(tensor=8, sequence_parallel=True)
    whole, cut = works(step()), works(step(layout=layout))
    for name, work in whole.items():
        if name.startswith("layer0.") and isinstance(work, Gemm):
            part = cut[name]
            assert isinstance(part, Gemm)
            assert part.flops * 8 == work.flops, name
    comms = [op for op in step(layout=layout).iteration.comms if op.origin.layer == 0]
    kinds = sorted(op.collective.kind for op in comms if op.origin.phase is Phase.FORWARD)
    assert kinds == [CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER]


def test_a_layer_of_one_part_has_one_norm_and_one_sum() -> None:
    found = works(step(), Phase.FORWARD)
    assert {"layer0.norm", "layer0.add1", "layer1.norm2", "layer1.add2"} <= set(found)
    assert not {"layer0.norm2", "layer0.add2", "layer1.norm", "layer1.add1"} & set(found)


def test_full_recomputation_runs_a_mamba_layer_again() -> None:
    again = works(step(layout=ParallelLayout(recompute=Recompute.FULL)), Phase.RECOMPUTE)
    plain = works(step(), Phase.FORWARD)
    assert flops(again, "layer0") == flops(plain, "layer0")


def test_experts_behind_a_projection_read_and_make_fewer_columns() -> None:
    layout = ParallelLayout(data=8, expert=8, global_batch=8)
    built = step(SUPER, layout)
    found = works(built)
    up, enter, leave = (found[f"layer1.{name}"] for name in ("expert_up", "expert_enter", "expert_leave"))
    assert [(work.n, work.k) for work in (up, enter, leave) if isinstance(work, Gemm)] == [
        (2688, 1024),
        (1024, 4096),
        (4096, 1024),
    ]
    sent = [op.collective.num_bytes for op in built.iteration.comms if op.communicator == "ep"]
    assert sent == [2 * SEQ * 22 * 1024] * 4
    assert {"layer1.expert_enter_w", "layer1.expert_leave_w"} <= set(found)


def test_fsdp2_and_planners_take_hybrids() -> None:
    layout = ParallelLayout(data=8, expert=8, zero_stage=3, global_batch=8)
    built = build_step(SUPER, layout, seq_len=512, rules=FSDP2)
    gathers = {op.name: op.collective.num_bytes for op in built.iteration.comms if op.name.endswith(".gather")}
    mamba, mixed = (SUPER.params_of(kind) for kind in SUPER.layer_kinds)
    assert gathers["mb0.layer0.gather"] == 2 * mamba.total
    assert gathers["mb0.layer1.gather"] == 2 * (mixed.total - mixed.experts)


@pytest.mark.parametrize(
    ("layout", "wrong"),
    [
        (ParallelLayout(tensor=16, sequence_parallel=True), r"must divide the model's mamba.num_groups \(8\)"),
        (ParallelLayout(context=2), "parallel.context is 2, must be 1: model 'nemotron-h-8b' has mamba layers"),
        (ParallelLayout(flash_attention=False), "flash_attention is false, must be true: .* has mamba layers"),
    ],
)
def test_what_mamba_layers_lack_is_refused_by_one_line(layout: ParallelLayout, wrong: str) -> None:
    with pytest.raises(JobError, match=wrong):
        step(layout=layout)


def test_predictions_of_one_repeated_layer_run_twice_and_hold_it_once() -> None:
    repeats = replace(SUPER, mtp_layers=2, mtp_pattern="attention experts", mtp_repeats=True)
    apart = replace(repeats, mtp_repeats=False)
    layout = ParallelLayout(data=8, expert=8, global_batch=16, zero_stage=1, overlap_gradients=True)
    once, twice = step(repeats, layout), step(apart, layout)
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT_GRAD):
        assert flops(works(once, phase), "") == flops(works(twice, phase), "")
    reduced, more = (
        sum(op.collective.num_bytes for op in built.iteration.comms if op.name.endswith(".scatter"))
        for built in (once, twice)
    )
    experts = repeats.params_of(repeats.mtp_kinds[-1]).experts  # on eight ranks alone: none travels
    assert more - reduced == 4 * (repeats.mtp_params - experts)
    updates = [op.name for op in once.iteration.ops if op.name.endswith(".update")]
    assert len(updates) == len(set(updates))
    (stage,), (apart_stage,) = plan_stages(repeats, layout), plan_stages(apart, layout)
    assert apart_stage.num_params - stage.num_params == repeats.mtp_params - experts + experts // 8
    gradients = [op for op in once.iteration.computations if op.name.endswith(("layer2.qkv_w", "layer4.qkv_w"))]
    first, second = sorted(gradients[:2], key=lambda op: op.name)
    assert second.name in first.deps  # the later prediction's backward comes first, and what it made is added to


def test_attention_without_positions_turns_nothing() -> None:
    model = replace(load_model("nemotron-3-nano-30b-a3b"), num_layers=1, pattern="attention experts mamba")
    assert not [name for name in works(step(model)) if "rotary" in name]
    assert [name for name in works(step(replace(model, rotary=True))) if "rotary" in name]
