"""What `lagom simulate --profile` measured. Format of its JSON: docs/formats.md."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lagom_overlap import __version__
from lagom_overlap.cost.fit import FittedConstant
from lagom_overlap.results.base import Result, Row
from lagom_overlap.units import format_percent


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOperator:
    """A measured operator, or one of `pieces` equal chunks of it; `held_out_error` is None where nothing is like it."""

    work: str
    pieces: int
    measured_s: float
    spread_s: float
    fit_error: float
    held_out_error: float | None


@dataclass(frozen=True, kw_only=True)
class ProfileResult(Result):
    """A profile, the fit and its errors (shares of the measured time); a constant's is infinite where it is unknown."""

    tool: str = "lagom simulate --profile"
    version: str = __version__
    job: str
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    date: str
    repeats: int
    operators: tuple[MeasuredOperator, ...]
    constants: tuple[FittedConstant, ...]
    unidentified: tuple[str, ...]
    fit_mean_abs_error: float
    held_out_mean_abs_error: float | None
    num_not_held_out: int
    files: tuple[Path, ...]

    def summary(self) -> str:
        """The errors in one line."""
        words = f"Mean error: {format_percent(self.fit_mean_abs_error)} on what was fitted"
        if self.held_out_mean_abs_error is None:
            return f"{words}; nothing could be held out: one operator of each kind."
        left = f" ({self.num_not_held_out} rows have no operator of their kind to learn from)"
        return (
            f"{words}, {format_percent(self.held_out_mean_abs_error)} on operators held out with their chunks"
            f"{left if self.num_not_held_out else ''}."
        )

    def table(self) -> list[Row]:
        """One row per operator."""
        return [asdict(row) for row in self.operators]
