import pytest

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.workload import Gemm, Iteration, Phase
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel import ParallelLayout, plan_stages, stage_memory
from lagom_overlap.workload.step import Unit, program_step

DENSE = TransformerModel(
    name="tiny", num_layers=3, hidden=64, ffn=128, num_heads=4, num_kv_heads=4, head_dim=16, vocab=256, gated=True
)
EXPERTS = TransformerModel(
    name="tiny-moe",
    num_layers=2,
    hidden=64,
    ffn=32,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    vocab=256,
    gated=True,
    num_experts=8,
    experts_per_token=2,
)


def _step(model: TransformerModel = DENSE, unit: Unit = Unit.LAYER, **layout: object) -> Iteration:
    return program_step(
        model,
        ParallelLayout(**layout),  # type: ignore[arg-type]
        seq_len=32,
        gpus_per_node=4,
        unit=unit,
    )


def _kinds(step: Iteration, communicator: str) -> dict[CollectiveKind, int]:
    found: dict[CollectiveKind, int] = {}
    for op in step.comms:
        if op.communicator == communicator:
            found[op.collective.kind] = found.get(op.collective.kind, 0) + 1
    return found


def test_products_count_six_flops_per_parameter_and_token() -> None:
    step = _step(micro_batch=2, global_batch=2)
    flops = sum(op.work.flops for op in step.computations if isinstance(op.work, Gemm))
    matrices = DENSE.num_layers * DENSE.layer_matrix_params + DENSE.vocab * DENSE.hidden
    assert flops == 6 * 2 * 32 * matrices


def test_fully_sharded_parameters_are_gathered_twice_and_gradients_scattered_once() -> None:
    step = _step(data=8, zero_stage=3, micro_batch=1, global_batch=8)
    units = DENSE.num_layers + 2
    assert _kinds(step, "fsdp") == {
        CollectiveKind.ALL_GATHER: 2 * DENSE.num_layers + 2,  # the head stays gathered, the lookup needs no backward
        CollectiveKind.REDUCE_SCATTER: units,
    }


def test_a_unit_of_a_matrix_moves_the_same_bytes() -> None:
    layer = _step(data=8, zero_stage=3, micro_batch=1, global_batch=8)
    matrix = _step(unit=Unit.MATRIX, data=8, zero_stage=3, micro_batch=1, global_batch=8)

    def moved(step: Iteration) -> int:
        return sum(op.collective.num_bytes for op in step.comms)

    # Two norms a layer and the last one: they travel with their unit, not with a matrix.
    small = DENSE.num_layers * (DENSE.layer_params - DENSE.layer_matrix_params)
    assert moved(layer) - moved(matrix) == (2 + 2 + 4) * small
    assert len(matrix.comms) > len(layer.comms)


def test_hybrid_sharding_reduces_a_share_over_replicas() -> None:
    step = _step(data=8, replicate=2, zero_stage=3, micro_batch=1, global_batch=8)
    scatter = next(op for op in step.comms if op.collective.kind is CollectiveKind.REDUCE_SCATTER)
    reduce = next(op for op in step.comms if op.communicator == "dp")
    assert (scatter.collective.num_ranks, scatter.collective.num_nodes) == (4, 1)
    assert (reduce.collective.num_ranks, reduce.collective.num_nodes) == (2, 2)
    assert reduce.collective.num_bytes * 4 == scatter.collective.num_bytes


def test_sequence_parallelism_gathers_and_scatters_what_an_all_reduce_moves() -> None:
    plain = _step(tensor=4, micro_batch=1, global_batch=1)
    split = _step(tensor=4, sequence_parallel=True, micro_batch=1, global_batch=1)
    assert set(_kinds(plain, "tp")) == {CollectiveKind.ALL_REDUCE}
    losses = 1  # sums over the vocabulary
    assert set(_kinds(split, "tp")) == {CollectiveKind(k) for k in ("all_gather", "reduce_scatter", "all_reduce")}
    assert _kinds(split, "tp")[CollectiveKind.ALL_REDUCE] == losses
    reduces = _kinds(plain, "tp")[CollectiveKind.ALL_REDUCE] - losses
    assert _kinds(split, "tp")[CollectiveKind.REDUCE_SCATTER] == reduces


def test_gradients_travel_after_the_last_micro_batch() -> None:
    step = _step(data=2, micro_batch=1, global_batch=6)
    reduces = [op for op in step.comms if op.communicator == "dp"]
    assert {op.origin.microbatch for op in reduces} == {2}
    assert all("mb2" in dep for op in reduces for dep in op.deps)


def test_experts_exchange_tokens_twice_forward_and_twice_backward() -> None:
    step = _step(EXPERTS, data=4, expert=4, micro_batch=1, global_batch=4)
    assert _kinds(step, "ep") == {CollectiveKind.ALL_TO_ALL: 4 * EXPERTS.num_layers}


def test_activations_live_until_backward_has_read_them() -> None:
    step = _step(micro_batch=1, global_batch=1)
    phases = {op.name: op.origin.phase for op in step.ops}
    kept = [b for b in step.buffers if phases[b.maker] is Phase.FORWARD]
    assert kept
    assert all({phases[user] for user in b.users} & {Phase.BACKWARD, Phase.WEIGHT_GRAD} for b in kept)


def test_every_source_is_waited_for() -> None:
    step = _step(data=8, zero_stage=3, micro_batch=2, global_batch=16, tensor=1, unit=Unit.MATRIX)
    for op in step.ops:
        assert op.shards is None or {use.source for use in op.shards.inputs if use.source} <= set(op.deps)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"pipeline": 3, "global_batch": 3}, "pipeline is 3, must be 1"),
        ({"data": 8, "zero_stage": 3, "global_batch": 8, "replicate": 3}, "replicate is 3, must divide the 8 ranks"),
        ({"data": 8, "global_batch": 8, "replicate": 2}, "replicate is 2, must be 1 with zero_stage 0"),
        ({"data": 8, "zero_stage": 3, "global_batch": 8, "expert": 2, "replicate": 2}, "must be 1 with expert = 2"),
        ({"tensor": 3}, "must divide the model's heads"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(layout: dict[str, int], message: str) -> None:
    with pytest.raises(JobError, match=message):
        _step(**layout)


@pytest.mark.parametrize("stage", [0, 1])
def test_what_stays_on_a_rank_is_what_the_memory_model_counts(stage: int) -> None:
    """Against `parallel.memory`, which counts norms too."""
    layout = ParallelLayout(data=8, zero_stage=stage, global_batch=8)
    (plan,) = plan_stages(DENSE, layout)
    memory = stage_memory(DENSE, layout, plan, 32)
    expected = memory.parameter_bytes + memory.gradient_bytes + memory.optimizer_bytes
    assert _step(data=8, zero_stage=stage, global_batch=8).resident_bytes == pytest.approx(expected, rel=0.01)
