"""Which frameworks have a switch for what a layout asks for, and what they call it: `[switches]` of their files.

What is in no file, all of them do: experts that tensor parallelism leaves whole are in all that cut experts, torchtitan
(`expert_tensor_parallel_degree` 1) and DeepSpeed (`enable_expert_tensor_parallelism`, by default off). DeepEP and
HybridEP are in Megatron-Core and torchtitan. DeepSpeed drops tokens too (`drop_tokens`), but its kernels are not
modelled. PyTorch documents whole-network capture for DDP, not for FSDP.
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from typing import Final

from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel.layout import (
    Dispatcher,
    ParallelLayout,
    PipelineSchedule,
    Recompute,
    RecomputeModule,
)
from lagom_overlap.workload.step.framework_file import framework_file, framework_names

TAKEN_ANYWHERE: Final = ("overlap_gradients", "prefetch")
"""Keys that a job of another framework may give all the same: they say how its units are issued, by whatever hook."""


@cache
def switches() -> Mapping[str, Mapping[str, str]]:
    """Keys of `[parallel]`: the frameworks in which they can be other than their default, and how one tells them.

    "": by no one switch.
    """
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name in framework_names():
        for key, said in framework_file(name).switches.items():
            found[key][name] = said
    return dict(found)


@cache
def dispatchers() -> Mapping[Dispatcher, Mapping[str, str]]:
    """The same of the ways in which tokens are sent."""
    found: dict[Dispatcher, dict[str, str]] = defaultdict(dict)
    for name in framework_names():
        for way, said in framework_file(name).dispatchers.items():
            found[Dispatcher(way)][name] = said
    return dict(found)


def has_switch(framework: str, key: str) -> bool:
    """Whether the framework can do what the key says."""
    return framework in switches().get(key, (framework,))


def can_overlap_experts(model: TransformerModel, layout: ParallelLayout) -> bool:
    """Whether Megatron-LM runs all-to-alls behind another micro-batch: of a pipeline, with virtual stages only.

    Nor where whole layers, or mixtures, are computed again, with more than one multi-token prediction, or with Mamba's
    layers. NVIDIA/Megatron-LM at d98e8a64, `core/transformer/transformer_config.py`; `core/models`: of all models
    `GPTModel` alone has a `build_schedule_plan`.
    """
    if model.mamba is not None or model.mtp_layers > 1:
        return False
    is_interleaved = layout.pipeline == 1 or layout.schedule is PipelineSchedule.INTERLEAVED
    makes_again = layout.recompute is Recompute.FULL or RecomputeModule.MOE in layout.recompute_modules
    return layout.expert > 1 and layout.num_micro_batches > 1 and is_interleaved and not makes_again


def has_dispatcher(framework: str, dispatcher: Dispatcher) -> bool:
    """Whether the framework sends tokens that way."""
    return framework in dispatchers().get(dispatcher, (framework,))
