"""One rank's view of a window of steps, and its report.

Ranks whose measured steps have the same shape must use the same program (`program`): the first that was shared. A
report that fails becomes a request to stop.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from lagom_overlap.collective import ConfigKey, ConfigSpace, common_space
from lagom_overlap.collective.size_class import WIDTHS
from lagom_overlap.errors import first_line
from lagom_overlap.online.program import (
    StepProgram,
    fingerprint,
    groups_of,
    median_times,
    program_of,
    times_of,
)
from lagom_overlap.online.ranks.exchange import Exchange, StoreLost
from lagom_overlap.online.ranks.messages import UNLIKE, Report, WindowPlan, calls_of, shape_of, wires_of
from lagom_overlap.online.routes.base import Route, StepRecord, by_class
from lagom_overlap.tuners.problem import Measurement

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Window:
    """The current window: its plan, its progress and its measurements.

    `void`: why its times are invalid; `hold`: why nothing may be switched after it.
    """

    plan: WindowPlan
    step: int = 0
    own_sizes: list[StepRecord] = field(default_factory=list)
    """The measured steps as the route recorded them."""
    records: list[StepRecord] = field(default_factory=list)
    """The same by the plan's classes of sizes."""
    steps_s: list[float] = field(default_factory=list)
    void: str = ""
    hold: str = ""
    own: Report | None = None
    reported_after: int = field(init=False)
    """Steps after which this rank reports, and from which on a step may have more to do than to be timed."""

    def __post_init__(self) -> None:
        self.reported_after = max(1, self.plan.decided_after - 1)

    def keep(self, record: StepRecord) -> None:
        """A step was measured."""
        self.own_sizes.append(record)
        self.records.append(by_class(record, self.plan.size_octaves))


@dataclass(slots=True)
class Totals:
    """One rank's counts since its tuner began; `exchange_s` was spent on agreement and on measuring."""

    num_steps: int = 0
    stepped_s: float = 0.0
    exchange_s: float = 0.0
    num_journal_lines: int = 0


class Observer:
    """Makes the reports of one rank; `programs` are those it has met, by fingerprint."""

    def __init__(self, exchange: Exchange, route: Route, *, is_exact_only: bool) -> None:
        self._exchange: Final = exchange
        self._route: Final = route
        self._is_exact_only: Final = is_exact_only
        self._places: dict[str, int] = {}
        self._before: StepRecord | None = None
        """The last step measured in an earlier window."""
        self.programs: dict[str, StepProgram] = {}

    def report(self, window: Window, totals: Totals, stop: str) -> Report:
        """What this rank saw; where that fails, its wish to stop.

        Raises:
            StoreLost: if the store does not answer.
        """
        rank = self._exchange.rank
        try:
            return self._summary(window, totals, stop)
        except StoreLost:
            raise
        except Exception as error:
            _log.exception("online tuning failed on rank %d", rank)
            words = first_line(error)
            return Report(rank=rank, num_steps=totals.num_steps, stop=f"rank {rank}: no report: {words}")

    def fetch(self, fingerprints: Sequence[str]) -> None:
        """Gets the programs that other ranks shared."""
        for shape in fingerprints:
            if shape not in self.programs:
                self.programs[shape] = self._exchange.program(shape)

    def _summary(self, window: Window, totals: Totals, stop: str) -> Report:
        records, times = window.records, dict[str, Measurement]()
        shapes = {fingerprint(record) for record in records}
        shape = shapes.pop() if len(shapes) == 1 else ""
        if shape and not stop:
            try:
                program = self._program(shape, window)
                times = median_times([times_of(program, groups_of(program), record) for record in records])
            except ValueError as error:
                stop = f"the step cannot be understood: {error}"
        rank, void = self._exchange.rank, window.void
        if records and not shape and not void:
            void = "its measured steps were not alike"
        octaves = self._octaves(window)
        # What was not recorded whole is not compared: the window is measured again anyway.
        calls, balance = (
            ({}, 0) if void else calls_of(records, rank, self._exchange.num_ranks, self._places_in(records))
        )
        return Report(
            rank=rank,
            num_steps=totals.num_steps,
            calls=calls,
            balance=balance,
            programs=(shape,) if shape and not stop else (),  # only what was shared: rank 0 waits for it
            shapes=shape_of(rank, shape),
            octaves=octaves,
            times={} if stop else times,
            step_s=median(record.duration_s for record in records) if records else 0.0,
            steps_s=tuple(window.steps_s),
            stepped_s=totals.stepped_s,
            exchange_s=totals.exchange_s,
            void=void and f"rank {rank}: {void}",
            hold=window.hold and f"rank {rank}: {window.hold}",
            stop=stop and f"rank {rank}: {stop}",
            journal_lines=totals.num_journal_lines,
            journal_rank=rank,
        )

    def _places_in(self, records: Sequence[StepRecord]) -> Mapping[str, int]:
        """This rank's places in communicators whose ranks it does not know; each is taken once."""
        for wire in wires_of(records).values():
            if wire not in self._places:
                self._places[wire] = self._exchange.place(wire)
        return self._places

    def _octaves(self, window: Window) -> int:
        """The least width of classes, from the plan's on, by which the window's steps and the one before are alike."""
        timed = [step for step in window.own_sizes if step.is_timed]  # others do not know what waits for what
        if not timed:
            return -1
        steps = timed if self._before is None else [self._before, *timed]
        self._before = steps[-1]
        for octaves in WIDTHS:
            if (
                octaves >= window.plan.size_octaves
                and len({fingerprint(by_class(step, octaves)) for step in steps}) == 1
            ):
                return octaves
        return UNLIKE

    def _program(self, shape: str, window: Window) -> StepProgram:
        """The program of this shape that all ranks work by; a class may be tried with what all of its calls may."""
        if shape not in self.programs:
            spaces = [
                common_space([self._space(call.key) for call in same])
                for same in zip(*(record.calls for record in window.own_sizes), strict=True)
            ]
            self.programs[shape] = self._exchange.share_program(shape, program_of(window.records, spaces))
        return self.programs[shape]

    def _space(self, key: ConfigKey) -> ConfigSpace | None:
        if self._is_exact_only and not self._route.is_exact(key):
            return None
        return self._route.space(key)
