"""One measured point of the contention surface, and the files that hold many.

A row answers: how long does one launch of this victim take during this injector, and how long alone. Solo and
overlapped batches alternate, so that a drift of the clock falls on both.
"""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from statistics import quantiles

from lagom_overlap.record import write_private


class Provenance(StrEnum):
    """Where the times of a file come from."""

    MEASURED = "measured"
    DRY_RUN = "dry run"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpread:
    """Median and quartiles of repeated timings, seconds."""

    median_s: float
    q25_s: float
    q75_s: float

    @classmethod
    def of(cls, times_s: Sequence[float]) -> "TimeSpread":
        """Inclusive quartiles of at least two timings."""
        if len(times_s) < 2:
            raise ValueError(f"need at least two timings for quartiles, got {len(times_s)}")
        q25, median, q75 = quantiles(times_s, n=4, method="inclusive")
        return cls(median_s=median, q25_s=q25, q75_s=q75)


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectorSetting:
    """What runs during the victim. `num_channels` is per rank; a knob that an injector lacks is None."""

    injector: str
    num_channels: int
    num_ranks: int = 1
    chunk_bytes: int | None = None
    num_threads: int | None = None
    target_bytes_per_s: float | None = None
    message_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.num_channels < 1 or self.num_ranks < 1:
            raise ValueError(f"channels and ranks must be positive, got {self.num_channels} and {self.num_ranks}")

    @property
    def num_blocks(self) -> int:
        """Blocks that must be resident at once: channels times ranks."""
        return self.num_channels * self.num_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A row of the table; README.md explains each column."""

    stage: str
    victim: str
    injector: str
    num_channels: int
    num_ranks: int
    num_blocks: int
    num_held_sms: int | None
    chunk_bytes: int | None
    num_threads: int | None
    target_bytes_per_s: float | None
    message_bytes: int | None
    injector_bytes_per_s: float | None
    median_s: float | None
    q25_s: float | None
    q75_s: float | None
    solo_s: float | None
    solo_q25_s: float | None
    solo_q75_s: float | None
    slowdown: float | None
    covered: bool
    num_repeats: int
    num_launches: int
    sm_clock_hz: float | None
    error: str | None

    @classmethod
    def failed(cls, stage: str, victim: str, setting: InjectorSetting, error: str) -> "Point":
        """A row that says why there is no time."""
        return cls.build(stage, victim, setting, error=error)

    @classmethod
    def build(
        cls,
        stage: str,
        victim: str,
        setting: InjectorSetting,
        *,
        during: TimeSpread | None = None,
        solo: TimeSpread | None = None,
        covered: bool = False,
        num_held_sms: int | None = None,
        injector_bytes_per_s: float | None = None,
        num_repeats: int = 0,
        num_launches: int = 0,
        sm_clock_hz: float | None = None,
        error: str | None = None,
    ) -> "Point":
        """A row from its parts; the slowdown is the ratio of medians."""
        return cls(
            stage=stage,
            victim=victim,
            injector=setting.injector,
            num_channels=setting.num_channels,
            num_ranks=setting.num_ranks,
            num_blocks=setting.num_blocks,
            num_held_sms=num_held_sms,
            chunk_bytes=setting.chunk_bytes,
            num_threads=setting.num_threads,
            target_bytes_per_s=setting.target_bytes_per_s,
            message_bytes=setting.message_bytes,
            injector_bytes_per_s=injector_bytes_per_s,
            median_s=during.median_s if during else None,
            q25_s=during.q25_s if during else None,
            q75_s=during.q75_s if during else None,
            solo_s=solo.median_s if solo else None,
            solo_q25_s=solo.q25_s if solo else None,
            solo_q75_s=solo.q75_s if solo else None,
            slowdown=during.median_s / solo.median_s if during and solo else None,
            covered=covered,
            num_repeats=num_repeats,
            num_launches=num_launches,
            sm_clock_hz=sm_clock_hz,
            error=error,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentionSurface:
    """All points of one run, with the machine that gave them."""

    provenance: Provenance
    machine: dict[str, str]
    protocol: dict[str, str]
    victims: dict[str, dict[str, str]]
    points: tuple[Point, ...]

    def write(self, folder: Path, stem: str) -> tuple[Path, Path]:
        """Write `stem`.json (everything) and `stem`.csv (the rows); return both paths."""
        folder.mkdir(parents=True, exist_ok=True)
        as_json, as_csv = folder / f"{stem}.json", folder / f"{stem}.csv"
        write_private(as_json, f"{json.dumps(asdict(self), indent=1)}\n".encode())
        stream = io.StringIO()
        rows = csv.DictWriter(stream, [field.name for field in fields(Point)], lineterminator="\n")
        rows.writeheader()
        rows.writerows(asdict(point) for point in self.points)
        write_private(as_csv, stream.getvalue().encode())
        return as_json, as_csv

    @classmethod
    def read(cls, path: Path) -> "ContentionSurface":
        """The surface of a JSON file written by `write`. An unknown column is a TypeError."""
        raw = json.loads(path.read_text())
        return cls(
            provenance=Provenance(raw["provenance"]),
            machine=raw["machine"],
            protocol=raw["protocol"],
            victims=raw["victims"],
            points=tuple(Point(**row) for row in raw["points"]),
        )
