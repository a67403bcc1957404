"""A traced kernel's slowdown during a traced collective, by the cost model."""

from typing import Final

from lagom_overlap.analysis.collectives import CollectiveKey
from lagom_overlap.analysis.groups import KernelKey
from lagom_overlap.analysis.modelled_kernel import modelled_kernel
from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.cost.contention import l2_miss_share, traffic_bytes_per_s
from lagom_overlap.hardware import Cluster
from lagom_overlap.trace.gpu_trace import NS_PER_S
from lagom_overlap.units import MIB

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
