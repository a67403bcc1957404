"""The state machine around a tuner: search, then verdict, with a journal. Backends pull it, training jobs push it.

    SEARCH --(tuner done, budget spent, or stop_search)--> VERDICT --(last round, or the tuned arm failed)--> DONE
    SEARCH --(the same, after skip_verdict)------------------------------------------------------------------> DONE

Pure: no clock, file, environment or global random numbers; the same reports give the same steps.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Final

from lagom_overlap.errors import BackendError, BundleError
from lagom_overlap.tuners.base import Problems, Trial, Tuner, check_outcomes, problems_by_name
from lagom_overlap.tuners.in_turns import InTurns
from lagom_overlap.tuners.journal import Entry, Step, StepKind
from lagom_overlap.tuners.problem import (
    MAX_PAIRS,
    MIN_PAIRS,
    SAME_PAIRS,
    Assignment,
    Failure,
    Measurement,
    Outcome,
    most_verdict_steps,
)
from lagom_overlap.tuners.sequential import Decision, Judgement, judged_pairs
from lagom_overlap.tuners.verdict import DEFAULT_ARM, SAME_ARM, TUNED_ARM, Verdict, judge

UNCHANGED_PAIRS: Final = 9
"""Rounds if the tuned assignment is the default: there is nothing to prove, they only compare it with the baselines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """What one of several tuners ended with, after `num_measurements`, and how it compares with the default.

    `judgement` is None where that is the default itself, nothing was compared, or it `failed` in the verdict, for the
    reason given.
    """

    name: str
    assignments: Mapping[str, Assignment]
    num_measurements: int
    judgement: Judgement | None
    failed: str = ""


class StudyPhase(StrEnum):
    """Where a study is."""

    SEARCH = "search"
    VERDICT = "verdict"
    DONE = "done"


class Study:
    """One tuning run over all groups of an iteration.

    The verdict runs pairs of the default first, then rounds of all contenders until the sequential test has decided,
    `num_pairs` at most. `max_measurements` bounds the search steps; the verdict's are counted apart. A baseline that
    only some groups have stands for the default in the others. Of several tuners (`InTurns`) the first is the study's
    own; what the others end with runs in the same rounds, which go on until the test has decided on each.

    Raises:
        ValueError: if there is no group, names repeat, a baseline is named like an arm of ours, or a number is out of
            range.
    """

    def __init__(
        self,
        problems: Problems,
        tuner: Tuner,
        *,
        seed: int = 0,
        num_pairs: int = 25,
        max_measurements: int | None = None,
    ) -> None:
        if not MIN_PAIRS <= num_pairs <= MAX_PAIRS:
            raise ValueError(f"num_pairs is {num_pairs}, must be between {MIN_PAIRS} and {MAX_PAIRS}")
        if max_measurements is not None and max_measurements < 1:
            raise ValueError(f"max_measurements is {max_measurements}, must be at least 1")
        self._problems = problems_by_name(problems)
        self._defaults = {name: problem.default for name, problem in self._problems.items()}
        self._baselines = _baselines(problems)
        self._tuner = tuner
        self._in_turns = tuner if isinstance(tuner, InTurns) else None
        self._rivals = {} if self._in_turns is None else dict.fromkeys(self._in_turns.names[1:], self._defaults)
        if taken := self._rivals.keys() & {DEFAULT_ARM, TUNED_ARM, SAME_ARM, *self._baselines}:
            raise ValueError(f"tuners are named {sorted(taken)}, which are other arms of the verdict")
        self._seed = seed
        self._num_pairs = num_pairs
        self._max_measurements = max_measurements
        self._wants_verdict = True
        self._tuner_finished = False
        self._phase = StudyPhase.SEARCH
        self._asked: Step | None = None
        self._trial: Trial | None = None
        self._entries: list[Entry] = []
        self._num_measurements = 0
        self._tuned: Mapping[str, Assignment] | None = None
        self._queue: list[tuple[int | None, str]] = []
        self._same_s: list[float] = []
        self._makespans_s: dict[str, list[float]] = {}
        self._failures: dict[str, str] = {}
        self._verdict: Verdict | None = None

    @property
    def phase(self) -> StudyPhase:
        """Search, verdict or done."""
        return self._phase

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The journal: every reported step, in order."""
        return tuple(self._entries)

    @property
    def recommended(self) -> Mapping[str, Assignment]:
        """The tuner's recommendation: the best so far during the search, final after it."""
        return self._tuner.recommend() if self._tuned is None else self._tuned

    @property
    def verdict(self) -> Verdict | None:
        """The verdict once all rounds are in; None before, or if it was skipped."""
        return self._verdict

    @property
    def chosen(self) -> Mapping[str, Assignment]:
        """What to run from now on: the recommendation, or the default where the verdict did not adopt it."""
        return self.recommended if self._verdict is None or self._verdict.adopted else dict(self._defaults)

    @property
    def tuner_finished(self) -> bool:
        """Whether the tuner itself ended the search; False if a budget or a stop did, or it is still going on.

        A tuner whose last measurement is spent is asked once more, to know whether it was finished.
        """
        return self._tuner_finished

    @property
    def num_measurements(self) -> int:
        """Reported search steps; the verdict's are not among them."""
        return self._num_measurements

    @property
    def num_verdict_steps(self) -> int:
        """The most steps that the verdict takes: pairs of the default, then rounds times contenders."""
        return most_verdict_steps(self._num_pairs, len(self._arms()))

    @property
    def contenders(self) -> tuple[Contender, ...]:
        """Each of several tuners against the default, once the study is done; none where there is one tuner."""
        if self._in_turns is None or self._phase is not StudyPhase.DONE or self._tuned is None:
            return ()
        results = []
        for name, assignments in self._in_turns.results().items():
            arm = self._arm_of(assignments)
            failed = "" if arm is None else self._failures.get(arm, "")
            is_judged = arm is not None and not failed and self.num_rounds > 0
            results.append(
                Contender(
                    name=name,
                    assignments=dict(assignments),
                    num_measurements=self._in_turns.num_measurements[name],
                    judgement=self._judged(arm) if is_judged and arm is not None else None,
                    failed=failed,
                )
            )
        return tuple(results)

    def _arm_of(self, assignments: Mapping[str, Assignment]) -> str | None:
        """The arm of the verdict that runs an assignment; None for the default."""
        if dict(assignments) == self._defaults:
            return None
        arms = {TUNED_ARM: self.recommended, **self._rivals}
        return next((arm for arm, own in arms.items() if dict(own) == dict(assignments)), None)

    @property
    def num_rounds(self) -> int:
        """Complete rounds of the verdict so far."""
        return min((len(self._makespans_s.get(arm, ())) for arm in (DEFAULT_ARM, TUNED_ARM)), default=0)

    def next(self) -> Step | None:
        """The step to run, the same one until it is reported; None when the study is done."""
        if self._asked is None and self._phase is StudyPhase.SEARCH:
            self._asked = self._next_search()
            if self._asked is None:
                self._end_search()
        if self._asked is None and self._phase is StudyPhase.VERDICT:
            self._asked = self._next_verdict()
        return self._asked

    def report(self, step: Step, outcomes: Mapping[str, Outcome], *, step_s: float | None = None) -> None:
        """Takes the outcomes of the step just given, one per group in it.

        A verdict's step may be timed as a whole instead: `step_s`, and no outcomes.

        Raises:
            ValueError: if it is another step, or a group's outcome is missing or foreign.
            BackendError: if the untouched default failed in the verdict: there is nothing to compare with.
        """
        if self._asked is None or step != self._asked:
            raise ValueError(f"reported step {step.number}, which is not the one just given")
        is_whole = step_s is not None and step.kind is StepKind.VERDICT
        check_outcomes(self._problems, {} if is_whole else step.assignments, outcomes)
        if self._trial is not None:
            self._tuner.tell(self._trial, outcomes)
            self._num_measurements += 1
        self._entries.append(Entry(step=step, outcomes=dict(outcomes), step_s=step_s))
        self._asked = self._trial = None
        if step.arm is not None:
            self._take_arm(step.arm, outcomes, step_s)

    def stop_search(self) -> None:
        """Ends the search with the best so far: the budget is spent, or the user asks. A step in flight is void."""
        if self._phase is StudyPhase.SEARCH:
            self._end_search()

    def skip_verdict(self) -> None:
        """Skips the verdict, or ends it undecided, because too few rounds prove nothing. A step in flight is void."""
        self._wants_verdict = False
        if self._phase is StudyPhase.VERDICT:
            self._phase = StudyPhase.DONE
            self._asked = None

    def replay(self, entries: Iterable[Entry]) -> None:
        """Replays a journal of the same problems, tuner, seed and rounds, so that the study resumes where it ended.

        Raises:
            BundleError: if an entry is not what this study would have run.
        """
        for entry in entries:
            if entry.step.kind is StepKind.VERDICT:
                self.stop_search()
            step = self.next()
            if step is None or _essence(step) != _essence(entry.step):
                raise BundleError(
                    f"step {entry.step.number} of the journal is not what this study would run"
                    f" ({_describe(step)}, not {_describe(entry.step)}): it belongs to another job, tuner or seed"
                )
            self.report(step, entry.outcomes, step_s=entry.step_s)

    def _next_search(self) -> Step | None:
        if self._max_measurements is not None and self._num_measurements >= self._max_measurements:
            self._tuner_finished = self._tuner.ask() is None
            return None
        self._trial = self._tuner.ask()
        if self._trial is None:
            self._tuner_finished = True
            return None
        return Step(
            number=len(self._entries),
            kind=StepKind.SEARCH,
            assignments=self._trial.assignments,
            reasons=self._trial.reasons,
            priorities=self._trial.priorities,
        )

    def _end_search(self) -> None:
        self._asked = self._trial = None
        self._tuned = dict(self._tuner.recommend())
        if not self._wants_verdict:
            self._phase = StudyPhase.DONE
            return
        self._phase = StudyPhase.VERDICT
        if self._in_turns is not None:  # what is equal runs once
            results = self._in_turns.results()
            self._rivals = {}
            for name in self._in_turns.names[1:]:
                if dict(results[name]) != self._defaults and self._arm_of(results[name]) is None:
                    self._rivals[name] = dict(results[name])
        self._makespans_s = {arm: [] for arm in self._arms()}
        self._queue = [(None, SAME_ARM)] * 2

    def _begin_round(self) -> None:
        """Begins a round in a newly drawn order: that is the toss of the coin in the sequential test."""
        number = self.num_rounds
        order = [arm for arm in self._arms() if arm not in self._failures]
        words = "/".join(sorted(self._problems))
        Random(f"{self._seed}/{words}/verdict/{number}").shuffle(order)
        self._queue = [(number, arm) for arm in order]

    def _arms(self) -> list[str]:
        return [DEFAULT_ARM, TUNED_ARM, *self._rivals, *self._baselines]

    def _next_verdict(self) -> Step:
        number, arm = self._queue[0]
        assert self._tuned is not None, "a verdict without a recommendation"
        contenders = {
            SAME_ARM: self._defaults,
            DEFAULT_ARM: self._defaults,
            TUNED_ARM: self._tuned,
            **self._rivals,
            **self._baselines,
        }
        return Step(
            number=len(self._entries),
            kind=StepKind.VERDICT,
            assignments=dict(contenders[arm]),
            arm=arm,
            round=number,
        )

    def _take_arm(self, arm: str, outcomes: Mapping[str, Outcome], step_s: float | None) -> None:
        self._queue.pop(0)
        failed = next((outcome for outcome in outcomes.values() if isinstance(outcome, Failure)), None)
        if failed is None:
            makespan_s = step_s if step_s is not None else self._makespan_s(outcomes)
            (self._same_s if arm == SAME_ARM else self._makespans_s[arm]).append(makespan_s)
        else:
            self._failures[arm] = failed.reason
            is_default = arm in (DEFAULT_ARM, SAME_ARM)
            if is_default or (arm == TUNED_ARM and dict(self.recommended) == self._defaults):
                self._phase = StudyPhase.DONE
                raise BackendError(f"the untouched default cannot run in the verdict: {failed.reason}")
        if TUNED_ARM in self._failures:
            self._close_verdict()
        elif not self._queue:
            self._go_on()

    def _makespan_s(self, outcomes: Mapping[str, Outcome]) -> float:
        return sum(
            self._problems[name].group.count * outcome.makespan_s
            for name, outcome in outcomes.items()
            if isinstance(outcome, Measurement)
        )

    def _go_on(self) -> None:
        """After a pair of the default, or a round: begins another one, or ends the verdict."""
        if not self.num_rounds:
            if len(self._same_s) < 2 * SAME_PAIRS and self._same_s[-1] != self._same_s[-2]:
                self._queue = [(None, SAME_ARM)] * 2
                return
        elif self._is_decided():
            self._close_verdict()
            return
        self._begin_round()

    def _is_decided(self) -> bool:
        rivals = [arm for arm in self._rivals if arm not in self._failures]
        if any(self._judged(arm).decision is Decision.OPEN for arm in rivals):
            return False
        if self._judged(TUNED_ARM).decision is not Decision.OPEN:
            return True
        return not self._tuned_differs and (self.num_rounds >= UNCHANGED_PAIRS or bool(rivals))

    @property
    def _tuned_differs(self) -> bool:
        return dict(self.recommended) != self._defaults

    def _judged(self, arm: str) -> Judgement:
        default_s, arm_s = self._makespans_s[DEFAULT_ARM], self._makespans_s[arm]
        return judged_pairs(default_s, arm_s, same_s=self._same_pairs, most_pairs=self._num_pairs)

    @property
    def _same_pairs(self) -> tuple[tuple[float, float], ...]:
        return tuple(zip(self._same_s[::2], self._same_s[1::2], strict=True))

    def _close_verdict(self) -> None:
        self._phase = StudyPhase.DONE
        self._verdict = judge(
            {arm: tuple(times) for arm, times in self._makespans_s.items()},
            tuned_differs=self._tuned_differs,
            failures=self._failures,
            same_s=self._same_pairs,
            most_pairs=self._num_pairs,
        )


def _baselines(problems: Problems) -> dict[str, dict[str, Assignment]]:
    """The union of the problems' baselines by name, each with an assignment for every group."""
    names = dict.fromkeys(name for problem in problems for name in problem.baselines)
    if reserved := names.keys() & {DEFAULT_ARM, TUNED_ARM}:
        raise ValueError(f"baselines are named {sorted(reserved)}, which are the verdict's own arms")
    return {
        name: {problem.group.name: problem.baselines.get(name, problem.default) for problem in problems}
        for name in names
    }


def _essence(step: Step) -> tuple[object, ...]:
    """What a step runs, without its reasons, whose wording may change between versions."""
    return step.number, step.kind, step.arm, step.round, dict(step.assignments)


def _describe(step: Step | None) -> str:
    if step is None:
        return "nothing"
    return f"{step.kind} step {step.number}" + ("" if step.arm is None else f" of {step.arm!r}")
