"""What ran when on every rank, step by step: the figures and the timeline of an emulated job."""

from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any, Final

from lagom_emulate.clock import Operation
from lagom_emulate.prices import Doubt, Priced, PriceSource
from lagom_overlap.timeline import Span, SpanKind, Timeline
from lagom_overlap.timeline.metrics import overlap_metrics
from lagom_overlap.units import NS

MAX_SPANS: Final = 6_000_000
"""Operations whose times are kept, over all ranks: some 40 bytes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """One step, means over the ranks, in seconds.

    `stretched_s` is what the kernels took beyond their price alone, whatever ran concurrently.
    """

    step_s: float
    compute_s: float
    comm_s: float
    exposed_comm_s: float
    idle_s: float
    stretched_s: float


@dataclass(slots=True)
class _Rank:
    starts: "array[float]" = field(default_factory=lambda: array("d"))
    ends: "array[float]" = field(default_factory=lambda: array("d"))
    alone: "array[float]" = field(default_factory=lambda: array("d"))
    streams: "array[int]" = field(default_factory=lambda: array("q"))
    priced: "array[int]" = field(default_factory=lambda: array("q"))
    steps: list[float] = field(default_factory=list)
    peak_bytes: int = 0


class Recorder:
    """Takes every operation as it ends."""

    def __init__(self) -> None:
        self.num_left_out = 0
        self.has_saved_zeros = False
        self.num_operations = 0
        self._ranks: dict[int, _Rank] = defaultdict(_Rank)
        self._priced: list[Priced] = []
        self._numbers: dict[int, int] = {}
        self._of_rank: dict[tuple[int, int], int] = {}
        self._time_by_source: dict[PriceSource, float] = defaultdict(float)
        self._count_by_source: dict[PriceSource, int] = defaultdict(int)
        self._doubtful: dict[Doubt, Counter[str]] = {doubt: Counter() for doubt in Doubt}

    def describe(self, rank: int, desc_id: int, priced: Priced) -> None:
        """What a rank's number of a description stands for."""
        number = self._numbers.get(id(priced))
        if number is None:
            number = self._numbers[id(priced)] = len(self._priced)
            self._priced.append(priced)
        self._of_rank[rank, desc_id] = number

    def add(self, operation: Operation) -> None:
        """An operation that has ended."""
        number = self._of_rank.get((operation.owner, operation.desc))
        if number is None:
            return
        priced = self._priced[number]
        rank = self._ranks[operation.owner]
        if priced.description.mark is not None:
            self._mark(rank, priced.description.mark, operation.end_ns)
            return
        if priced.source is PriceSource.INSTANT:
            return
        self.num_operations += 1
        alone_ns = priced.alone_ns * operation.scale
        self._time_by_source[priced.source] += alone_ns
        self._count_by_source[priced.source] += 1
        if priced.doubt is not None:
            self._doubtful[priced.doubt][priced.description.label] += 1
        if self.num_operations > MAX_SPANS:
            self.num_left_out += 1
            return
        rank.starts.append(operation.start_ns)
        rank.ends.append(operation.end_ns)
        rank.alone.append(alone_ns)
        rank.streams.append(operation.stream)
        rank.priced.append(number)

    @property
    def shares(self) -> Mapping[PriceSource, float]:
        """Which part of all operations' time alone was priced by what."""
        whole = sum(self._time_by_source.values()) or 1.0
        return {source: time / whole for source, time in sorted(self._time_by_source.items())}

    @property
    def counts(self) -> Mapping[PriceSource, int]:
        """How many operations were priced by what."""
        return dict(sorted(self._count_by_source.items()))

    @property
    def doubtful(self) -> Mapping[Doubt, Mapping[str, int]]:
        """Launches by kernel or operator, the most frequent first, whose prices are to be doubted."""
        return {doubt: dict(counts.most_common()) for doubt, counts in self._doubtful.items() if counts}

    @property
    def ranks(self) -> list[int]:
        """The ranks that ran anything."""
        return sorted(self._ranks)

    @property
    def peak_bytes(self) -> int:
        """The most memory that a rank's framework allocated; 0 if none said."""
        return max((rank.peak_bytes for rank in self._ranks.values()), default=0)

    @property
    def num_steps(self) -> int:
        """Steps that every rank has ended."""
        return max(0, min((len(rank.steps) for rank in self._ranks.values()), default=0) - 1)

    def step_s(self) -> list[float]:
        """Every step's time, means over the ranks."""
        num = self.num_steps
        rows = [[b - a for a, b in pairwise(rank.steps)][:num] for rank in self._ranks.values()]
        return [fmean(times) * NS for times in zip(*rows, strict=True)]

    def figures(self, step: int) -> StepFigures:
        """What one step was spent on."""
        rows = [self._rank_figures(number, step) for number in self.ranks]
        return StepFigures(
            **{name: fmean(getattr(row, name) for row in rows) for name in StepFigures.__dataclass_fields__}
        )

    def timeline(self, step: int | None) -> Timeline:
        """What ran in a step, on all ranks, since the step's beginning on the first; None: from start to end."""
        origin = min(self._ranks[number].steps[step] for number in self.ranks) if step is not None else 0.0
        return Timeline(tuple(span for number in self.ranks for span in self._spans(number, step, origin)))

    def _mark(self, rank: _Rank, mark: Mapping[str, Any], at_ns: float) -> None:
        if mark.get("step") == "begin":
            rank.steps.append(at_ns)
        self.has_saved_zeros |= mark.get("saved") == "zeros"
        peak = mark.get("peak_bytes")
        if isinstance(peak, int):
            rank.peak_bytes = max(rank.peak_bytes, peak)

    def _places(self, rank: _Rank, step: int | None) -> range | list[int]:
        """The operations that started in a step."""
        if step is None:
            return range(len(rank.starts))
        begin, end = rank.steps[step], rank.steps[step + 1]
        # Kept in order of their ends: none that ended before the step's beginning started in it.
        first = bisect_right(rank.ends, begin)
        return [place for place in range(first, len(rank.starts)) if begin <= rank.starts[place] < end]

    def _spans(self, number: int, step: int | None, origin: float) -> list[Span]:
        rank, spans = self._ranks[number], []
        for place in self._places(rank, step):
            priced = self._priced[rank.priced[place]]
            spans.append(
                Span(
                    name=priced.description.label,
                    kind=SpanKind.COMM if priced.description.collective is not None else SpanKind.COMP,
                    stream=f"stream {rank.streams[place]}",
                    start_s=(rank.starts[place] - origin) * NS,
                    end_s=(rank.ends[place] - origin) * NS,
                    rank=number,
                )
            )
        return spans

    def _rank_figures(self, number: int, step: int) -> StepFigures:
        rank = self._ranks[number]
        spans, stretched_ns = [], 0.0
        begin, end = rank.steps[step], rank.steps[step + 1]
        for place, span in zip(self._places(rank, step), self._spans(number, step, begin), strict=True):
            work = self._priced[rank.priced[place]].work
            if work.kind is None:  # a copy by an engine neither computes nor communicates
                continue
            spans.append(span)
            if work.kind < 0:
                stretched_ns += rank.ends[place] - rank.starts[place] - rank.alone[place]
        found = overlap_metrics(Timeline(tuple(spans)), rank=number)
        step_s = (end - begin) * NS
        return StepFigures(
            step_s=step_s,
            compute_s=found.comp_s,
            comm_s=found.comm_s,
            exposed_comm_s=found.exposed_comm_s,
            idle_s=max(0.0, step_s - found.comp_s - found.exposed_comm_s),
            stretched_s=max(0.0, stretched_ns * NS),
        )
