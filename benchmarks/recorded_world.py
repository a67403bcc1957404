"""A recorded surface as a world to search in: what every assignment takes, and the noise that went with it.

A surface (`paired_tuners.py`) holds a few values of every assignment, and their noise may be larger than what tuning
gains: the smallest of hundreds of noisy values is small because of its noise. So the truth is smoothed first. The
logarithm of Y, and of every x_j, is a Gaussian process over the assignments:

    ln t(a, i) = mean + sum_j f_j(a_j) + g(a_1, ..., a_N) + h(i) + e

f_j is what one collective's setting does, g what they do together, h the machine's mood, alike in measurements that
follow each other (`MEMORY`), e the rest. How large each is maximises the probability of what was measured (marginal
likelihood, Rasmussen and Williams 2006, ch. 5). Settings one doubling of the channels or a factor four of the chunk
apart are alike; another implementation, or the engine's own untouched, is a thing by itself.

The truth of Y and x_j is mean + f + g. What is left, h + e, is the noise: one row of residuals per measurement, in the
order in which they were taken. A search begins at a random row and meets one after the other, so that its noise is
correlated between Y and x_j and in time as it was on the machine; or draws rows independently. The makespan is the
larger of Y and X times what that measurement's makespan was over them. The truth of a makespan is its median over all
rows of residuals.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from random import Random
from statistics import median
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize

from lagom_overlap.collective import CommConfig
from lagom_overlap.tuners.problem import Assignment, GroupProblem, Measurement
from lagom_overlap.tuners.rows import GroupRow, assignment_of, outcome_of

Floats = npt.NDArray[np.float64]
MEMORY: Final = 10.0
"""Measurements after which the machine's mood is forgotten to 1/e."""
DOUBLINGS: Final = 1.0, 2.0
"""Of channels and of chunk, after which settings are alike to exp(-1/2)."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Successive measurements of a surface: what was measured, and when."""

    assignments: Sequence[Assignment]
    numbers: Sequence[int]
    runs: Sequence[Measurement]

    def half(self, second: bool) -> "Pass":
        """The first or the second half, in time."""
        middle = len(self.runs) // 2
        part = slice(middle, None) if second else slice(middle)
        return Pass(self.assignments[part], self.numbers[part], self.runs[part])


class _Line(msgspec.Struct, frozen=True):
    groups: dict[str, GroupRow]


def read_surface(bundle: Path, problem: GroupProblem) -> Pass:
    """All that ran, of the problem's group, in order."""
    decoder, name = msgspec.json.Decoder(_Line), problem.group.name
    lines = (bundle / "measurements.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    rows = [decoder.decode(line).groups[name] for line in lines]
    told = [(assignment_of(row, problem), outcome_of(row, problem)) for row in rows]
    ran = [(arm, number, run) for number, (arm, run) in enumerate(told) if isinstance(run, Measurement)]
    return Pass(*map(list, zip(*ran, strict=True)))


def likeness(settings: Sequence[CommConfig]) -> Floats:
    """(S, S): 1 on the diagonal, less for settings that differ."""
    kinds = [(one.algorithm, one.protocol, one.transport, one.num_channels is None) for one in settings]
    channels = np.array([log(one.num_channels or 1, 2) for one in settings]) / DOUBLINGS[0]
    chunks = np.array([log(one.chunk_bytes or 1, 2) for one in settings]) / DOUBLINGS[1]
    apart = np.subtract.outer(channels, channels) ** 2 + np.subtract.outer(chunks, chunks) ** 2
    same = np.array([[one == two for two in kinds] for one in kinds])
    return np.asarray(np.where(same, np.exp(-0.5 * apart), 0.0))


def _parts(arms: Sequence[Assignment], others: Sequence[Assignment]) -> list[Floats]:
    """Per collective, then all together: how alike arms (A) and others (B) are, (A, B)."""
    parts = []
    for mine, theirs in zip(zip(*arms, strict=True), zip(*others, strict=True), strict=True):
        settings = list(dict.fromkeys((*mine, *theirs)))
        place = {setting: index for index, setting in enumerate(settings)}
        alike = likeness(settings)
        parts.append(alike[np.ix_([place[one] for one in mine], [place[one] for one in theirs])])
    return [*parts, np.prod(parts, axis=0)] if len(parts) > 1 else parts


def smoothed(seen: Pass, values: Floats, wanted: Sequence[Assignment]) -> Floats:
    """Mean + f + g at each wanted assignment, from one value per measurement."""
    mean = float(np.median(values))
    numbers = np.array(seen.numbers, dtype=np.float64)
    mood = np.exp(-np.abs(np.subtract.outer(numbers, numbers)) / MEMORY)
    parts = np.array([*_parts(seen.assignments, seen.assignments), mood, np.eye(len(values))])
    away = values - mean

    def cost(logs: Floats) -> tuple[float, Floats]:
        """Minus the log marginal likelihood, and its slope, at the logarithms of the parts' variances."""
        sizes = np.exp(logs)
        factor = cho_factor(np.tensordot(sizes, parts, 1), lower=True)
        weights, inverse = cho_solve(factor, away), cho_solve(factor, np.eye(len(away)))
        value = 0.5 * float(away @ weights) + float(np.log(np.diagonal(factor[0])).sum())
        slope = [float(np.sum(inverse * part) - weights @ part @ weights) for part in parts]
        return value, 0.5 * sizes * np.array(slope)

    start = np.full(len(parts), log(float(np.var(away)) / len(parts) + 1e-12))
    bounds = [(start[0] - 12, start[0] + 6)] * len(parts)
    sizes = np.exp(minimize(cost, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 40}).x)
    weights = cho_solve(cho_factor(np.tensordot(sizes, parts, 1), lower=True), away)
    towards = np.array(_parts(wanted, seen.assignments))
    return np.asarray(mean + np.tensordot(sizes[: len(towards)], towards, 1) @ weights)


class World:
    """A surface's truth and its noise; `scale` multiplies the noise (0: none)."""

    def __init__(self, seen: Pass, *, scale: float = 1.0) -> None:
        self.arms = list(dict.fromkeys(seen.assignments))
        self._place = {arm: index for index, arm in enumerate(self.arms)}
        times = np.log([(run.comp_s, *run.comm_s) for run in seen.runs])
        self._truth = np.stack([smoothed(seen, column, self.arms) for column in times.T], axis=1)
        rows = [self._place[arm] for arm in seen.assignments]
        self.residuals = scale * (times - self._truth[rows])
        longer = [run.makespan_s / max(run.comp_s, run.total_comm_s) for run in seen.runs]
        self._over = np.exp(median(np.log(longer)) + scale * (np.log(longer) - median(np.log(longer))))
        self._spread = [scale * run.makespan_iqr_s / run.makespan_s for run in seen.runs]
        self._template = seen.runs[0]
        self.makespans_s = {arm: self._median_s(arm) for arm in self.arms}

    def _median_s(self, arm: Assignment) -> float:
        times = np.exp(self._truth[self._place[arm]] + self.residuals)
        return float(np.median(np.maximum(times[:, 0], times[:, 1:].sum(axis=1)) * self._over))

    @property
    def best(self) -> Assignment:
        """The shortest in truth."""
        return min(self.makespans_s, key=self.makespans_s.__getitem__)

    @property
    def noise(self) -> float:
        """Standard deviation of the logarithm of a makespan: of the best's."""
        times = np.exp(self._truth[self._place[self.best]] + self.residuals)
        return float(np.log(np.maximum(times[:, 0], times[:, 1:].sum(axis=1)) * self._over).std())

    def measure(self, arm: Assignment, row: int) -> Measurement:
        """An assignment under the noise of one row."""
        row %= len(self.residuals)
        comp_s, *comm_s = np.exp(self._truth[self._place[arm]] + self.residuals[row]).tolist()
        makespan_s = max(comp_s, sum(comm_s)) * float(self._over[row])
        return replace(
            self._template,
            makespan_s=makespan_s,
            comp_s=comp_s,
            comm_s=tuple(comm_s),
            makespan_iqr_s=self._spread[row] * makespan_s,
        )

    def rows(self, rng: Random, *, in_order: bool) -> "Rows":
        """The noise of one search."""
        return Rows(rng, len(self.residuals), in_order)


class Rows:
    """Numbers of rows: one after the other from a random one, or each drawn by itself."""

    def __init__(self, rng: Random, num_rows: int, in_order: bool) -> None:
        self._rng, self._num_rows, self._in_order = rng, num_rows, in_order
        self._next = rng.randrange(num_rows)

    def __next__(self) -> int:
        row = self._next
        self._next = (row + 1) % self._num_rows if self._in_order else self._rng.randrange(self._num_rows)
        return row
