"""The loop that pulls a study through a backend: the one place where search meets the clock. Its journal on disk."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lagom_overlap.backends.base import Backend
from lagom_overlap.errors import BackendError, OutputError
from lagom_overlap.interrupts import received
from lagom_overlap.record import append_line, write_private
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.journal import Entry, StepKind, entry_to_json
from lagom_overlap.tuners.problem import Measurement, Outcome
from lagom_overlap.tuners.study import Study

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """Where a run is; `best_s` is the smallest iteration makespan measured so far in the search, None before any."""

    phase: StepKind
    num_done: int
    num_planned: int
    best_s: float | None


Observer = Callable[[RunProgress], None]
"""Called after every step."""


def ignore(_progress: RunProgress) -> None:
    """The observer that shows nothing."""


@dataclass(slots=True)
class Journal:
    """The measurements of a run, on disk as soon as they are made; `failure` says why no longer, if so."""

    path: Path
    problems: Problems
    entries: list[Entry] = field(default_factory=list)
    failure: str = ""

    def start(self, header: str, entries: tuple[Entry, ...] = ()) -> None:
        """Writes the header line, and what an earlier process has measured."""
        self.entries = list(entries)
        lines = (header, *(entry_to_json(entry, self.problems) for entry in entries))
        write_private(self.path, "".join(f"{line}\n" for line in lines).encode())

    def keep(self, entry: Entry) -> None:
        """Adds an entry, in memory, and on disk as long as it takes any: hours of measuring outlive a full one."""
        self.entries.append(entry)
        if self.failure:
            return
        try:
            append_line(self.path, entry_to_json(entry, self.problems))
        except OutputError as error:
            self.failure = str(error)
            _log.warning("measurements are no longer written: %s", error)


@dataclass(slots=True)
class Run:
    """A study on its way through a backend; `interrupted` says that a signal ended it early."""

    study: Study
    backend: Backend
    problems: Problems
    max_seconds: float
    max_measurements: int
    interrupted: bool = False
    out_of_time: bool = False

    @property
    def out_of_budget(self) -> bool:
        """Whether the budget, not the tuner, ended the search."""
        return self.out_of_time or (
            self.study.num_measurements >= self.max_measurements and not self.study.tuner_finished
        )

    def drive(self, observe: Observer = ignore, keep: Callable[[Entry], None] = lambda _: None) -> None:
        """Runs every step; `keep` receives each entry as soon as it is measured.

        Ctrl-C and SIGTERM stop the run and keep what was measured; a second one ends the process.

        Raises:
            BackendError: if the machine could not run a step; what was measured before has been kept.
        """
        try:
            self._drive(observe, keep)
        except KeyboardInterrupt:
            self.interrupted = True
        except BackendError:
            if not received():
                raise
            self.interrupted = True  # the ranks got the signal, too, and were gone before us

    def _drive(self, observe: Observer, keep: Callable[[Entry], None]) -> None:
        groups = {problem.group.name: problem.group for problem in self.problems}
        deadline = time.monotonic() + self.max_seconds
        best_s: float | None = None
        done = {kind: sum(entry.step.kind is kind for entry in self.study.entries) for kind in StepKind}
        while (step := self.study.next()) is not None:
            if step.kind is StepKind.SEARCH and time.monotonic() > deadline:
                self.out_of_time = True
                self.study.stop_search()
                continue
            outcomes = {
                name: self.backend.measure(groups[name], assignment) for name, assignment in step.assignments.items()
            }
            self.study.report(step, outcomes)
            keep(Entry(step=step, outcomes=outcomes))
            done[step.kind] += 1
            total = iteration_makespan_s(self.problems, outcomes)
            if step.kind is StepKind.SEARCH and total is not None:
                best_s = total if best_s is None else min(best_s, total)
            planned = self._num_planned(step.kind)
            observe(RunProgress(phase=step.kind, num_done=done[step.kind], num_planned=planned, best_s=best_s))

    def _num_planned(self, kind: StepKind) -> int:
        if kind is StepKind.SEARCH:
            return self.max_measurements
        return self.study.num_verdict_steps


def iteration_makespan_s(problems: Problems, outcomes: Mapping[str, Outcome]) -> float | None:
    """Sum over groups of count x makespan; None if a group is missing or failed."""
    total = 0.0
    for problem in problems:
        outcome = outcomes.get(problem.group.name)
        if not isinstance(outcome, Measurement):
            return None
        total += problem.group.count * outcome.makespan_s
    return total
