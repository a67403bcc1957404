"""What `lagom selftest --nccl` found. Format of its JSON: docs/formats.md."""

from dataclasses import dataclass
from pathlib import Path

from lagom_overlap.cost.measured_surface import Point
from lagom_overlap.engines.nccl.base import Facts
from lagom_overlap.nccl_plugin.capability import MapRow, SettingOutcome
from lagom_overlap.results.base import Result, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Host seconds of a small grouped call with the plug-in deciding and switched off: medians of alternating blocks.

    `difference_s` is the median of the pairs' differences, `spread_s` the distance of their quartiles.
    """

    on_s: float
    off_s: float
    difference_s: float
    spread_s: float
    num_pairs: int


@dataclass(frozen=True, slots=True)
class Swaps:
    """Tables that were swapped in at random while calls were in flight, and wrong results among those."""

    num_swaps: int
    num_wrong: int


@dataclass(frozen=True, kw_only=True)
class SelfTestResult(Result):
    """One self-test; `stopped` says why it ended before its grid was done, empty where it did not."""

    tool: str = "lagom selftest"
    facts: Facts
    rows: tuple[MapRow, ...]
    num_planned_calls: int
    num_called: int
    swaps: Swaps | None
    overhead: Overhead | None
    contention: tuple[Point, ...]
    notes: tuple[str, ...]
    stopped: str
    is_interrupted: bool
    has_failed: bool
    wall_s: float
    map_path: Path | None
    files: tuple[Path, ...]

    @property
    def wrong(self) -> tuple[MapRow, ...]:
        """The settings whose results differed from the reference."""
        return tuple(row for row in self.rows if row.outcome is SettingOutcome.WRONG)

    @property
    def is_wrong(self) -> bool:
        """Whether any result differed from the reference."""
        return bool(self.wrong or (self.swaps is not None and self.swaps.num_wrong))

    def summary(self) -> str:
        """How many settings ran, and as what."""
        counts = [(outcome, sum(row.outcome is outcome for row in self.rows)) for outcome in SettingOutcome]
        counted = ", ".join(f"{num} {outcome}" for outcome, num in counts if num)
        nccl = ".".join(map(str, self.facts.nccl))
        where = f"NCCL {nccl} on {self.facts.num_gpus} x {self.facts.gpu}"
        return f"{where}: {len(self.rows)} settings: {counted or 'none'}"

    def table(self) -> list[Row]:
        """One row per setting."""
        return [
            {
                "kind": row.kind,
                "num_bytes": row.num_bytes,
                "asked_algorithm": row.asked.algorithm,
                "asked_protocol": row.asked.protocol,
                "asked_channels": row.asked.num_channels,
                "asked_chunk_bytes": row.asked.chunk_bytes,
                "ran_algorithm": row.ran.algorithm,
                "ran_protocol": row.ran.protocol,
                "ran_channels": row.ran.num_channels,
                "ran_chunk_bytes": row.ran.chunk_bytes,
                "outcome": row.outcome,
                "time_s": row.time_s,
            }
            for row in self.rows
        ]
