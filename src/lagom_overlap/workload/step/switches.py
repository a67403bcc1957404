"""Which frameworks have a switch for what a layout asks for; what is absent here, all of them do or can be told to.

Megatron-LM: `--recompute-modules`, `--cuda-graph-scope`, `--overlap-moe-expert-parallel-comm`, Transformer Engine's
fused grouped MLP and cross entropy, `--overlap-param-gather`, frozen weights (Megatron-Bridge's LoRA), whole iterations
as CUDA graphs; the all-reduce of input gradients behind the weight gradient's product, and scatter-gather between
stages, are in the copy that Megatron-DeepSpeed holds too. PyTorch documents whole-network capture for DDP
(`docs/source/notes/cuda.rst`, "Usage with DistributedDataParallel"), not for FSDP.

Experts that tensor parallelism leaves whole are in all of them that cut experts: torchtitan
(`expert_tensor_parallel_degree` 1) and DeepSpeed (`enable_expert_tensor_parallelism`, by default off). DeepEP and
HybridEP are in Megatron-Core and torchtitan (`expert_parallel_comm_backend`). DeepSpeed drops tokens too
(`drop_tokens`), but its kernels are not modelled.
"""

from collections.abc import Mapping
from typing import Final

from lagom_overlap.workload.parallel.layout import Dispatcher

_MEGATRON: Final = ("megatron",)
_BOTH_MEGATRONS: Final = ("megatron", "megatron_deepspeed")

SWITCHES: Final[Mapping[str, tuple[str, ...]]] = {
    "recompute_modules": _MEGATRON,
    "graph_modules": _MEGATRON,
    "overlap_experts": _MEGATRON,
    "fused_experts": _MEGATRON,
    "fused_loss": _MEGATRON,
    "overlap_parameters": _MEGATRON,
    "frozen": _MEGATRON,
    "async_tensor": _BOTH_MEGATRONS,
    "scatter_gather": _BOTH_MEGATRONS,
    "cuda_graph": ("megatron", "ddp"),
}
"""Keys of `[parallel]`, and the frameworks in which they can be other than their default."""
DISPATCHERS: Final[Mapping[Dispatcher, tuple[str, ...]]] = {
    Dispatcher.MERGED: ("megatron", "torchtitan", "torchtitan_blocks", "torchtitan_compiled"),
    Dispatcher.CAPACITY: _MEGATRON,
}


def has_switch(framework: str, key: str) -> bool:
    """Whether the framework can do what the key says."""
    return framework in SWITCHES.get(key, (framework,))


def has_dispatcher(framework: str, dispatcher: Dispatcher) -> bool:
    """Whether the framework sends tokens that way."""
    return framework in DISPATCHERS.get(dispatcher, (framework,))
