"""FSDP2's built step against PyTorch: a capture of the same model, the docstring's own claim, published captures."""

import gzip
import json
import os
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import load_preset
from lagom_overlap.sim import IterationSimulator
from lagom_overlap.workload import Attention, CommOp, Gemm, Iteration, Phase, find_overlap_groups
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.models import load_model
from lagom_overlap.workload.parallel import ParallelLayout
from lagom_overlap.workload.precision import DType, Precision
from lagom_overlap.workload.step import build_step, load_rules
from lagom_overlap.workload.streams import ALL_GATHER, ALL_GATHER_COPY_IN, ALL_REDUCE, COMPUTE, REDUCE_SCATTER

FSDP2 = load_rules("fsdp2")

TOKENS = 2 * 2048
CAPTURES = {"phi-2": "out_hf_phi2", "llama-3-8b": "out_hf_llama3", "mpt-7b": "out_hf_mpt"}
FORWARD = (Phase.FORWARD, Phase.LOSS)


def built(
    name: str = "phi-2",
    *,
    num_ranks: int = 8,
    replicate: int = 1,
    micro_batch: int = 2,
    num_micro_batches: int = 1,
    num_layers: int = 0,
    prefetch: int = 0,
    precision: Precision | None = None,
) -> IssuedStep:
    model = load_model(name)
    layout = ParallelLayout(
        data=num_ranks,
        zero_stage=3,
        replicate=replicate,
        micro_batch=micro_batch,
        global_batch=micro_batch * num_ranks * num_micro_batches,
        forward_prefetch=prefetch,
        backward_prefetch=prefetch,
    )
    return build_step(
        replace(model, num_layers=num_layers or model.num_layers),
        layout,
        seq_len=2048,
        rules=FSDP2,
        precision=precision,
    )


def gemm_flops(iteration: Iteration, *, forward: bool) -> float:
    products = [op for op in iteration.computations if isinstance(op.work, Gemm)]
    return sum(op.work.flops for op in products if (op.origin.phase in FORWARD) is forward)  # type: ignore[union-attr]


def captured(name: str) -> list[dict[str, object]]:
    beside = Path(__file__).parents[3].parent / "shared" / "data"
    path = Path(os.environ.get("LAGOM_SHARED_DATA", beside)) / "captures" / f"{CAPTURES[name]}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"captured steps are absent: {path.name} in $LAGOM_SHARED_DATA/captures")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", list(CAPTURES))
def test_products_cost_two_flops_per_parameter_and_token_forward_and_four_backward(name: str) -> None:
    model, iteration = load_model(name), built(name).iteration
    used = model.num_layers * model.layer_matrix_params + model.vocab * model.hidden
    assert gemm_flops(iteration, forward=True) == 2 * used * TOKENS
    assert gemm_flops(iteration, forward=False) == 4 * used * TOKENS


@pytest.mark.parametrize("name", list(CAPTURES))
def test_attention_costs_the_causal_half_of_four_b_h_s2_d(name: str) -> None:
    model = load_model(name)
    per_layer = 0.5 * 4 * 2 * model.num_heads * 2048**2 * model.head_dim
    attention = [op.work.flops for op in built(name).iteration.computations if isinstance(op.work, Attention)]
    assert sum(attention) == pytest.approx((1 + 2.5) * model.num_layers * per_layer)


@pytest.mark.parametrize("name", list(CAPTURES))
def test_bytes_and_flops_are_those_of_the_captured_step(name: str) -> None:
    rows = captured(name)
    iteration = built(name, num_ranks=16, micro_batch=1).iteration
    # MPT's attention is eager, so the capture counts its products in full; fused kernels count nothing there.
    eager = 32 * 4 * 32 * 2048**2 * 128 if name == "mpt-7b" else 0
    assert gemm_flops(iteration, forward=True) + eager == sum(row["flops"] for row in rows if not row["bw"])  # type: ignore[misc]
    assert gemm_flops(iteration, forward=False) + 2 * eager == sum(row["flops"] for row in rows if row["bw"])  # type: ignore[misc]
    gathers = [row["out_bytes"] for row in rows if row["op"] == "c10d._allgather_base_.default"]
    reduces = [row["out_bytes"] * 16 for row in rows if row["op"] == "c10d._reduce_scatter_base_.default"]  # type: ignore[operator]
    ours: dict[CollectiveKind, list[int]] = {kind: [] for kind in CollectiveKind}
    for op in iteration.comms:
        ours[op.collective.kind].append(op.collective.num_bytes)
    layer_gather, layer_reduce = Counter(gathers).most_common(1)[0], Counter(reduces).most_common(1)[0]
    assert Counter(ours[CollectiveKind.ALL_GATHER])[layer_gather[0]] == layer_gather[1] == 64  # type: ignore[index]
    assert Counter(ours[CollectiveKind.REDUCE_SCATTER])[layer_reduce[0]] == layer_reduce[1] == 32  # type: ignore[index]
    # Embedding and head: one root unit there, two units here where they are not tied; the gradients' sum is the same.
    assert sum(ours[CollectiveKind.REDUCE_SCATTER]) == sum(reduces)  # type: ignore[arg-type]


def _signature(step: IssuedStep) -> list[tuple[str, str, int]]:
    """The step's collectives as they are issued: stream, kind, bytes."""
    return [(op.stream, op.collective.kind, op.collective.num_bytes) for op in step.iteration.comms]


def _copies(step: IssuedStep) -> list[tuple[str, int]]:
    """Copies into the gathers' buffers, in order, and what each waits for by kind of operator."""
    return [(op.stream, op.work.num_bytes) for op in step.iteration.computations if op.stream != COMPUTE]  # type: ignore[union-attr]


def _bytes_by_stream(step: IssuedStep) -> Counter[str]:
    found: Counter[str] = Counter()
    for stream, num_bytes in _copies(step):
        found[stream] += num_bytes
    return found


def _gather_waits(step: IssuedStep) -> list[tuple[str, ...]]:
    """What every copy-in stream's operator and every gather waits for, as (kind, bytes) in the order of issue."""
    ops = {op.name: op for op in step.iteration.ops}
    place = {op.name: number for number, op in enumerate(step.iteration.ops)}

    def word(name: str) -> str:
        op = ops[name]
        if isinstance(op, CommOp):
            return f"{op.collective.kind} {op.collective.num_bytes}"
        return f"{op.stream} {op.work.num_bytes}"  # type: ignore[union-attr]

    found = []
    for op in step.iteration.ops:
        if op.stream in (ALL_GATHER_COPY_IN, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE):
            waits = sorted({*step.waits.get(op.name, ())}, key=place.__getitem__)
            found.append(tuple(word(name) for name in waits))
    return found


@pytest.mark.torch
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "replicate", "num_micro_batches"),
    [("mpt-7b", 1, 1), ("phi-2", 2, 1), ("phi-2", 2, 2)],
)
def test_a_capture_of_fsdp2_has_the_built_steps_streams_collectives_and_waits(
    name: str, replicate: int, num_micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch itself issues the same model: the same collectives in the same order, streams and waits.

    With replicas it is HSDP: each scatter's result is summed on a stream of its own.
    """
    pytest.importorskip("torch")
    from lagom_overlap.capturing.models import named

    model = replace(load_model(name), num_layers=3)
    monkeypatch.setattr(named, "load_model", lambda _: model)
    options = {"fsdp": 8 // replicate, "replicate": replicate, "micro_batches": num_micro_batches}
    theirs = named.capture_named(name, options, micro_batch=2, seq_len=2048)
    ours = built(name, num_layers=3, replicate=replicate, num_micro_batches=num_micro_batches)
    assert _signature(ours) == _signature(theirs)
    if num_micro_batches == 1:
        assert _copies(ours) == _copies(theirs)
        assert _gather_waits(ours) == _gather_waits(theirs)
    else:  # gradients are added parameter by parameter there, a unit at once here: as many bytes on the same stream
        assert _bytes_by_stream(ours) == _bytes_by_stream(theirs)


@pytest.mark.parametrize("name", ["phi-2", "mpt-7b"])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_explicit_prefetch_of_one_equals_the_default_overlap(name: str, num_micro_batches: int) -> None:
    """The docstring of `set_modules_to_forward_prefetch`: "the same all-gather overlap behavior as the default"."""
    cluster = load_preset("a40_nvlink")
    model = ContentionModel(cluster, load_profile("plausible"))

    def seconds(prefetch: int) -> float:
        step = built(name, num_layers=6, num_micro_batches=num_micro_batches, prefetch=prefetch)
        return IterationSimulator(step.placed_on(cluster).issued, model).makespan_s({})

    assert seconds(1) == seconds(0)
    assert seconds(2) <= seconds(0)


@pytest.mark.torch
@pytest.mark.timeout(120)
def test_explicit_prefetch_of_one_equals_the_default_overlap_on_a_capture() -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.fsdp import fully_shard

    from lagom_overlap.capturing.fake_tensor import TrainingStep, capture_step

    def step(explicit: bool) -> float:
        def build() -> TrainingStep:
            layers = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(6)])
            for layer in layers:
                fully_shard(layer)
            fully_shard(layers)
            if explicit:
                for layer, after in pairwise(layers):
                    layer.set_modules_to_forward_prefetch([after])
            return TrainingStep(model=layers, inputs=(torch.randn(512, 2048),), loss=lambda out: out.sum())

        cluster = load_preset("a40_nvlink")
        captured_step = capture_step(build, num_ranks=8, name="linear").placed_on(cluster)
        model = ContentionModel(cluster, load_profile("plausible"))
        return IterationSimulator(captured_step.issued, model).makespan_s({})

    assert step(explicit=True) == pytest.approx(step(explicit=False), rel=1e-12)


def test_phi_2_on_eight_gpus_has_the_papers_two_dominant_patterns() -> None:
    groups = sorted(find_overlap_groups(built().issued), key=lambda group: -group.count)
    forward, backward = groups[:2]
    assert [comm.collective.kind for comm in forward.comms] == [CollectiveKind.ALL_GATHER]
    assert (forward.count, forward.starts_after) == (31, (0,))
    assert {op.origin.phase for op in forward.computations} == {Phase.FORWARD}
    kinds = [comm.collective.kind for comm in backward.comms]
    assert kinds == [CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER]
    assert (backward.count, backward.starts_after) == (30, (0, 1))  # the gather waits for the layer's copy-out
    assert not {op.origin.phase for op in backward.computations} & set(FORWARD)
    assert all(group.count == 1 for group in groups[2:])


def test_the_two_patterns_hold_about_nine_tenths_of_the_work_as_the_paper_says() -> None:
    iteration = built().issued
    total = sum(op.work.flops for op in iteration.computations if isinstance(op.work, Gemm | Attention))
    dominant = sum(
        group.count * sum(op.work.flops for op in group.computations if isinstance(op.work, Gemm | Attention))
        for group in find_overlap_groups(iteration)
        if group.count > 1
    )
    assert dominant / total == pytest.approx(0.9, abs=0.03)  # section 4.3: "approximately 90 %"


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_every_micro_batch_gathers_twice_and_reduces_once(num_micro_batches: int) -> None:
    step = built(num_layers=5, num_micro_batches=num_micro_batches).iteration
    kinds = Counter(op.collective.kind for op in step.comms)
    # Embedding, layers, head; the prefetch of the embedding in backward is FSDP2's own.
    assert kinds[CollectiveKind.ALL_GATHER] == 2 * 7 * num_micro_batches
    assert kinds[CollectiveKind.REDUCE_SCATTER] == 7 * num_micro_batches
    sums = [op for op in step.computations if op.name.endswith(".accumulate")]
    assert len(sums) == 7 * (num_micro_batches - 1)
    assert {op.stream for op in sums} <= {REDUCE_SCATTER}


def test_the_optimizer_waits_for_the_last_reduction() -> None:
    step = built(num_layers=3)
    first = next(op for op in step.iteration.ops if op.origin.phase is Phase.OPTIMIZER)
    last = [op.name for op in step.iteration.comms][-1]
    assert last in (*first.deps, *step.waits.get(first.name, ()))


def test_precision_sets_what_is_gathered_and_what_is_reduced() -> None:
    num_params = load_model("phi-2").layer_params
    single = built(num_layers=2, precision=Precision(DType.FP32, DType.FP32, DType.FP32))
    half = built(num_layers=2, precision=Precision(DType.BF16, DType.BF16, DType.BF16))
    for step, num_bytes in ((single, 4), (half, 2)):
        sizes = {op.collective.num_bytes for op in step.iteration.comms if op.origin.layer is not None}
        assert sizes == {num_bytes * num_params}
    # Parameters that are kept as they are gathered need no cast before the copy-in.
    assert not any(op.name.endswith(".cast") for op in single.iteration.ops)


def test_data_flow_is_kept_apart_from_the_frameworks_waits() -> None:
    """A planner may move what only the framework holds back: gathers wait for nothing but their copies."""
    step = built(num_layers=3)
    assert step.iteration.is_dataflow
    ops = {op.name: op for op in step.iteration.ops}
    for gather in step.iteration.comms:
        if gather.collective.kind is CollectiveKind.ALL_GATHER:
            (copy,) = gather.deps
            (cast,) = ops[copy].deps
            assert ops[cast].deps == ()
            assert ops[copy].stream == ops[cast].stream == ALL_GATHER_COPY_IN


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_what_fsdp2_does_not_shard_is_refused(zero_stage: int) -> None:
    layout = ParallelLayout(data=8, zero_stage=zero_stage, global_batch=8)
    with pytest.raises(JobError, match=f"zero_stage is {zero_stage}: fsdp2 shards parameters, must be 2 or 3"):
        build_step(load_model("phi-2"), layout, seq_len=2048, rules=FSDP2)
