"""What `lagom analyze` prints with --json: typed, stable, in SI units. Format: docs/formats_analyze.md."""

from collections.abc import Sequence

import msgspec

from lagom_overlap.analysis.advice import Advice
from lagom_overlap.analysis.collectives import CollectiveRow
from lagom_overlap.analysis.contention import Contention, Slowdown
from lagom_overlap.analysis.estimate import FillIn
from lagom_overlap.analysis.findings import Findings, RankFindings
from lagom_overlap.analysis.hta import HtaFigures
from lagom_overlap.analysis.measures import StepMeasures
from lagom_overlap.job.analyze_against import AgainstJson
from lagom_overlap.job.analyze_fill_in import FillInJson, fill_in_json
from lagom_overlap.job.analyze_groups import GroupJson
from lagom_overlap.trace.gpu_trace import NS_PER_S

_US_PER_S = 10**6


class StepJson(msgspec.Struct, frozen=True, kw_only=True):
    """One profiler step on the GPU."""

    step: int
    span_s: float
    compute_s: float
    comm_s: float
    overlap_s: float
    exposed_comm_s: float
    idle_s: float
    host_bound_s: float
    memory_s: float


class RankJson(msgspec.Struct, frozen=True, kw_only=True):
    """One rank over its whole trace; with `--compat hta` over the events that HTA keeps, in HTA's rounding."""

    file: str
    rank: int | None
    steps: int
    span_s: float
    compute_s: float
    comm_s: float
    overlap_s: float
    exposed_comm_s: float
    idle_s: float
    overlap_pct: float | None
    stretched_compute_s: float
    host_bound_s: float
    memory_s: float
    non_compute_s: float
    waiting_s: float | None
    gpu: str
    per_step: list[StepJson]


class CollectiveJson(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one operation, communicator, size and launch, over all ranks."""

    kind: str
    communicator: str
    bytes: int
    channels: int
    threads: int
    num_ranks: int
    count: int
    total_s: float
    exposed_s: float
    stretched_s: float
    waiting_s: float | None
    median_s: float
    min_s: float
    busbw_bytes_per_s: float | None
    reach: str


class SlowdownJson(msgspec.Struct, frozen=True, kw_only=True):
    """Kernels of one class beside one collective (of all where both are null) against the same kernels alone."""

    kernel_class: str | None
    kind: str | None
    communicator: str | None
    bytes: int | None
    channels: int | None
    num_beside: int
    num_alone: int
    slowdown: float
    low: float | None
    high: float | None
    stretched_s: float


class ContentionJson(msgspec.Struct, frozen=True, kw_only=True):
    """Contention; `uncovered_s` is computation beside collectives without an uncontended twin."""

    total: SlowdownJson
    classes: list[SlowdownJson]
    covered_s: float
    uncovered_s: float
    filled_in: FillInJson


class AdviceJson(msgspec.Struct, frozen=True, kw_only=True):
    """One change and its gain per step of the average rank."""

    rule: str
    what: str
    apply: str
    evidence: str
    predicted_gain_s: float


class AnalyzeJson(msgspec.Struct, frozen=True, kw_only=True):
    """One run of `lagom analyze`."""

    tool: str
    version: str
    compat: str | None
    ranks: list[RankJson]
    collectives: list[CollectiveJson]
    contention: ContentionJson
    groups: list[GroupJson]
    advice: list[AdviceJson]
    unreachable_comm_s: float
    warnings: list[str]
    files: list[str]
    against: AgainstJson | None = None

    def to_dict(self) -> dict[str, object]:
        """The whole result as dictionaries, lists, numbers and text."""
        found: dict[str, object] = msgspec.to_builtins(self)
        return found


def _seconds(length_ns: float) -> float:
    return length_ns / NS_PER_S


def _step_json(step: StepMeasures) -> StepJson:
    found = step.measures
    return StepJson(
        step=step.number,
        span_s=_seconds(found.span_ns),
        compute_s=_seconds(found.compute_ns),
        comm_s=_seconds(found.comm_ns),
        overlap_s=_seconds(found.overlap_ns),
        exposed_comm_s=_seconds(found.exposed_comm_ns),
        idle_s=_seconds(found.idle_ns),
        host_bound_s=_seconds(found.host_bound_ns),
        memory_s=_seconds(found.memory_ns),
    )


def rank_json(rank: RankFindings, hta: HtaFigures | None) -> RankJson:
    """A rank's row; HTA's figures in place of ours where given."""
    found, trace = rank.measures, rank.trace
    waits = [wait for wait in rank.waiting_ns if wait is not None]
    exact = RankJson(
        file=trace.file,
        rank=trace.rank,
        steps=len(trace.steps),
        span_s=_seconds(found.span_ns),
        compute_s=_seconds(found.compute_ns),
        comm_s=_seconds(found.comm_ns),
        overlap_s=_seconds(found.overlap_ns),
        exposed_comm_s=_seconds(found.exposed_comm_ns),
        idle_s=_seconds(found.idle_ns),
        overlap_pct=found.overlap_pct,
        stretched_compute_s=_seconds(rank.stretched_ns),
        host_bound_s=_seconds(found.host_bound_ns),
        memory_s=_seconds(found.memory_ns),
        non_compute_s=_seconds(found.span_ns - found.idle_ns - found.compute_ns),
        waiting_s=_seconds(sum(waits)) if waits else None,
        gpu=trace.gpu_name,
        per_step=[_step_json(step) for step in rank.steps],
    )
    if hta is None:
        return exact
    return msgspec.structs.replace(
        exact,
        span_s=hta.span_us / _US_PER_S,
        compute_s=hta.compute_us / _US_PER_S,
        comm_s=hta.comm_us / _US_PER_S,
        overlap_s=hta.overlap_us / _US_PER_S,
        exposed_comm_s=(hta.comm_us - hta.overlap_us) / _US_PER_S,
        idle_s=hta.idle_us / _US_PER_S,
        overlap_pct=None if hta.overlap_pct is None else round(hta.overlap_pct, 2),
        non_compute_s=hta.non_compute_us / _US_PER_S,
        per_step=[],
    )


def _collective_json(row: CollectiveRow, contention: Contention) -> CollectiveJson:
    key = row.key
    return CollectiveJson(
        kind=key.op,
        communicator=key.communicator,
        bytes=key.num_bytes,
        channels=key.num_channels,
        threads=key.num_threads,
        num_ranks=key.num_ranks,
        count=row.count,
        total_s=_seconds(row.total_ns),
        exposed_s=_seconds(row.exposed_ns),
        stretched_s=_seconds(contention.blame.get(key, 0.0)),
        waiting_s=None if row.waiting_ns is None else _seconds(row.waiting_ns),
        median_s=_seconds(row.median_ns),
        min_s=_seconds(row.min_ns),
        busbw_bytes_per_s=row.busbw_bytes_per_s,
        reach=row.key.reach.value,
    )


def _slowdown_json(found: Slowdown, **names: str | int | None) -> SlowdownJson:
    fields: dict[str, str | int | None] = dict.fromkeys(("kernel_class", "kind", "communicator", "bytes", "channels"))
    return msgspec.convert(
        {
            **fields,
            **names,
            "num_beside": found.num_beside,
            "num_alone": found.num_alone,
            "slowdown": found.slowdown,
            "low": found.low,
            "high": found.high,
            "stretched_s": _seconds(found.stretched_ns),
        },
        SlowdownJson,
    )


def contention_json(contention: Contention, filled: FillIn) -> ContentionJson:
    """The contention table."""
    return ContentionJson(
        total=_slowdown_json(contention.total),
        classes=[
            _slowdown_json(
                row.found,
                kernel_class=row.kernel_class.value,
                kind=row.collective.op,
                communicator=row.collective.communicator,
                bytes=row.collective.num_bytes,
                channels=row.collective.num_channels,
            )
            for row in contention.classes
        ],
        covered_s=_seconds(contention.covered_ns),
        uncovered_s=_seconds(contention.uncovered_ns),
        filled_in=fill_in_json(filled),
    )


def collectives_json(findings: Findings) -> list[CollectiveJson]:
    """The table of collectives."""
    return [_collective_json(row, findings.contention) for row in findings.rows]


def advice_json(advice: Sequence[Advice]) -> list[AdviceJson]:
    """The advice, best first."""
    return [
        AdviceJson(
            rule=held.rule,
            what=held.what,
            apply=held.apply,
            evidence=held.evidence,
            predicted_gain_s=held.predicted_gain_s,
        )
        for held in advice
    ]
