"""How a framework issues a step: what it gathers and reduces, when, in which units, on which streams.

Facts, each from the framework's own source:

- FSDP2 (PyTorch 2.13, `torch/distributed/fsdp/_fully_shard`): the shard is cast and copied into the gather's buffer on
  a stream of its own, gathered on another, copied out on the stream of computations; gradients are copied into the
  reduction's buffer on the stream of computations and reduced on a third stream. The copy-in of unit k + 2 waits for
  the copy-out of unit k. In backward a unit's copy-out is followed by the gather of the unit before it in forward's
  order. The copy into a reduction waits for the reduction before it. The root's own parameters stay gathered.
  Blocks are recomputed by PyTorch's non-reentrant checkpoint (`torch/utils/checkpoint.py`), which stops early.
- torchtitan (`parallelize_llama.py`, Apr 2024 to Jun 2025): FSDP2 around blocks compiled or not, clipping; AdamW is
  multi-tensor until Dec 2024 (9dec370: `optimizer.fused` is off) and fused in Jun 2025 (820504e: `implementation`), the
  loss is compiled with the blocks in Jun 2025 and not before (9dec370, `train.py`: turned off for CUDA errors);
  q, k, v, gate and up are a `Linear` each; with one FP8 scale per tensor, casts come before gathers
  (torchao's `float8_tensor_parallel.py`);
  tensor parallelism through DTensor, whose gathers and scatters run along the second axis of [batch, sequence, hidden].
- FSDP1 (PyTorch 2.3): gathers in place, one unit ahead, and reduces on one stream.
- DDP (`nn/parallel/distributed.py`, `csrc/distributed/c10d/reducer.cpp`): buckets of 25 MiB in the order in which
  gradients are ready, the first one of 1 MiB; gradients are copied into them and out again. From PyTorch 2.15 on it
  hides none of their reductions, unless one says so (`releases.py`).
- Megatron-LM (`core/distributed`): buckets of max(40 M, 1 M x data ranks) FP32 gradients, views of one buffer; without
  --overlap-grad-reduce one reduction after the last backward. The distributed optimizer scatters gradients and gathers
  parameters before the next forward. Transformer Engine casts what sequence parallelism gathers before it is gathered
  (v2.9 to v2.16, `gather_along_first_dim` with a quantizer in `layernorm_linear.py` and `linear.py`;
  `grad_output_preprocess` in `base.py`), also behind user buffers; one scale per tensor is found over all ranks
  (`set_quantizer_amax_reduction_group`); with block scales both copies are gathered when each is needed.
- DeepSpeed (`runtime/zero`): ZeRO-3 gathers ahead on a stream of its own and reduces during every backward, ZeRO-2
  reduces during every backward and keeps parameters whole.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from lagom_overlap.errors import UnknownNameError
from lagom_overlap.units import MIB
from lagom_overlap.workload.parallel.eager_memory import EagerStep
from lagom_overlap.workload.parallel.layout import MAX_ZERO_STAGE, ParallelLayout, PipelineSchedule
from lagom_overlap.workload.precision import HALF, MIXED, DType, Precision
from lagom_overlap.workload.step.traffic import (
    COMPILED,
    COMPILED_BLOCKS,
    DYNAMIC_CASTS,
    EAGER,
    FUSED,
    JOINED_CASTS,
    MEGATRON_MIXTURE,
    PLAIN,
    PLAIN_MIXTURE,
    RING_COMPILED,
    RING_EAGER,
    TRANSFORMER_ENGINE_CASTS,
    UNFUSED_ROTARY,
    Accumulation,
    Casts,
    Mixture,
    RingSteps,
    Traffic,
)
from lagom_overlap.workload.streams import ALL_GATHER, ALL_REDUCE, COMM, REDUCE_SCATTER


class Sharding(StrEnum):
    """By which mechanism sharded parameters are gathered and their gradients reduced."""

    FSDP2 = "fsdp2"
    LAYERWISE = "layerwise"
    BUCKETS = "buckets"


@dataclass(frozen=True, slots=True, kw_only=True)
class IssueRules:
    """The rules of one framework.

    `sharding` is how parameters and gradients travel. `gather_stream` and `reduce_stream` are where, and
    `sum_stream` where sums over the replicas of hybrid sharding are (None: with the reductions). Without
    `waits_for_use` a gather is issued just before its first use and waits for nothing, as a program says it before any
    framework has issued it. `first_bucket_bytes` and `bucket_bytes` are for buckets (None: the layout's);
    `copies_buckets` says that gradients are copied into them and out again, `waits_for_buckets` that computations wait
    for each bucket's reduction as soon as it is issued. `reduces_shards_at_once`: with ZeRO 2
    gradients are reduced during every backward, not only the last. `accumulation` is how weight gradients
    of several micro-batches are added. `traffic` is what memory-bound kernels move. `casts` are what scaling
    and casting for products in FP8 move. `hides_tensor`: backward gathers a
    column-parallel product's input again behind the input gradient's product and scatters that gradient behind the
    weight gradient's, as Megatron-LM does; without it the gathered input is kept and the scatter is waited for.
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
    gradients, `clips` whether that is done by default. `eager` is what PyTorch's allocator holds where PyTorch itself
    runs the step (None: not known; formulas count).
    """

    name: str
    sharding: Sharding
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
    traffic: Traffic = FUSED
    casts: Casts = TRANSFORMER_ENGINE_CASTS
    hides_tensor: bool = True
    sequence_first: bool = True
    mixture: Mixture = PLAIN_MIXTURE
    joint_products: bool = True
    casts_before_gathers: bool = False
    stops_recompute: bool = False
    ring: RingSteps | None = None
    trains_mtp: bool = False
    weighs_inside: bool = False
    optimizer_bytes: int = 28
    clip_bytes: int = 12
    clips: bool = False
    eager: EagerStep | None = None

    def most_zero_stage(self, pipeline: int) -> int:
        """The most that is sharded in a pipeline of that many stages.

        DeepSpeed (`runtime/pipe/engine.py`) refuses 2 and 3 there.
        """
        return 1 if pipeline > 1 and "deepspeed" in self.name else MAX_ZERO_STAGE

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


_ADAMW_FOREACH_BYTES: Final = 84
"""Per FP32 parameter, counted in PyTorch 2.13's multi-tensor AdamW, its default on GPUs: mul 8, lerp 12, mul 8,
addcmul 16, sqrt 8, div 8, add 8, addcdiv 16."""
_ADAMW_FUSED_BYTES: Final = 28
"""Per FP32 parameter of one fused kernel: parameter, gradient and two moments read, all but the gradient written."""
_CLIP_MEGATRON_BYTES: Final = 20
"""Per FP32 gradient: unscale and check 8, norm 4, clip 8."""

FSDP2: Final = IssueRules(
    name="fsdp2",
    sharding=Sharding.FSDP2,
    gather_stream=ALL_GATHER,
    reduce_stream=REDUCE_SCATTER,
    sum_stream=ALL_REDUCE,
    traffic=PLAIN,
    stops_recompute=True,
    optimizer_bytes=_ADAMW_FOREACH_BYTES,
    eager=EagerStep(),
)
TORCHTITAN: Final = replace(
    FSDP2,
    name="torchtitan",
    traffic=EAGER,
    ring=RING_EAGER,
    casts=DYNAMIC_CASTS,
    hides_tensor=False,
    sequence_first=False,
    joint_products=False,
    casts_before_gathers=True,
    clips=True,
    eager=EagerStep(is_joint=False, keeps_logits=False),  # train.py deletes its logits before backward
)
TORCHTITAN_BLOCKS: Final = replace(
    TORCHTITAN, name="torchtitan_blocks", traffic=COMPILED_BLOCKS, ring=RING_COMPILED, casts=JOINED_CASTS,
    eager=EagerStep(is_joint=False, keeps_logits=False, runs_blocks=False),
)  # fmt: skip
TORCHTITAN_COMPILED: Final = replace(
    TORCHTITAN_BLOCKS, name="torchtitan_compiled", traffic=COMPILED, optimizer_bytes=_ADAMW_FUSED_BYTES,
    eager=EagerStep(is_joint=False, keeps_logits=False, runs_blocks=False, runs_loss=False, runs_update=False),
)  # fmt: skip
FSDP1: Final = IssueRules(
    name="fsdp1",
    sharding=Sharding.LAYERWISE,
    precision=HALF,
    traffic=PLAIN,
    optimizer_bytes=_ADAMW_FOREACH_BYTES,
)
DDP: Final = IssueRules(
    name="ddp",
    sharding=Sharding.BUCKETS,
    first_bucket_bytes=MIB,
    bucket_bytes=25 * MIB,
    copies_buckets=True,
    precision=Precision(DType.BF16, DType.FP32, DType.FP32),  # FP32 parameters under autocast
    traffic=PLAIN,
    optimizer_bytes=_ADAMW_FOREACH_BYTES,
    eager=EagerStep(autocasts=True, in_buckets=True),
)
MEGATRON: Final = IssueRules(
    name="megatron",
    sharding=Sharding.BUCKETS,
    accumulation=Accumulation.FUSED,
    traffic=replace(FUSED, scaled_rotary=UNFUSED_ROTARY),
    mixture=MEGATRON_MIXTURE,
    casts_before_gathers=True,
    trains_mtp=True,
    weighs_inside=True,
    clip_bytes=_CLIP_MEGATRON_BYTES,
    clips=True,
)
MEGATRON_DEEPSPEED: Final = IssueRules(
    name="megatron_deepspeed", sharding=Sharding.BUCKETS, accumulation=Accumulation.ADDED
)
DEEPSPEED: Final = IssueRules(
    name="deepspeed",
    sharding=Sharding.LAYERWISE,
    gather_stream=ALL_GATHER,
    reduce_stream=REDUCE_SCATTER,
    precision=HALF,
    accumulation=Accumulation.ADDED,
    clip_bytes=_CLIP_MEGATRON_BYTES,
    clips=True,
)
PROGRAM_ORDER: Final = IssueRules(
    name="program_order", sharding=Sharding.LAYERWISE, waits_for_use=False, reduces_shards_at_once=False
)
"""No framework: each unit is gathered just before its use and reduced just after its last gradient, on one stream."""

RULES: Final = {rules.name: rules for rules in (
    FSDP2, FSDP1, TORCHTITAN, TORCHTITAN_BLOCKS, TORCHTITAN_COMPILED, DDP, MEGATRON, MEGATRON_DEEPSPEED, DEEPSPEED,
)}  # fmt: skip


def load_rules(name: str) -> IssueRules:
    """The rules of the framework of that name.

    Raises:
        UnknownNameError: if there is none.
    """
    if name not in RULES:
        raise UnknownNameError.among("framework", name, sorted(RULES))
    return RULES[name]
