"""Which frameworks have a switch for what a layout asks for, and what they call it; what is not here, all of them do.

Megatron-LM: `--recompute-modules`, `--cuda-graph-scope`, `--overlap-moe-expert-parallel-comm`, Transformer Engine's
fused grouped MLP and cross entropy, `--overlap-param-gather`, frozen weights (Megatron-Bridge's LoRA), whole iterations
as CUDA graphs; the all-reduce of input gradients behind the weight gradient's product, and scatter-gather between
stages, are in the copy that Megatron-DeepSpeed holds too. PyTorch documents whole-network capture for DDP
(`docs/source/notes/cuda.rst`, "Usage with DistributedDataParallel"), not for FSDP. DDP reduces during backward whatever
one says; Megatron-DeepSpeed's switch depends on its ZeRO stage.

Experts that tensor parallelism leaves whole are in all of them that cut experts: torchtitan
(`expert_tensor_parallel_degree` 1) and DeepSpeed (`enable_expert_tensor_parallelism`, by default off). DeepEP and
HybridEP are in Megatron-Core and torchtitan (`expert_parallel_comm_backend`). DeepSpeed drops tokens too
(`drop_tokens`), but its kernels are not modelled.
"""

from collections.abc import Mapping
from typing import Final

from lagom_overlap.workload.parallel.layout import Dispatcher, ParallelLayout, PipelineSchedule
from lagom_overlap.workload.step.rules import RULES, Sharding

_FSDP2: Final = tuple(name for name, rules in RULES.items() if rules.sharding is Sharding.FSDP2)
_TORCHTITANS: Final = tuple(name for name in _FSDP2 if name.startswith("torchtitan"))
_MEGATRONS: Final = ("megatron", "megatron_deepspeed")

SWITCHES: Final[Mapping[str, Mapping[str, str]]] = {
    "recompute_modules": {"megatron": "--recompute-modules (Megatron-LM)"},
    "graph_modules": {"megatron": "--cuda-graph-scope (Megatron-LM)"},
    "overlap_experts": {"megatron": "--overlap-moe-expert-parallel-comm (Megatron-LM)"},
    "fused_experts": {"megatron": ""},
    "fused_loss": {"megatron": "--cross-entropy-fusion-impl te (Megatron-LM)"},
    "overlap_parameters": {"megatron": "--overlap-param-gather (Megatron-LM)"},
    "frozen": {"megatron": ""},
    "async_tensor": dict.fromkeys(_MEGATRONS, ""),
    "scatter_gather": dict.fromkeys(_MEGATRONS, ""),
    "cuda_graph": dict.fromkeys(("megatron", "ddp"), ""),
    "overlap_tensor": {
        "megatron": "--tp-comm-overlap (Megatron-LM)",  # Transformer Engine's user buffers
        **dict.fromkeys(_FSDP2, "async TP (torchtitan)"),
    },
    "overlap_p2p": {
        **dict.fromkeys(_MEGATRONS, "without --no-overlap-p2p-communication (Megatron-LM)"),
        **dict.fromkeys(_FSDP2, "TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P=1 (PyTorch 2.15)"),
    },
    "overlap_gradients": {"megatron": "--overlap-grad-reduce (Megatron-LM)", "megatron_deepspeed": "", "ddp": ""},
    "prefetch": {
        **dict.fromkeys(_FSDP2, "set_modules_to_forward_prefetch, set_modules_to_backward_prefetch"),
        "deepspeed": "stage3_prefetch_bucket_size (DeepSpeed)",
    },
}
"""Keys of `[parallel]`: the frameworks in which they can be other than their default, and how one tells them ("": by
no one switch)."""
TAKEN_ANYWHERE: Final = ("overlap_gradients", "prefetch")
"""Keys that a job of another framework may give all the same: they say how its units are issued, by whatever hook."""
DISPATCHERS: Final[Mapping[Dispatcher, Mapping[str, str]]] = {
    Dispatcher.MERGED: {
        "megatron": "--moe-token-dispatcher-type flex (Megatron-LM: DeepEP, HybridEP)",
        **dict.fromkeys(_TORCHTITANS, "expert_parallel_comm_backend = 'deepep' (torchtitan)"),
    },
    Dispatcher.CAPACITY: {"megatron": ""},
}
"""The same of the ways in which tokens are sent."""


def has_switch(framework: str, key: str) -> bool:
    """Whether the framework can do what the key says."""
    return framework in SWITCHES.get(key, (framework,))


def can_overlap_experts(layout: ParallelLayout) -> bool:
    """Whether Megatron-LM runs all-to-alls behind another micro-batch: of a pipeline, with virtual stages only.

    NVIDIA/Megatron-LM at 002526d8, `core/transformer/transformer_config.py`.
    """
    is_interleaved = layout.pipeline == 1 or layout.schedule is PipelineSchedule.INTERLEAVED
    return layout.expert > 1 and layout.num_micro_batches > 1 and is_interleaved


def has_dispatcher(framework: str, dispatcher: Dispatcher) -> bool:
    """Whether the framework sends tokens that way."""
    return framework in DISPATCHERS.get(dispatcher, (framework,))
