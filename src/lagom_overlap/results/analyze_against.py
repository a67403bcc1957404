"""Two analyses compared, as `lagom analyze A --against B --json` prints it. Format: docs/formats_analyze.md."""

from dataclasses import dataclass

from lagom_overlap.analysis.against import Against, CallShare, Change, StepShare
from lagom_overlap.trace.gpu_trace import seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimesOfRun:
    """A step of the average rank."""

    step_s: float
    compute_s: float
    comm_s: float
    overlap_s: float
    exposed_comm_s: float
    stretched_compute_s: float
    idle_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTimes:
    """Some collectives in a step of the average rank."""

    count: float
    total_s: float
    exposed_s: float
    stretched_s: float
    channels: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallChange:
    """The same collectives in both runs; null in a name: all of them."""

    kind: str | None
    communicator: str | None
    bytes: int | None
    num_ranks: int | None
    before: CallTimes
    after: CallTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class AgainstRun:
    """A run against another; `before` is the other one."""

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


def _step(share: StepShare) -> StepTimesOfRun:
    return StepTimesOfRun(
        step_s=seconds(share.span_ns),
        compute_s=seconds(share.compute_ns),
        comm_s=seconds(share.comm_ns),
        overlap_s=seconds(share.overlap_ns),
        exposed_comm_s=seconds(share.exposed_comm_ns),
        stretched_compute_s=seconds(share.stretched_ns),
        idle_s=seconds(share.idle_ns),
    )


def _calls(share: CallShare) -> CallTimes:
    return CallTimes(
        count=share.count,
        total_s=seconds(share.total_ns),
        exposed_s=seconds(share.exposed_ns),
        stretched_s=seconds(share.stretched_ns),
        channels=tuple(share.channels),
    )


def _change(change: Change) -> CallChange:
    return CallChange(
        kind=change.key.op,
        communicator=change.key.communicator,
        bytes=change.key.num_bytes,
        num_ranks=change.key.num_ranks,
        before=_calls(change.before),
        after=_calls(change.after),
    )


def against_run(found: Against, files: tuple[str, ...]) -> AgainstRun:
    """The comparison; `files` are the other run's."""
    return AgainstRun(
        files=files,
        before=_step(found.before),
        after=_step(found.after),
        step_ratio=found.ratio,
        step_ratio_low=found.low,
        step_ratio_high=found.high,
        num_steps_before=found.num_steps[0],
        num_steps_after=found.num_steps[1],
        kinds=tuple(map(_change, found.kinds)),
        communicators=tuple(map(_change, found.communicators)),
        collectives=tuple(map(_change, found.collectives)),
        warnings=found.warnings,
    )
