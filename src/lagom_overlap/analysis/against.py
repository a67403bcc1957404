"""Two jobs compared: what changed in a step, and in which collectives.

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

from lagom_overlap.analysis.collectives import CollectiveKey
from lagom_overlap.analysis.findings import Findings

MIN_STEPS: Final = 5
"""Steps of each run from which an interval is told."""
_NUM_RESAMPLES: Final = 2000
"""Enough for the ends of a 95 % interval to be stable to a few per cent of its length."""
_CONFIDENCE: Final = (2.5, 97.5)


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class CallKey:
    """What makes collectives of two runs the same; None: all of them."""

    op: str | None = None
    communicator: str | None = None
    num_bytes: int | None = None
    num_ranks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShare:
    """Where a step of the average rank goes, in ns."""

    span_ns: float
    compute_ns: float
    comm_ns: float
    overlap_ns: float
    exposed_comm_ns: float
    stretched_ns: float
    idle_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShare:
    """Some collectives in a step of the average rank: calls, ns, and which channels they had (0: unknown)."""

    count: float = 0.0
    total_ns: float = 0.0
    exposed_ns: float = 0.0
    stretched_ns: float = 0.0
    channels: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The same collectives in both runs."""

    key: CallKey
    before: CallShare
    after: CallShare

    @property
    def size_ns(self) -> float:
        """How much changed: the largest difference of total, exposed and stretched time."""
        return max(
            abs(self.after.total_ns - self.before.total_ns),
            abs(self.after.exposed_ns - self.before.exposed_ns),
            abs(self.after.stretched_ns - self.before.stretched_ns),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """A run (`after`) against another (`before`); changes by what they are grouped by, the largest first.

    `ratio` is the step's length after over before, `low` and `high` bound it (None of too few steps).
    """

    before: StepShare
    after: StepShare
    ratio: float | None
    low: float | None
    high: float | None
    num_steps: tuple[int, int]
    kinds: tuple[Change, ...]
    communicators: tuple[Change, ...]
    collectives: tuple[Change, ...]
    warnings: tuple[str, ...]

    @property
    def is_proven(self) -> bool:
        """Whether the step's length changed by more than the steps' scatter."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


def _steps(findings: Findings) -> StepShare:
    num = findings.num_windows
    measures = [rank.measures for rank in findings.ranks]
    return StepShare(
        span_ns=sum(step.span_ns for step in measures) / num,
        compute_ns=sum(step.compute_ns for step in measures) / num,
        comm_ns=sum(step.comm_ns for step in measures) / num,
        overlap_ns=sum(step.overlap_ns for step in measures) / num,
        exposed_comm_ns=sum(step.exposed_comm_ns for step in measures) / num,
        stretched_ns=sum(findings.contention.of_rank) / num,
        idle_ns=sum(step.idle_ns for step in measures) / num,
    )


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


def _shares(findings: Findings, group: Callable[[CollectiveKey], CallKey]) -> dict[CallKey, CallShare]:
    num = findings.num_windows
    shares: dict[CallKey, CallShare] = {}
    for row in findings.rows:
        key = group(row.key)
        share = shares.get(key, CallShare())
        shares[key] = CallShare(
            count=share.count + row.count / num,
            total_ns=share.total_ns + row.total_ns / num,
            exposed_ns=share.exposed_ns + row.exposed_ns / num,
            stretched_ns=share.stretched_ns + findings.contention.blame.get(row.key, 0.0) / num,
            channels=tuple(sorted({*share.channels, row.key.num_channels})),
        )
    return shares


def _changes(before: Findings, after: Findings, group: Callable[[CollectiveKey], CallKey]) -> tuple[Change, ...]:
    was, became = _shares(before, group), _shares(after, group)
    changes = [
        Change(key=key, before=was.get(key, CallShare()), after=became.get(key, CallShare()))
        for key in dict.fromkeys((*became, *was))
    ]
    return tuple(sorted(changes, key=lambda change: -change.size_ns))


def _exactly(key: CollectiveKey) -> CallKey:
    return CallKey(op=key.op, communicator=key.communicator, num_bytes=key.num_bytes, num_ranks=key.num_ranks)


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


def against(after: Findings, before: Findings, *, seed: int = 0) -> Against:
    """What changed from one run to another."""
    was, became = _steps(before), _steps(after)
    low, high = _ratio(before, after, seed)
    return Against(
        before=was,
        after=became,
        ratio=became.span_ns / was.span_ns if was.span_ns else None,
        low=low,
        high=high,
        num_steps=(len(_lengths(before)), len(_lengths(after))),
        kinds=_changes(before, after, lambda key: CallKey(op=key.op)),
        communicators=_changes(before, after, lambda key: CallKey(communicator=key.communicator)),
        collectives=_changes(before, after, _exactly),
        warnings=_warnings(before, after),
    )
