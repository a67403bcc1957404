"""How long a collective takes, by algorithm, protocol, channels, threads, chunk, bytes, ranks, links and memory load.

Source: the project's contention model specification, section 1, built on NCCL 2.18.3 (src/graph/tuning.cc, enqueue.cc).

    spec     here                     unit   meaning
    W        wire_bytes               B      bytes that each rank sends
    NC, NT   num_channels, threads    -      blocks, threads per block
    C_eff    chunk_bytes              B      chunk on the wire; the kernel shrinks its last loop
    sigma    num_slices               -      slices in a chunk
    o        slice_s                  s      synchronisation per slice
    b_ch     channel_bytes_per_s      B/s    b_sm (1 - exp(-NT / NT0)) eff
    k        (in steps_s, hops_s)     -      steps of the algorithm
    F        fifo_bytes               B      memory that the FIFO's slots touch

    tau = sigma o + [sigma = 1] hop + C_eff / b_ch          time of a chunk on one channel
    R   = ((NC C_eff / tau)^-m + (eff B_link)^-m)^(-1/m)    rate on the wire
    x   = base + sum over steps (o + hop) + fill (C_eff / sigma) NC depth / R  +  W / R

Small chunks pay sigma o per chunk, large ones the unfilled pipeline: x is U-shaped in C. The right branch is weak
(about 1 %) for a ring inside a node, where all ranks start together (depth 1), and strong for a tree (depth log2 n),
for a chain (broadcast, reduce: depth n - 1) and for a ring over nodes, whose proxies store and forward every slice.

Slice and chunk: NCCL's kernel cuts a chunk of the Simple ring into two slices of at least 32 KiB, so time reads
C as the chunk on the wire, which is `CommConfig.chunk_bytes`. F reads C as a slice: a slice takes 1, 2 or 4 of the
FIFO's 8 steps of 512 KiB and leaves 8, 4 or 2 slots.

Departures from the specification: the depths of chains and of rings over nodes are ours (it says only "strong for NIC
hops"); a tree is a chain inside the node, as NCCL's latency formula has it; an all-to-all over nodes sends
(n - ppn) / n of its bytes through the node's card, which all ppn ranks share.
"""

from dataclasses import dataclass
from math import ceil, exp, log2
from typing import Final

from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, CommConfig, Protocol
from lagom_overlap.collective.slices import STEP_BYTES
from lagom_overlap.cost.contention import l2_miss_share
from lagom_overlap.cost.profile import Profile
from lagom_overlap.errors import SpaceError
from lagom_overlap.hardware import Cluster, LinkKind
from lagom_overlap.units import KIB

FIFO_STEPS: Final = 8
"""Steps of a channel's FIFO; in the Simple protocol 8 x 512 KiB = 4 MiB."""
MIN_SLICE_BYTES: Final = 32 * KIB
MIN_BYTES_PER_THREAD: Final = 16
"""One 16-byte load per thread: the kernel makes no smaller chunk."""

_POINT_TO_POINT: Final = (CollectiveKind.ALL_TO_ALL, CollectiveKind.SEND_RECV)
_CHAINED: Final = (CollectiveKind.BROADCAST, CollectiveKind.REDUCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """A collective under one full configuration, reduced to the terms of its time.

    `link` names the wire that it shares with other collectives; the rest are the module's symbols.
    """

    num_channels: int
    wire_bytes: float
    chunk_bytes: float
    num_slices: int
    slice_s: float
    exposed_hop_s: float
    channel_bytes_per_s: float
    link: LinkKind
    link_bytes_per_s: float
    base_s: float
    steps_s: float
    hops_s: float
    fill_bytes: float
    fifo_bytes: float
    touches: float
    link_sharpness: float
    load_sensitivity: float

    def bytes_per_s(self, memory_load: float = 0.0) -> float:
        """R: bytes per second on the wire while the memory is busy to the share `memory_load` (0..1)."""
        slow = self.load_sensitivity * memory_load
        tau = (
            self.num_slices * self.slice_s * (1.0 + slow)
            + self.exposed_hop_s
            + self.chunk_bytes / (self.channel_bytes_per_s * (1.0 - 0.5 * slow))
        )
        channels = self.num_channels * self.chunk_bytes / tau
        narrow, wide = sorted((channels, self.link_bytes_per_s))
        return float(narrow * (1.0 + (narrow / wide) ** self.link_sharpness) ** (-1.0 / self.link_sharpness))

    def seconds(self, memory_load: float = 0.0, link_share: float = 1.0) -> float:
        """x: the whole collective under unchanging conditions; `link_share` is its share of its own rate."""
        rate = link_share * self.bytes_per_s(memory_load)
        latency = self.base_s + self.steps_s * (1.0 + self.load_sensitivity * memory_load) + self.hops_s
        return latency + (self.fill_bytes + self.wire_bytes) / rate


def default_chunk_bytes(
    kind: CollectiveKind, algorithm: Algorithm | None, protocol: Protocol, intra: LinkKind = LinkKind.NVLINK
) -> int:
    """NCCL's chunk on the wire, which is also the largest: a number of FIFO steps of the protocol's buffer.

    Simple: 4 steps (2 MiB) for rings of all-reduce, all-gather, reduce-scatter; 1 step (512 KiB) for trees, broadcast
    and reduce; 512 KiB per peer over NVLink and 128 KiB otherwise for point-to-point (NCCL_P2P_NVL_CHUNKSIZE,
    NCCL_P2P_PCI_CHUNKSIZE). LL: one step of 64 KiB, half of it data. LL128: one step of 600 KiB, 15/16 of it data.
    """
    match protocol:
        case Protocol.LL:
            return 32 * KIB
        case Protocol.LL128:
            return 600 * KIB * 15 // 16
        case Protocol.SIMPLE:
            if kind in _POINT_TO_POINT:
                return STEP_BYTES if intra is LinkKind.NVLINK else 128 * KIB
            return STEP_BYTES if algorithm is Algorithm.TREE or kind in _CHAINED else 4 * STEP_BYTES


def algorithms_of(kind: CollectiveKind) -> tuple[Algorithm | None, ...]:
    """The algorithms modelled for a kind, the default first: point-to-point has none, only all-reduce has trees."""
    if kind in _POINT_TO_POINT:
        return (None,)
    return (Algorithm.RING, Algorithm.TREE) if kind is CollectiveKind.ALL_REDUCE else (Algorithm.RING,)


def protocols_of(kind: CollectiveKind, intra: LinkKind) -> tuple[Protocol, ...]:
    """The protocols that NCCL has for a kind, the default first: LL128 needs NVLink and is not for point-to-point."""
    if kind in _POINT_TO_POINT or intra is not LinkKind.NVLINK:
        return Protocol.SIMPLE, Protocol.LL
    return Protocol.SIMPLE, Protocol.LL, Protocol.LL128


@dataclass(frozen=True, slots=True)
class _Path:
    """Steps inside and between nodes, depth of the pipeline, parts that a buffer is cut into, share of the link."""

    intra_steps: int
    inter_steps: int
    depth: float
    num_parts: int
    link_share: float = 1.0


def _path(collective: Collective, algorithm: Algorithm | None, num_nodes: int, gpus_per_node: int) -> _Path:
    n, kind = collective.num_ranks, collective.kind
    between = num_nodes - 1
    if kind is CollectiveKind.SEND_RECV:
        return _Path(0 if between else 1, 1 if between else 0, 1.0 + between, 1)
    if kind is CollectiveKind.ALL_TO_ALL:
        if not between:
            return _Path(n - 1, 0, 1.0, n)
        away = n - gpus_per_node
        return _Path(gpus_per_node - 1, away, 2.0, n, link_share=(n - 1) / (gpus_per_node * away))
    if kind in _CHAINED:
        return _Path(n - 1 - between, between, float(n - 1), 1)
    if algorithm is Algorithm.TREE:
        inside = min(gpus_per_node, n) - 1
        return _Path(2 * inside, 2 * ceil(log2(num_nodes)), max(1.0, log2(n)), 1)
    passes = 2 if kind is CollectiveKind.ALL_REDUCE else 1
    return _Path(passes * (n - 1 - between), passes * between, 1.0 + passes * between, n)


def _check(collective: Collective, config: CommConfig, cluster: Cluster) -> tuple[Protocol, int, int, int]:
    """The knobs that must be set, after refusing what the cluster cannot run."""
    protocol, channels, threads, chunk = config.protocol, config.num_channels, config.num_threads, config.chunk_bytes
    if protocol is None or channels is None or threads is None or chunk is None:
        raise ValueError(f"{config} is not full; fill it with ContentionModel.effective")
    if config.transport is not None:
        raise SpaceError(f"transport is {config.transport}, but the cost model has no transport knob; leave it out")
    algorithms = algorithms_of(collective.kind)
    if config.algorithm not in algorithms:
        names = ", ".join(a or "none" for a in algorithms)
        raise SpaceError(f"algorithm is {config.algorithm or 'none'}; {collective.kind} has {names}")
    protocols = protocols_of(collective.kind, cluster.intra.kind)
    if protocol not in protocols:
        raise SpaceError(f"protocol is {protocol}; {collective.kind} has {', '.join(protocols)} here")
    if channels >= cluster.gpu.num_sms:
        raise SpaceError(
            f"num_channels is {channels}, but {cluster.gpu.name} has {cluster.gpu.num_sms} SMs: "
            "computation would never run; allowed: fewer channels than SMs"
        )
    largest = default_chunk_bytes(collective.kind, config.algorithm, protocol, cluster.intra.kind)
    if chunk > largest:
        raise SpaceError(f"chunk_bytes is {chunk}; {collective.kind} with {protocol} takes at most {largest}")
    return protocol, channels, threads, chunk


def collective_cost(collective: Collective, config: CommConfig, cluster: Cluster, profile: Profile) -> CollectiveCost:
    """The terms of a collective's time under a full configuration.

    Raises:
        SpaceError: if the configuration cannot run: algorithm, protocol, transport, channels or chunk.
        JobError: if the cluster has fewer GPUs than the collective has ranks.
        ValueError: if a knob is None.
    """
    num_nodes = cluster.num_nodes_of(collective.num_ranks)
    protocol, channels, threads, chunk_limit = _check(collective, config, cluster)
    path = _path(collective, config.algorithm, num_nodes, cluster.gpus_per_node)
    tree, ring = config.algorithm is Algorithm.TREE, config.algorithm is Algorithm.RING
    link = cluster.link_between(collective.num_ranks)
    narrow = min(cluster.intra.bytes_per_s, link.bytes_per_s * path.link_share)
    efficiency = profile.protocol_efficiency.of(protocol)
    overhead = profile.protocol_overhead.of(protocol)
    intra_o, inter_o = (profile.slice_overhead_s.of(end.kind) * overhead for end in (cluster.intra, cluster.inter))

    least = MIN_BYTES_PER_THREAD * threads
    chunk = min(chunk_limit, max(collective.num_bytes / (path.num_parts * channels), least))
    cut = ring and protocol is Protocol.SIMPLE and collective.kind not in _CHAINED and chunk > MIN_SLICE_BYTES
    num_slices = 2 if cut else 1
    slice_bytes = chunk / num_slices
    slots = FIFO_STEPS // {1: 1, 2: 2}.get(ceil(slice_bytes / STEP_BYTES), 4)
    fifo_bytes = channels * min(slots * slice_bytes, FIFO_STEPS * STEP_BYTES)
    miss = 0.0 if link.host_fifo else l2_miss_share(fifo_bytes, cluster.gpu.l2_bytes, profile.l2_share)
    bases = profile.tree_base_s if tree else profile.ring_base_s
    channel_rate = profile.for_gpu(cluster.gpu.name).channel_bytes_per_s
    return CollectiveCost(
        num_channels=channels,
        wire_bytes=collective.wire_bytes,
        chunk_bytes=chunk,
        num_slices=num_slices,
        slice_s=intra_o if num_nodes == 1 else inter_o,
        exposed_hop_s=link.hop_s if num_slices == 1 else 0.0,
        channel_bytes_per_s=channel_rate * (1.0 - exp(-threads / profile.thread_scale)) * efficiency,
        link=link.kind,
        link_bytes_per_s=narrow * efficiency * (profile.tree_efficiency if tree else 1.0),
        base_s=bases.of(protocol),
        steps_s=path.intra_steps * intra_o + path.inter_steps * inter_o,
        hops_s=path.intra_steps * cluster.intra.hop_s + path.inter_steps * cluster.inter.hop_s,
        fill_bytes=profile.fill * slice_bytes * channels * path.depth,
        fifo_bytes=fifo_bytes,
        touches=profile.user_traffic + profile.fifo_traffic * miss,
        link_sharpness=profile.link_sharpness,
        load_sensitivity=profile.load_sensitivity,
    )
