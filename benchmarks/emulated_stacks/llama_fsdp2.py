"""Llama-3-8B's shape under FSDP2, the step of which `lagom simulate` speaks.

Embedding, layers and head are each a unit; bf16 parameters are gathered, gradients reduced and the loss taken in fp32;
AdamW is PyTorch's default. Rotary positions are one multiplication, as a fused kernel takes; EAGER_ROTARY=1 has them in
PyTorch's own operators, and EAGER_NORM=1 norms as torchtitan wrote them in December 2024. RECOMPUTE=1 keeps attention
and every second product, as torchtitan's selective mode by operators does, RECOMPUTE=full nothing of a layer but its
input. JOINT=1 has one product for query, key and value and one for gate and up, as the model of `simulate` and
Megatron-LM. BATCH is 1, micro-batches are MICRO_BATCHES. REPLICAS=2 shards over half of the ranks and adds the halves'
gradients (HSDP); TENSOR=2 has tensor parallelism over neighbours, with sequence parallelism and a loss that is never
gathered, as torchtitan does. RESHARD=0 keeps parameters whole between forward and backward, PREFETCH=2
has each unit gather two ahead (`set_modules_to_forward_prefetch`, `..._backward_prefetch`). DDP=1 is
DistributedDataParallel under autocast in FSDP2's place. FREE_LOGITS=1 drops them before backward, as torchtitan does.
SHAPE has another model's sizes, SEQUENCE another length. At the end each rank's peaks of allocated and reserved memory
stand in PEAKS.RANK, if PEAKS is given.

    torchrun --nproc-per-node 8 llama_fsdp2.py LAYERS STEPS
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

BATCH, RECOMPUTE = int(os.environ.get("BATCH", "1")), os.environ.get("RECOMPUTE", "")
MICRO_BATCHES = int(os.environ.get("MICRO_BATCHES", "1"))
FREES_LOGITS = bool(os.environ.get("FREE_LOGITS"))
IS_DDP, RESHARDS = bool(os.environ.get("DDP")), os.environ.get("RESHARD", "1") == "1"
IS_JOINT = bool(os.environ.get("JOINT"))
REPLICAS, TENSOR = (int(os.environ.get(name, "1")) for name in ("REPLICAS", "TENSOR"))
LAYERS, STEPS = map(int, sys.argv[1:])
HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = map(
    int, os.environ.get("SHAPE", "4096,14336,32,8,128,128256").split(",")
)
SEQUENCE = int(os.environ.get("SEQUENCE", "8192"))


class EagerNorm(nn.Module):
    """Root mean square, operator by operator, in FP32 up to the scale."""

    def __init__(self, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x):
        """The last axis normed and scaled."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


NORM = EagerNorm if os.environ.get("EAGER_NORM") else nn.RMSNorm


def rotated(x, cosine, sine):
    """Rotary positions on (batch, heads, sequence, head_dim)."""
    if not os.environ.get("EAGER_ROTARY"):
        return x * cosine
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


def kept():
    """Contexts of a checkpoint that keeps attention and every second product."""
    counts = {False: 0, True: 0}

    def policy(context, operator, *_, **__):
        if operator is torch.ops.aten.mm.default:
            counts[context.is_recompute] += 1
            return (
                CheckpointPolicy.PREFER_RECOMPUTE
                if counts[context.is_recompute] % 2 == 0
                else CheckpointPolicy.MUST_SAVE
            )
        is_attention = operator is torch.ops.aten._scaled_dot_product_flash_attention.default
        return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Projections(nn.Module):
    """Linear layers of one input: a product each, or one for all."""

    def __init__(self, *outputs):
        super().__init__()
        self.outputs = outputs
        self.parts = nn.ModuleList(nn.Linear(HIDDEN, n, bias=False) for n in ([sum(outputs)] if IS_JOINT else outputs))

    def forward(self, x):
        """One result for each of the outputs."""
        return self.parts[0](x).split(self.outputs, -1) if IS_JOINT else [part(x) for part in self.parts]


class Layer(nn.Module):
    """Attention with grouped heads and a gated MLP."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = NORM(HIDDEN), NORM(HIDDEN)
        self.heads = Projections(HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.gate_up = Projections(FFN, FFN)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x, cosine, sine):
        """(batch, sequence, hidden) to the same."""
        normed = self.norm1(x)
        query, key, value = (part.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for part in self.heads(normed))
        query, key = rotated(query, cosine, sine), rotated(key, cosine, sine)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm2(x))
        return x + self.down(functional.silu(gate) * up)


class Llama(nn.Module):
    """Embedding, layers, norm and head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = NORM(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens, cosine, sine):
        """Tokens to logits."""
        x = self.embedding(tokens)
        for layer in self.layers:
            if RECOMPUTE:
                policy = {} if RECOMPUTE == "full" else {"context_fn": kept}
                x = checkpoint(layer, x, cosine, sine, use_reentrant=False, **policy)
            else:
                x = layer(x, cosine, sine)
        return self.head(self.norm(x))


def in_parallel(model, mesh):
    """Megatron's columns and rows, with norms and sums on a part of the sequence."""
    whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        "layers.*.norm1": SequenceParallel(),
        "layers.*.norm2": SequenceParallel(),
        "layers.*.heads": whole,
        "layers.*.gate_up": whole,
        "layers.*.out": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    columns = ("heads", "gate_up")
    parallelize_module(model, mesh, plan | {f"layers.*.{name}.parts.*": ColwiseParallel() for name in columns})


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
with torch.device("meta"):
    model = Llama()
mesh = None
if TENSOR > 1:
    both = init_device_mesh("cuda", (dist.get_world_size() // TENSOR, TENSOR), mesh_dim_names=("data", "tensor"))
    in_parallel(model, both["tensor"])
    mesh = both["data"]
elif REPLICAS > 1:
    mesh = init_device_mesh("cuda", (REPLICAS, dist.get_world_size() // REPLICAS), mesh_dim_names=("copy", "shard"))
if not IS_DDP:
    for unit in (model.embedding, *model.layers, [model.norm, model.head]):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=RESHARDS)
    fully_shard(model, mesh=mesh, mp_policy=policy)
if (PREFETCH := int(os.environ.get("PREFETCH", "1"))) > 1:
    units = [model.embedding, *model.layers, model.norm]  # norm and head are one unit, which the first of them names
    for at, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[at + 1 : at + 1 + PREFETCH])
        unit.set_modules_to_backward_prefetch(units[max(0, at - PREFETCH) : at][::-1])
model.to_empty(device="cuda")  # values do not matter here, and no rank holds all of them
if IS_DDP:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), device="cuda")
angles = torch.outer(torch.arange(SEQUENCE), 5e5 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)).repeat(1, 2)
cosine, sine = (each.to("cuda", torch.bfloat16) for each in (angles.cos(), angles.sin()))
for step in range(STEPS):
    for number in range(MICRO_BATCHES):
        if IS_DDP:
            model.require_backward_grad_sync = number + 1 == MICRO_BATCHES
        with torch.autocast("cuda", torch.bfloat16, enabled=IS_DDP):
            logits = model(tokens[:, :-1], cosine, sine)
        with loss_parallel() if TENSOR > 1 else nullcontext():
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            if FREES_LOGITS:
                del logits
            loss.backward()
        logits = loss = None
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print("step", step, flush=True)
if "PEAKS" in os.environ:
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    Path(f"{os.environ['PEAKS']}.{dist.get_rank()}").write_text("{} {}".format(*peaks))
dist.destroy_process_group()
