"""A traced kernel in the cost model's terms, as far as a trace tells, and its slowdown during a traced collective.

A trace tells name, grid, threads and time. What it does not tell is assumed by the kernel's class:

    class                            resident blocks per SM        memory traffic, of what moves in its time
    gemm, attention, convolution     1 (their tiles fill an SM)    the GPU's `product_share`, else `COMPUTE_TRAFFIC`
    all others                       as many as 2048 threads hold  `MEMORY_TRAFFIC`

cuBLAS's products on Hopper say tile and cluster in their names (`cost.persistent`). How many tiles they have follows
from the product's shape; where none is given, from the time, as for a depth of `DEPTH`.
"""

from math import prod
from typing import Final

from lagom_overlap.analysis.collectives import CollectiveKey
from lagom_overlap.analysis.groups import KernelKey
from lagom_overlap.analysis.kernel_class import KernelClass, kernel_class
from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.cost.kernels import kernel_of_time, persistent_of_time
from lagom_overlap.cost.lagom_equations import l2_miss_share, traffic_bytes_per_s
from lagom_overlap.cost.persistent import nvjet_grid, nvjet_grid_of_time
from lagom_overlap.cost.profile import Profile
from lagom_overlap.hardware import Cluster, Gpu
from lagom_overlap.trace.gpu_trace import NS_PER_S
from lagom_overlap.units import MIB
from lagom_overlap.workload import Kernel

_FIFO_BYTES: Final = 4 * MIB
"""NCCL's Simple FIFO of a channel."""


def model_of(cluster: Cluster, profile: str) -> ContentionModel:
    """The cost model of a machine with a profile by name."""
    return ContentionModel(cluster, load_profile(profile))


def slowdown_during(
    kernel: KernelKey,
    alone_ns: float,
    model: ContentionModel,
    *,
    key: CollectiveKey,
    kind: CollectiveKind | None,
    comm_ns: float,
) -> float:
    """r: the kernel's time during a collective of `comm_ns` over its time alone, at least 1."""
    profile, gpu = model.profile, model.cluster.gpu
    modelled = modelled_kernel(kernel, alone_ns, gpu, profile)
    channels = min(key.num_channels, gpu.num_sms - 1)
    fifo_bytes = float(channels * _FIFO_BYTES)
    rate = 0.0
    if kind is not None and key.num_bytes > 0 and key.num_ranks > 1 and comm_ns > 0:
        rate = Collective(kind, key.num_bytes, key.num_ranks).wire_bytes * NS_PER_S / comm_ns
    traffic = traffic_bytes_per_s(
        rate,
        profile.user_traffic + profile.fifo_traffic * l2_miss_share(fifo_bytes, gpu.l2_bytes, profile.l2_share),
        amplification=profile.amplification,
        ceiling_bytes_per_s=profile.max_traffic_share * gpu.hbm_bytes_per_s,
    )
    stretched_s = model.kernel_seconds(
        modelled, num_channels=channels, traffic_bytes_per_s=traffic, fifo_bytes=fifo_bytes
    )
    return max(1.0, stretched_s / model.kernel_seconds(modelled))


def alone_ns(length_ns: float, overlapped_ns: float, slowdown: float) -> float:
    """The run's time alone, by Eq. 4: during collectives it advanced at 1/r of its rate."""
    return length_ns - overlapped_ns * (1 - 1 / slowdown)


COMPUTE_TRAFFIC: Final = 0.3
"""Share of the memory bandwidth that a tensor-core kernel takes: assumed (A40's Phi-2 products: 0.2 to 0.4)."""
MEMORY_TRAFFIC: Final = 0.98
"""The same of all other kernels: an addition on an H100 moved 3.04 TB/s of the 3.0 of a copy (November 2026)."""
DEPTH: Final = 4096
"""The k of a product whose shape is not known: a hidden size of the 7B and 8B models, assumed."""
_TILED: Final = (KernelClass.GEMM, KernelClass.ATTENTION, KernelClass.CONVOLUTION)
_THREADS_PER_SM: Final = 2048
"""CUDA's limit of threads that an SM holds at once, compute capability 8.0 and 9.0."""
_MAX_BLOCKS_PER_SM: Final = 32
"""And of blocks."""


def modelled_kernel(
    key: KernelKey, alone_ns: float, gpu: Gpu, profile: Profile, shape: tuple[int, int] | None = None
) -> Kernel:
    """The kernel that the model runs alone in that time; `shape` is m and n of a row-major product, where known."""
    tiled = kernel_class(key.name) in _TILED
    num_blocks, threads = max(1, prod(key.grid)), max(1, prod(key.block))
    alone_s = max(1.0, alone_ns) / NS_PER_S
    own = profile.for_gpu(gpu).product_share
    share = (COMPUTE_TRAFFIC if own is None else own) if tiled else MEMORY_TRAFFIC
    total_bytes = share * gpu.hbm_bytes_per_s * alone_s
    if shape is not None:
        grid = nvjet_grid(key.name, num_blocks, shape)
    else:
        grid = nvjet_grid_of_time(key.name, num_blocks, alone_s * gpu.gemm_flops / (2.0 * DEPTH))
    if grid is not None and num_blocks <= gpu.num_sms:
        return persistent_of_time(gpu, profile, alone_s=alone_s, grid=grid, total_bytes=total_bytes)
    return kernel_of_time(
        gpu,
        profile,
        alone_s=alone_s,
        num_blocks=num_blocks,
        blocks_per_sm=1 if tiled else max(1, min(_MAX_BLOCKS_PER_SM, _THREADS_PER_SM // threads)),
        total_bytes=total_bytes,
    )
