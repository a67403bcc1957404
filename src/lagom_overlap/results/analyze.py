"""What `lagom analyze` found. Format of its JSON: docs/formats_analyze.md."""

from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import ClassVar

import msgspec

from lagom_overlap.analysis.advice import Advice
from lagom_overlap.analysis.against import AgainstRun
from lagom_overlap.analysis.findings import Findings
from lagom_overlap.analysis.groups import TraceGroup
from lagom_overlap.analysis.hta import HtaFigures
from lagom_overlap.results.analyze_rows import CollectiveTimes, ContentionTimes, PartTimes, RankTimes, TraceGroupTimes
from lagom_overlap.results.base import Drawn, Row
from lagom_overlap.sim.what_if import WhatIf
from lagom_overlap.trace.gpu_trace import UNKNOWN, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """What stands behind the rows: events, calls and groups, to the nanosecond.

    `hta` holds HTA's figures by rank where they were asked for, else nothing.
    """

    findings: Findings
    groups: tuple[TraceGroup, ...] = ()
    hta: tuple[HtaFigures, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AnalyzeResult(Drawn):
    """One run of `lagom analyze`; `measured` is found again as `analysis`.

    `looked_for` says why there is no advice where there is none; `next_line` is the command to type next. `files` is
    the run folder's content, names alone where names were taken out. `said` are the words of `summary`, which are made
    from events that a loaded result lacks.
    """

    verb: ClassVar[str] = "analyze"

    tool: str = "lagom analyze"
    date: str = field(compare=False)
    compat: str | None
    ranks: tuple[RankTimes, ...]
    collectives: tuple[CollectiveTimes, ...]
    contention: ContentionTimes
    groups: tuple[TraceGroupTimes, ...]
    advice: tuple[Advice, ...]
    looked_for: str
    next_line: str
    what_ifs: tuple[WhatIf, ...] = ()
    unreachable_comm_s: float
    rank_skew_s: float | None
    parts: tuple[PartTimes, ...] = ()
    hangs: tuple[str, ...] = ()
    warnings: tuple[str, ...]
    files: tuple[Path, ...]
    against: AgainstRun | None = None
    said: str = ""
    measured: InitVar[Analysis]

    def __post_init__(self, measured: Analysis) -> None:
        object.__setattr__(self, "_analysis", measured)

    @property
    def analysis(self) -> Analysis:
        """What was measured, to the nanosecond."""
        analysis: Analysis = self.behind("_analysis", "events of its traces: analyse those again")
        return analysis

    def summary(self) -> str:
        """What a step is made of, what contention costs, and what to do first."""
        return self.said or super().summary()

    def table(self) -> list[Row]:
        """One row per collective: all calls of one operation, communicator, size and launch."""
        return [_flat(row) for row in self.collectives]

    def tables(self) -> dict[str, list[Row]]:
        """The tables `ranks`, `steps`, `parts`, `collectives`, `calls`, and of contention `contention`, `kernels`.

        Further `groups`, `advice`, `what_ifs`. Every row of a table has the same keys, so that pandas and polars take
        it as it is. `calls` holds every single collective of every rank, its `start_s` from the rank's first GPU event;
        `kernels` those that lost most next to collectives.
        """
        findings = self.analysis.findings
        return {
            "ranks": [_flat(rank) for rank in self.ranks],
            "steps": [_flat(step, file=rank.file, rank=rank.rank) for rank in self.ranks for step in rank.per_step],
            "parts": [_flat(part) for part in self.parts],
            "collectives": self.table(),
            "calls": _calls(findings),
            "contention": [_flat(row) for row in self.contention.classes],
            "kernels": _kernels(findings),
            "groups": [_flat(group) for group in self.groups],
            "advice": [_flat(advice) for advice in self.advice],
            "what_ifs": [_flat(answer) for answer in self.what_ifs],
        }


def _flat(row: object, **more: str | int | float | None) -> Row:
    """A row without the fields that are tables themselves."""
    plain = msgspec.to_builtins(row)
    return more | {name: value for name, value in plain.items() if not isinstance(value, list | tuple | dict)}


def _calls(findings: Findings) -> list[Row]:
    rows: list[Row] = []
    for rank in findings.ranks:
        events = rank.trace.events
        first = int(events.start_ns[0]) if len(events) else 0
        for call, exposed, waiting in zip(rank.trace.calls, rank.exposed_ns.tolist(), rank.waiting_ns, strict=True):
            timed = call.event != UNKNOWN
            rows.append(
                {
                    "file": rank.trace.file,
                    "rank": rank.trace.rank,
                    "kind": call.op,
                    "communicator": call.communicator,
                    "bytes": call.num_bytes,
                    "channels": call.num_channels,
                    "threads": call.num_threads,
                    "num_ranks": call.num_ranks,
                    "sequence": call.sequence,
                    "start_s": seconds(int(events.start_ns[call.event]) - first) if timed else None,
                    "duration_s": seconds(call.duration_ns),
                    "exposed_s": seconds(exposed) if timed else None,
                    "waiting_s": None if waiting is None else seconds(waiting),
                    "reach": call.reach.value,
                }
            )
    return rows


def _kernels(findings: Findings) -> list[Row]:
    return [
        {
            "kernel": row.name,
            "kernel_class": row.kernel_class.value,
            "grid_x": row.grid[0],
            "grid_y": row.grid[1],
            "grid_z": row.grid[2],
            "num_overlapped": row.found.num_overlapped,
            "num_alone": row.found.num_alone,
            "slowdown": row.found.slowdown,
            "low": row.found.low,
            "high": row.found.high,
            "stretched_s": seconds(row.found.stretched_ns),
        }
        for row in findings.contention.kernels
    ]
