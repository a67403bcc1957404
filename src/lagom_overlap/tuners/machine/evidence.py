"""How far the machine's formula is believed: what both families foretold, judged by what was then measured.

The weight is w = 1 / (1 + exp(-sum d)), where d is, for each measurement, the log density that the machine's forecast
gave it less that of the curves' (Dawid's prequential evidence, JRSS A 147, 1984).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, hypot, log
from typing import Final

import numpy as np

from lagom_overlap.tuners.curves import Floats

MACHINE_SD: Final = 0.015
"""The error of the machine's formula where nothing was measured, as a share. Chosen, not measured."""
MOST_ODDS: Final = 30.0
"""Bounds the log odds between the families: keeps the exponential finite."""
STUDENT: Final = 4.0
"""Degrees of freedom of a forecast: one reading far off does not decide between the families."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The logarithm of a makespan in seconds before it is measured: mean and standard deviation."""

    mean: float
    sd: float

    @classmethod
    def of(cls, draws_s: Floats, sd: float = 0.0) -> "Forecast":
        """From draws of the makespan; `sd` is the error that they leave out."""
        logs = np.log(np.maximum(draws_s, 1e-12))
        return cls(float(logs.mean()), hypot(float(logs.std()), sd))

    def log_density(self, makespan_s: float, noise: float) -> float:
        """How probable what was measured was, in log but for a constant; Student's t."""
        variance = self.sd**2 + noise**2
        off = (log(max(makespan_s, 1e-12)) - self.mean) ** 2 / variance
        return -0.5 * log(variance) - (STUDENT + 1) / 2 * log(1 + off / STUDENT)


class ForecastScores:
    """The forecasts of a search, by the number of the measurement that they are of."""

    def __init__(self) -> None:
        self._forecasts: dict[int, tuple[Forecast, Forecast]] = {}

    def foretell(self, number: int, curves_s: Floats, machine_s: Floats | None) -> None:
        """Keeps draws of a makespan by both families; none are kept where the machine has no place for the setting."""
        self._forecasts.pop(number, None)  # of a question that failed
        if machine_s is not None and not np.isnan(machine_s).any():
            self._forecasts[number] = Forecast.of(curves_s), Forecast.of(machine_s, MACHINE_SD)

    def weight(self, num: int, makespan_s: Callable[[int], float], noise: float) -> float:
        """The machine's weight after `num` measurements, whose noise is a share of them; the curves have the rest."""
        odds = 0.0
        for number, (curves, machine) in self._forecasts.items():
            if number < num:
                measured_s = makespan_s(number)
                odds += machine.log_density(measured_s, noise) - curves.log_density(measured_s, noise)
        return 1 / (1 + exp(-max(-MOST_ODDS, min(MOST_ODDS, odds))))
