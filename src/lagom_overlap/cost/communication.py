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
    P        ceiling_bytes_per_s      B/s    NCCL's own limit of LL, LL128 and trees (`nccl.bandwidth`)
    M        memory_bytes_per_s       B/s    what the memory feeds: its bandwidth over `touches`, bytes per wire byte

    tau = sigma o + [sigma = 1] hop + C_eff / b_ch          time of a chunk on one channel
    R   = ((NC C_eff / tau)^-m + min(eff B_link, P, M)^-m)^(-1/m)    rate on the wire
    x   = base + sum over steps (o + hop) + fill (C_eff / sigma) NC depth / R  +  W / R

Small chunks pay sigma o per chunk, large ones the unfilled pipeline: x is U-shaped in C. The right branch is weak
(about 1 %) for a ring inside a node, where all ranks start together (depth 1), and strong for a tree (depth log2 n),
for a chain (broadcast, reduce: depth n - 1) and for a ring over nodes, whose proxies store and forward every slice.

Slice and chunk: NCCL's kernel cuts a chunk of the Simple ring into two slices of at least 32 KiB, so time reads
C as the chunk on the wire, which is `CommConfig.chunk_bytes`. F reads C as a slice: a slice takes 1, 2 or 4 of the
FIFO's 8 steps of 512 KiB and leaves 8, 4 or 2 slots.

Where the profile asks for measured links, latency, bytes and B_link are NCCL's own model (`nccl.wire`), with its own
limits of LL, LL128 and trees: on a link that was measured (`nccl.links`), so that what nobody touched takes as long as
measured, and over nodes, where nobody measured, on the cluster's stated wire. The channels, threads and chunk still
enter through tau. NVLS and PAT are priced so everywhere. A chunk then counts in the same bytes (LL's flags included).
Everything else is the formula above on stated wires, under the same limits P.

A collective has the channels of its communicator at most, however many a configuration names.

Departures from the specification: P, M and the communicator's channels; the depths of chains and of rings over nodes
are ours (it says only "strong for NIC hops": here once per pass, however many nodes); a tree is a chain inside the
node, as NCCL's latency formula has it; an all-to-all over nodes sends (n - ppn) / n of its bytes through the node's
card, which all ppn ranks share.
"""

from dataclasses import dataclass, replace
from math import ceil, exp, inf, log2
from typing import Final

from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, CommConfig, Protocol, Transport
from lagom_overlap.collective.config import STEP_BYTES
from lagom_overlap.cost.lagom_equations import l2_miss_share
from lagom_overlap.cost.nccl.bandwidth import ceiling_bytes_per_s
from lagom_overlap.cost.nccl.constants import load_constants
from lagom_overlap.cost.nccl.copy_engine import copy_engine_available, copy_engine_limits
from lagom_overlap.cost.nccl.fitted_links import link_of
from lagom_overlap.cost.nccl.machines import on_topology
from lagom_overlap.cost.nccl.topology import Topology
from lagom_overlap.cost.nccl.wire import FittedLink, WireTerms, wire_terms
from lagom_overlap.cost.nccl_algorithms import (
    BEYOND_RINGS,
    algorithms_of,
    largest_chunk_bytes,
    most_channels,
    protocols_of,
    table_ways,
)
from lagom_overlap.cost.profile import LinkSource, Profile
from lagom_overlap.errors import SpaceError
from lagom_overlap.hardware import Cluster, Link, LinkKind
from lagom_overlap.units import KIB

FIFO_STEPS: Final = 8
"""Steps of a channel's FIFO; in the Simple protocol 8 x 512 KiB = 4 MiB."""
MIN_SLICE_BYTES: Final = 32 * KIB
"""A chunk up to this size is one slice."""
MIN_BYTES_PER_THREAD: Final = 16
"""One 16-byte load per thread: the kernel makes no smaller chunk."""

_ENDLESS_BYTES_PER_S: Final = 1e30
"""A link that takes no time, so that what is left is everything else."""
COPY_TOUCHES: Final = 2.0
"""Memory bytes per wire byte of a copy engine: read here, written there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """A collective under one full configuration, reduced to the terms of its time.

    `link` names the wire that it shares with other collectives; `skew_s` is how long its blocks wait on their SMs,
    moving nothing, for the last rank; `time_scale` multiplies x but for that wait, as a trace was fitted; the rest are
    the module's symbols.
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
    ceiling_bytes_per_s: float = inf
    memory_bytes_per_s: float = inf
    base_s: float
    steps_s: float
    hops_s: float
    fill_bytes: float
    fifo_bytes: float
    touches: float
    link_sharpness: float
    load_sensitivity: float
    skew_s: float = 0.0
    time_scale: float = 1.0

    def bytes_per_s(self, memory_load: float = 0.0) -> float:
        """R: bytes per second on the wire while the memory is busy to the share `memory_load` (0..1)."""
        return self._unscaled_bytes_per_s(memory_load) / self.time_scale

    def _unscaled_bytes_per_s(self, memory_load: float) -> float:
        slow = self.load_sensitivity * memory_load
        tau = (
            self.num_slices * self.slice_s * (1.0 + slow)
            + self.exposed_hop_s
            + self.chunk_bytes / (self.channel_bytes_per_s * (1.0 - 0.5 * slow))
        )
        if not self.num_channels:  # copy engines: nothing but the link and the memory bounds them
            return min(self.link_bytes_per_s, self.memory_bytes_per_s) * (1.0 - 0.5 * slow)
        channels = self.num_channels * self.chunk_bytes / tau
        wire = min(self.link_bytes_per_s, self.ceiling_bytes_per_s, self.memory_bytes_per_s)
        narrow, wide = sorted((channels, wire))
        return float(narrow * (1.0 + (narrow / wide) ** self.link_sharpness) ** (-1.0 / self.link_sharpness))

    def seconds(self, memory_load: float = 0.0, link_share: float = 1.0) -> float:
        """x: the whole collective under unchanging conditions; `link_share` is its share of its own rate."""
        rate = link_share * self.bytes_per_s(memory_load)
        latency = self.base_s + self.steps_s * (1.0 + self.load_sensitivity * memory_load) + self.hops_s
        return self.skew_s + self.time_scale * latency + (self.fill_bytes + self.wire_bytes) / rate

    def moving_share(self, memory_load: float = 0.0, link_share: float = 1.0) -> float:
        """The share of its time in which it does more than wait for the last rank."""
        return 1.0 - self.skew_s / self.seconds(memory_load, link_share) if self.skew_s else 1.0


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
        return _Path(0 if between else 1, 1 if between else 0, 2.0 if between else 1.0, 1)
    if kind is CollectiveKind.ALL_TO_ALL:
        if not between:
            return _Path(n - 1, 0, 1.0, n)
        away = n - gpus_per_node
        return _Path(gpus_per_node - 1, away, 2.0, n, link_share=(n - 1) / (gpus_per_node * away))
    if kind.traits.is_rooted:
        return _Path(n - 1 - between, between, float(n - 1), 1)
    if algorithm is Algorithm.TREE:
        inside = min(gpus_per_node, n) - 1
        return _Path(2 * inside, 2 * ceil(log2(num_nodes)), max(1.0, log2(n)), 1)
    passes = kind.traits.passes
    # All ranks start together, so a ring is filled once per pass, however many nodes it crosses.
    return _Path(passes * (n - 1 - between), passes * between, 1.0 + (passes if between else 0), n)


@dataclass(frozen=True, slots=True)
class _Knobs:
    """A full configuration: every knob set and allowed."""

    algorithm: Algorithm | None
    protocol: Protocol
    channels: int
    threads: int
    chunk_bytes: float


def _check(collective: Collective, config: CommConfig, cluster: Cluster, profile: Profile) -> _Knobs:
    """The knobs as NCCL takes them, after refusing what the cluster cannot run."""
    protocol, channels, threads, chunk = config.protocol, config.num_channels, config.num_threads, config.chunk_bytes
    if protocol is None or channels is None or threads is None or chunk is None:
        raise ValueError(f"{config} is not full; fill it with ContentionModel.effective")
    if config.transport is not None:
        raise SpaceError(
            f"transport is {config.transport}, but the cost model has no transport knob; leave it out, or take "
            f"{Transport.COPY_ENGINE}"
        )
    kind, intra = collective.kind, cluster.intra.kind
    algorithms = algorithms_of(collective, cluster, profile.collectives)
    if config.algorithm not in algorithms:
        names = ", ".join(a or "none" for a in algorithms)
        raise SpaceError(f"algorithm is {config.algorithm or 'none'}; {kind} has {names}")
    protocols = protocols_of(collective, config.algorithm, cluster, profile.collectives)
    if protocol not in protocols:
        raise SpaceError(f"protocol is {protocol}; {kind} has {', '.join(protocols)} here")
    if channels >= cluster.gpu.num_sms:
        raise SpaceError(
            f"num_channels is {channels}, but {cluster.gpu.name} has {cluster.gpu.num_sms} SMs: "
            "computation would never run; allowed: fewer channels than SMs"
        )
    largest = largest_chunk_bytes(kind, config.algorithm, protocol, intra)
    if chunk > largest:
        raise SpaceError(f"chunk_bytes is {chunk}; {kind} with {protocol} takes at most {largest}")
    most = most_channels(collective, config.algorithm, cluster, profile.collectives)
    return _Knobs(config.algorithm, protocol, min(channels, most), threads, chunk)


def collective_cost(collective: Collective, config: CommConfig, cluster: Cluster, profile: Profile) -> CollectiveCost:
    """The terms of a collective's time under a full configuration.

    Raises:
        SpaceError: if the configuration cannot run: algorithm, protocol, transport, channels or chunk.
        JobError: if the cluster has fewer GPUs than the collective has ranks.
        ValueError: if a knob is None.
    """
    if config.transport is Transport.COPY_ENGINE:
        return _by_copy_engine(collective, config, cluster, profile)
    knobs = _check(collective, config, cluster, profile)
    measured = _measured(collective, cluster, profile)
    if knobs.algorithm in BEYOND_RINGS:
        return _by_nccl(collective, knobs, cluster, profile, measured or FittedLink(_wire(collective, cluster)))
    if measured is not None and _in_table(collective, knobs, cluster):
        return _by_nccl(collective, knobs, cluster, profile, measured)
    return _by_specification(collective, knobs, cluster, profile)


def _measured(collective: Collective, cluster: Cluster, profile: Profile) -> FittedLink | None:
    """The link that NCCL's model is taken on: the measured one; over nodes, where nobody measured, the stated wire."""
    if profile.links is LinkSource.STATED:
        return None
    measured = link_of(cluster, collective.num_ranks, collective.num_nodes)
    over_nodes = cluster.num_nodes_of(collective.num_ranks, collective.num_nodes) > 1
    return FittedLink(_wire(collective, cluster)) if measured is None and over_nodes else measured


def _wire(collective: Collective, cluster: Cluster) -> float:
    """The narrowest wire of a ring as the cluster states it, in B/s."""
    link = cluster.link_between(collective.num_ranks, collective.num_nodes)
    return min(cluster.intra.bytes_per_s, link.bytes_per_s)


def _in_table(collective: Collective, knobs: _Knobs, cluster: Cluster) -> bool:
    """Whether NCCL's own table has that algorithm and protocol there."""
    return knobs.algorithm is None or (knobs.algorithm, knobs.protocol) in table_ways(collective, cluster)


def _slices(collective: Collective, knobs: _Knobs) -> int:
    """sigma: slices in the chunk."""
    ring = knobs.algorithm is Algorithm.RING and knobs.protocol is Protocol.SIMPLE
    return 2 if ring and not collective.kind.traits.is_rooted and knobs.chunk_bytes > MIN_SLICE_BYTES else 1


def _fifo(knobs: _Knobs, num_slices: int, cluster: Cluster, link: Link, profile: Profile) -> tuple[float, float]:
    """F, the bytes that the FIFO's slots touch, and the memory bytes per wire byte that follow from it."""
    slice_bytes = knobs.chunk_bytes / num_slices
    slots = FIFO_STEPS // {1: 1, 2: 2}.get(ceil(slice_bytes / STEP_BYTES), 4)
    fifo_bytes = knobs.channels * min(slots * slice_bytes, FIFO_STEPS * STEP_BYTES)
    miss = 0.0 if link.host_fifo else l2_miss_share(fifo_bytes, cluster.gpu.l2_bytes, profile.l2_share)
    return fifo_bytes, profile.user_traffic + profile.fifo_traffic * miss


def _channel_rate(threads: int, cluster: Cluster, profile: Profile) -> float:
    """What one channel copies with that many threads, in B/s."""
    return profile.for_gpu(cluster.gpu).channel_bytes_per_s * (1.0 - exp(-threads / profile.thread_scale))


def _by_specification(collective: Collective, knobs: _Knobs, cluster: Cluster, profile: Profile) -> CollectiveCost:
    """The terms of the module's text on the cluster's stated wires."""
    num_nodes = cluster.num_nodes_of(collective.num_ranks, collective.num_nodes)
    per_node = -(-collective.num_ranks // num_nodes) if collective.num_nodes else cluster.gpus_per_node
    path = _path(collective, knobs.algorithm, num_nodes, per_node)
    tree = knobs.algorithm is Algorithm.TREE
    link = cluster.link_between(collective.num_ranks, collective.num_nodes)
    narrow = min(cluster.intra.bytes_per_s, link.bytes_per_s * path.link_share)
    efficiency = profile.protocol_efficiency.of(knobs.protocol)
    overhead = profile.protocol_overhead.of(knobs.protocol)
    intra_o, inter_o = (profile.slice_overhead_s.of(end.kind) * overhead for end in (cluster.intra, cluster.inter))

    least = MIN_BYTES_PER_THREAD * knobs.threads
    chunk = min(knobs.chunk_bytes, max(collective.num_bytes / (path.num_parts * knobs.channels), least))
    cut = replace(knobs, chunk_bytes=chunk)
    num_slices = _slices(collective, cut)
    fifo_bytes, touches = _fifo(cut, num_slices, cluster, link, profile)
    bases = profile.tree_base_s if tree else profile.ring_base_s
    return CollectiveCost(
        num_channels=knobs.channels,
        wire_bytes=collective.wire_bytes,
        chunk_bytes=chunk,
        num_slices=num_slices,
        slice_s=intra_o if num_nodes == 1 else inter_o,
        exposed_hop_s=link.hop_s if num_slices == 1 else 0.0,
        channel_bytes_per_s=_channel_rate(knobs.threads, cluster, profile) * efficiency,
        link=link.kind,
        link_bytes_per_s=narrow * efficiency * (profile.tree_efficiency if tree else 1.0),
        ceiling_bytes_per_s=_ceiling(collective, knobs, cluster),
        base_s=bases.of(knobs.protocol),
        steps_s=path.intra_steps * intra_o + path.inter_steps * inter_o,
        hops_s=path.intra_steps * cluster.intra.hop_s + path.inter_steps * cluster.inter.hop_s,
        fill_bytes=profile.fill * chunk / num_slices * knobs.channels * path.depth,
        fifo_bytes=fifo_bytes,
        touches=touches,
        memory_bytes_per_s=cluster.gpu.hbm_bytes_per_s / touches,
        link_sharpness=profile.link_sharpness,
        load_sensitivity=profile.load_sensitivity,
    )


def _ceiling(collective: Collective, knobs: _Knobs, cluster: Cluster) -> float:
    """P: point-to-point has LL's limit alone; a tree's limit counts the whole tensor, up and down."""
    _, topology = on_topology(collective, cluster)
    if knobs.algorithm is None and knobs.protocol is not Protocol.LL:
        return inf
    limit = ceiling_bytes_per_s(knobs.algorithm or Algorithm.RING, knobs.protocol, topology, load_constants())
    return limit * collective.wire_bytes / (2 * collective.num_bytes) if knobs.algorithm is Algorithm.TREE else limit


def _by_nccl(
    collective: Collective, knobs: _Knobs, cluster: Cluster, profile: Profile, measured: FittedLink
) -> CollectiveCost:
    """NCCL's own latency and bytes on a measured link; channels, threads and chunk as in the specification.

    Bytes are counted at the Simple ring's efficiency (`nccl.wire`), and chunks in the same unit. The unfilled pipeline
    is part of the measured latency.
    """
    filled, topology = on_topology(collective, cluster)
    nvls = knobs.algorithm in (Algorithm.NVLS, Algorithm.NVLS_TREE)
    terms, ceiling = _wire_terms(filled, topology, knobs, knobs.chunk_bytes if nvls else None)
    link = cluster.link_between(collective.num_ranks, collective.num_nodes)
    parts = 1 if knobs.algorithm is Algorithm.TREE else filled.num_ranks
    least = MIN_BYTES_PER_THREAD * knobs.threads
    chunk = min(knobs.chunk_bytes, max(collective.num_bytes / (parts * knobs.channels), least))
    cut = replace(knobs, chunk_bytes=chunk)
    num_slices = _slices(collective, cut)
    fifo_bytes, touches = _fifo(cut, num_slices, cluster, link, profile)
    # NCCL's latency holds the first loop's synchronisation; every further loop of chunks pays its own.
    loops = ceil(collective.num_bytes / (parts * knobs.channels * chunk))
    further = 0.0 if nvls else 1.0 - 1.0 / loops
    if knobs.algorithm is None:  # a send waits for nothing that is received: the FIFO's other steps are under way
        further /= FIFO_STEPS
    per_byte = terms.wire_bytes / collective.wire_bytes
    overhead = profile.slice_overhead_s.of(link.kind) * profile.protocol_overhead.of(knobs.protocol)
    return CollectiveCost(
        num_channels=knobs.channels,
        wire_bytes=terms.wire_bytes,
        chunk_bytes=chunk * per_byte,
        num_slices=num_slices,
        slice_s=further * overhead,
        exposed_hop_s=further * link.hop_s if num_slices == 1 else 0.0,
        channel_bytes_per_s=_channel_rate(knobs.threads, cluster, profile),
        link=link.kind,
        link_bytes_per_s=measured.bytes_per_s,
        ceiling_bytes_per_s=ceiling,
        base_s=terms.fixed_s + measured.latency_scale * terms.scaled_s,
        steps_s=0.0,
        hops_s=0.0,
        fill_bytes=_fill_bytes(collective, cut, num_slices, topology, profile) * per_byte,
        fifo_bytes=fifo_bytes,
        touches=touches,
        memory_bytes_per_s=cluster.gpu.hbm_bytes_per_s / touches,
        link_sharpness=profile.link_sharpness,
        load_sensitivity=profile.load_sensitivity,
    )


def _wire_terms(
    collective: Collective, topology: Topology, knobs: _Knobs, chunk_bytes: float | None
) -> tuple[WireTerms, float]:
    """NCCL's terms, and its own limit in wire bytes per second.

    Over nodes, where the wire is the stated one, the bytes are those of a wire too slow for any limit to matter, and
    the limit is what an endless one would carry: NCCL's belief in the wire, which has steps, is no part of a price.
    """

    def terms(on: Topology) -> WireTerms:
        return wire_terms(collective, on, knobs.algorithm, knobs.protocol, chunk_bytes)

    if topology.num_nodes == 1:
        return terms(topology), inf
    slow, fast = terms(topology.with_ring_of(1.0)), terms(topology.with_ring_of(_ENDLESS_BYTES_PER_S))
    return slow, _ENDLESS_BYTES_PER_S * slow.wire_bytes / fast.wire_bytes


def _fill_bytes(collective: Collective, knobs: _Knobs, num_slices: int, topology: Topology, profile: Profile) -> float:
    """What passes before the pipeline of a ring or tree over nodes is full; in a node the measured latency has it."""
    if topology.num_nodes == 1 or knobs.algorithm in BEYOND_RINGS:
        return 0.0
    depth = _path(collective, knobs.algorithm, topology.num_nodes, topology.ranks_per_node).depth
    return profile.fill * knobs.chunk_bytes / num_slices * knobs.channels * depth


def _by_copy_engine(collective: Collective, config: CommConfig, cluster: Cluster, profile: Profile) -> CollectiveCost:
    """No SM and no FIFO: bytes cross the link, read once and written once."""
    filled, topology = on_topology(collective, cluster)
    if not copy_engine_available(collective.kind, topology):
        raise SpaceError(
            f"transport is {config.transport}; copy engines carry all-gathers and all-to-alls of one node's NVLink, "
            f"not {collective.kind} of {collective.num_ranks} ranks on {cluster.name!r}"
        )
    terms = copy_engine_limits(filled, topology)
    measured = _measured(collective, cluster, profile) or FittedLink(_wire(collective, cluster))
    return CollectiveCost(
        num_channels=0,
        wire_bytes=terms.wire_bytes,
        chunk_bytes=float(collective.num_bytes),
        num_slices=1,
        slice_s=0.0,
        exposed_hop_s=0.0,
        channel_bytes_per_s=measured.bytes_per_s,
        link=cluster.intra.kind,
        link_bytes_per_s=measured.bytes_per_s,
        base_s=measured.latency_scale * terms.scaled_s,
        steps_s=0.0,
        hops_s=0.0,
        fill_bytes=0.0,
        fifo_bytes=0.0,
        touches=COPY_TOUCHES,
        memory_bytes_per_s=cluster.gpu.hbm_bytes_per_s / COPY_TOUCHES,
        link_sharpness=profile.link_sharpness,
        load_sensitivity=profile.load_sensitivity,
    )
