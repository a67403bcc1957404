"""Two analyses compared, as `lagom analyze A --against B --json` prints it. Format: docs/formats_analyze.md."""

import msgspec

from lagom_overlap.analysis.against import Against, CallShare, Change, StepShare
from lagom_overlap.trace.gpu_trace import NS_PER_S


class StepShareJson(msgspec.Struct, frozen=True, kw_only=True):
    """A step of the average rank."""

    step_s: float
    compute_s: float
    comm_s: float
    overlap_s: float
    exposed_comm_s: float
    stretched_compute_s: float
    idle_s: float


class CallShareJson(msgspec.Struct, frozen=True, kw_only=True):
    """Some collectives in a step of the average rank."""

    count: float
    total_s: float
    exposed_s: float
    stretched_s: float
    channels: list[int]


class ChangeJson(msgspec.Struct, frozen=True, kw_only=True):
    """The same collectives in both runs; null in a name: all of them."""

    kind: str | None
    communicator: str | None
    bytes: int | None
    num_ranks: int | None
    before: CallShareJson
    after: CallShareJson


class AgainstJson(msgspec.Struct, frozen=True, kw_only=True):
    """A run against another; `before` is the other one."""

    files: list[str]
    before: StepShareJson
    after: StepShareJson
    step_ratio: float | None
    step_ratio_low: float | None
    step_ratio_high: float | None
    num_steps_before: int
    num_steps_after: int
    kinds: list[ChangeJson]
    communicators: list[ChangeJson]
    collectives: list[ChangeJson]
    warnings: list[str]


def _step(share: StepShare) -> StepShareJson:
    return StepShareJson(
        step_s=share.span_ns / NS_PER_S,
        compute_s=share.compute_ns / NS_PER_S,
        comm_s=share.comm_ns / NS_PER_S,
        overlap_s=share.overlap_ns / NS_PER_S,
        exposed_comm_s=share.exposed_comm_ns / NS_PER_S,
        stretched_compute_s=share.stretched_ns / NS_PER_S,
        idle_s=share.idle_ns / NS_PER_S,
    )


def _calls(share: CallShare) -> CallShareJson:
    return CallShareJson(
        count=share.count,
        total_s=share.total_ns / NS_PER_S,
        exposed_s=share.exposed_ns / NS_PER_S,
        stretched_s=share.stretched_ns / NS_PER_S,
        channels=list(share.channels),
    )


def _change(change: Change) -> ChangeJson:
    return ChangeJson(
        kind=change.key.op,
        communicator=change.key.communicator,
        bytes=change.key.num_bytes,
        num_ranks=change.key.num_ranks,
        before=_calls(change.before),
        after=_calls(change.after),
    )


def against_json(found: Against, files: tuple[str, ...]) -> AgainstJson:
    """The comparison; `files` are the other run's."""
    return AgainstJson(
        files=list(files),
        before=_step(found.before),
        after=_step(found.after),
        step_ratio=found.ratio,
        step_ratio_low=found.low,
        step_ratio_high=found.high,
        num_steps_before=found.num_steps[0],
        num_steps_after=found.num_steps[1],
        kinds=[_change(change) for change in found.kinds],
        communicators=[_change(change) for change in found.communicators],
        collectives=[_change(change) for change in found.collectives],
        warnings=list(found.warnings),
    )
