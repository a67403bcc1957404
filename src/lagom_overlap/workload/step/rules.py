"""How a framework issues a step: what it gathers and reduces, when, in which units, on which streams.

Facts of each framework, from its own source, are the table `[rules]` of its file (`framework_file`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Any, Final

from lagom_overlap.errors import JobError
from lagom_overlap.toml_tables import from_table
from lagom_overlap.workload.parallel.eager_memory import EagerStep
from lagom_overlap.workload.parallel.layout import MAX_ZERO_STAGE, ParallelLayout, ParallelTable, PipelineSchedule
from lagom_overlap.workload.precision import MIXED, Precision
from lagom_overlap.workload.step.framework_file import framework_file, framework_names
from lagom_overlap.workload.step.traffic import (
    Accumulation,
    Casts,
    Mixture,
    RingSteps,
    Traffic,
    counts,
    load_counts,
)
from lagom_overlap.workload.streams import COMM


class Sharding(StrEnum):
    """By which mechanism sharded parameters are gathered and their gradients reduced."""

    FSDP2 = "fsdp2"
    LAYERWISE = "layerwise"
    BUCKETS = "buckets"


_ONE_KERNEL_FOR_ALL: Final = Mixture()


@dataclass(frozen=True, slots=True, kw_only=True)
class IssueRules:
    """The rules of one framework.

    `sharding` is how parameters and gradients travel. `gather_stream` and `reduce_stream` are where, and `sum_stream`
    where sums over the replicas of hybrid sharding are (None: with the reductions). Without `waits_for_use` a gather is
    issued just before its first use and waits for nothing, as a program says it before any framework has issued it.
    `bucket_bytes` have the buckets of a job that does not say (None: of `bucket_elements`, or the layout's), the first
    of them `first_bucket_bytes` (None: as the others); `copies_buckets` says that gradients are copied into them and
    out again, `waits_for_buckets` that computations wait for each bucket's reduction as soon as it is issued.
    `reduces_shards_at_once`: with ZeRO 2 gradients are reduced during every backward, not only the last. `accumulation`
    is how weight gradients of several micro-batches are added. `traffic` is what memory-bound kernels move. `casts` are
    what scaling and casting for products in FP8 move. `hides_tensor`: backward gathers a column-parallel product's
    input again behind the input gradient's product and scatters that gradient behind the weight gradient's, as
    Megatron-LM does; without it the gathered input is kept and the scatter is waited for.
    `sequence_first`: activations are [sequence, batch, hidden]; otherwise each gather and scatter of sequence
    parallelism goes along the second axis, which costs a copy. `mixture` is how a mixture of experts runs.
    `joint_products`: one product makes q, k and v, and one gate and up; otherwise each has its own, and autograd
    adds their inputs' gradients. `casts_before_gathers`: what a product in FP8 meets is cast before sequence
    parallelism gathers it. `stops_recompute`: a dense block is computed again up to the last product's input, which
    is all that backward reads (PyTorch's early stop, the default). `ring` is what context parallelism costs besides
    attention where it runs in steps whose results are merged (None: one kernel, keys and values behind it).
    `trains_mtp`: it builds multi-token prediction (transformers leaves it out of DeepSeek-V3). `weighs_inside`: the
    router's weights scale the experts' activations, not what they make (Megatron-LM since 26596307, April 2025).
    `optimizer_bytes` is the optimizer's memory traffic per parameter, `clip_bytes` that of checking and clipping
    gradients, `clips` whether that is done by default. `most_stage_in_pipelines` is the furthest ZeRO stage there.
    `overlaps_gradients` and `bucket_elements` are what a job has that does not say: whether replicated gradients are
    reduced during backward, and how many a bucket holds at least, or `bucket_elements_per_rank` for each data-parallel
    rank (None: the layout's bytes). `eager` is what PyTorch's allocator holds where PyTorch itself runs the step (None:
    not known; formulas count). `exchanges`: stages of a pipeline exchange results as in Megatron-LM's schedules.
    """

    name: str
    sharding: Sharding
    traffic: Traffic
    casts: Casts
    gather_stream: str = COMM
    reduce_stream: str = COMM
    sum_stream: str | None = None
    waits_for_use: bool = True
    first_bucket_bytes: int | None = None
    bucket_bytes: int | None = None
    copies_buckets: bool = False
    waits_for_buckets: bool = False
    precision: Precision = MIXED
    accumulation: Accumulation = Accumulation.FREE
    reduces_shards_at_once: bool = True
    hides_tensor: bool = True
    sequence_first: bool = True
    mixture: Mixture = _ONE_KERNEL_FOR_ALL
    joint_products: bool = True
    casts_before_gathers: bool = False
    stops_recompute: bool = False
    ring: RingSteps | None = None
    trains_mtp: bool = False
    weighs_inside: bool = False
    optimizer_bytes: int = 28
    clip_bytes: int = 12
    clips: bool = False
    most_stage_in_pipelines: int = MAX_ZERO_STAGE
    overlaps_gradients: bool = True
    bucket_elements: int | None = None
    bucket_elements_per_rank: int = 0
    exchanges: bool = False
    eager: EagerStep | None = None

    def most_zero_stage(self, pipeline: int) -> int:
        """The most that is sharded in a pipeline of that many stages."""
        return self.most_stage_in_pipelines if pipeline > 1 else MAX_ZERO_STAGE

    def default_bucket_elements(self, num_ranks: int) -> int | None:
        """The framework's own number of gradients in a bucket for as many data-parallel ranks; None without a rule."""
        each = self.bucket_elements_per_rank * num_ranks
        return None if self.bucket_elements is None else max(self.bucket_elements, each)

    def default_bucket_bytes(self, layout: ParallelLayout, precision: Precision) -> int | None:
        """The framework's own size of a bucket; of a number of gradients, their bytes as they are reduced."""
        if self.bucket_bytes is not None:
            return self.bucket_bytes
        elements = self.default_bucket_elements(layout.replicas)
        return None if elements is None else elements * precision.reduction.num_bytes

    def completed(self, parallel: ParallelTable, precision: Precision) -> ParallelLayout:
        """The layout of a job, in which what the job leaves out is what the framework does.

        Raises:
            JobError: if the degrees contradict each other.
        """
        layout = parallel.layout()
        completed: dict[str, Any] = {}
        if parallel.overlap_gradients is None and layout.zero_stage <= 1:
            completed["overlap_gradients"] = self.overlaps_gradients
        size = self.default_bucket_bytes(layout, precision)
        if parallel.bucket_bytes is None and size is not None:
            completed["bucket_bytes"] = size
        return replace(layout, **completed)

    def stays_whole(self, layout: ParallelLayout) -> bool:
        """Whether parameters and gradients stay whole from the first forward to the last backward.

        PyTorch's pipelines do so with FSDP2 (`torch/distributed/pipelining/stage.py`).
        """
        return self.sharding is Sharding.FSDP2 and layout.pipeline > 1

    def queues_transfers(self, layout: ParallelLayout) -> bool:
        """Whether computations go on while stages exchange results, and all that a stage exchanges is in one queue.

        PyTorch's interleaved schedules send and receive on one stream of one communicator (2.15; pytorch issue 188833).
        """
        return self.stays_whole(layout) and layout.schedule is PipelineSchedule.INTERLEAVED

    def exchanges_transfers(self, layout: ParallelLayout) -> bool:
        """Whether transfers are those of Megatron-LM's schedules: at once, and waited for (`sim.transfers`)."""
        return self.exchanges and layout.pipeline > 1 and layout.schedule is not PipelineSchedule.GPIPE


PROGRAM_ORDER: Final = IssueRules(
    name="program_order",
    sharding=Sharding.LAYERWISE,
    traffic=load_counts("traffic", "fused", Traffic),
    casts=load_counts("casts", "transformer_engine", Casts),
    waits_for_use=False,
    reduces_shards_at_once=False,
)
"""No framework: each unit is gathered just before its use and reduced just after its last gradient, on one stream."""


@cache
def load_rules(name: str) -> IssueRules:
    """The rules of the framework of that name.

    Raises:
        UnknownNameError: if there is none.
    """
    table: dict[str, Any] = {"name": name, **framework_file(name).rules}
    for kind in ("traffic", "casts", "ring"):
        if kind in table:
            table[kind] = counts(kind, table[kind])
    return from_table(table, IssueRules, f"frameworks/{name}.toml", "rules.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseChange:
    """What `framework` does from release `since` of `software` on.

    `rules` are the fields of `IssueRules` that change, `what` says it in words, `avoided_by` is the variable that makes
    the step as it was before.
    """

    framework: str
    software: str
    since: str
    what: str
    avoided_by: str
    rules: dict[str, bool]

    def is_in(self, release: str) -> bool:
        """Whether that release has it."""
        return _numbers(release) >= _numbers(self.since)

    def is_avoided(self, environment: Mapping[str, str]) -> bool:
        """Whether the environment makes the step as it was before."""
        name, _, value = self.avoided_by.partition("=")
        return environment.get(name) == value


def _numbers(release: str) -> tuple[int, ...]:
    """Major and minor of `2.15`, `2.15.0+cu132` and the like."""
    return tuple(int(number) for number in release.split(".")[:2])


@cache
def release_changes() -> tuple[ReleaseChange, ...]:
    """All that are known."""
    return tuple(
        from_table({"framework": name, **table}, ReleaseChange, f"frameworks/{name}.toml", "release.")
        for name in framework_names()
        for table in framework_file(name).release
    )


def changes_of(framework: str) -> tuple[ReleaseChange, ...]:
    """Those of one framework."""
    return tuple(change for change in release_changes() if change.framework == framework)


def rules_in_release(rules: IssueRules, release: str | None) -> IssueRules:
    """The framework's rules as of a release; without one, those of the releases before any change.

    Raises:
        JobError: if a release is given of a framework whose releases are not told apart.
    """
    if release is None:
        return rules
    changes = changes_of(rules.name)
    if not changes:
        known = ", ".join(sorted({change.framework for change in release_changes()}))
        raise JobError(
            f"parallel.framework_release is {release!r}, but releases of framework {rules.name} are not told apart; "
            f"allowed with: {known}"
        )
    for change in changes:
        if change.is_in(release):
            changed: dict[str, Any] = dict(change.rules)
            rules = replace(rules, **changed)
    return rules
