"""What the report of an analysis shows: everything in one value, decided before anything is drawn."""

from dataclasses import dataclass

from lagom_overlap.analysis.advice import Advice
from lagom_overlap.analysis.against import Against
from lagom_overlap.analysis.findings import Findings
from lagom_overlap.analysis.groups import TraceGroup
from lagom_overlap.analysis.hta import HtaFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzeReport:
    """One analysis.

    `hta` holds HTA's figures by rank where they were asked for, else nothing; `against` the comparison with another
    run.
    """

    findings: Findings
    advice: tuple[Advice, ...]
    date: str
    unreachable_s: float
    compat: str | None = None
    hta: tuple[HtaFigures, ...] = ()
    against: Against | None = None
    groups: tuple[TraceGroup, ...] = ()
