"""How long the operators that run together take: the contention model of one cluster under one profile.

Several operators at once, beyond the paper's one kernel and one collective (departures, all conserve work):

- collectives add up their SMs, their memory traffic and their FIFOs; on the same kind of link they scale down together
  when their rates exceed it;
- kernels on several streams take turns: each runs at 1/k of its rate;
- the load that kernels put on the memory is taken from their times under the traffic of collectives without load: one
  step of the mutual dependence, not its fixed point (as in the specification's prototype).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

from lagom_overlap.collective import (
    Collective,
    CollectiveKind,
    CommConfig,
    ConfigSpace,
    LaunchConfig,
    Protocol,
    SpaceLimits,
    Transport,
)
from lagom_overlap.collective.config import UNTOUCHED
from lagom_overlap.cost.communication import CollectiveCost, collective_cost
from lagom_overlap.cost.kernels import persistent_of_time
from lagom_overlap.cost.lagom_equations import (
    eq5_dispatch,
    eq6_kernel_time,
    l2_miss_share,
    traffic_bytes_per_s,
)
from lagom_overlap.cost.nccl.machines import default_choice
from lagom_overlap.cost.nccl_algorithms import algorithms_of, largest_chunk_bytes
from lagom_overlap.cost.operators import OperatorConstants, OperatorTimes, load_operators
from lagom_overlap.cost.operators.operator_times import OperatorWork
from lagom_overlap.cost.persistent import TileGrid, as_persistent, hopper_grid, persistent_waves
from lagom_overlap.cost.profile import Collectives, Profile
from lagom_overlap.cost.space import NO_LIMITS, collective_space
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import Cluster, LinkKind
from lagom_overlap.units import GB_PER_S
from lagom_overlap.workload import Gemm, Kernel, Work

PAPER_CHANNELS: Final = {
    (LinkKind.NVLINK, False): 8,
    (LinkKind.NVLINK, True): 4,
    (LinkKind.PCIE, False): 4,
    (LinkKind.PCIE, True): 2,
}
"""NCCL 2.18.3's rings on the Lagom paper's A40 clusters by link inside a node and whether nodes are crossed.

Logged from its real host code on emulated GPUs (22 Nov 2026), GPUs on the roots of AMD CPUs: that layout gives the
paper's own "NC=8, C=2MB" (section 4.3) on a node of cluster A. Behind PCIe switches or on Intel's roots there are 2 or
4 channels everywhere.
"""
PAPER_OTHER_CHANNELS: Final = 8
"""Point-to-point, and other clusters: nothing was logged, the paper's number stands."""
SLOW_LINK_BYTES_PER_S: Final = 12 * GB_PER_S
"""NCCL 2.18.3, tuning.cc: 256 threads where the ring is no faster than PCI_BW = 12 GB/s, else 512."""


@dataclass(frozen=True, slots=True)
class RunningTimes:
    """Whole-operator times (s) while a set of operators runs together: per kernel, per collective."""

    kernel_s: tuple[float, ...]
    comm_s: tuple[float, ...]


@lru_cache(maxsize=64)
def _kernels_by(*priced_by: object) -> dict[Work, Kernel]:
    """The kernels of works, by all that prices them: layouts of one model run the same ones."""
    return {}


@lru_cache(maxsize=64)
def _untouched_by(*priced_by: object) -> dict[Collective, CollectiveCost]:
    """The costs of collectives that nobody touched, by all that prices them."""
    return {}


@dataclass(frozen=True, slots=True)
class ContentionModel:
    """Prices kernels and collectives of a cluster; pure, so results may be cached by arguments.

    With `persistent_carve_out_sms` matrix products are persistent kernels that leave that many SMs free
    (`persistent.py`); None: they are plain ones, whose blocks go wherever there is room. `operators` are what single
    operators take on this GPU; None: those of the package's file for it.

    `rank_skew_s` is how much later the last rank reaches every collective than the rank that is priced: its blocks hold
    their SMs for the transfer and for the wait, and move nothing while they wait. Copy engines wait without SMs.

    `collective_scales` are factors on collectives' times by kind, fitted to a trace; 1 for a kind that is not named.
    """

    cluster: Cluster
    profile: Profile
    persistent_carve_out_sms: int | None = None
    operators: OperatorConstants | None = None
    rank_skew_s: float = 0.0
    collective_scales: tuple[tuple[CollectiveKind, float], ...] = ()
    _kernels: dict[Work, Kernel] = field(init=False, repr=False, compare=False)
    _untouched: dict[Collective, CollectiveCost] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "profile", self.profile.on_gpu(self.cluster.gpu))
        if not 0 <= self.rank_skew_s < float("inf"):
            raise JobError(f"cost.rank_skew is {self.rank_skew_s} s, must be finite and not negative")
        carved, gpu = self.persistent_carve_out_sms, self.cluster.gpu
        priced_by = gpu, self.operators, self.profile, carved
        object.__setattr__(self, "_kernels", _kernels_by(*priced_by))
        object.__setattr__(
            self, "_untouched", _untouched_by(self.cluster, self.profile, self.rank_skew_s, self.collective_scales)
        )
        if carved is not None and not 0 <= carved < gpu.num_sms:
            raise JobError(f"cost.sm_carveout is {carved}, must lie in 0..{gpu.num_sms - 1} on {gpu.name}")

    def launched(self, launch: LaunchConfig) -> "ContentionModel":
        """The model under another launch of the computation: persistent products leave other SMs free.

        Plain ones heed no carve-out: their blocks go wherever there is room. Order and priority are the simulators'.

        Raises:
            JobError: if the carve-out leaves no SM.
        """
        carved = launch.sm_carveout
        if self.persistent_carve_out_sms is None or carved is None:
            return self
        return replace(self, persistent_carve_out_sms=carved)

    def default_config(self, collective: Collective) -> CommConfig:
        """What the engine does untouched, every knob but the transport set.

        NCCL 2.30.7's own choice by size and topology (`nccl.machines.default_choice`), with fewer channels where the
        GPU has no SM left for computation otherwise. Under a profile with `collectives = "paper"` what NCCL 2.18.3 took
        on the paper's clusters: ring, Simple, `PAPER_CHANNELS`, 2 MiB chunks (512 KiB for broadcast and reduce), 512
        threads, or 256 on links up to 12 GB/s; point-to-point has no algorithm and NCCL's own smaller chunks.
        """
        most = max(1, self.cluster.gpu.num_sms - 1)
        if self.profile.collectives is Collectives.NCCL:
            config = default_choice(collective, self.cluster).config
            return config if (config.num_channels or 0) <= most else replace(config, num_channels=most)
        kind, intra = collective.kind, self.cluster.intra.kind
        algorithm = algorithms_of(collective, self.cluster, self.profile.collectives)[0]
        protocol = Protocol.SIMPLE
        link = self.cluster.link_between(collective.num_ranks, collective.num_nodes)
        crosses = self.cluster.num_nodes_of(collective.num_ranks, collective.num_nodes) > 1
        ring_channels = None if algorithm is None else PAPER_CHANNELS.get((intra, crosses))
        channels = PAPER_OTHER_CHANNELS if ring_channels is None else ring_channels
        return CommConfig(
            algorithm=algorithm,
            protocol=protocol,
            num_channels=min(channels, most),
            num_threads=256 if link.bytes_per_s <= SLOW_LINK_BYTES_PER_S else 512,
            chunk_bytes=largest_chunk_bytes(kind, algorithm, protocol, intra),
        )

    def effective(self, collective: Collective, config: CommConfig) -> CommConfig:
        """The configuration with every None filled from the default; the chunk from that of its algorithm and protocol.

        Transport stays None: it is not modelled, but for copy engines, which have no other knob.
        """
        if config.transport is Transport.COPY_ENGINE:
            return config
        default = self.default_config(collective)
        algorithm, protocol = config.algorithm or default.algorithm, config.protocol or default.protocol
        chunk = config.chunk_bytes
        if chunk is None:
            kind, intra = collective.kind, self.cluster.intra.kind
            own = (algorithm, protocol) == (default.algorithm, default.protocol)
            chunk = default.chunk_bytes if own else None
            chunk = chunk or largest_chunk_bytes(kind, algorithm, protocol or Protocol.SIMPLE, intra)
        return replace(
            config,
            algorithm=algorithm,
            protocol=protocol,
            num_channels=config.num_channels or default.num_channels,
            num_threads=config.num_threads or default.num_threads,
            chunk_bytes=chunk,
        )

    def space(self, collective: Collective, limits: SpaceLimits = NO_LIMITS) -> ConfigSpace:
        """What may be tried for a collective; see `space.collective_space`.

        Raises:
            SpaceError: if a limit asks for what cannot be.
        """
        default = self.default_config(collective)
        return collective_space(collective, self.cluster, self.profile.collectives, limits, default=default)

    def kernel(self, work: Work) -> Kernel:
        """The kernel of a computation on this cluster's GPU."""
        if isinstance(work, Kernel):
            return work
        known = self._kernels.get(work)
        if known is None:
            known = self._kernels[work] = self._kernel(work)
        return known

    def _kernel(self, work: OperatorWork) -> Kernel:
        gpu = self.cluster.gpu
        kernel = OperatorTimes(gpu, self.operators or load_operators(gpu)).kernel(work, self.profile)
        carved = self.persistent_carve_out_sms
        if carved is None or not isinstance(work, Gemm):
            return kernel
        if not self.profile.for_gpu(gpu).nvjet:
            return as_persistent(kernel, gpu.num_sms, carved)
        whole, fewer = (hopper_grid((work.m, work.n), work.batch, sms) for sms in (gpu.num_sms, gpu.num_sms - carved))
        alone_s, total_bytes = self.kernel_seconds(kernel), kernel.num_blocks * kernel.block_bytes
        return persistent_of_time(
            gpu, self.profile, alone_s=alone_s, grid=whole, total_bytes=total_bytes, launched=fewer
        )

    def collective(self, collective: Collective, config: CommConfig) -> CollectiveCost:
        """The cost terms of a collective under a configuration, its None knobs filled from the default.

        Raises:
            SpaceError: if the configuration cannot run.
        """
        known = self._untouched.get(collective) if config == UNTOUCHED else None
        if known is None:
            known = collective_cost(collective, self.effective(collective, config), self.cluster, self.profile)
            known = replace(known, skew_s=self.rank_skew_s) if self.rank_skew_s else known
            scale = dict(self.collective_scales).get(collective.kind, 1.0)
            known = replace(known, time_scale=scale) if scale != 1.0 else known
            if config == UNTOUCHED:
                self._untouched[collective] = known
        return known

    def kernel_seconds(
        self, kernel: Kernel, *, num_channels: int = 0, traffic_bytes_per_s: float = 0.0, fifo_bytes: float = 0.0
    ) -> float:
        """Seconds g f of a whole kernel during collectives that hold SMs, take memory traffic and pollute the L2."""
        profile, gpu = self.profile, self.cluster.gpu
        own = profile.for_gpu(gpu)
        small = kernel.blocks_per_sm >= profile.small_block_count
        if kernel.grid is not None and kernel.own_tiles:
            waves = persistent_waves(
                TileGrid(
                    num_tiles=kernel.num_blocks,
                    num_blocks=kernel.grid,
                    cluster=kernel.cluster,
                    own_tiles=kernel.own_tiles,
                ),
                gpu,
                num_channels,
            )
        else:
            waves = eq5_dispatch(
                kernel.num_blocks,
                kernel.blocks_per_sm,
                num_sms=gpu.num_sms,
                num_channels=num_channels,
                shared_blocks_per_sm=profile.small_block_share * kernel.blocks_per_sm if small else 0.0,
                num_xcds=gpu.num_xcds,
                channel_xcds=gpu.channel_xcds,
                grid=kernel.grid,
                spill=own.spill if num_channels else 0.0,
            )
        pollution = profile.pollution * l2_miss_share(fifo_bytes, gpu.l2_bytes, profile.l2_share)
        kernel_s = eq6_kernel_time(
            kernel.wave_s,
            waves,
            block_bytes=kernel.block_bytes * (1.0 + pollution),
            free_bytes_per_s=gpu.hbm_bytes_per_s - traffic_bytes_per_s,
            norm=profile.overlap_norm,
            quantisation=profile.quantisation,
        )
        kernel_s = kernel_s * own.overlap_factor if num_channels else kernel_s
        if kernel.slowdown_scale == 1.0 or not (num_channels or traffic_bytes_per_s):
            return kernel_s
        alone_s = self.kernel_seconds(kernel)
        return alone_s + kernel.slowdown_scale * (kernel_s - alone_s)

    def collective_seconds(self, comms: Sequence[CollectiveCost], memory_load: float) -> list[float]:
        """Seconds of each whole collective while exactly these run."""
        shares = self._link_shares(comms, memory_load)
        return [comm.seconds(memory_load, share) for comm, share in zip(comms, shares, strict=True)]

    def running_times(self, kernels: Sequence[Kernel], comms: Sequence[CollectiveCost]) -> RunningTimes:
        """The whole time of each operator while exactly these run together."""
        memory_load = 0.0
        if comms and kernels:
            unloaded = self._kernel_times(kernels, comms, 0.0)
            bandwidth = self.cluster.gpu.hbm_bytes_per_s
            moved = (k.num_blocks * k.block_bytes / s for k, s in zip(kernels, unloaded, strict=True))
            memory_load = min(1.0, sum(moved) / bandwidth)
        shares = self._link_shares(comms, memory_load)
        return RunningTimes(
            kernel_s=self._kernel_times(kernels, comms, memory_load),
            comm_s=tuple(comm.seconds(memory_load, share) for comm, share in zip(comms, shares, strict=True)),
        )

    def _kernel_times(
        self, kernels: Sequence[Kernel], comms: Sequence[CollectiveCost], memory_load: float
    ) -> tuple[float, ...]:
        channels = min(sum(comm.num_channels for comm in comms), self.cluster.gpu.num_sms - 1)
        fifo_bytes = sum(comm.fifo_bytes for comm in comms)
        traffic = self._traffic(comms, memory_load)
        return tuple(
            len(kernels)
            * self.kernel_seconds(k, num_channels=channels, traffic_bytes_per_s=traffic, fifo_bytes=fifo_bytes)
            for k in kernels
        )

    def _traffic(self, comms: Sequence[CollectiveCost], memory_load: float) -> float:
        """V: the memory bandwidth that the collectives take together."""
        ceiling = self.profile.max_traffic_share * self.cluster.gpu.hbm_bytes_per_s
        traffic = 0.0
        for comm, share in zip(comms, self._link_shares(comms, memory_load), strict=True):
            traffic += traffic_bytes_per_s(
                share * comm.bytes_per_s(memory_load) * comm.moving_share(memory_load, share),
                comm.touches,
                amplification=self.profile.amplification,
                ceiling_bytes_per_s=ceiling,
            )
        return min(ceiling, traffic)

    @staticmethod
    def _link_shares(comms: Sequence[CollectiveCost], memory_load: float) -> list[float]:
        """Each collective's share of its own rate: 1 unless the sum on its kind of link exceeds the link."""
        if len(comms) < 2:
            return [1.0] * len(comms)
        wanted: dict[LinkKind, float] = defaultdict(float)
        for comm in comms:
            wanted[comm.link] += comm.bytes_per_s(memory_load) / comm.link_bytes_per_s
        return [1.0 / max(1.0, wanted[comm.link]) for comm in comms]
