"""Captured steps against what can be counted by hand: collectives, bytes, FLOPs, memory, who waits for whom."""

import random
from collections import Counter

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from small_steps import SEQ_LEN, capture_small, small_model  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from lagom_overlap.capturing.fake_tensor import TrainingStep, capture_step  # noqa: E402
from lagom_overlap.collective import CollectiveKind  # noqa: E402
from lagom_overlap.cost import ContentionModel, load_profile  # noqa: E402
from lagom_overlap.errors import BackendError, JobError  # noqa: E402
from lagom_overlap.hardware import load_preset  # noqa: E402
from lagom_overlap.sim.iteration import simulate_iteration  # noqa: E402
from lagom_overlap.workload import Attention, Gather, Gemm, Phase  # noqa: E402
from lagom_overlap.workload.issued import IssuedStep  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]  # a shared machine may be slow

AG, RS, AR, A2A = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_TO_ALL,
)


def kinds(capture: IssuedStep) -> Counter:
    return Counter((comm.collective.kind, comm.communicator) for comm in capture.iteration.comms)


def test_fsdp_gathers_each_unit_twice_and_reduces_it_once(fsdp: IssuedStep) -> None:
    """Three layers, the embedding and the head with its norm: five units."""
    assert kinds(fsdp) == {(AG, "fsdp"): 10, (RS, "fsdp"): 5}
    assert fsdp.groups == {"fsdp": (0, 1, 2, 3)}


def test_gathers_move_bf16_and_reductions_fp32(fsdp: IssuedStep) -> None:
    model = small_model()
    gathered = sum(comm.collective.num_bytes for comm in fsdp.iteration.comms if comm.collective.kind is AG)
    reduced = sum(comm.collective.num_bytes for comm in fsdp.iteration.comms if comm.collective.kind is RS)
    assert gathered == 2 * 2 * model.num_params
    assert reduced == 4 * model.num_params


def test_parameters_and_moments_of_the_own_shard_stay_in_memory(fsdp: IssuedStep) -> None:
    """FP32 parameters and two moments, a quarter each; step counters and token ids are the small rest."""
    sharded = 12 * small_model().num_params / 4
    assert sharded <= fsdp.iteration.resident_bytes <= sharded + 4096


def test_products_are_six_operations_per_parameter_and_token(fsdp: IssuedStep) -> None:
    """Forward, input gradient, weight gradient; the embedding is looked up, norms are no products."""
    model = small_model()
    matrices = model.num_layers * model.layer_matrix_params + model.vocab * model.hidden
    works = [op.work for op in fsdp.iteration.computations]
    assert sum(work.flops for work in works if isinstance(work, Gemm)) == 6 * matrices * SEQ_LEN
    attention = 0.5 * 4 * model.num_heads * SEQ_LEN**2 * model.head_dim
    assert sum(work.flops for work in works if isinstance(work, Attention)) == 3 * attention * (1 + 2.5)


def test_every_matrix_has_one_weight_gradient(fsdp: IssuedStep) -> None:
    phases = Counter(op.origin.phase for op in fsdp.iteration.computations if isinstance(op.work, Gemm))
    num_matrices = 3 * 7 + 1
    assert phases == dict.fromkeys((Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT_GRAD), num_matrices)


def test_backward_operators_know_the_module_they_belong_to(fsdp: IssuedStep) -> None:
    names = {op.name for op in fsdp.iteration.ops}
    for matrix in ("attention.query", "attention.out", "mlp.gate", "mlp.down"):
        found = [op for op in fsdp.iteration.ops if op.origin.module == f"layers.1.{matrix}"]
        assert {op.origin.layer for op in found} == {1}
        assert {f"fwd.layers.1.{matrix}.mm", f"bwd.layers.1.{matrix}.mm"} <= names
    assert "bwd.layers.1.reduce_scatter" in names


def test_data_reaches_products_through_copies_and_views(fsdp: IssuedStep) -> None:
    """The query's product reads its gathered weight and the normalised input, and nothing else."""
    ops = {op.name: op for op in fsdp.iteration.ops}
    product = ops["fwd.layers.0.attention.query.mm"]
    assert set(product.deps) == {"fwd.layers.0.split_with_sizes_copy", "fwd.layers.0.norm.to_copy_2"}
    assert ops["fwd.layers.0.split_with_sizes_copy"].deps == ("fwd.layers.0.all_gather",)


def test_a_gather_waits_for_its_own_copies_only(fsdp: IssuedStep) -> None:
    """The data flow leaves prefetching free; what FSDP waits for is among the waits."""
    ops = {op.name: op for op in fsdp.iteration.ops}
    gather = ops["fwd.layers.2.all_gather"]
    assert gather.deps == ("fwd.layers.2.all_gather_copy_in",)
    assert ops["fwd.layers.2.foreach_copy"].deps == ()
    assert "fwd.layers.1.all_gather" in fsdp.waits["fwd.layers.2.all_gather"]


def test_every_result_is_read_or_kept(fsdp: IssuedStep, tensor_and_fsdp: IssuedStep) -> None:
    """But for the optimizer's last updates, and the embedding, which FSDP2 gathers for a backward that reads none."""
    for capture in (fsdp, tensor_and_fsdp):
        read = {dep for op in capture.iteration.ops for dep in op.deps}
        unread = {op.origin.kernel for op in capture.iteration.ops if op.name not in read}
        assert unread <= {"aten._foreach_addcdiv_", "aten._foreach_add_", "fsdp.split_with_sizes_copy"}


def test_streams_are_those_of_fsdp(fsdp: IssuedStep) -> None:
    of_kind = {comm.collective.kind: comm.stream for comm in fsdp.iteration.comms}
    assert of_kind == {AG: "all_gather", RS: "reduce_scatter"}
    assert {op.stream for op in fsdp.iteration.computations} == {"compute", "all_gather_copy_in"}


def test_gathered_parameters_live_from_their_gather_to_their_last_use(fsdp: IssuedStep) -> None:
    ops = {op.name: op for op in fsdp.iteration.ops}
    gathered = [buffer for buffer in fsdp.iteration.buffers if buffer.maker.endswith("all_gather")]
    comms = {op.name: op.collective.num_bytes for op in fsdp.iteration.comms}
    assert len(gathered) >= 8
    for buffer in gathered:
        assert buffer.num_bytes == comms[buffer.maker]
        assert {ops[user].origin.layer for user in buffer.users} <= {ops[buffer.maker].origin.layer, None}
    layer = next(buffer for buffer in gathered if buffer.maker == "fwd.layers.1.all_gather")
    assert "fwd.layers.1.mlp.down.mm" in layer.users
    assert not [user for user in layer.users if user.startswith("bwd")]


def test_activations_live_from_forward_into_backward(fsdp: IssuedStep) -> None:
    made = {buffer.maker: buffer for buffer in fsdp.iteration.buffers}
    kept = made["fwd.layers.0.attention.scaled_dot_product_flash_attention_for_cpu"]
    assert any(user.startswith("bwd.layers.0.attention") for user in kept.users)


def test_tensor_parallelism_with_sequence_gathers_and_scatters_around_every_block(tensor_and_fsdp: IssuedStep) -> None:
    """Megatron: two gathers and two scatters forward per layer, as many backward, one each for embedding and head."""
    counted = kinds(tensor_and_fsdp)
    assert counted[AG, "tp"] == counted[RS, "tp"] == 4 * 3 + 2
    assert counted[AG, "fsdp"] == 10
    assert counted[RS, "fsdp"] == 5
    sizes = {
        comm.collective.num_bytes
        for comm in tensor_and_fsdp.iteration.comms
        if comm.collective.kind is AG and comm.communicator == "tp"
    }
    assert sizes == {SEQ_LEN * 32 * 2}
    assert tensor_and_fsdp.groups == {"fsdp": (0, 2), "tp": (0, 1)}


def test_a_collective_that_is_waited_for_holds_back_what_comes_next(tensor_and_fsdp: IssuedStep) -> None:
    ops = tensor_and_fsdp.issued.ops
    for number, op in enumerate(ops):
        if getattr(op, "communicator", "") == "tp" and op.collective.kind is AG:
            after = next(other for other in ops[number + 1 :] if other.stream == "compute")
            assert op.name in after.deps


def test_tensor_parallelism_halves_every_product(tensor_and_fsdp: IssuedStep) -> None:
    """What DTensor computes only to learn shapes is not part of the step."""
    model = small_model()
    matrices = model.num_layers * model.layer_matrix_params + model.vocab * model.hidden
    works = [op.work for op in tensor_and_fsdp.iteration.computations]
    assert sum(work.flops for work in works if isinstance(work, Gemm)) == 6 * matrices * SEQ_LEN / 2


def test_a_chain_of_cuts_leads_from_a_product_to_the_scatter_of_its_columns(tensor_and_fsdp: IssuedStep) -> None:
    """DTensor scatters along the sequence through a copy; columns stay columns all the way."""
    ops = {op.name: op for op in tensor_and_fsdp.iteration.ops}
    product = ops["fwd.layers.0.mlp.down.mm"]
    copy = next(op for op in tensor_and_fsdp.iteration.ops if product.name in op.deps)
    scatter = next(op for op in tensor_and_fsdp.iteration.comms if copy.name in op.deps)
    assert product.shards is not None
    assert copy.shards is not None
    assert scatter.shards is not None
    assert product.shards.combine[-1] == Gather(1)
    (use,) = scatter.shards.inputs
    assert use.source == copy.name
    assert scatter.shards.combine[-1] == Gather(2)
    assert use.axes[2] == len(scatter.shards.combine) - 1
    assert {from_product.source for from_product in copy.shards.inputs} == {product.name}
    assert {from_product.axes[1] for from_product in copy.shards.inputs} != {None}


def test_hybrid_sharding_reduces_across_replicas_too() -> None:
    capture = capture_small(replicate=2, fsdp=2, rank=3)
    assert kinds(capture) == {(AG, "fsdp"): 10, (RS, "fsdp"): 5, (AR, "replicate"): 5}
    assert capture.groups == {"fsdp": (2, 3), "replicate": (1, 3)}


def test_replication_reduces_whole_gradients() -> None:
    capture = capture_small(replicate=4)
    assert {kind for kind, _ in kinds(capture)} == {AR}
    reduced = sum(comm.collective.num_bytes for comm in capture.iteration.comms)
    assert reduced == 4 * small_model().num_params


def test_experts_exchange_tokens_twice_each_way() -> None:
    model = small_model(num_experts=8, experts_per_token=2, num_kv_heads=4)
    capture = capture_small(model, fsdp=4, expert=2)
    assert kinds(capture)[A2A, "ep"] == 4 * 3
    sizes = {comm.collective.num_bytes for comm in capture.iteration.comms if comm.collective.kind is A2A}
    assert sizes == {SEQ_LEN * 2 * 32 * 2}
    assert capture.groups["ep"] == (0, 1)
    assert capture.groups["expert_fsdp"] == (0, 2)


def test_micro_batches_are_told_apart_and_share_one_optimizer() -> None:
    capture = capture_small(fsdp=2, num_micro_batches=2)
    assert {op.origin.microbatch for op in capture.iteration.ops} == {0, 1}
    products = Counter(op.origin.microbatch for op in capture.iteration.computations if isinstance(op.work, Gemm))
    assert products[0] == products[1]
    assert all(not op.origin.microbatch for op in capture.iteration.ops if op.origin.phase is Phase.OPTIMIZER)


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x: "torch.Tensor") -> "torch.Tensor":
        return checkpoint(self.inner, x, use_reentrant=False)


def test_what_is_computed_again_in_backward_is_recomputation() -> None:
    def build() -> TrainingStep:
        return TrainingStep(model=_Checkpointed(), inputs=(torch.zeros(4, 8, requires_grad=True),), loss=torch.sum)

    capture = capture_step(build, num_ranks=1)
    products = [
        (op.origin.phase, op.origin.module) for op in capture.iteration.computations if isinstance(op.work, Gemm)
    ]
    assert products[:3] == [(Phase.FORWARD, "inner.0"), (Phase.FORWARD, "inner.2"), (Phase.RECOMPUTE, "inner.0")]


class _InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))

    def forward(self, x: "torch.Tensor") -> "torch.Tensor":
        before = x * 2
        total = before.sum()
        before.add_(1)
        return before * self.weight + total


def test_an_overwritten_tensor_waits_for_its_readers() -> None:
    capture = capture_step(
        lambda: TrainingStep(model=_InPlace(), inputs=(torch.zeros(8),), loss=torch.sum), num_ranks=1
    )
    ops = {op.name: op for op in capture.iteration.ops}
    assert ops["fwd.sum"].deps == ("fwd.mul",)
    assert set(ops["fwd.add"].deps) >= {"fwd.mul", "fwd.sum"}
    assert ops["fwd.mul_2"].deps == ("fwd.add",)


def test_every_order_that_the_data_flow_allows_keeps_writers_before_readers(fsdp: IssuedStep) -> None:
    """Random topological orders keep, for every buffer, its maker first."""
    ops = {op.name: op for op in fsdp.iteration.ops}
    makers = {buffer.maker: set(buffer.users) for buffer in fsdp.iteration.buffers}
    chance = random.Random(7)
    for _ in range(3):
        waiting = {name: len(set(op.deps)) for name, op in ops.items()}
        followers: dict[str, list[str]] = {name: [] for name in ops}
        for name, op in ops.items():
            for dep in set(op.deps):
                followers[dep].append(name)
        ready, place = [name for name, count in waiting.items() if not count], {}
        while ready:
            name = ready.pop(chance.randrange(len(ready)))
            place[name] = len(place)
            for follower in followers[name]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    ready.append(follower)
        assert len(place) == len(ops)
        assert all(place[maker] <= place[user] for maker, users in makers.items() for user in users)


def test_the_issued_step_gathers_at_most_one_unit_ahead_in_forward(fsdp: IssuedStep) -> None:
    """FSDP2 lets the gather after next wait for the copy-out of the one before: simulated, it does."""
    cluster = load_preset("a100_dgx")
    timeline = simulate_iteration(
        fsdp.placed_on(cluster).issued, {}, ContentionModel(cluster, load_profile("plausible"))
    )
    spans = {span.name: span for span in timeline.spans}
    for layer in (0, 1):
        copied = spans[f"fwd.layers.{layer}.split_with_sizes_copy"]
        assert spans[f"fwd.layers.{layer + 1}.all_gather"].start_s >= spans[f"fwd.layers.{layer}.all_gather"].end_s
        if layer:
            assert spans["fwd.layers.2.all_gather"].start_s >= spans["fwd.layers.0.split_with_sizes_copy"].end_s
        assert copied.start_s >= spans[f"fwd.layers.{layer}.all_gather"].end_s


def test_groups_that_skip_ranks_span_more_nodes() -> None:
    capture = capture_small(replicate=2, fsdp=2)
    cluster = load_preset("a100_dgx", 2)
    nodes = {
        comm.communicator: comm.collective.num_nodes
        for comm in capture.placed_on(_two_gpus_a_node(cluster)).iteration.comms
    }
    assert nodes == {"fsdp": None, "replicate": 2}


def _two_gpus_a_node(cluster: object) -> object:
    from dataclasses import replace

    return replace(cluster, gpus_per_node=2, num_nodes=2)


def test_nothing_is_left_behind(fsdp: IssuedStep) -> None:
    assert not dist.is_initialized()
    assert "resize_" not in vars(torch.UntypedStorage)
    assert torch.cuda.Stream.__module__.startswith("torch")
    assert torch.get_default_dtype() == torch.float32


def test_a_failing_build_leaves_no_process_group() -> None:
    def build() -> TrainingStep:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        capture_step(build, num_ranks=2)
    assert not dist.is_initialized()


def test_a_process_with_a_group_of_its_own_is_refused(tmp_path: object) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(BackendError, match="default process group"):
            capture_step(lambda: None, num_ranks=2)  # type: ignore[arg-type,return-value]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("num_ranks", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_ranks_out_of_range_are_refused(num_ranks: int, rank: int) -> None:
    with pytest.raises(JobError, match="must be"):
        capture_step(lambda: None, num_ranks=num_ranks, rank=rank)  # type: ignore[arg-type,return-value]


def test_a_build_function_that_returns_something_else_is_refused() -> None:
    with pytest.raises(JobError, match="returned int, must return a TrainingStep"):
        capture_step(lambda: 3, num_ranks=2)  # type: ignore[arg-type,return-value]
