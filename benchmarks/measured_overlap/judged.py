"""What became of a row of the measured files."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One measured value and the model's.

    `family` is what is left out together in cross-validation; `claimed` says whether the model claims the row.
    """

    line: int
    quantity: str
    series: str
    kind: str
    family: str
    measured: float
    predicted: float
    claimed: bool = True

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted / self.measured - 1
