"""Two jobs compared: what changed in a step, and in which collectives. Format of its JSON: docs/formats_analyze.md.

All times are per step of the average rank, so that runs of different length and different numbers of ranks compare;
without profiler steps the whole trace counts as one step. Rows are matched by what the program asked for, not by how
it ran: the same operation, communicator, bytes and ranks are one collective, and its channels may have changed. A row
that only one run has is told with zero calls in the other.

A step's length scatters. The interval is a percentile bootstrap of the ratio of mean lengths over the steps of each
run (the ranks of a step are averaged first, they are not independent), for two runs of `MIN_STEPS` steps or more. It
holds what changed between these runs' steps, not between machines or days.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from lagom_overlap.analysis.collectives import CollectiveKey, CollectiveRow
from lagom_overlap.analysis.findings import Findings
from lagom_overlap.trace.gpu_trace import seconds

MIN_STEPS: Final = 5
"""Steps of each run from which an interval is told."""
_NUM_RESAMPLES: Final = 2000
"""Enough for the ends of a 95 % interval to be stable to a few per cent of its length."""
_CONFIDENCE: Final = (2.5, 97.5)
"""Percentiles: the ends of a 95 % interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimesOfRun:
    """Where a step of the average rank goes."""

    step_s: float
    compute_s: float
    comm_s: float
    overlap_s: float
    exposed_comm_s: float
    stretched_compute_s: float
    idle_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTimes:
    """Some collectives in a step of the average rank: calls, times, and which channels they had (0: unknown)."""

    count: float = 0.0
    total_s: float = 0.0
    exposed_s: float = 0.0
    stretched_s: float = 0.0
    channels: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallChange:
    """The same collectives in both runs, by what makes them the same; None: all of them."""

    kind: str | None
    communicator: str | None
    bytes: int | None
    num_ranks: int | None
    before: CallTimes
    after: CallTimes

    @property
    def size_s(self) -> float:
        """How much changed: the largest difference of total, exposed and stretched time."""
        return max(
            abs(self.after.total_s - self.before.total_s),
            abs(self.after.exposed_s - self.before.exposed_s),
            abs(self.after.stretched_s - self.before.stretched_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgainstRun:
    """A run (`after`) against another (`before`, of `files`); changes by what they are grouped by, the largest first.

    `step_ratio` is the step's length after over before; its bounds are None of too few steps.
    """

    files: tuple[str, ...]
    before: StepTimesOfRun
    after: StepTimesOfRun
    step_ratio: float | None
    step_ratio_low: float | None
    step_ratio_high: float | None
    num_steps_before: int
    num_steps_after: int
    kinds: tuple[CallChange, ...]
    communicators: tuple[CallChange, ...]
    collectives: tuple[CallChange, ...]
    warnings: tuple[str, ...]

    @property
    def is_proven(self) -> bool:
        """Whether the step's length changed by more than the steps' scatter."""
        low, high = self.step_ratio_low, self.step_ratio_high
        return low is not None and high is not None and not low <= 1 <= high


_Same = tuple[str | None, str | None, int | None, int | None]
"""Kind, communicator, bytes and ranks of collectives that count as the same."""


def _step(findings: Findings) -> StepTimesOfRun:
    num = findings.num_windows
    measures = [rank.measures for rank in findings.ranks]
    return StepTimesOfRun(
        step_s=seconds(_span_ns(findings)),
        compute_s=seconds(sum(step.compute_ns for step in measures) / num),
        comm_s=seconds(sum(step.comm_ns for step in measures) / num),
        overlap_s=seconds(sum(step.overlap_ns for step in measures) / num),
        exposed_comm_s=seconds(sum(step.exposed_comm_ns for step in measures) / num),
        stretched_compute_s=seconds(sum(findings.contention.of_rank) / num),
        idle_s=seconds(sum(step.idle_ns for step in measures) / num),
    )


def _span_ns(findings: Findings) -> float:
    return sum(rank.measures.span_ns for rank in findings.ranks) / findings.num_windows


def _lengths(findings: Findings) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """The steps' lengths, each the mean over the ranks that have it."""
    by_step: dict[int, list[int]] = defaultdict(list)
    for rank in findings.ranks:
        for step in rank.steps if rank.trace.steps else ():
            by_step[step.number].append(step.measures.span_ns)
    return np.array([float(np.mean(lengths)) for lengths in by_step.values()])


def _ratio(before: Findings, after: Findings, seed: int) -> tuple[float | None, float | None]:
    was, became = _lengths(before), _lengths(after)
    if min(len(was), len(became)) < MIN_STEPS:
        return None, None
    rng = np.random.default_rng(seed)
    means = [runs[rng.integers(len(runs), size=(_NUM_RESAMPLES, len(runs)))].mean(axis=1) for runs in (was, became)]
    low, high = np.percentile(means[1] / np.maximum(means[0], 1e-9), _CONFIDENCE)
    return float(low), float(high)


def _calls(findings: Findings, same: Callable[[CollectiveKey], _Same]) -> dict[_Same, CallTimes]:
    num = findings.num_windows
    rows: dict[_Same, list[CollectiveRow]] = defaultdict(list)
    for row in findings.rows:
        rows[same(row.key)].append(row)
    return {
        key: CallTimes(
            count=sum(row.count / num for row in alike),
            total_s=seconds(sum(row.total_ns / num for row in alike)),
            exposed_s=seconds(sum(row.exposed_ns / num for row in alike)),
            stretched_s=seconds(sum(findings.contention.blame.get(row.key, 0.0) / num for row in alike)),
            channels=tuple(sorted({row.key.num_channels for row in alike})),
        )
        for key, alike in rows.items()
    }


def _changes(before: Findings, after: Findings, same: Callable[[CollectiveKey], _Same]) -> tuple[CallChange, ...]:
    was, became = _calls(before, same), _calls(after, same)
    changes = [
        CallChange(
            kind=key[0],
            communicator=key[1],
            bytes=key[2],
            num_ranks=key[3],
            before=was.get(key, CallTimes()),
            after=became.get(key, CallTimes()),
        )
        for key in dict.fromkeys((*became, *was))
    ]
    return tuple(sorted(changes, key=lambda change: -change.size_s))


def _warnings(before: Findings, after: Findings) -> tuple[str, ...]:
    warnings = []
    gpus = [sorted({rank.trace.gpu_name for rank in findings.ranks}) for findings in (before, after)]
    if gpus[0] != gpus[1]:
        warnings.append("the two runs ran on different GPUs: " + " against ".join(", ".join(g) or "?" for g in gpus))
    num_ranks = len(before.ranks), len(after.ranks)
    if num_ranks[0] != num_ranks[1]:
        warnings.append(f"{num_ranks[1]} ranks against {num_ranks[0]}: the averages are over different ranks")
    if any(not rank.trace.steps for findings in (before, after) for rank in findings.ranks):
        warnings.append("a trace has no profiler steps: it counts as one step, whatever it holds")
    return tuple(warnings)


def against(after: Findings, before: Findings, *, files: tuple[str, ...] = (), seed: int = 0) -> AgainstRun:
    """What changed from one run to another; `files` are the one's that was before."""
    was_ns = _span_ns(before)
    low, high = _ratio(before, after, seed)
    return AgainstRun(
        files=files,
        before=_step(before),
        after=_step(after),
        step_ratio=_span_ns(after) / was_ns if was_ns else None,
        step_ratio_low=low,
        step_ratio_high=high,
        num_steps_before=len(_lengths(before)),
        num_steps_after=len(_lengths(after)),
        kinds=_changes(before, after, lambda key: (key.op, None, None, None)),
        communicators=_changes(before, after, lambda key: (None, key.communicator, None, None)),
        collectives=_changes(before, after, lambda key: (key.op, key.communicator, key.num_bytes, key.num_ranks)),
        warnings=_warnings(before, after),
    )
