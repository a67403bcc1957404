"""The training step of a job's named model, the same in every verb."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from lagom_overlap.cost.nccl.machines import is_guessed, nccl_of
from lagom_overlap.cost.operators import (
    FrameworkConstants,
    OperatorConstants,
    load_framework,
    load_operators,
)
from lagom_overlap.cost.profile import Profile, contention_of, load_profile
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import Cluster, Gpu, load_preset
from lagom_overlap.jobfile.spec import ClusterTable, JobSpec, ModelTable
from lagom_overlap.sim.training import TrainingSimulator, TrainingTimes
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.models import TransformerModel, load_model
from lagom_overlap.workload.parallel import (
    Dispatcher,
    ParallelLayout,
    ParallelTable,
    StageMemory,
    plan_stages,
    stage_memory,
)
from lagom_overlap.workload.parallel.layout_check import check_layout
from lagom_overlap.workload.precision import ATTENTION_FORMATS, Precision, ProductFormat
from lagom_overlap.workload.step import IssueRules, changes_of, load_rules, rules_in_release
from lagom_overlap.workload.step.framework_file import (
    TAKEN_ANYWHERE,
    dispatchers,
    framework_file,
    has_dispatcher,
    switches,
)

MAX_PASSES: Final = 1 << 14
"""Layers of all micro-batches of a step that is written out: as many are 600,000 operations, 20 s and 0.8 GB."""

SEQ_LEN: Final = 4096
"""Tokens of a sequence where a command gives a model and no length."""


@dataclass(frozen=True, kw_only=True)
class JobStep:
    """What a job with a named model trains, how and on what.

    `says_fsdp` where it names its degree so, `says_batch` where it names a global batch. What is made of it is made
    once; another layout or carve-out is another step (`dataclasses.replace`).
    """

    model: TransformerModel
    layout: ParallelLayout
    cluster: Cluster
    seq_len: int
    rules: IssueRules
    precision: Precision
    clips: bool
    framework: FrameworkConstants
    operators: OperatorConstants
    profile: Profile
    sm_carveout: int | None
    rank_skew_s: float
    says_fsdp: bool
    says_batch: bool

    @cached_property
    def simulator(self) -> TrainingSimulator:
        """The job's iteration under contention."""
        return TrainingSimulator(
            self.model,
            self.layout,
            seq_len=self.seq_len,
            cluster=self.cluster,
            operators=self.operators,
            framework=self.framework,
            profile=self.profile,
            rules=self.rules,
            precision=self.precision,
            clips=self.clips,
            sm_carveout=self.sm_carveout,
            rank_skew_s=self.rank_skew_s,
        )

    @cached_property
    def times(self) -> TrainingTimes:
        """The iteration's."""
        return self.simulator.times()

    @cached_property
    def issued(self) -> IssuedStep:
        """One rank's whole step; of a pipeline, the first stage's, with one micro-batch.

        Raises:
            JobError: if that is too long.
        """
        num = self.layout.num_micro_batches if self.is_whole else 1
        layers = self.model.num_layers
        if num * layers > MAX_PASSES:
            raise JobError(
                f"parallel: {num} micro-batches through {layers} layers are too many operations to write out one by "
                f"one, at most {MAX_PASSES // layers} are (lagom simulate takes more); lessen parallel.global_batch"
            )
        return self.simulator.step(num_micro_batches=num)

    @property
    def is_whole(self) -> bool:
        """Whether one rank's step is the iteration: there is no pipeline whose stages wait for each other."""
        return self.layout.pipeline == 1

    @cached_property
    def memories(self) -> Sequence[StageMemory]:
        """What one GPU of each stage holds at its peak."""
        stages = plan_stages(self.model, self.layout)
        return [
            stage_memory(
                self.model,
                self.layout,
                stage,
                self.seq_len,
                self.precision,
                weighs_inside=self.rules.weighs_inside,
                stays_whole=self.rules.stays_whole(self.layout),
                eager=self.rules.eager,
            )
            for stage in stages
        ]

    @property
    def most_bytes(self) -> int:
        """What the fullest GPU holds at its peak."""
        return max(memory.total_bytes for memory in self.memories)

    @property
    def fits(self) -> bool:
        """Whether every GPU has that much memory."""
        return self.most_bytes <= self.cluster.gpu.memory_bytes


def model_of(table: ModelTable) -> TransformerModel:
    """The model that a job names, with as many multi-token predictions as it trains.

    Raises:
        UnknownNameError: if there is no such model.
        JobError: if it has fewer.
    """
    assert table.name is not None
    model = load_model(table.name)
    if table.mtp_layers is None or table.mtp_layers == model.mtp_layers:
        return model
    if table.mtp_layers > model.mtp_layers:
        raise JobError(f"model.mtp_layers is {table.mtp_layers}, but model {model.name!r} has {model.mtp_layers}")
    return model.with_mtp(table.mtp_layers)


def stated_cluster(table: ClusterTable) -> Cluster:
    """The cluster that `[cluster]` states.

    Raises:
        UnknownNameError: if there is no such preset or GPU.
        JobError: if it is a file that describes no cluster or GPU, or its nodes cannot have so many GPUs.
    """
    cluster = load_preset(table.preset, table.nodes, table.gpus_per_node, table.gpu)
    if cluster.gpu.own is not None:  # what is wrong in a user's own tables is told here, not where they are used
        for load in (load_operators, contention_of, nccl_of):
            load(cluster.gpu)
    return cluster


def nodes_notes(spec: JobSpec, cluster: Cluster) -> list[str]:
    """What a job on several nodes should know: that they could be larger, as in racks; that their graph is a guess."""
    if is_guessed(cluster):
        return [
            f"Between nodes of {cluster.gpu.name} one ring of few channels is assumed: how its library joins them is "
            "not known here, and communication may be several times too slow."
        ]
    most = cluster.max_gpus_per_node
    if (
        spec.cluster is None
        or spec.cluster.gpus_per_node is not None
        or most is None
        or cluster.num_nodes == 1
        or most == cluster.gpus_per_node
    ):
        return []
    return [
        f"Nodes of {cluster.gpus_per_node} GPUs, joined by the network. The links inside a node could join "
        f"{most} (cluster.gpus_per_node)."
    ]


def release_notes(parallel: ParallelTable, layout: ParallelLayout) -> list[str]:
    """That newer releases of the framework issue the step otherwise, where the job does not say which it runs."""
    if parallel.framework_release is not None or layout.data == 1:
        return []
    return [
        f"The step of releases before {change.software} {change.since}: from then on {change.what} "
        f'(parallel.framework_release = "{change.since}"), unless {change.avoided_by} is set.'
        for change in changes_of(parallel.framework_name)
    ]


def filled_cluster(table: ClusterTable, num_ranks: int) -> Cluster:
    """The cluster that `[cluster]` states; without a number of nodes, as many as the ranks fill.

    Raises:
        UnknownNameError: if there is no such preset.
        JobError: if it is a file that describes no cluster, or its nodes cannot have so many GPUs.
    """
    cluster = stated_cluster(table)
    if table.nodes is not None:
        return cluster
    return replace(cluster, num_nodes=-(-num_ranks // cluster.gpus_per_node))


def cluster_of(preset: str, num_gpus: int) -> Cluster:
    """So many GPUs of a preset or a cluster's file: part of a node, or whole nodes.

    Raises:
        UnknownNameError: if there is no such preset.
        JobError: if the GPUs fill no whole number of nodes.
    """
    cluster = stated_cluster(ClusterTable(preset=preset))
    each = cluster.gpus_per_node
    if num_gpus > each and num_gpus % each:
        raise JobError(
            f"--gpus {num_gpus}: must be at most a node's {each} GPUs ({cluster.name}), or a multiple of them"
        )
    return replace(cluster, num_nodes=-(-num_gpus // each), gpus_per_node=min(each, num_gpus))


def cluster_for(spec: JobSpec, layout: ParallelLayout) -> Cluster:
    """The job's cluster; without a number of nodes, as many as the layout fills, one of them no larger than it.

    Raises:
        UnknownNameError: if there is no such preset.
    """
    assert spec.cluster is not None
    cluster = filled_cluster(spec.cluster, layout.num_gpus)
    if spec.cluster.nodes is not None:
        return cluster
    return replace(cluster, gpus_per_node=min(cluster.gpus_per_node, layout.num_gpus))


def step_operators(gpu: Gpu, parallel: ParallelTable | None) -> OperatorConstants:
    """What operators cost in a whole step; where no framework is told, stock PyTorch's kernels of attention."""
    framework = load_framework("fsdp2" if parallel is None else parallel.framework_name)
    asked = None if parallel is None else parallel.attention_kernel
    return load_operators(gpu).in_training().running(framework, asked)


def precision_of(spec: JobSpec, rules: IssueRules) -> Precision:
    """The job's number formats; what `[precision]` leaves out is the framework's."""
    table, default = spec.precision, rules.precision
    return Precision(
        table.parameter or default.parameter,
        table.gradient or default.gradient,
        table.reduction or default.reduction,
        table.products,
        others=() if table.head is ProductFormat.PARAMETER else (("logits", table.head),),
        attention=table.attention,
    )


def check_switches(parallel: ParallelTable, framework: str) -> None:
    """Refuses keys that the job's framework has no switch for.

    Raises:
        JobError: naming the key, the framework, and the frameworks that have it.
    """
    default = ParallelTable()
    if parallel.prefetch != default.prefetch and "forward_prefetch" in framework_file(framework).switches:
        raise JobError(
            f"parallel.prefetch is {parallel.prefetch}, but framework {framework} has two lists: give "
            "parallel.forward_prefetch and parallel.backward_prefetch"
        )
    for key, having in switches().items():
        value = getattr(parallel, key)
        if value != getattr(default, key) and framework not in having and key not in TAKEN_ANYWHERE:
            shown = "true" if value is True else [str(one) for one in value]
            raise JobError(
                f"parallel.{key} is {shown}, but framework {framework} has no such switch; allowed with: "
                f"{', '.join(having)}"
            )
    if not has_dispatcher(framework, parallel.dispatcher):
        known = ", ".join(one for one in Dispatcher if has_dispatcher(framework, one))
        raise JobError(
            f"parallel.dispatcher is {parallel.dispatcher}, but framework {framework} is modelled with {known}; "
            f"allowed with: {', '.join(dispatchers()[parallel.dispatcher])}"
        )


def _check_products(products: ProductFormat, gpu: Gpu) -> None:
    """Refuses a format that the GPU does not multiply."""
    allowed = [ProductFormat.PARAMETER]
    allowed += [ProductFormat.FP8, ProductFormat.FP8_CURRENT, ProductFormat.FP8_ROWWISE] if gpu.fp8 else []
    allowed += [ProductFormat.MXFP8] if gpu.mxfp8 else []
    allowed += [ProductFormat.NVFP4] if gpu.nvfp4 else []
    if products not in allowed:
        keys = "gpu.fp8, gpu.mxfp8, gpu.nvfp4"
        raise JobError(f"precision.products is {products}, must be {', '.join(allowed)} on {gpu.name} ({keys})")


def _check_block_scaled(spec: JobSpec, framework: str, gpu: Gpu) -> None:
    """Refuses attention and heads in formats that Transformer Engine does not multiply them in, or the GPU.

    Both are switches of the recipe that the layers have: Megatron-LM refuses `fp8_output_proj` without the MXFP8 recipe
    (`transformer_config.py`, @d98e8a64), and without a recipe Transformer Engine's attention heeds no `fp8_dpa`.
    """
    precision, can = spec.precision, framework == "megatron" and gpu.mxfp8
    for key in ("attention", "head"):
        given = getattr(precision, key)
        if given is ProductFormat.PARAMETER:
            continue
        if given is not ProductFormat.MXFP8 or not can:
            allowed = ", ".join(ATTENTION_FORMATS if can else ATTENTION_FORMATS[:1])
            raise JobError(
                f"precision.{key} is {given}, must be {allowed} on {gpu.name} with framework {framework}; "
                "mxfp8 needs framework megatron and a GPU that has it (gpu.mxfp8)"
            )
        if precision.products is not ProductFormat.MXFP8:
            raise JobError(f"precision.{key} is mxfp8, needs precision.products = mxfp8, not {precision.products}")


def _check_attention(spec: JobSpec, parallel: ParallelTable) -> None:
    """Refuses a format of a flash attention where there is none."""
    if not parallel.flash_attention and spec.precision.attention is not ProductFormat.PARAMETER:
        raise JobError(f"precision.attention is {spec.precision.attention}, needs parallel.flash_attention = true")


def job_step(spec: JobSpec) -> JobStep | None:
    """The step of a job's named model; None for groups given by shapes, captures and programs.

    Raises:
        LagomError: if the layout does not fit the model or the cluster, or the framework does not shard so.
    """
    if spec.model is None or spec.parallel is None or spec.cluster is None or spec.model.name is None:
        return None
    assert spec.model.seq_len is not None  # checked when the file was read
    parallel = spec.parallel
    rules = rules_in_release(load_rules(parallel.framework_name), parallel.framework_release)
    check_switches(parallel, rules.name)
    model, precision = model_of(spec.model), precision_of(spec, rules)
    layout = rules.completed(parallel, precision)
    cluster = cluster_for(spec, layout)
    check_layout(model, layout, cluster, spec.model.seq_len)
    framework = load_framework(rules.name)
    _check_products(precision.products, cluster.gpu)
    _check_block_scaled(spec, rules.name, cluster.gpu)
    _check_attention(spec, parallel)
    return JobStep(
        model=model,
        layout=layout,
        cluster=cluster,
        seq_len=spec.model.seq_len,
        rules=rules,
        precision=precision,
        clips=rules.clips if parallel.clip_gradients is None else parallel.clip_gradients,
        framework=framework.graphed() if parallel.cuda_graph else framework,
        operators=load_operators(cluster.gpu),
        profile=load_profile(spec.cost.profile),
        sm_carveout=spec.cost.sm_carveout,
        rank_skew_s=spec.cost.rank_skew_s,
        says_fsdp=parallel.fsdp is not None,
        says_batch=parallel.global_batch is not None,
    )
