"""NCCL's environment variables, policies and profilers that take a knob away from tuning, or its measurement.

Source: NCCL 2.30.7 (src/init.cc, src/graph/tuning.cc, src/enqueue.cc): the environment goes before a communicator's
configuration and before a tuner.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Conflict:
    """A variable that is set, and what it does to tuning."""

    variable: str
    value: str
    why: str


_ALWAYS: Final = {
    "NCCL_ALGO": "fixes the algorithms that NCCL offers; a decision for another one is not applied",
    "NCCL_PROTO": "fixes the protocols that NCCL offers; a decision for another one is not applied",
    "NCCL_MIN_CTAS": "is a floor of channels; from NCCL 2.31 on of every call",
    "NCCL_MAX_CTAS": "caps the channels of every communicator",
    "NCCL_MIN_NCHANNELS": "is a floor of the channels of every communicator",
    "NCCL_MAX_NCHANNELS": "caps the channels of every communicator (but not of all-to-all: NCCL_MAX_P2P_NCHANNELS)",
    "NCCL_NVLS_NCHANNELS": "fixes the channels of NVLS",
    "NCCL_NTHREADS": "fixes the threads of rings and trees",
    "NCCL_LL128_NTHREADS": "fixes the threads of LL128",
    "NCCL_THREAD_THRESHOLDS": "moves the size from which NCCL uses all its channels",
    "NCCL_BUFFSIZE": "changes the largest chunk of Simple",
    "NCCL_LL_BUFFSIZE": "changes the largest chunk of LL",
    "NCCL_LL128_BUFFSIZE": "changes the largest chunk of LL128",
    "NCCL_CGA_CLUSTER_SIZE": "fixes how blocks are clustered; counts that are no multiple of it run otherwise",
    "NCCL_CTA_POLICY": "is CTA_POLICY_EFFICIENCY switched off by any tuner that is loaded; ZERO bypasses tuners",
    "NCCL_TUNER_CONFIG_FILE": "is read by NVIDIA's example tuner: as the chained one it answers 1 channel by default",
    "NCCL_PROFILER_PLUGIN": "is the user's own profiler: it stays, and measured steps are timed by PyTorch's",
    "CUDA_DEVICE_MAX_CONNECTIONS": "at 1 kernels start in launch order: right for Megatron's tensor parallelism only",
    "TORCH_NCCL_ENABLE_TIMING": "records events around every collective, which costs overlap",
}
_ONLY: Final = {"CUDA_DEVICE_MAX_CONNECTIONS": ("1",), "NCCL_CTA_POLICY": ("1", "2", "EFFICIENCY", "ZERO")}
"""The values that matter, where not all do."""


def conflicts(environment: Mapping[str, str]) -> tuple[Conflict, ...]:
    """The variables in an environment that stand in the way, in a fixed order."""
    return tuple(
        Conflict(name, value, f"{name} {why}")
        for name, why in _ALWAYS.items()
        if (value := environment.get(name)) and value in _ONLY.get(name, (value,))
    )
