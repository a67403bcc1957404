"""Megatron-LM's overlap switches of a job: keys of `[parallel]`, a launch's arguments, the environment they want.

Source of arguments, their defaults and what excludes what: NVIDIA/Megatron-LM at d98e8a64 (2026-08-22),
`megatron/training/arguments.py`, `core/model_parallel_config.py`, `core/transformer/transformer_config.py`. What
depends on a framework's release or a GPU's generation is data, `[[environment]]` and `[[not_modelled]]` of its file.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

import msgspec

from lagom_overlap.hardware import Gpu
from lagom_overlap.toml_tables import from_table
from lagom_overlap.workload.parallel import Dispatcher, ParallelLayout, PipelineSchedule
from lagom_overlap.workload.precision import Precision
from lagom_overlap.workload.step.framework_file import framework_file
from lagom_overlap.workload.step.rules import IssueRules

OVERLAP_GRADIENTS: Final = "--overlap-grad-reduce"
OVERLAP_PARAMETERS: Final = "--overlap-param-gather"
SEQUENCE_PARALLEL: Final = "--sequence-parallel"
OVERLAP_TENSOR: Final = "--tp-comm-overlap"
CHUNKS: Final = "--num-virtual-stages-per-pipeline-rank"
GROUP: Final = "--microbatch-group-size-per-virtual-pipeline-stage"
OVERLAP_EXPERTS: Final = "--overlap-moe-expert-parallel-comm"
DISPATCHER: Final = "--moe-token-dispatcher-type"
BUCKET: Final = "--ddp-bucket-size"
_SHARDING: Final = {2: "optim_grads", 3: "optim_grads_params"}
_BLACKWELL: Final = ("b200", "b300", "gb200", "gb300")
"""Beginnings of the names of GPUs of compute capability 10, from which on Megatron-LM asks for no one connection."""
_RACKS: Final = ("gb200", "gb300")
"""Whose NVLink domain spans nodes: of the flex dispatcher's backends only HybridEP runs there."""


class MegatronSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The overlap switches of a job: the keys of its `[parallel]` by their names there, all of them.

    Bucket sizes are in bytes of reduced gradients.
    """

    overlap_gradients: bool
    overlap_parameters: bool
    bucket_bytes: int
    sequence_parallel: bool
    async_tensor: bool
    overlap_tensor: bool
    schedule: PipelineSchedule
    chunks: int
    overlap_p2p: bool
    micro_batch_group: int
    overlap_experts: bool
    dispatcher: Dispatcher

    @classmethod
    def of(cls, layout: ParallelLayout) -> "MegatronSettings":
        """Those of a layout."""
        values: dict[str, Any] = {key: getattr(layout, key) for key in cls.__struct_fields__}
        return cls(**values)

    def applied(self, layout: ParallelLayout) -> ParallelLayout:
        """The layout with these.

        Raises:
            JobError: if they exclude each other, or do not suit its degrees.
        """
        values: dict[str, Any] = {key: getattr(self, key) for key in self.__struct_fields__}
        return replace(layout, **values)


def differing_keys(layout: ParallelLayout, job: ParallelLayout) -> dict[str, bool | int | str]:
    """The overlap switches of a layout that differ from a job's, as keys of `[parallel]`."""
    own, other = MegatronSettings.of(job), MegatronSettings.of(layout)
    return {key: getattr(other, key) for key in other.__struct_fields__ if getattr(other, key) != getattr(own, key)}


def arguments(layout: ParallelLayout, rules: IssueRules, precision: Precision, gpu: Gpu) -> tuple[str, ...]:
    """All that a launch of Megatron-LM says of overlap to run a layout; what is not said is Megatron's default."""
    words = [*_sharding_arguments(layout)]
    if layout.replicas > 1 and layout.zero_stage <= 1:
        words += [OVERLAP_GRADIENTS] if layout.overlap_gradients else []
        words += [OVERLAP_PARAMETERS] if layout.overlap_parameters else []
        if layout.overlap_gradients and layout.bucket_bytes != rules.default_bucket_bytes(layout, precision):
            words.append(bucket_argument(layout.bucket_bytes, precision))
    words += [SEQUENCE_PARALLEL] if layout.sequence_parallel else []
    words += [OVERLAP_TENSOR] if layout.overlap_tensor else []
    words += _pipeline_arguments(layout)
    if layout.expert > 1:
        words.append(dispatcher_argument(layout.dispatcher, gpu))
        words += [OVERLAP_EXPERTS] if layout.overlap_experts else []
    return tuple(words)


def _sharding_arguments(layout: ParallelLayout) -> list[str]:
    if layout.zero_stage == 1:
        return ["--use-distributed-optimizer"]
    if layout.zero_stage in _SHARDING:  # Megatron-FSDP, which refuses another format of checkpoints
        return [
            *("--use-megatron-fsdp", f"--data-parallel-sharding-strategy {_SHARDING[layout.zero_stage]}"),
            *("--ckpt-format fsdp_dtensor", OVERLAP_GRADIENTS, OVERLAP_PARAMETERS),
        ]
    return []


def _pipeline_arguments(layout: ParallelLayout) -> list[str]:
    words = []
    if layout.tables_as_layers:
        words += ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
    if layout.pipeline_layout:
        words.append(f"--pipeline-model-parallel-layout {layout.pipeline_layout}")  # no quotes: a variable's words
    if layout.schedule is not PipelineSchedule.INTERLEAVED:
        return words
    words += [] if layout.pipeline_layout else [f"{CHUNKS} {layout.chunks}"]
    words += [] if layout.overlap_p2p else ["--no-overlap-p2p-communication"]
    return [*words, f"{GROUP} {layout.micro_batch_group}"] if layout.micro_batch_group else words


def bucket_argument(bucket_bytes: int, precision: Precision) -> str:
    """Megatron-LM counts the elements of a bucket."""
    return f"{BUCKET} {bucket_bytes // precision.reduction.num_bytes}"


def dispatcher_argument(dispatcher: Dispatcher, gpu: Gpu) -> str:
    """How tokens are sent; Megatron-LM's own default is to gather all of them."""
    if dispatcher is not Dispatcher.MERGED:
        return f"{DISPATCHER} alltoall"
    backend = "hybridep" if gpu.name.lower().startswith(_RACKS) else "deepep"
    return f"{DISPATCHER} flex --moe-flex-dispatcher-backend {backend}"


class Condition(StrEnum):
    """When a row of the framework's file is about a job."""

    ALWAYS = "always"
    FULLY_SHARDED = "fully_sharded"
    OVERLAPPED_EXPERTS = "overlapped_experts"
    CUT_BEFORE_BLACKWELL = "cut_before_blackwell"
    BLACKWELL = "blackwell"
    DATA = "data"
    OPTIMIZER = "optimizer"
    USER_BUFFERS = "user_buffers"
    CONTEXT = "context"
    PIPELINE = "pipeline"
    INTERLEAVED = "interleaved"
    EXPERTS = "experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRule:
    """A variable where its condition is the first of the framework's that holds; value "": it must not be 1."""

    when: Condition
    variable: str
    value: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NotModelled:
    """An argument about overlap that no prediction here knows, where a job could have it (`when`)."""

    argument: str
    when: Condition
    why: str


def environment(framework: str, layout: ParallelLayout, gpu: Gpu) -> tuple[EnvironmentRule, ...]:
    """What a launch of the layout wants of its environment, each variable by the first rule that holds."""
    rules: dict[str, EnvironmentRule] = {}
    for number, table in enumerate(framework_file(framework).environment):
        rule = from_table(table, EnvironmentRule, f"frameworks/{framework}.toml", f"environment[{number}].")
        if _holds(rule.when, layout, gpu):
            rules.setdefault(rule.variable, rule)
    return tuple(rules.values())


def not_modelled(framework: str, layout: ParallelLayout, gpu: Gpu) -> tuple[NotModelled, ...]:
    """Arguments that the job could have and that no prediction here knows."""
    named = f"frameworks/{framework}.toml"
    rows = enumerate(framework_file(framework).not_modelled)
    flags = [from_table(table, NotModelled, named, f"not_modelled[{number}].") for number, table in rows]
    return tuple(row for row in flags if _holds(row.when, layout, gpu))


def _holds(condition: Condition, layout: ParallelLayout, gpu: Gpu) -> bool:
    """Whether a condition of the framework's file holds of a job."""
    is_blackwell = gpu.name.lower().startswith(_BLACKWELL)
    is_cut = layout.tensor > 1 or layout.context > 1
    return {
        Condition.ALWAYS: True,
        Condition.FULLY_SHARDED: layout.zero_stage > 1,
        Condition.OVERLAPPED_EXPERTS: layout.overlap_experts,
        Condition.CUT_BEFORE_BLACKWELL: is_cut and not is_blackwell,
        Condition.BLACKWELL: is_blackwell,
        Condition.DATA: layout.replicas > 1,
        Condition.OPTIMIZER: layout.shard > 1 and layout.zero_stage == 1,
        Condition.USER_BUFFERS: layout.overlap_tensor,
        Condition.CONTEXT: layout.context > 1,
        Condition.PIPELINE: layout.pipeline > 1,
        Condition.INTERLEAVED: layout.schedule is PipelineSchedule.INTERLEAVED,
        Condition.EXPERTS: layout.expert > 1,
    }[condition]
