"""A wire between GPUs, or between nodes."""

from dataclasses import dataclass
from enum import StrEnum

from lagom_overlap.errors import JobError


class LinkKind(StrEnum):
    """What the wire is; NCCL's latency tables distinguish exactly these."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    NETWORK = "network"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The narrowest hop that a ring crosses: one direction's usable bandwidth and the latency of a hop.

    `host_fifo` says that NCCL's FIFO lies in host memory (shared-memory transport): then it takes no HBM bandwidth.
    """

    kind: LinkKind
    bytes_per_s: float
    hop_s: float
    host_fifo: bool = False

    def __post_init__(self) -> None:
        for field in ("bytes_per_s", "hop_s"):
            value = getattr(self, field)
            if not 0 < value < float("inf"):
                raise JobError(f"link {self.kind}: {field} is {value}, must be positive and finite")
