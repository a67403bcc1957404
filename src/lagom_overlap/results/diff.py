"""What `lagom diff` found: two runs, what was set otherwise, and whether their times differ. JSON: docs/formats.md."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lagom_overlap.results.base import Result, Row
from lagom_overlap.results.conclusion import Conclusion
from lagom_overlap.units import format_seconds

MAX_SETTINGS: Final = 20
"""Settings that are said of two runs; `--json` has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedSetting:
    """One thing that was set otherwise; None: that run says nothing of it."""

    name: str
    first: str | None
    second: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTime:
    """One time of both runs in seconds; `ratio` is the first over the second, above 1 where the second is faster.

    `low` and `high` are its 95 % interval, None where a run says one figure only.
    """

    name: str
    first_s: float
    second_s: float
    ratio: float
    low: float | None = None
    high: float | None = None

    @property
    def verdict(self) -> str:
        """What the interval says of the second run; empty without one."""
        if self.low is None or self.high is None:
            return ""
        return "faster" if self.low > 1 else "slower" if self.high < 1 else "not measurably different"

    @property
    def words(self) -> str:
        """The row as a line."""
        interval = "" if self.low is None else f" ({self.low:.3f} to {self.high:.3f}), {self.verdict}"
        times = f"{format_seconds(self.first_s)} -> {format_seconds(self.second_s)}"
        return f"{self.name}: {times}, {self.ratio:.3f}x{interval}"


@dataclass(frozen=True, kw_only=True)
class DiffResult(Result):
    """Two runs compared; `settings` and `times` are what differs and what both tell, `where` machine and versions."""

    tool: str = "lagom diff"
    first: Path
    second: Path
    kinds: tuple[str, str]
    settings: tuple[ChangedSetting, ...]
    where: tuple[ChangedSetting, ...]
    times: tuple[ComparedTime, ...]
    conclusion: Conclusion

    def summary(self) -> str:
        """What differs, line by line, and the three lines."""
        same = [row for row in self.times if row.ratio == 1 and row.low is None]
        both = f"{self.first} ({self.kinds[0]}) -> {self.second} ({self.kinds[1]})"
        if self.times and len(same) == len(self.times) and not self.settings and not self.where:
            return f"{both}: nothing differs: settings, machine and {_counted(len(same))} are the same"
        lines = [both]
        for title, changed in (("settings", self.settings), ("machine and versions", self.where)):
            lines += [f"{title} that differ: {len(changed) or 'none'}"]
            lines += [f"  {row.name}: {_said(row.first)} -> {_said(row.second)}" for row in changed[:MAX_SETTINGS]]
            lines += [f"  and {len(changed) - MAX_SETTINGS} more (--json)"] if len(changed) > MAX_SETTINGS else []
        lines += [f"times of both: {len(self.times) or 'none'}"]
        lines += [f"  {row.words}" for row in self.times if row not in same]
        lines += [f"  {_counted(len(same))} the same"] if same else []
        return "\n".join([*lines, *self.conclusion.lines()])

    def table(self) -> list[Row]:
        """A row per time."""
        return [
            {
                "name": row.name,
                "first_s": row.first_s,
                "second_s": row.second_s,
                "ratio": row.ratio,
                "low": row.low,
                "high": row.high,
                "verdict": row.verdict,
            }
            for row in self.times
        ]


def _counted(number: int) -> str:
    return "one time" if number == 1 else f"{number} times"


def _said(value: str | None) -> str:
    return "-" if value is None else value
