"""NCCL's model of a cluster as fixed-size records: what the C host of `csrc/nccl/nccl_host.h` decides with.

The model is here, in Python; C holds the arithmetic that depends on the size (time, channels, threads, chunk), and a
test holds both equal. One record per number of nodes and of ranks per node: a communicator finds its own by these two.

    header   magic, version, release, number of records, bytes of a record, constants for a tuner's init (doubles)
    record   `nccl_shape`: channels, thresholds, latencies (us), bandwidths (GB/s; 0: not offered), tree correction
"""

import struct
from pathlib import Path
from typing import Final

import numpy as np

from lagom_overlap.collective import Algorithm, Protocol
from lagom_overlap.collective.config import STEP_BYTES
from lagom_overlap.cost.nccl.bandwidth import bytes_per_s
from lagom_overlap.cost.nccl.choice import OLD_PLATEAU, PLATEAU, max_threads, thread_threshold_bytes
from lagom_overlap.cost.nccl.chunk import NVLS_CHUNK_BYTES
from lagom_overlap.cost.nccl.constants import NEWEST_RELEASE, ChannelLimit, Constants, load_constants
from lagom_overlap.cost.nccl.latency import latency_s
from lagom_overlap.cost.nccl.machines import topology_of
from lagom_overlap.cost.nccl.point_to_point import SLOW_CHUNK_BYTES, channels_per_peer, point_to_point_channels
from lagom_overlap.cost.nccl.topology import CpuVendor, GpuGeneration, PathType, Topology
from lagom_overlap.hardware import Cluster, LinkKind
from lagom_overlap.nccl_plugin.table_layout import ALGORITHMS, KINDS, PROTOCOLS
from lagom_overlap.units import KIB

MAGIC: Final = b"LAGOMNCC"
VERSION: Final = 1
SHAPE: Final = np.dtype(
    [
        *((name, "<u4") for name in ("num_ranks", "num_nodes", "num_channels", "nvls_channels", "compute_capability")),
        *((name, "<u4") for name in ("p2p_channels", "p2p_channels_per_peer", "p2p_chunk_bytes")),
        ("least_traffic_bytes", "<u4"),
        ("nvls_tree_chunk_bytes", "<u4"),
        ("plateau", "<f4"),
        ("has_nvls_tree_correction", "<u4"),
        ("max_threads", "<u4", (7, 3)),
        ("thread_threshold", "<u4", (7, 3)),
        ("latency_us", "<f4", (5, 7, 3)),
        ("bandwidth", "<f4", (5, 7, 3)),
        ("tree_correction", "<f4", (3, 24)),
    ]
)
"""`nccl_shape` of nccl_host.h."""
_HEADER: Final = struct.Struct("<8sIIII")
_MICROSECONDS: Final = 1e6
_PER_GB: Final = 1e-9


def shape_record(topology: Topology, release: str = NEWEST_RELEASE) -> np.ndarray:
    """The record of one topology in a release, of type `SHAPE`."""
    constants = load_constants(release)
    record = np.zeros((), SHAPE)
    nvlink = topology.ring.intra_type <= PathType.NVB and topology.num_nodes == 1
    correction = constants.tree_correction
    plain = {
        "num_ranks": topology.num_ranks,
        "num_nodes": topology.num_nodes,
        "num_channels": topology.num_channels,
        "nvls_channels": topology.num_nvls_channels,
        "compute_capability": topology.compute_capability,
        "p2p_channels": point_to_point_channels(topology),
        "p2p_channels_per_peer": channels_per_peer(topology),
        "p2p_chunk_bytes": STEP_BYTES if nvlink else SLOW_CHUNK_BYTES,
        "nvls_tree_chunk_bytes": 64 * KIB if topology.num_nodes >= 4 else NVLS_CHUNK_BYTES,
        "plateau": PLATEAU if topology.compute_capability >= 80 else OLD_PLATEAU,
        "has_nvls_tree_correction": topology.compute_capability >= 100 and constants.release >= 22900,
        "tree_correction": (correction.ll, correction.ll128, correction.simple),
    }
    for name, value in plain.items():
        record[name] = value
    for i, algorithm in enumerate(ALGORITHMS):
        for j, protocol in enumerate(PROTOCOLS):
            _fill(record, (i, j), (algorithm, protocol), topology, constants)
    return record


def _fill(
    record: np.ndarray,
    at: tuple[int, int],
    way: tuple[Algorithm, Protocol],
    topology: Topology,
    constants: Constants,
) -> None:
    algorithm, protocol = way
    record["max_threads"][at] = max_threads(algorithm, protocol, topology, constants.release)
    record["thread_threshold"][at] = thread_threshold_bytes(algorithm, protocol, topology.num_ranks)
    for k, kind in enumerate(KINDS):
        rate = bytes_per_s(kind, algorithm, protocol, topology, constants)
        if rate > 0.0:
            record["bandwidth"][k, *at] = rate * _PER_GB
            record["latency_us"][k, *at] = latency_s(kind, algorithm, protocol, topology, constants) * _MICROSECONDS


def tuner_constants(release: str = NEWEST_RELEASE) -> np.ndarray:
    """NCCL's constants as a tuner's init gets them (`nccl_constants_v7`): base and link latencies (us), limits (GB/s).

    Algorithms that the model leaves out (CollNet) and generations that NCCL 2.30 does not know are zero.
    """
    constants = load_constants(release)
    base, links = np.zeros((7, 3)), np.zeros((3, 7, 3))
    limits = np.zeros((5, 5, 3))
    for i, algorithm in enumerate(ALGORITHMS):
        if algorithm in constants.base_latency_s:
            base[i] = constants.base_latency_s[algorithm]
            for j, link in enumerate((LinkKind.NVLINK, LinkKind.PCIE, LinkKind.NETWORK)):
                links[j, i] = constants.hop_latency_s[link][algorithm]
    generations = (GpuGeneration.VOLTA, GpuGeneration.AMPERE, GpuGeneration.HOPPER, GpuGeneration.BLACKWELL)
    vendors = (CpuVendor.INTEL, CpuVendor.AMD)
    for i, generation in enumerate(generations):
        limits[0, i, 0] = constants.ll_max(generation, CpuVendor.INTEL, 1)
        if i < len(vendors):  # several nodes: NCCL reads the rows of the CPU's vendor, here as far as there are two
            limits[0, i, 1:] = [constants.ll_max(generation, vendors[i], nodes) for nodes in (2, 4)]
        for j, limit in enumerate(ChannelLimit):
            limits[1 + j, i] = constants.channel_max_bytes_per_s[limit][generation]
    return np.concatenate([base.ravel() * _MICROSECONDS, links.ravel() * _MICROSECONDS, limits.ravel() * _PER_GB])


def encode_tables(topologies: list[Topology], release: str = NEWEST_RELEASE) -> bytes:
    """The file for these topologies."""
    header = _HEADER.pack(MAGIC, VERSION, load_constants(release).release, len(topologies), SHAPE.itemsize)
    records = b"".join(shape_record(topology, release).tobytes() for topology in topologies)
    return header + tuner_constants(release).astype("<f8").tobytes() + records


def write_tables(path: Path, cluster: Cluster, release: str = NEWEST_RELEASE) -> None:
    """Writes the model of every number of nodes and of ranks per node of a cluster, for LAGOM_EMULATION_NCCL.

    Raises:
        ValueError: if the release is not one that the model knows.
    """
    shapes = [
        topology_of(cluster, nodes * local, nodes)
        for nodes in range(1, cluster.num_nodes + 1)
        for local in range(1, cluster.gpus_per_node + 1)
        if nodes * local > 1
    ]
    path.write_bytes(encode_tables(shapes, release))
