"""A traced kernel in the cost model's terms, as far as a trace tells.

A trace tells grid, threads and time. What it does not tell is assumed by the kernel's class:

    class                            resident blocks per SM        memory traffic, of what moves in its time
    gemm, attention, convolution     1 (their tiles fill an SM)    `COMPUTE_TRAFFIC`
    all others                       as many as 2048 threads hold  `MEMORY_TRAFFIC`

The GPU is the preset whose model stands as a word in the trace's name ("NVIDIA H100 PCIe" -> H100), with the trace's
own number of SMs: a card with another memory is taken for its sister.
"""

import re
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Final

from lagom_overlap.analysis.groups import KernelKey
from lagom_overlap.analysis.kernel_class import KernelClass, kernel_class
from lagom_overlap.cost.kernels import kernel_of_time
from lagom_overlap.cost.profile import Profile
from lagom_overlap.hardware import Cluster, Gpu, load_preset, preset_names
from lagom_overlap.trace.gpu_trace import NS_PER_S, GpuTrace
from lagom_overlap.workload import Kernel

COMPUTE_TRAFFIC: Final = 0.3
"""Share of the memory bandwidth that a tensor-core kernel takes: assumed (A40's Phi-2 products: 0.2 to 0.4)."""
MEMORY_TRAFFIC: Final = 0.9
"""The same of all other kernels: assumed."""
_TILED: Final = (KernelClass.GEMM, KernelClass.ATTENTION, KernelClass.CONVOLUTION)
_THREADS_PER_SM: Final = 2048
_MAX_BLOCKS_PER_SM: Final = 32


@lru_cache
def _cluster_named_in(gpu_name: str) -> Cluster | None:
    held = [load_preset(name) for name in preset_names()]
    named = (cluster for cluster in held if re.search(rf"\b{re.escape(_model(cluster.gpu))}\b", gpu_name))
    return next(named, None)


def _model(gpu: Gpu) -> str:
    """What makes one model of a GPU: `"A100"` of `"A100-SXM4-80GB"`."""
    return gpu.name.partition("-")[0]


def cluster_of_trace(trace: GpuTrace) -> Cluster | None:
    """The preset of the trace's GPU with the trace's number of SMs; None where no preset has it.

    Of several presets with that GPU the first by name: their wires differ, and a trace says nothing of wires.
    """
    cluster = _cluster_named_in(trace.gpu_name)
    if cluster is None or trace.num_sms is None:
        return cluster
    return replace(cluster, gpu=replace(cluster.gpu, num_sms=trace.num_sms))


def modelled_kernel(key: KernelKey, alone_ns: float, gpu: Gpu, profile: Profile) -> Kernel:
    """The kernel that the model runs alone in that time."""
    tiled = kernel_class(key.name) in _TILED
    threads = max(1, prod(key.block))
    alone_s = max(1.0, alone_ns) / NS_PER_S
    return kernel_of_time(
        gpu,
        profile,
        alone_s=alone_s,
        num_blocks=max(1, prod(key.grid)),
        blocks_per_sm=1 if tiled else max(1, min(_MAX_BLOCKS_PER_SM, _THREADS_PER_SM // threads)),
        total_bytes=(COMPUTE_TRAFFIC if tiled else MEMORY_TRAFFIC) * gpu.hbm_bytes_per_s * alone_s,
    )
