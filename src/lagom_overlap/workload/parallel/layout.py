"""How a model is cut over GPUs: the degrees of parallelism, the schedule, what is recomputed and what is sharded."""

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated, Any, Final

from msgspec import Meta

from lagom_overlap.errors import JobError
from lagom_overlap.toml_tables import Count, Name, Size, size_bytes
from lagom_overlap.workload.fsdp2.settings import MAX_PREFETCH, MAX_REDUCE_BUFFERS
from lagom_overlap.workload.layer_kinds import MAX_LAYERS
from lagom_overlap.workload.parallel.pipeline_layout import parse_pipeline_layout


class PipelineSchedule(StrEnum):
    """In which order a pipeline stage runs its micro-batches."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"


class Recompute(StrEnum):
    """Which activations are computed again in backward.

    None; the attention's core; every layer; torchtitan's two selective modes: all but attention and every second
    product (`products`), and every second layer (`layers`).
    """

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"
    PRODUCTS = "products"
    LAYERS = "layers"


class Dispatcher(StrEnum):
    """How tokens reach the experts that they are routed to.

    An all-to-all of every routed row; the same with as many rows for every expert (token dropping, padded to a
    capacity); one whose kernels send a token once to each rank and to each node (DeepEP, HybridEP).
    """

    ALL_TO_ALL = "all_to_all"
    CAPACITY = "capacity"
    MERGED = "merged"


class RecomputeModule(StrEnum):
    """A part of a layer that selective recomputation names (Megatron-Core's `--recompute-modules`).

    The attention's core; latent attention's norms, projections up and rotary; the layer's norms; the MLP of a layer
    without experts; a whole mixture with its all-to-alls; the activation inside its experts.
    """

    CORE_ATTN = "core_attn"
    MLA_UP_PROJ = "mla_up_proj"
    LAYERNORM = "layernorm"
    MLP = "mlp"
    MOE = "moe"
    MOE_ACT = "moe_act"


class GraphModule(StrEnum):
    """A part of a layer that is replayed as a CUDA graph (Megatron-Core's `--cuda-graph-scope`, Transformer Engine's).

    Attention with its norm and residual; a Mamba layer; the MLP of a layer without experts; of a mixture the norm, the
    router and the MLP next to the experts, and with `moe_preprocess` what counts and lays out rows before they are
    sent. What experts do is in none of them.
    """

    ATTN = "attn"
    MAMBA = "mamba"
    MLP = "mlp"
    MOE_ROUTER = "moe_router"
    MOE_PREPROCESS = "moe_preprocess"


class AttentionKernel(StrEnum):
    """Whose kernel of flash attention runs: the flash-attn package's, PyTorch's build of it, cuDNN's."""

    FLASH_2 = "flash_attention_2"
    SDPA_FLASH = "sdpa_flash"
    CUDNN = "cudnn"


MAX_ZERO_STAGE: Final = 3
"""Optimizer, gradients, parameters shared out."""
DEFAULT_BUCKET: Final = "160 MB"
"""Megatron-LM's 40 million FP32 gradients."""
MAX_SLOTS: Final = 1 << 18
"""Forwards of all stages that an iteration may have: as many take 20 s, and real jobs have a hundredth of it."""
MAX_GPUS: Final = 1 << 20
"""GPUs of a job: the members of its groups are listed one by one, and 10^9 of them fill a memory."""
MAX_MICRO_BATCH: Final = 1 << 20
"""Sequences of a micro-batch: no GPU holds as many of one token each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelChoices:
    """The keys of `[parallel]` that a layout takes as a job file gives them.

    `micro_batch` is in sequences. `chunks` are the model chunks (virtual stages) of one GPU under the interleaved
    schedule, each of which runs `micro_batch_group` micro-batches before the next one's turn (0: as many as there
    are stages). `replicate` groups of consecutive ranks each share out the whole, and gradients are added between them
    (hybrid sharding, HSDP). `prefetch` is in layers (stage 3).
    FSDP2's settings: each unit names `forward_prefetch` and `backward_prefetch` units in its lists (0: no list, and
    then FSDP2 gathers none ahead in forward and one in backward); the last `kept_units` units of forward keep their
    parameters until their backward (reshard_after_forward=False; of all units: `zero_stage` 2); inputs of
    `reduce_buffers` reductions may be in flight; with `separate_reduce_group` reductions have a communicator of their
    own.
    `context` ranks share every sequence: each has its tokens, and keys and values travel around them during attention.
    `async_tensor` hides the all-reduce of input gradients behind the weight gradient's product (no sequence
    parallelism). `overlap_tensor` cuts the gathers and scatters of sequence parallelism into parts that run with their
    product's (PyTorch's async TP, Transformer Engine's user buffers). `overlap_p2p` lets a stage go on while its
    results travel to its neighbours (interleaved only). With `tables_as_layers` embedding and head count as a layer
    each where a pipeline is cut: its first and last model chunk have one layer fewer. `overlap_experts` runs a
    micro-batch's all-to-alls behind the computations of another one (Megatron-LM's --overlap-moe-expert-parallel-comm).
    `dispatcher` is how tokens reach their experts. `fused_experts`: one kernel for all experts, whose epilogue is the
    activation and its cast (Transformer Engine's grouped MLP).
    `recompute_modules` are what selective recomputation computes again (none: the attention's core, where it is not
    flash attention), `graph_modules` what is replayed as CUDA graphs. `pipeline_layout` says which layers each model
    chunk has (`pipeline_layout`; "": as many each).
    `fused_loss`: Transformer Engine's cross entropy (--cross-entropy-fusion-impl te). `overlap_parameters`: with
    stage 1, parameters are gathered behind the first forward instead of before it (--overlap-param-gather). `frozen`:
    weights have no gradients (LoRA, whose small adapters are left out): backward makes those of activations alone.
    `whole_experts`: tensor parallelism does not cut experts, its ranks are expert parallelism's too
    (--expert-tensor-parallel-size 1). `attention_kernel`: where it is not the one that the framework takes.
    """

    replicate: Count = 1
    micro_batch: Annotated[int, Meta(ge=1, le=MAX_MICRO_BATCH)] = 1
    prefetch: Annotated[int, Meta(ge=1, le=MAX_LAYERS)] = 1
    forward_prefetch: Annotated[int, Meta(ge=0, le=MAX_PREFETCH)] = 0
    backward_prefetch: Annotated[int, Meta(ge=0, le=MAX_PREFETCH)] = 0
    kept_units: Annotated[int, Meta(ge=0, le=2 * MAX_LAYERS)] = 0
    reduce_buffers: Annotated[int, Meta(ge=1, le=MAX_REDUCE_BUFFERS)] = 1
    separate_reduce_group: bool = False
    tensor: Count = 1
    pipeline: Count = 1
    expert: Count = 1
    context: Count = 1
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    chunks: Count = 1
    micro_batch_group: Annotated[int, Meta(ge=0, le=MAX_SLOTS)] = 0
    recompute: Recompute = Recompute.NONE
    sequence_parallel: bool = False
    async_tensor: bool = False
    overlap_tensor: bool = False
    flash_attention: bool = True
    scatter_gather: bool = False
    overlap_p2p: bool = False
    tables_as_layers: bool = False
    overlap_experts: bool = False
    dispatcher: Dispatcher = Dispatcher.ALL_TO_ALL
    fused_experts: bool = False
    fused_loss: bool = False
    overlap_parameters: bool = False
    frozen: bool = False
    graph_modules: Annotated[tuple[GraphModule, ...], Meta(max_length=8)] = ()
    recompute_modules: Annotated[tuple[RecomputeModule, ...], Meta(max_length=16)] = ()
    pipeline_layout: Annotated[str, Meta(max_length=4096)] = ""
    whole_experts: bool = False
    attention_kernel: AttentionKernel | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelTable(ParallelChoices):
    """`[parallel]` of a job file: fully sharded data parallelism over `fsdp` ranks, or degrees of their own.

    `fsdp = N` is `data = N` with `zero_stage = 3` under FSDP2 (2, if that is given); with `replicate = R` there are R
    such groups, and `data` is all of them. What `layout` makes of the other keys: `ParallelLayout`.
    `framework` issues the step (`workload.step.rules`); by default FSDP2 for `fsdp` and Megatron-LM otherwise.
    `framework_release` is its release, where that makes a difference (`workload.step.rules`).
    `clip_gradients`, `overlap_gradients` and `bucket_bytes` are by default what the framework does
    (`IssueRules.completed`).
    `auto = [2, 8]` gives no degrees but a mesh, over which `lagom capture` and `lagom plan` search for a sharding.
    """

    auto: Annotated[list[Annotated[int, Meta(ge=2, le=1 << 20)]], Meta(min_length=1, max_length=2)] | None = None
    fsdp: Annotated[int, Meta(ge=2)] | None = None
    global_batch: Count | None = None
    data: Count | None = None
    zero_stage: Annotated[int, Meta(ge=0, le=MAX_ZERO_STAGE)] | None = None
    overlap_gradients: bool | None = None
    bucket_bytes: Size | None = None
    cuda_graph: bool = False
    framework: Name | None = None
    framework_release: Annotated[str, Meta(pattern=r"^\d{1,4}\.\d{1,4}(\.\d{1,4})?$")] | None = None
    clip_gradients: bool | None = None

    def layout(self) -> "ParallelLayout":
        """The layout, in which what the job leaves out is what the rest of it says, or most frameworks do.

        Raises:
            JobError: if the degrees contradict each other.
        """
        if self.auto is not None:
            raise JobError(
                "parallel.auto: a sharding is searched for by `lagom capture` and `lagom plan` only; give degrees"
            )
        choices: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(ParallelChoices)}
        data = self.fsdp * self.replicate if self.fsdp else self.data or 1
        return ParallelLayout(
            data=data,
            global_batch=self.global_batch or self.micro_batch * data,
            zero_stage=self.zero_stage or (0 if self.fsdp is None else 3),
            overlap_gradients=self.overlap_gradients is not False,
            bucket_bytes=size_bytes(
                DEFAULT_BUCKET if self.bucket_bytes is None else self.bucket_bytes, "parallel.bucket_bytes"
            ),
            **choices,
        )

    @property
    def framework_name(self) -> str:
        """The framework that runs the job: FSDP2 where `fsdp` says so, Megatron-LM otherwise, unless one is named."""
        return self.framework or ("fsdp2" if self.fsdp is not None else "megatron")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout(ParallelChoices):
    """Degrees of parallelism and the choices that go with them, which fit each other.

    `global_batch` is in sequences. `zero_stage` shards over the data-parallel ranks: 1 the optimizer (Megatron's
    distributed optimizer), 2 the gradients too, 3 the parameters too (FSDP). `overlap_gradients` reduces buckets of
    `bucket_bytes` during the last backward instead of everything after it.
    """

    data: int = 1
    global_batch: int = 1
    zero_stage: int = 0
    overlap_gradients: bool = False
    bucket_bytes: int = 160_000_000

    def __post_init__(self) -> None:
        counts = (
            "tensor",
            "pipeline",
            "data",
            "context",
            "expert",
            "micro_batch",
            "global_batch",
            "chunks",
            "prefetch",
            "replicate",
        )
        for field in (*counts, "bucket_bytes"):
            value = getattr(self, field)
            if value < 1:
                raise JobError(f"parallel.{field} is {value}, must be at least 1")
        self._check_sharing()
        self._check_batches()
        self._check_schedule()
        self._check_replicate()
        num_slots = self.num_micro_batches * self.num_chunks
        if num_slots > MAX_SLOTS:
            raise JobError(
                f"parallel: {self.num_micro_batches} micro-batches through {self.num_chunks} model chunks are "
                f"{num_slots} forwards, at most {MAX_SLOTS} are simulated"
            )
        if self.sequence_parallel and self.tensor == 1:
            raise JobError("parallel.sequence_parallel needs tensor of at least 2: it shards what tensor leaves whole")
        if self.overlap_tensor and not self.sequence_parallel:
            raise JobError("parallel.overlap_tensor needs sequence_parallel: it cuts its gathers and scatters")
        if self.overlap_experts and (self.expert == 1 or self.num_micro_batches == 1):
            raise JobError(
                f"parallel.overlap_experts needs expert and micro-batches of at least 2, not {self.expert} and "
                f"{self.num_micro_batches}: all-to-alls run behind another micro-batch"
            )
        if self.recompute_modules and self.recompute is not Recompute.SELECTIVE:
            raise JobError(f"parallel.recompute_modules needs recompute = 'selective', not {str(self.recompute)!r}")
        for key in ("recompute_modules", "graph_modules"):
            named = getattr(self, key)
            for place, module in enumerate(named):
                if module in named[:place]:
                    raise JobError(f"parallel.{key} has {str(module)!r} twice, must name each module once")
        if GraphModule.MOE_PREPROCESS in self.graph_modules and GraphModule.MOE_ROUTER not in self.graph_modules:
            raise JobError("parallel.graph_modules has 'moe_preprocess', which needs 'moe_router' too")
        self._check_experts()

    def _check_sharing(self) -> None:
        if self.num_gpus > MAX_GPUS:
            raise JobError(
                f"parallel: tensor x pipeline x data x context are {self.num_gpus} GPUs, "
                f"at most {MAX_GPUS} are simulated"
            )
        if self.frozen and self.zero_stage:
            raise JobError(
                f"parallel.zero_stage is {self.zero_stage}, must be 0 with frozen: there is nothing to shard"
            )
        if not 0 <= self.zero_stage <= MAX_ZERO_STAGE:
            raise JobError(f"parallel.zero_stage is {self.zero_stage}, must be 0 to {MAX_ZERO_STAGE}")
        if self.kept_units and (self.zero_stage != MAX_ZERO_STAGE or self.pipeline > 1):
            raise JobError(
                f"parallel.kept_units is {self.kept_units}, must be 0 with zero_stage = {self.zero_stage} and pipeline "
                f"= {self.pipeline}: parameters are freed after forward with zero_stage = 3 and no pipeline only"
            )
        if self.overlap_parameters and (self.zero_stage != 1 or not self.overlap_gradients):
            # NVIDIA/Megatron-LM at d98e8a64, `megatron/training/arguments.py`: asserted of --overlap-param-gather
            raise JobError(
                "parallel.overlap_parameters needs zero_stage = 1 and overlap_gradients = true, as Megatron-LM does, "
                f"not {self.zero_stage} and {str(self.overlap_gradients).lower()}"
            )

    def _check_experts(self) -> None:
        if self.whole_experts and self.tensor > 1 and self.expert == 1:
            raise JobError(
                f"parallel.whole_experts needs expert of at least 2 with tensor = {self.tensor}: "
                "the ranks of tensor share out the experts"
            )
        if self.dispatcher is Dispatcher.MERGED and self.expert == 1:
            raise JobError(
                "parallel.dispatcher is merged, must be all_to_all or capacity with expert = 1: nothing is sent"
            )
        if self.expert_ranks % self.expert:
            context = "" if self.context == 1 else f" x context {self.context}"
            tensor = f" x tensor {self.tensor}" if self.whole_experts else ""
            raise JobError(
                f"parallel.expert is {self.expert}, must divide parallel.data = {self.data}{context}{tensor}: "
                f"experts are spread over data-parallel ranks{' and those of tensor' if tensor else ''}"
            )

    def _check_batches(self) -> None:
        per_step = self.micro_batch * self.data
        if self.global_batch % per_step:
            raise JobError(
                f"parallel.global_batch is {self.global_batch}, must be a multiple of "
                f"micro_batch x data = {self.micro_batch} x {self.data} = {per_step}"
            )

    def _check_replicate(self) -> None:
        if self.replicate == 1:
            return
        if not self.zero_stage:
            raise JobError(f"parallel.replicate is {self.replicate}, must be 1 with zero_stage 0, which shards nothing")
        if self.replicas % self.replicate:
            raise JobError(
                f"parallel.replicate is {self.replicate}, must divide the {self.replicas} ranks that hold the same "
                "(data x context)"
            )
        if self.expert > 1:
            raise JobError(f"parallel.replicate is {self.replicate}, must be 1 with expert = {self.expert}")

    def _check_schedule(self) -> None:
        if self.schedule is PipelineSchedule.INTERLEAVED:
            if self.pipeline < 2 or self.chunks < 2:
                raise JobError(
                    f"parallel.schedule is interleaved with pipeline = {self.pipeline} and chunks = {self.chunks}; "
                    "both must be at least 2"
                )
            if self.num_micro_batches % self.pipeline:
                raise JobError(
                    f"parallel.schedule is interleaved with {self.num_micro_batches} micro-batches, "
                    f"must be a multiple of pipeline = {self.pipeline}"
                )
            self._check_micro_batch_group()
        elif self.micro_batch_group:
            raise JobError("parallel.micro_batch_group needs schedule interleaved, in which model chunks take turns")
        elif self.chunks != 1:
            raise JobError(f"parallel.chunks is {self.chunks}, must be 1 unless schedule is interleaved")
        elif self.overlap_p2p:
            raise JobError(f"parallel.overlap_p2p is true with schedule {self.schedule}: Megatron-LM needs interleaved")
        if self.tables_as_layers and self.pipeline == 1:
            raise JobError("parallel.tables_as_layers needs pipeline of at least 2: it says how a pipeline is cut")
        if not self.pipeline_layout:
            return
        if self.pipeline == 1:
            raise JobError("parallel.pipeline_layout needs pipeline of at least 2: it says how a pipeline is cut")
        if self.tables_as_layers:
            raise JobError("parallel.pipeline_layout already says what parallel.tables_as_layers does: give one")
        num_chunks = len(parse_pipeline_layout(self.pipeline_layout).layers)
        if num_chunks != self.num_chunks:
            raise JobError(
                f"parallel.pipeline_layout has {num_chunks} chunks, must have pipeline x chunks = "
                f"{self.pipeline} x {self.chunks} = {self.num_chunks}"
            )
        turn, stage = divmod(self.mtp_chunk, self.pipeline)
        if turn < self.chunks - 1 or stage == 0:
            raise JobError(
                f"parallel.pipeline_layout has predictions m in chunk {turn} of stage {stage}, must have them in the "
                "last chunk of a stage, which is not the first stage"
            )

    def _check_micro_batch_group(self) -> None:
        """As Megatron-LM refuses it (d98e8a64, `core/pipeline_parallel/schedules.py`)."""
        group, num = self.micro_batch_group, self.num_micro_batches
        if not group:
            return
        if not self.pipeline <= group <= num:
            raise JobError(
                f"parallel.micro_batch_group is {group}, must be from pipeline = {self.pipeline} to the "
                f"{num} micro-batches"
            )
        if 0 < num % group < self.pipeline:
            raise JobError(
                f"parallel.micro_batch_group is {group}: the last group has {num % group} of {num} micro-batches, "
                f"must have none or at least pipeline = {self.pipeline}"
            )

    @property
    def num_gpus(self) -> int:
        """GPUs in all: tensor x pipeline x context x data (experts live on the data-parallel ranks)."""
        return self.tensor * self.pipeline * self.replicas

    @property
    def replicas(self) -> int:
        """Ranks that hold, or share out, the same parameters: data x context."""
        return self.data * self.context

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold, or share out, all experts of a layer."""
        return self.replicas * (self.tensor if self.whole_experts else 1)

    @property
    def expert_tensor(self) -> int:
        """In how many parts tensor parallelism cuts an expert."""
        return 1 if self.whole_experts else self.tensor

    @property
    def shard(self) -> int:
        """Consecutive ranks that share out what `zero_stage` shards; 1 where it shards nothing."""
        return self.replicas // self.replicate if self.zero_stage else 1

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that one pipeline runs per iteration."""
        return self.global_batch // (self.micro_batch * self.data)

    @property
    def mtp_chunk(self) -> int:
        """The model chunk of multi-token predictions; the head's, the last one, unless `pipeline_layout` differs."""
        if not self.pipeline_layout:
            return self.num_chunks - 1
        return parse_pipeline_layout(self.pipeline_layout).mtp_chunk

    @property
    def num_chunks(self) -> int:
        """Model chunks in all: stages times chunks."""
        return self.pipeline * self.chunks
