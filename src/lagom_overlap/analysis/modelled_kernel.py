"""A traced kernel in the cost model's terms, as far as a trace tells.

A trace tells grid, threads and time. What it does not tell is assumed by the kernel's class:

    class                            resident blocks per SM        memory traffic, of what moves in its time
    gemm, attention, convolution     1 (their tiles fill an SM)    `COMPUTE_TRAFFIC`
    all others                       as many as 2048 threads hold  `MEMORY_TRAFFIC`
"""

from math import prod
from typing import Final

from lagom_overlap.analysis.groups import KernelKey
from lagom_overlap.analysis.kernel_class import KernelClass, kernel_class
from lagom_overlap.cost.kernels import kernel_of_time
from lagom_overlap.cost.profile import Profile
from lagom_overlap.hardware import Gpu
from lagom_overlap.trace.gpu_trace import NS_PER_S
from lagom_overlap.workload import Kernel

COMPUTE_TRAFFIC: Final = 0.3
"""Share of the memory bandwidth that a tensor-core kernel takes: assumed (A40's Phi-2 products: 0.2 to 0.4)."""
MEMORY_TRAFFIC: Final = 0.9
"""The same of all other kernels: assumed."""
_TILED: Final = (KernelClass.GEMM, KernelClass.ATTENTION, KernelClass.CONVOLUTION)
_THREADS_PER_SM: Final = 2048
_MAX_BLOCKS_PER_SM: Final = 32


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
