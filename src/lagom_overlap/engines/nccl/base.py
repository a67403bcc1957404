"""The seam to a box's NCCL: what a self-test asks of it, and what it reads back. No torch here."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from lagom_overlap.collective import CollectiveKind, CommConfig
from lagom_overlap.cost.measured_surface import Point
from lagom_overlap.nccl_plugin.record_log import Implementation, RecordLog
from lagom_overlap.nccl_plugin.tuning_log import LoggedLimits, TuningLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One setting as it ran.

    `grids` holds the blocks of each rank's kernel, empty where the profiler's kernels could not be told apart; `log` is
    what NCCL wrote and `record` what the plug-in noted during the checked call.
    """

    config: CommConfig
    is_right: bool
    grids: tuple[int, ...]
    log: TuningLog
    record: RecordLog
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What runs: the GPU, NCCL, torch and the plug-in's interface; the communicator's limits where NCCL said them."""

    gpu: str
    num_sms: int
    num_gpus: int
    ranks_per_gpu: int
    nccl: tuple[int, int, int]
    torch: str
    tuner_version: int
    limits: LoggedLimits | None


class CollectiveBench(Protocol):
    """Runs collectives on all GPUs of the box under settings of the plug-in."""

    facts: Facts

    def offered(self, kind: CollectiveKind, num_bytes: int) -> frozenset[Implementation]:
        """What NCCL offers for such a call, which is made once, untouched."""

    def measure(self, kind: CollectiveKind, num_bytes: int, configs: Iterable[CommConfig]) -> Iterator[Reading]:
        """Each setting checked, read back and timed; the settings are taken all at once."""


class TrafficBench(Protocol):
    """What the plug-in does to calls that are under way, and to the host."""

    def num_wrong(self, num_swaps: int) -> int:
        """Wrong results among calls in flight while so many tables are swapped in at random."""

    def host_s(self, *, is_on: bool) -> float:
        """Host seconds of a small grouped call, with the plug-in deciding or switched off."""


class ContentionBench(Protocol):
    """Times a GEMM during collectives."""

    def point(self, kind: CollectiveKind, num_channels: int) -> Point:
        """The GEMM alone and during this collective on so many channels."""


@dataclass(frozen=True, slots=True)
class Benches:
    """A box, ready to be tested."""

    collectives: CollectiveBench
    traffic: TrafficBench
    contention: ContentionBench
