"""How a model is cut over GPUs: the degrees of parallelism, the schedule, what is recomputed and what is sharded."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from lagom_overlap.errors import JobError
from lagom_overlap.hardware import Cluster
from lagom_overlap.workload.layer_kinds import Mixer, Mlp
from lagom_overlap.workload.models import TransformerModel
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


MAX_ZERO_STAGE: Final = 3
MAX_SLOTS: Final = 2_000_000
"""Forwards of all stages that an iteration may have; a simulation of more would not end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Degrees of parallelism and the choices that go with them.

    `micro_batch` and `global_batch` are in sequences. `chunks` are the model chunks (virtual stages) of one GPU under
    the interleaved schedule. `zero_stage` shards over the data-parallel ranks: 1 the optimizer (Megatron's distributed
    optimizer), 2 the gradients too, 3 the parameters too (FSDP). `replicate` groups of consecutive ranks each share out
    the whole, and gradients are added between them (hybrid sharding, HSDP). `overlap_gradients` reduces buckets of
    `bucket_bytes` during the last backward instead of everything after it; `prefetch` is in layers (stage 3).
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
    (--expert-tensor-parallel-size 1).
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    micro_batch: int = 1
    global_batch: int = 1
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    chunks: int = 1
    recompute: Recompute = Recompute.NONE
    sequence_parallel: bool = False
    async_tensor: bool = False
    overlap_tensor: bool = False
    zero_stage: int = 0
    replicate: int = 1
    overlap_gradients: bool = False
    bucket_bytes: int = 160_000_000
    prefetch: int = 1
    flash_attention: bool = True
    scatter_gather: bool = False
    overlap_p2p: bool = False
    tables_as_layers: bool = False
    overlap_experts: bool = False
    dispatcher: Dispatcher = Dispatcher.ALL_TO_ALL
    fused_experts: bool = False
    recompute_modules: tuple[RecomputeModule, ...] = ()
    graph_modules: tuple[GraphModule, ...] = ()
    pipeline_layout: str = ""
    whole_experts: bool = False
    fused_loss: bool = False
    overlap_parameters: bool = False
    frozen: bool = False

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
        most = 0 if self.frozen else MAX_ZERO_STAGE
        if not 0 <= self.zero_stage <= most:
            with_frozen = " with frozen: there is nothing to shard" if self.frozen else ""
            raise JobError(f"parallel.zero_stage is {self.zero_stage}, must be 0 to {most}{with_frozen}")
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


def check_layout(model: TransformerModel, layout: ParallelLayout, cluster: Cluster, seq_len: int) -> None:
    """Refuses a layout that cannot be built: divisibility of the model, size of the cluster.

    Raises:
        JobError: naming the key, its value and what is allowed.
    """
    context, times = ("", "") if layout.context == 1 else (" x context", f" x {layout.context}")
    if layout.num_gpus != cluster.num_gpus:
        raise JobError(
            f"parallel: tensor x pipeline x data{context} = "
            f"{layout.tensor} x {layout.pipeline} x {layout.data}{times} = "
            f"{layout.num_gpus} GPUs, but cluster {cluster.name!r} has {cluster.num_gpus} "
            f"({cluster.num_nodes} x {cluster.gpus_per_node})"
        )
    check_model(model, layout, seq_len)
    if layout.tensor > cluster.gpus_per_node and layout.tensor % cluster.gpus_per_node:
        raise JobError(
            f"parallel.tensor is {layout.tensor}, must be at most a node's {cluster.gpus_per_node} GPUs "
            "or a multiple of them"
        )


def _check_chunks(model: TransformerModel, layout: ParallelLayout) -> None:
    if layout.pipeline_layout:
        sizes = parse_pipeline_layout(layout.pipeline_layout)
        if (sum(sizes.layers), sizes.num_mtp) != (model.num_layers, model.mtp_layers):
            raise JobError(
                f"parallel.pipeline_layout has {sum(sizes.layers)} layers t and {sizes.num_mtp} predictions m, must "
                f"have those of model {model.name!r}: {model.num_layers} and {model.mtp_layers}"
            )
        if model.tied_embeddings and layout.mtp_chunk < layout.num_chunks - 1:
            raise JobError(
                f"parallel.pipeline_layout has predictions m before the head's chunk, which is not modelled for tied "
                f"tables, as those of model {model.name!r}"
            )
        return
    tables = 2 if layout.tables_as_layers else 0
    cut = f"parallel.pipeline x chunks = {layout.pipeline} x {layout.chunks} = {layout.num_chunks}"
    if (model.num_layers + tables) % layout.num_chunks:
        more = " and 2 for tables_as_layers" if tables else ""
        raise JobError(
            f"{cut}, must divide the model's layers ({model.num_layers}){more}; or pipeline_layout names each chunk's"
        )
    if tables and (model.num_layers + tables) // layout.num_chunks < 2:
        raise JobError(f"{cut}: with tables_as_layers the first and last chunk would have no layer")


def check_model(model: TransformerModel, layout: ParallelLayout, seq_len: int) -> None:
    """Refuses degrees that do not divide the model.

    Raises:
        JobError: naming the key, its value and what it must divide.
    """
    for what, size in _cut_sizes(model, layout):
        if size % layout.tensor:
            raise JobError(f"parallel.tensor is {layout.tensor}, must divide the model's {what} ({size})")
    has_keys = any(kind.mixer in (Mixer.ATTENTION, Mixer.WINDOW) for kind in model.kind_counts)
    if has_keys and max(model.num_kv_heads, layout.tensor) % min(model.num_kv_heads, layout.tensor):
        raise JobError(
            f"parallel.tensor is {layout.tensor}, must divide the model's key-value heads ({model.num_kv_heads}) "
            "or be a multiple of them"
        )
    _check_chunks(model, layout)
    _check_kinds(model, layout)
    if layout.recompute is Recompute.PRODUCTS and (model.num_experts or not (model.gated and layout.flash_attention)):
        raise JobError(
            "parallel.recompute is products, torchtitan's operator mode: only dense models with gated MLPs and flash "
            f"attention have it here, not {model.name!r}"
        )
    if layout.context > 1 and not layout.flash_attention:
        raise JobError(f"parallel.context is {layout.context}, must be 1 without flash_attention")
    if seq_len % layout.context:
        raise JobError(f"parallel.context is {layout.context}, must divide seq_len ({seq_len})")
    if layout.sequence_parallel and seq_len // layout.context % layout.tensor:
        raise JobError(f"parallel.tensor is {layout.tensor}, must divide seq_len ({seq_len}) for sequence parallelism")
    if layout.dispatcher is not Dispatcher.ALL_TO_ALL and not model.num_experts:
        raise JobError(
            f"parallel.dispatcher is {layout.dispatcher}, must be all_to_all: model {model.name!r} has no experts"
        )
    if layout.fused_experts and not model.num_experts:
        raise JobError(f"parallel.fused_experts is true, must be false: model {model.name!r} has no experts")
    if layout.expert > 1 and not model.num_experts:
        raise JobError(f"parallel.expert is {layout.expert}, must be 1: model {model.name!r} has no experts")
    if layout.expert > 1 and model.num_experts % layout.expert:
        raise JobError(f"parallel.expert is {layout.expert}, must divide the model's experts ({model.num_experts})")


def _cut_sizes(model: TransformerModel, layout: ParallelLayout) -> Iterator[tuple[str, int]]:
    """What tensor parallelism cuts, by its name."""
    yield "heads", model.num_heads
    if not (model.num_experts and layout.whole_experts):
        yield "ffn", model.ffn
    if model.dense_ffn:
        yield "dense_ffn", model.dense_ffn
    if model.mamba is not None:
        yield "mamba.num_heads", model.mamba.num_heads
        yield "mamba.num_groups", model.mamba.num_groups


def _check_kinds(model: TransformerModel, layout: ParallelLayout) -> None:
    """Refuses what is not modelled for layers of some kinds."""
    kinds = {*model.kind_counts, *(model.mtp_kinds if model.mtp_layers else ())}
    mixers, mlps = {kind.mixer for kind in kinds}, {kind.mlp for kind in kinds}
    special = sorted(mixers & {Mixer.LATENT, Mixer.WINDOW, Mixer.MAMBA})
    if special and not layout.flash_attention:
        raise JobError(f"parallel.flash_attention is false, must be true: model {model.name!r} has {special[0]} layers")
    if layout.context > 1 and Mixer.MAMBA in mixers:
        raise JobError(f"parallel.context is {layout.context}, must be 1: model {model.name!r} has mamba layers")
    if layout.recompute is Recompute.PRODUCTS and (special or len(kinds) > 1):
        raise JobError(
            f"parallel.recompute is products, which layers of one kind with plain attention have, not {model.name!r}"
        )
    needs = {
        RecomputeModule.MLA_UP_PROJ: (Mixer.LATENT in mixers, "latent attention"),
        RecomputeModule.MLP: (Mlp.MLP in mlps, "layers without experts"),
        RecomputeModule.MOE: (Mlp.EXPERTS in mlps, "experts"),
        RecomputeModule.MOE_ACT: (Mlp.EXPERTS in mlps, "experts"),
    }
    graphs = {
        GraphModule.MAMBA: (Mixer.MAMBA in mixers, "Mamba layers"),
        GraphModule.MLP: (Mlp.MLP in mlps, "layers without experts"),
        GraphModule.MOE_ROUTER: (Mlp.EXPERTS in mlps, "experts"),
    }
    named = [("recompute_modules", str(one), needs.get(one)) for one in layout.recompute_modules]
    named += [("graph_modules", str(one), graphs.get(one)) for one in layout.graph_modules]
    for key, module, needed in named:
        if needed is not None and not needed[0]:
            raise JobError(f"parallel.{key} has {module!r}, but model {model.name!r} has no {needed[1]}")
    if layout.whole_experts and Mlp.EXPERTS not in mlps:
        raise JobError(f"parallel.whole_experts is true, must be false: model {model.name!r} has no experts")
