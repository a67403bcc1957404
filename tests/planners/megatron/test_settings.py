"""Switches as a launch of Megatron-LM says them."""

from dataclasses import replace

import pytest

from lagom_overlap.errors import JobError
from lagom_overlap.hardware import load_preset
from lagom_overlap.planners.megatron.settings import MegatronSettings, arguments, differing_keys, not_modelled
from lagom_overlap.workload.parallel import Dispatcher, ParallelLayout, PipelineSchedule
from lagom_overlap.workload.parallel.schedule import most_in_flight
from lagom_overlap.workload.precision import MIXED, DType, Precision
from lagom_overlap.workload.step.rules import load_rules

H100 = load_preset("h100_dgx").gpu
GB200 = load_preset("gb200").gpu
RULES = load_rules("megatron")
RULE_BYTES = 4 * 40_000_000
PLAIN = ParallelLayout(data=8, global_batch=8, zero_stage=1, bucket_bytes=RULE_BYTES)
EVERYTHING = ParallelLayout(
    tensor=2, pipeline=2, data=4, expert=4, zero_stage=1, overlap_gradients=True, overlap_parameters=True,
    bucket_bytes=80_000_000, sequence_parallel=True, overlap_tensor=True, schedule=PipelineSchedule.INTERLEAVED,
    chunks=3, micro_batch_group=4, overlap_experts=True, dispatcher=Dispatcher.MERGED, global_batch=32,
    tables_as_layers=True,
)  # fmt: skip
PARSED = {
    "--account-for-embedding-in-pipeline-split": 0,
    "--account-for-loss-in-pipeline-split": 0,
    "--ckpt-format": 1,
    "--data-parallel-sharding-strategy": 1,
    "--ddp-bucket-size": 1,
    "--microbatch-group-size-per-virtual-pipeline-stage": 1,
    "--moe-flex-dispatcher-backend": 1,
    "--moe-token-dispatcher-type": 1,
    "--no-overlap-p2p-communication": 0,
    "--num-virtual-stages-per-pipeline-rank": 1,
    "--overlap-grad-reduce": 0,
    "--overlap-moe-expert-parallel-comm": 0,
    "--overlap-param-gather": 0,
    "--sequence-parallel": 0,
    "--tp-comm-overlap": 0,
    "--use-distributed-optimizer": 0,
    "--use-megatron-fsdp": 0,
}
"""How many values each takes, read in Megatron-LM at d98e8a64: `training/arguments.py`, and the fields of
`core/transformer/transformer_config.py` and `core/model_parallel_config.py` of which it makes arguments."""


def words(layout: ParallelLayout, precision: Precision = MIXED) -> list[str]:
    return list(arguments(layout, RULES, precision, H100))


def test_every_argument_is_megatrons_with_as_many_values() -> None:
    written = [*words(EVERYTHING), *words(replace(PLAIN, zero_stage=3))]
    parts = [part for one in written for part in one.replace(" --", "\n--").split("\n")]
    assert {part.split()[0]: len(part.split()) - 1 for part in parts} == PARSED


def test_what_is_megatrons_default_is_not_said() -> None:
    assert words(ParallelLayout(data=8, global_batch=8)) == []
    assert words(PLAIN) == ["--use-distributed-optimizer"]
    overlapped = replace(PLAIN, overlap_gradients=True)
    assert words(overlapped) == ["--use-distributed-optimizer", "--overlap-grad-reduce"]
    assert words(replace(overlapped, bucket_bytes=RULE_BYTES // 2))[-1] == "--ddp-bucket-size 20000000"


def test_a_bucket_is_counted_in_elements_of_the_reduced_format() -> None:
    halves = Precision(reduction=DType.BF16)
    overlapped = replace(PLAIN, overlap_gradients=True)
    assert words(replace(overlapped, bucket_bytes=80_000_000), halves)[-1] == "--overlap-grad-reduce"
    assert words(overlapped, halves)[-1] == "--ddp-bucket-size 80000000"


def test_megatron_asserts_gradients_overlapped_where_parameters_are() -> None:
    with pytest.raises(JobError, match="overlap_parameters needs"):
        replace(MegatronSettings.of(EVERYTHING).applied(EVERYTHING), overlap_gradients=False)


def test_the_flex_dispatcher_runs_by_hybrid_ep_in_racks() -> None:
    layout = ParallelLayout(data=8, global_batch=8, expert=8, dispatcher=Dispatcher.MERGED)
    said = [arguments(layout, RULES, MIXED, gpu)[-1].split()[-1] for gpu in (H100, GB200)]
    assert said == ["deepep", "hybridep"]
    assert words(ParallelLayout(data=8, global_batch=8, expert=8)) == ["--moe-token-dispatcher-type alltoall"]


def test_settings_of_a_layout_make_it_again() -> None:
    settings = MegatronSettings.of(EVERYTHING)
    assert settings.applied(EVERYTHING) == EVERYTHING
    assert differing_keys(EVERYTHING, EVERYTHING) == {}
    other = replace(EVERYTHING, micro_batch_group=0, chunks=4)
    assert differing_keys(other, EVERYTHING) == {"chunks": 4, "micro_batch_group": 0}


def test_what_no_prediction_knows_is_listed_where_a_job_could_have_it() -> None:
    def named(layout: ParallelLayout) -> str:
        return " ".join(one.argument for one in not_modelled("megatron", layout, H100))

    assert named(ParallelLayout()) == ""
    assert "--use-sharp" in named(PLAIN)
    assert "--defer-embedding-wgrad-compute" in named(ParallelLayout(pipeline=2))
    assert "--delay-wgrad-compute" in named(EVERYTHING)
    assert "--cp-comm-type" not in named(EVERYTHING)
    assert all(one.why for one in not_modelled("megatron", EVERYTHING, H100))


@pytest.mark.parametrize(
    ("group", "message"),
    [(1, "must be from pipeline = 2 to the 8 micro-batches"), (16, "must be from"), (7, "the last group has 1 of 8")],
)
def test_groups_of_micro_batches_that_megatron_refuses_are_refused(group: int, message: str) -> None:
    with pytest.raises(JobError, match=message):
        replace(EVERYTHING, micro_batch_group=group)
    with pytest.raises(JobError, match="needs schedule interleaved"):
        ParallelLayout(pipeline=2, global_batch=8, micro_batch_group=4)


def test_larger_groups_hold_more_activations() -> None:
    """Megatron-LM's warm-up of the first stage: 2 (p - 1) + (chunks - 1) group forwards, and the one that follows."""
    held = [most_in_flight(replace(EVERYTHING, micro_batch_group=group), 0) for group in (2, 4, 8)]
    assert held == [2 * 1 + 2 * group + 1 for group in (2, 4)] + [2 * 1 + 2 * 8 + 1]


def test_a_pipelines_layout_is_one_word_of_the_variable() -> None:
    """A shell takes no quotes out of a variable that it expands."""
    layout = ParallelLayout(pipeline=2, pipeline_layout="Et*2|t*2L")
    assert words(layout) == ["--pipeline-model-parallel-layout Et*2|t*2L"]
