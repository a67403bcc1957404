"""Nodes of equal GPUs, the wires inside a node and between nodes.

Presets: one TOML file per cluster (`clusters/NAME.toml`), each number with its source and date in a comment next to it.
"""

import tomllib
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from lagom_overlap.errors import JobError, UnknownNameError
from lagom_overlap.hardware.gpu import Gpu
from lagom_overlap.hardware.gpu_file import load_gpu, read_preset_file, taken_out, with_own
from lagom_overlap.toml_tables import from_table


class LinkKind(StrEnum):
    """What the wire is; NCCL's latency tables distinguish exactly these."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    NETWORK = "network"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The narrowest hop that a ring crosses: one direction's usable bandwidth and the latency of a hop.

    `host_fifo` says that NCCL's FIFO lies in host memory (shared-memory transport): then it takes no HBM bandwidth.
    `measured` says whether what was measured on such GPUs (`[[nccl.links]]` of the GPU's file) refines it: not where
    the machine is known to be wired in another way.
    """

    kind: LinkKind
    bytes_per_s: float
    hop_s: float
    host_fifo: bool = False
    measured: bool = True

    def __post_init__(self) -> None:
        for field in ("bytes_per_s", "hop_s"):
            value = getattr(self, field)
            if not 0 < value < float("inf"):
                raise JobError(f"link {self.kind}: {field} is {value}, must be positive and finite")


def _folder() -> Traversable:
    return resources.files("lagom_overlap.clusters")


def preset_names() -> list[str]:
    """The names that `load_preset` knows, sorted."""
    return list(_preset_names())


@cache
def _preset_names() -> tuple[str, ...]:
    names = (entry.name for entry in _folder().iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`num_nodes` nodes of `gpus_per_node` equal GPUs.

    `max_gpus_per_node` is how many GPUs the links inside a node can join at most (a rack's NVLink domain, where a node
    is one of its trays); None: `gpus_per_node`.
    """

    name: str
    gpu: Gpu
    gpus_per_node: int
    num_nodes: int
    intra: Link
    inter: Link
    max_gpus_per_node: int | None = None

    def __post_init__(self) -> None:
        for field in ("gpus_per_node", "num_nodes", "max_gpus_per_node"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise JobError(f"cluster {self.name!r}: {field} is {value}, must be at least 1")
        most = self.max_gpus_per_node
        if most is not None and self.gpus_per_node > most:
            raise JobError(f"cluster {self.name!r}: gpus_per_node is {self.gpus_per_node}, must be 1 to {most}")

    @property
    def num_gpus(self) -> int:
        """GPUs in all."""
        return self.num_nodes * self.gpus_per_node

    def with_gpus_per_node(self, gpus_per_node: int) -> "Cluster":
        """The cluster with nodes of another size and the same network bandwidth per GPU.

        Raises:
            JobError: if the links inside a node cannot join that many GPUs.
        """
        per_gpu = self.inter.bytes_per_s / self.gpus_per_node
        inter = replace(self.inter, bytes_per_s=per_gpu * gpus_per_node)
        return replace(
            self,
            gpus_per_node=gpus_per_node,
            inter=inter,
            max_gpus_per_node=self.gpus_per_node if self.max_gpus_per_node is None else self.max_gpus_per_node,
        )

    def num_nodes_of(self, num_ranks: int, num_nodes: int | None = None) -> int:
        """The nodes that `num_ranks` ranks cover: `num_nodes` if given, else as many as consecutive ranks fill.

        Raises:
            JobError: if the cluster has fewer GPUs or nodes, or a node would hold more ranks than GPUs.
        """
        if num_ranks > self.num_gpus:
            raise JobError(
                f"{num_ranks} ranks do not fit: cluster {self.name!r} has {self.num_gpus} GPUs "
                f"({self.num_nodes} x {self.gpus_per_node})"
            )
        if num_nodes is None:
            return -(-num_ranks // self.gpus_per_node)
        if num_nodes > self.num_nodes or num_ranks > num_nodes * self.gpus_per_node:
            raise JobError(
                f"{num_ranks} ranks on {num_nodes} nodes do not fit: cluster {self.name!r} has "
                f"{self.num_nodes} x {self.gpus_per_node} GPUs"
            )
        return num_nodes

    def link_between(self, num_ranks: int, num_nodes: int | None = None) -> Link:
        """The narrowest wire on a ring of `num_ranks` consecutive ranks, or of ranks spread evenly over `num_nodes`.

        A group that does not fill its nodes shares their network ports with the neighbouring groups, which communicate
        at the same time: its share of the wire is its share of a node's GPUs.
        """
        nodes = self.num_nodes_of(num_ranks, num_nodes)
        if nodes == 1:
            return self.intra
        per_node = self.gpus_per_node if num_nodes is None else -(-num_ranks // nodes)
        if per_node >= self.gpus_per_node:
            return self.inter
        return replace(self.inter, bytes_per_s=self.inter.bytes_per_s * per_node / self.gpus_per_node)

    def part(self, num_ranks: int, num_nodes: int | None = None) -> "Cluster":
        """The part of the cluster that a group of ranks uses: its GPUs and its share of the wires.

        Raises:
            JobError: if the cluster has fewer GPUs or nodes, or a node would hold more ranks than GPUs.
        """
        nodes = self.num_nodes_of(num_ranks, num_nodes)
        per_node = num_ranks if nodes == 1 else self.gpus_per_node if num_nodes is None else -(-num_ranks // nodes)
        inter = self.inter if nodes == 1 else self.link_between(num_ranks, num_nodes)
        return replace(self, gpus_per_node=per_node, num_nodes=nodes, inter=inter)


def load_preset(
    name: str, num_nodes: int | None = None, gpus_per_node: int | None = None, gpu: str | None = None
) -> Cluster:
    """The cluster of that name, or of that file where the name ends in `.toml`.

    With `num_nodes` nodes, `gpus_per_node` GPUs in each, and GPUs of the name or file `gpu`, if given.

    A file has the keys of a preset. `gpu` is a GPU's name or file (seen from the cluster file) or a table of the
    hardware; other tables of a GPU's file (`gpu_file`) may stand next to it.

    Raises:
        UnknownNameError: if there is no such preset or GPU.
        JobError: if the file cannot be read or describes no cluster, or its nodes cannot have that many GPUs.
    """
    if name.endswith(".toml"):
        tables = read_preset_file(Path(name), "cluster file")
        own_gpu = tables.get("gpu")
        if isinstance(own_gpu, str) and own_gpu.endswith(".toml"):
            tables = {**tables, "gpu": str(Path(name).parent / own_gpu)}
        cluster = _cluster_of(tables, f"cluster file {name!r}")
    else:
        if name not in preset_names():
            raise UnknownNameError.among("cluster preset", name, preset_names())
        cluster = _preset(name)
    if gpu is not None:
        cluster = replace(cluster, gpu=load_gpu(gpu))
    if gpus_per_node is not None:
        cluster = cluster.with_gpus_per_node(gpus_per_node)
    return cluster if num_nodes is None else replace(cluster, num_nodes=num_nodes)


@cache
def _preset(name: str) -> Cluster:
    """One of ours, which does not change while we run."""
    text = (_folder() / f"{name}.toml").read_text(encoding="utf-8")
    return _cluster_of(tomllib.loads(text), f"clusters/{name}.toml")


def _cluster_of(tables: dict[str, Any], source: str) -> Cluster:  # any TOML value
    own = taken_out(tables)
    named = tables.get("gpu")
    if isinstance(named, str):
        tables = tables | {"gpu": load_gpu(named)}
    cluster = from_table(tables, Cluster, source)
    return replace(cluster, gpu=with_own(cluster.gpu, own, source))
