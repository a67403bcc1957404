"""The constants of the contention model, as data: profiles are TOML files in `data/`, each number with its source.

What differs between GPUs is the table `[contention]` of their files (`hardware.gpu_file`), whatever the profile.
A profile may say `extends = "other"`; then it holds only what differs. Symbols in brackets are those of
docs/glossary.md; which equation reads which constant is said in `lagom_equations.py` and `communication.py`.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from importlib import resources
from math import isnan
from typing import Any

import msgspec

from lagom_overlap.collective import Protocol
from lagom_overlap.errors import UnknownNameError
from lagom_overlap.hardware import Gpu, LinkKind
from lagom_overlap.hardware.gpu_file import table_of
from lagom_overlap.toml_tables import from_table


class Collectives(StrEnum):
    """What NCCL does with a collective that nobody touched.

    `nccl`: NCCL 2.30.7's own choice by size and topology. `paper`: what NCCL 2.18.3 took on the Lagom paper's clusters
    (section 4.3: 8 channels, 2 MiB).
    """

    NCCL = "nccl"
    PAPER = "paper"


class LinkSource(StrEnum):
    """Which bandwidth and latency a link has: as measured where somebody measured it, or as the cluster states them."""

    MEASURED = "measured"
    STATED = "stated"


@dataclass(frozen=True, slots=True, kw_only=True)
class ByLink:
    """One number per kind of link."""

    nvlink: float
    pcie: float
    network: float

    def of(self, kind: LinkKind) -> float:
        """The number of that kind of link."""
        match kind:
            case LinkKind.NVLINK:
                return self.nvlink
            case LinkKind.PCIE:
                return self.pcie
            case LinkKind.NETWORK:
                return self.network


@dataclass(frozen=True, slots=True, kw_only=True)
class ByProtocol:
    """One number per wire protocol."""

    ll: float
    ll128: float
    simple: float

    def of(self, protocol: Protocol) -> float:
        """The number of that protocol."""
        match protocol:
            case Protocol.LL:
                return self.ll
            case Protocol.LL128:
                return self.ll128
            case Protocol.SIMPLE:
                return self.simple


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuConstants:
    """What differs between GPU generations, `[contention]` of a GPU's file; what is None is the profile's.

    `channel_bytes_per_s` [b_sm] is what one channel copies with many threads. `sm_flops` is the dense 2-byte rate of
    one SM while few of them work: with it, what a product takes beyond that is a limit that all SMs share (power,
    fabric, caches), and counts as its memory traffic; None: its memory traffic is counted. `overlap_factor` is how much
    longer every kernel takes while a collective runs, whatever that moves. `spill` is the share of dispatched blocks
    that miss their wave next to a collective (`contention.eq5_dispatch`). `product_share` is the share of a tensor-core
    kernel's time alone that its traffic needs at the copy's bandwidth; None: the bytes are counted, or assumed. `nvjet`
    says that persistent products are cuBLAS's kernels for Hopper (`cost.persistent`).
    """

    channel_bytes_per_s: float
    link_sharpness: float | None = None
    amplification: float | None = None
    load_sensitivity: float | None = None
    overlap_norm: float | None = None
    sm_flops: float | None = None
    overlap_factor: float = 1.0
    spill: float = 0.0
    product_share: float | None = None
    nvjet: bool = False

    def __post_init__(self) -> None:
        for term in ("channel_bytes_per_s", "link_sharpness", "amplification", "load_sensitivity", "sm_flops"):
            value = getattr(self, term)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{term} is {value}, must be positive and finite")
        if self.overlap_norm is not None and not self.overlap_norm >= 1:
            raise ValueError(f"overlap_norm is {self.overlap_norm}, must be at least 1")
        if not 1 <= self.overlap_factor < float("inf"):
            raise ValueError(f"overlap_factor is {self.overlap_factor}, must be at least 1 and finite")
        if not 0 <= self.spill < 1:
            raise ValueError(f"spill is {self.spill}, must lie in 0..1")
        if self.product_share is not None and not 0 <= self.product_share < 1:
            raise ValueError(f"product_share is {self.product_share}, must lie in 0..1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One calibration of the contention model.

    `label` is shown wherever results of the profile are shown.
    """

    name: str
    label: str
    collectives: Collectives
    links: LinkSource

    # Communication alone.
    thread_scale: float
    """[NT0] threads at which a channel reaches 63 % of its bandwidth."""
    slice_overhead_s: ByLink
    """[o] synchronisation per slice, Simple protocol."""
    protocol_overhead: ByProtocol
    """[ovh] synchronisation relative to Simple."""
    protocol_efficiency: ByProtocol
    """[eff] payload share of the wire."""
    tree_efficiency: float
    ring_base_s: ByProtocol
    tree_base_s: ByProtocol
    link_sharpness: float
    """[m] how abruptly channels saturate the link."""
    fill: float
    """Slices exposed per pass before the pipeline is full."""

    # Contention.
    user_traffic: float
    """[k_u] memory bytes per wire byte in the user's buffer."""
    fifo_traffic: float
    """[k_f] memory bytes per wire byte in the FIFO, where it misses the L2."""
    l2_share: float
    """[phi] share of the L2 that the FIFO may live in."""
    amplification: float
    """[kappa] of the communication's memory traffic; 1 conserves work."""
    pollution: float
    """[gamma] growth of a kernel's memory traffic through a polluted L2."""
    max_traffic_share: float
    """[vcap] of the memory bandwidth that communication can take."""
    load_sensitivity: float
    """[xi] of communication to a busy memory."""
    overlap_norm: float
    """[p] of Eq. 6: 1 adds computation and transfer (the paper), infinity hides the shorter."""
    quantisation: float
    """[s] of Eq. 5: 1 is the paper's ceiling, 0 is fluid."""
    small_block_count: int
    """Kernels with at least that many resident blocks per SM fit next to a communication block..."""
    small_block_share: float
    """...with this share of them."""

    fitted: Mapping[str, GpuConstants] = field(default_factory=dict, hash=False)
    """What a fit tries, by the GPU's name, in place of what its file says."""

    def __post_init__(self) -> None:
        positive = ("thread_scale", "tree_efficiency", "link_sharpness", "l2_share")
        for term in positive:
            if not 0 < getattr(self, term) < float("inf"):
                raise ValueError(f"profile {self.name!r}: {term} is {getattr(self, term)}, must be positive")
        amounts = ("fill", "user_traffic", "fifo_traffic", "amplification", "pollution")
        for term in amounts:
            if not 0 <= getattr(self, term) < float("inf"):
                raise ValueError(f"profile {self.name!r}: {term} is {getattr(self, term)}, must not be negative")
        for term in ("quantisation", "small_block_share"):
            if not 0 <= getattr(self, term) <= 1:
                raise ValueError(f"profile {self.name!r}: {term} is {getattr(self, term)}, must lie in 0..1")
        if not 0 <= self.load_sensitivity < 2:  # half of it is taken off a channel's rate
            raise ValueError(f"profile {self.name!r}: load_sensitivity is {self.load_sensitivity}, must lie in 0..2")
        if not 0 < self.max_traffic_share < 1:
            raise ValueError(f"profile {self.name!r}: max_traffic_share is {self.max_traffic_share}, must lie in 0..1")
        if isnan(self.overlap_norm) or self.overlap_norm < 1:
            raise ValueError(f"profile {self.name!r}: overlap_norm is {self.overlap_norm}, must be at least 1")

    def for_gpu(self, gpu: Gpu) -> GpuConstants:
        """The constants of that GPU.

        Raises:
            JobError: if those of a user's own file are none.
        """
        return self.fitted.get(gpu.name) or contention_of(gpu)

    def on_gpu(self, gpu: Gpu) -> "Profile":
        """The profile with what that GPU's constants say otherwise.

        Raises:
            JobError: if those of a user's own file are none.
        """
        own = self.for_gpu(gpu)
        names = ("link_sharpness", "amplification", "load_sensitivity", "overlap_norm")
        changed = {name: value for name in names if (value := getattr(own, name)) not in (None, getattr(self, name))}
        return replace(self, **changed) if changed else self


@cache
def contention_of(gpu: Gpu) -> GpuConstants:
    """What the GPU's file says of contention.

    Raises:
        JobError: if the table of a user's own file is none.
    """
    own = table_of(gpu, "contention")
    assert own is not None, "gpus/any.toml has one for all"
    return from_table(own[0], GpuConstants, own[1], "contention.")


def profile_names() -> list[str]:
    """The names that `load_profile` knows, sorted."""
    folder = resources.files(__package__) / "data"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def _read(name: str) -> dict[str, Any]:
    text = (resources.files(__package__) / "data" / f"{name}.toml").read_text(encoding="utf-8")
    own = tomllib.loads(text)
    base = own.pop("extends", None)
    return own if base is None else {**_read(base), **own}


@cache
def load_profile(name: str) -> Profile:
    """The profile of that name.

    Raises:
        UnknownNameError: if there is no such profile.
    """
    if name not in profile_names():
        raise UnknownNameError.among("cost profile", name, profile_names())
    return msgspec.convert({"name": name, **_read(name)}, Profile)
