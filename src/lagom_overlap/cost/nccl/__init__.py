"""NCCL's default choice and the time that its own model predicts: algorithm, protocol, channels, threads, chunk."""

from lagom_overlap.cost.nccl.choice import Candidate, NcclChoice, candidates, channels_and_threads, choose
from lagom_overlap.cost.nccl.topology import CpuVendor, Graph, PathType, Topology, load_topology, topology_names

__all__ = [
    "Candidate",
    "CpuVendor",
    "Graph",
    "NcclChoice",
    "PathType",
    "Topology",
    "candidates",
    "channels_and_threads",
    "choose",
    "load_topology",
    "topology_names",
]
