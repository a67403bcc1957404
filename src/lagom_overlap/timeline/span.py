"""Spans and timelines."""

from dataclasses import dataclass
from enum import StrEnum


class SpanKind(StrEnum):
    """Whether a span computes or communicates."""

    COMP = "comp"
    COMM = "comm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One operator on one stream of one rank, from `start_s` to `end_s` since the timeline's origin."""

    name: str
    kind: SpanKind
    stream: str
    start_s: float
    end_s: float
    rank: int = 0

    def __post_init__(self) -> None:
        if not self.start_s <= self.end_s:
            raise ValueError(f"span {self.name!r} ends at {self.end_s} before it starts at {self.start_s}")

    @property
    def duration_s(self) -> float:
        """Its length."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans in order of start; empty timelines have length 0."""

    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        ordered = sorted(self.spans, key=lambda s: (s.start_s, s.rank, s.stream, s.end_s, s.name))
        object.__setattr__(self, "spans", tuple(ordered))

    @property
    def makespan_s(self) -> float:
        """From the first start to the last end."""
        if not self.spans:
            return 0.0
        return max(span.end_s for span in self.spans) - self.spans[0].start_s

    def of(self, kind: SpanKind, rank: int | None = None) -> tuple[Span, ...]:
        """The spans of one kind (of one rank, if given)."""
        return tuple(s for s in self.spans if s.kind is kind and rank in (None, s.rank))
