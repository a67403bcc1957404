"""One search of a recorded job: trials, then the rounds of the verdict, as windows of rank 0's plans.

A trial is two windows under one setting: a short one whose single measured step decides whether the trial is abandoned,
then one that measures. Measured steps guide the search and nothing else. The verdict's windows, default and tuned in
the study's shuffled rounds, are judged by whole steps in which nothing of ours runs; unless tuned is faster there, the
default comes back. Pure, like all decisions of rank 0.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

from lagom_overlap.collective import CommConfig, LaunchScope, LaunchSpace
from lagom_overlap.collective.sites import SiteSetting
from lagom_overlap.errors import BundleError
from lagom_overlap.online.journal import whole_lines
from lagom_overlap.online.options import OnlineOptions
from lagom_overlap.online.payback import Payback
from lagom_overlap.online.problems import JobProblems
from lagom_overlap.online.ranks.messages import Report, SwitchState, WindowPlan, steps_that_count
from lagom_overlap.online.ranks.plans import PROBATION_STEPS, Plans
from lagom_overlap.results.contest import ContestResult, TunerResult
from lagom_overlap.tuners.base import Problems, Tuner
from lagom_overlap.tuners.bundle import header_line, parse_header
from lagom_overlap.tuners.guard import make_tuner
from lagom_overlap.tuners.in_turns import InTurns
from lagom_overlap.tuners.journal import Entry, Step, StepKind, entries_from_json, entry_to_json
from lagom_overlap.tuners.problem import Assignment, Failure, Measurement, Outcome, most_verdict_steps
from lagom_overlap.tuners.readings import exposed_s, is_exposed
from lagom_overlap.tuners.registry import asks_job_length, takes_warm_start
from lagom_overlap.tuners.study import Study, StudyPhase
from lagom_overlap.tuners.verdict import DEFAULT_ARM, SAME_ARM
from lagom_overlap.tuners.warm_start import WarmStart
from lagom_overlap.units import format_percent, format_seconds

_log = logging.getLogger(__name__)

StudyFactory = Callable[[Problems, WarmStart | None, int], Study]
"""Makes the study of a job that makes so many more steps, 0 if that is unknown."""


@dataclass(slots=True)
class _Trial:
    """The study's step under way."""

    step: Step
    is_probation: bool


class Search:
    """A study of `job`, begun by `warm`, whose steps are windows that `plans` writes; `payback` counts what it costs.

    `steps_left` are the steps that the job still makes, 0 if that is unknown.
    Its first trial is the default, and measures what the groups take untouched.
    """

    def __init__(
        self,
        job: JobProblems,
        *,
        plans: Plans,
        options: OnlineOptions,
        payback: Payback,
        make_study: StudyFactory,
        warm: WarmStart | None,
        steps_left: int = 0,
    ) -> None:
        self._plans: Final = plans
        self._options: Final = options
        self._payback: Final = payback
        self._new_study: Final[Callable[[], Study]] = lambda: make_study(job.problems, warm, steps_left)
        self.job: Final = job
        self.study = self._new_study()
        self._assignments: dict[str, Assignment] = job.default
        self._trial: _Trial | None = None
        self._default_s: dict[str, float] = {}
        """What each group took under the default."""

    @property
    def num_verdict_steps(self) -> int:
        """Training steps of the verdict."""
        return self.study.num_verdict_steps * self._options.window_steps

    @property
    def num_steps_left(self) -> int:
        """The most training steps until the verdict is over: what `max_steps` leaves, in the verdict its rounds."""
        study, options = self.study, self._options
        if study.phase is StudyPhase.SEARCH:
            return max(options.most_steps - self._payback.num_steps, self.num_verdict_steps)
        ran = sum(entry.step.kind is StepKind.VERDICT for entry in study.entries)
        return max(0, study.num_verdict_steps - ran) * options.window_steps

    def take_up_journal(self, text: str, name: str, route_name: str) -> None:
        """Resumes from a journal that some rank read, if it is of the job of this name; begins the ranks' journals."""
        # Ranks whose journals are one file on a shared disk have written every line several times.
        lines = list(dict.fromkeys(whole_lines(text)))
        kept: Sequence[Entry] = ()
        try:
            kept = _entries_of(lines, self.job.problems, name)
            self.study.replay(kept)
            if kept:
                _log.info("resuming from the journal: it holds %d measured settings of this job", len(kept))
        except BundleError as error:
            _log.warning("starting anew: %s", error)
            kept = ()
            self.study = self._new_study()
        header = header_line(name, f"online-{route_name}", self.job.problems, description="a running job")
        self._plans.begin_journal([header, *(entry_to_json(entry, self.job.problems) for entry in kept)])

    def next_trial(self) -> WindowPlan | None:
        """The next window; None once the study is over."""
        study, options = self.study, self._options
        if study.phase is StudyPhase.SEARCH:
            rest = self.num_verdict_steps
            out_of_steps = self._payback.num_steps + rest + 2 * options.window_steps > options.most_steps
            if out_of_steps or self._payback.elapsed_s + rest * self._payback.base_s > options.most_seconds:
                study.stop_search()
        step = study.next()
        if step is not None and step.kind is StepKind.VERDICT and self._ends_with_the_default:
            study.skip_verdict()
            step = None
        if step is None:
            return None
        self._assignments |= step.assignments
        self._plans.set(self.job.settings(self._assignments))
        is_search = step.kind is StepKind.SEARCH
        state = SwitchState.SEARCH if is_search else SwitchState.VERDICT
        is_default = dict(self._assignments) == self.job.default
        self._trial = _Trial(step, is_probation=is_search and not is_default)
        where = "" if step.round is None else f" in round {step.round + 1}"
        arm = "measuring noise" if step.arm == SAME_ARM else f"{step.arm}{where}"
        reason = _reason(step) or arm
        if self._trial.is_probation:
            return self._plans.give(state, reason, PROBATION_STEPS, 1)
        # Whole steps judge: none of them is measured.
        return self._plans.give(state, reason, options.window_steps, 1 if is_search else options.window_steps)

    @property
    def _ends_with_the_default(self) -> bool:
        """Whether a verdict would only compare the untouched job with itself."""
        return not self._options.compare and dict(self.study.recommended) == self.job.default

    def why_void(self, report: Report) -> str:
        """Why the window of a trial or of the verdict has to be repeated; empty if it is complete."""
        if self._plans.state is SwitchState.VERDICT:
            timed = steps_that_count(report.steps_s)
            return "" if timed and min(timed) > 0 else "no step was timed"
        missing = self._under_way.step.assignments.keys() - report.times.keys()
        return f"no rank measured {min(missing)!r}" if missing else ""

    def measured(self, report: Report) -> WindowPlan | None:
        """After a window of a trial: the next one; None once the study is over."""
        trial = self._under_way
        step, step_s = trial.step, report.step_s
        measured = {name: report.times[name] for name in self.job.groups if name in report.times}
        outcomes: dict[str, Outcome] = {name: outcome for name, outcome in measured.items() if name in step.assignments}
        if trial.is_probation:
            if step_s <= self._options.max_slowdown * self._payback.base_s:
                trial.is_probation = False
                return self._plans.give(self._plans.state, self._plans.reason, self._options.window_steps - 1, 0)
            outcomes |= self._abandoned(outcomes, step_s)
        elif dict(step.assignments) == self.job.default:
            self._default_s = {name: outcome.makespan_s for name, outcome in measured.items()}
            self._payback.saw_default(step_s)
        self._keep(Entry(step=step, outcomes=outcomes))
        return self.next_trial()

    def round_ran(self, report: Report) -> WindowPlan | None:
        """After a window of the verdict: its whole steps count, as long as the slowest rank took for them."""
        step, step_s = self._under_way.step, fmean(steps_that_count(report.steps_s))
        if step.arm in (DEFAULT_ARM, SAME_ARM):
            self._payback.saw_default(step_s)
        self._keep(Entry(step=step, outcomes={}, step_s=step_s))
        return self.next_trial()

    def outcome(self) -> tuple[tuple[SiteSetting, ...], str]:
        """What the verdict adopts, and its words."""
        verdict = self.study.verdict
        is_adopted = verdict is not None and verdict.adopted
        if any(map(self._is_of_settings, self.study.entries)):
            sentence = self._payback.sentence(verdict)
        else:
            sentence = self._payback.sentence(verdict, why_none=f"no setting was tried{self._why_none_was_tried()}")
        return self.job.settings(self.study.chosen) if is_adopted else (), sentence

    def _why_none_was_tried(self) -> str:
        """Empty where the untouched job waits for its communication, too, or could not be measured."""
        if not self.study.entries:
            return ", because its budget leaves no steps for one"
        outcomes = [outcome for entry in self.study.entries for outcome in entry.outcomes.values()]
        measured = [outcome for outcome in outcomes if isinstance(outcome, Measurement)]
        if not measured or any(map(is_exposed, measured)):
            return ""
        share = sum(map(exposed_s, measured)) / sum(outcome.makespan_s for outcome in measured)
        return f", because computation hides the communication: a step waits for it {format_percent(share)} of its time"

    def contest(self) -> ContestResult | None:
        """Each of several tuners against the default, once all is over; None where there is one tuner."""
        contenders = self.study.contenders
        if not contenders:
            return None
        searches = [entry for entry in self.study.entries if entry.step.kind is StepKind.SEARCH]
        rows, at = [], 0
        for each in contenders:
            own, at = searches[at : at + each.num_measurements], at + each.num_measurements
            changed = {n: a for n, a in each.assignments.items() if a != self.job.default[n]}
            rows.append(
                TunerResult(
                    name=each.name,
                    settings={name: self._configs(name, assignment) for name, assignment in changed.items()},
                    judgement=each.judgement,
                    num_measurements=each.num_measurements,
                    num_steps=sum(map(self._num_steps_of, own)),
                    failed=each.failed,
                )
            )
        adopted = self.study.verdict is not None and self.study.verdict.adopted
        return ContestResult(
            tuners=tuple(rows),
            adopted=rows[0].name if adopted else None,
            num_verdict_steps=self._options.window_steps
            * sum(entry.step.kind is StepKind.VERDICT for entry in self.study.entries),
            default_step_s=self._payback.base_s,
        )

    def _configs(self, group: str, assignment: Assignment) -> dict[str, CommConfig]:
        names = self.job.groups[group].problem.group.comm_names
        return dict(zip(names, assignment, strict=True))

    def _is_of_settings(self, entry: Entry) -> bool:
        """Whether anything but the default ran in it."""
        return any(assignment != self.job.default[name] for name, assignment in entry.step.assignments.items())

    def _num_steps_of(self, entry: Entry) -> int:
        """Steps of a trial; windows that had to be repeated are left out."""
        window = self._options.window_steps
        if not self._is_of_settings(entry):
            return window
        is_abandoned = any(isinstance(outcome, Failure) for outcome in entry.outcomes.values())
        return PROBATION_STEPS + (0 if is_abandoned else window - 1)

    @property
    def priorities(self) -> Mapping[str, Mapping[str, float]]:
        """The metric H by group and collective as the trial under way has it, of a tuner that has one."""
        trial = self._trial
        return {} if trial is None or self.study.phase is not StudyPhase.SEARCH else trial.step.priorities

    @property
    def _under_way(self) -> _Trial:
        assert self._trial is not None, "no trial is under way"
        return self._trial

    def _keep(self, entry: Entry) -> None:
        """Tells the study, and the journal."""
        self.study.report(entry.step, entry.outcomes, step_s=entry.step_s)
        self._plans.add_to_journal(entry_to_json(entry, self.job.problems))

    def _abandoned(self, outcomes: Mapping[str, Outcome], step_s: float) -> dict[str, Outcome]:
        """Failures for the groups that made a step too slow: those too slow themselves, else the slowest one."""
        ratios = {
            name: outcome.makespan_s / self._default_s[name]
            for name, outcome in outcomes.items()
            if not isinstance(outcome, Failure) and self._default_s.get(name)
        }
        slow = [name for name, ratio in ratios.items() if ratio > self._options.max_slowdown]
        blamed = slow or ([max(ratios, key=ratios.__getitem__)] if ratios else list(outcomes))
        took = f"{format_seconds(step_s)}, the default takes {format_seconds(self._payback.base_s)}"
        reason = f"abandoned after one step: the step took {took}"
        read = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Measurement)}
        return {name: Failure(reason, read.get(name)) for name in blamed}


def _reason(step: Step) -> str:
    """Why a trial runs what it runs, in one group; where a tuner has H, in two of them, since each climbs its own."""
    climbing = [reason for name, reason in step.reasons.items() if step.priorities.get(name)]
    if not climbing:
        return next(iter(step.reasons.values()), "")
    more = f"; and {len(climbing) - 2} groups more" if len(climbing) > 2 else ""
    return "; ".join(climbing[:2]) + more


def study_factory(options: OnlineOptions) -> StudyFactory:
    """The factory of the studies of the options' tuner."""
    launches = LaunchSpace(sm_carveouts=options.sm_carveouts, scope=LaunchScope.STEP)
    takes_warm = takes_warm_start(options.tuner)
    asks_length = asks_job_length(options.tuner) and "job_measurements" not in options.tuner_options

    def make(problems: Problems, warm: WarmStart | None, steps_left: int) -> Study:
        problems = tuple(replace(problem, launches=launches) for problem in problems)
        if warm is not None and takes_warm:
            _log.info("the search begins with %s", warm.source)
        tuner: Tuner = make_tuner(
            options.tuner,
            problems,
            seed=options.seed,
            options=options.tuner_options | ({"job_measurements": windows_left(steps_left)} if asks_length else {}),
            guarded=True,
            warm=warm if takes_warm else None,
        )
        if options.compare:
            rivals = {
                name: make_tuner(name, problems, seed=options.seed, options={}, guarded=False)
                for name in options.compare
            }
            searched = options.max_steps - most_verdict_steps(options.num_pairs) * options.window_steps
            most = max(1, searched // (PROBATION_STEPS + options.window_steps - 1))
            tuner = InTurns(problems, {options.tuner: tuner, **rivals}, most)
        return Study(problems, tuner, seed=options.seed, num_pairs=options.num_pairs)

    def windows_left(steps_left: int) -> int:
        """Windows from the search's first one to the job's end, without the verdict's, which gain nothing yet."""
        return max(0, steps_left // options.window_steps - most_verdict_steps(options.num_pairs))

    return make


def _entries_of(lines: Sequence[str], problems: Problems, fingerprint: str) -> tuple[Entry, ...]:
    """The entries of a journal of this very job.

    Raises:
        BundleError: if it is damaged or belongs to another job.
    """
    if not lines:
        return ()
    header = parse_header(lines[0], "the journal")
    if header.job_fingerprint != fingerprint:
        raise BundleError(
            f"the journal was written for job {header.job_fingerprint}, this is {fingerprint}: "
            "another model, number of ranks, tuner or seed, or calls that were hidden then and are exposed now"
        )
    return entries_from_json(lines[1:], problems, first_line=2)
