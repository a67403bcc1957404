"""Rank 0's decisions, as a state machine, all of it in one place: reports of a window in, the next one's plan out.

    RECORD --(ranks agree on steps and calls)--> SEARCH --(tuner done or budget)--> VERDICT --> WATCH or DONE
    any   --(sequences or step numbers differ)--> FROZEN --(they agree again)--> RECORD
    RECORD --(saved settings)--> CHECK --(faster than the default)--> WATCH, else RECORD
    WATCH --(now and then, see `check`)--> CHECK --(not slower than the default)--> WATCH, else as after a drift
    WATCH --(drift, or another step)--> RECORD, at most `max_rearms` times
    any   --(a rank wants to stop)--> OFF

A trial is two windows under one setting: a short one, whose one measured step decides whether it is abandoned, then one
that measures. Measured steps guide the search and nothing else: the verdict's windows, default and tuned in the study's
shuffled rounds, are judged by their whole steps, in which nothing of ours runs; unless tuned is faster there, the
default comes back. Pure: no clock, file, store or torch; the same reports give the same plans.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean
from typing import Final

from lagom_overlap.backends.bundle import header_line
from lagom_overlap.collective.sites import RoleCycle, SiteSetting
from lagom_overlap.errors import BundleError
from lagom_overlap.online.journal import entries_of, whole_lines
from lagom_overlap.online.options import OnlineOptions
from lagom_overlap.online.payback import Payback
from lagom_overlap.online.problems import JobProblems, job_problems
from lagom_overlap.online.program import StepProgram
from lagom_overlap.online.ranks.check import Arm, Check
from lagom_overlap.online.ranks.messages import SETTLED, UNLIKE, Report, SwitchState, WindowPlan
from lagom_overlap.online.slow_phases import SlowPhases
from lagom_overlap.online.warm import earlier_search, warm_start
from lagom_overlap.online.watcher import Watcher
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.journal import Entry, Step, StepKind, entry_to_json
from lagom_overlap.tuners.problem import Assignment, Failure, Measurement, Outcome
from lagom_overlap.tuners.sequential import LEAST_PAIRS
from lagom_overlap.tuners.study import Study, StudyPhase
from lagom_overlap.tuners.verdict import DEFAULT_ARM, SAME_ARM
from lagom_overlap.tuners.warm_start import Earlier, WarmStart
from lagom_overlap.units import format_seconds

_log = logging.getLogger(__name__)

PROBATION_STEPS: Final = 3
"""One step to settle, one measured, one while the reports travel."""
MAX_VOID: Final = 20
"""Windows in a row whose times meant nothing, after which the tuner waits in long windows."""
MIN_VARIED: Final = 3
"""Windows in which calls had other sizes, before sizes are taken by classes."""
FROZEN_STEPS: Final = 50
"""Length of a window while ranks disagree, or nothing can be measured."""
MAX_FREEZES: Final = 20
"""As many times, and the tuner gives up for good."""
WATCHED_STEPS: Final = 4
"""The last steps of a long window: all but the very last are measured."""
WATCHED_WINDOWS: Final = 8
"""Once settled, one window in this many is measured like that, or fewer; in the others steps are only timed."""
MEASURING_SHARE: Final = 0.001
"""Of a settled job's time, what measuring may take; half of what all of ours may."""
MEASURING_S: Final = 25e-6
"""As much it may take of each step, however short."""
AGREEING_S: Final = 5e-4
"""Of a rank's processor, what a settled window's report and plan take, about: 460 us where they were measured."""
AGREEING_SHARE: Final = 0.0005
"""Of a settled job's time, what they may take; a window has more steps where steps are short."""
AGREEING_LEAST_S: Final = 5e-6
"""As much they may take of each step, however short."""
MOST_LENGTHENED: Final = 4
"""A settled window has at most so many times the steps that were asked for: a job is not left alone for long."""

StudyFactory = Callable[[Problems, WarmStart | None], Study]


@dataclass(slots=True)
class _Trial:
    """The study's step under way."""

    step: Step
    is_probation: bool


class Leader:
    """Tunes one job; `steps_apart` as in `WindowPlan`.

    `started` are settings that were found before, by classes of sizes `size_octaves` wide, in a job of these `cycles`:
    they take the place of a search if the job has all of their sites and is faster with them. A search that comes all
    the same may begin with them, as it may with what an earlier one measured (`warm`).
    """

    def __init__(
        self,
        options: OnlineOptions,
        make_study: StudyFactory,
        *,
        num_ranks: int,
        route_name: str,
        started: tuple[SiteSetting, ...] = (),
        cycles: tuple[RoleCycle, ...] = (),
        size_octaves: int = 0,
        steps_apart: int = 1,
        has_one_clock: bool = True,
    ) -> None:
        self._options = options
        self._make_study = make_study
        self._num_ranks = num_ranks
        self._route_name = route_name
        self._started = self._saved = started
        self._cycles = cycles
        self._searched: tuple[Earlier, ...] = ()
        self._octaves = size_octaves
        self._varied: list[int] = []
        self._num_alike = 0
        self._steps_apart = steps_apart
        self._window = 0
        self._epoch = 0
        self._settings: tuple[SiteSetting, ...] = ()
        self._adopted: tuple[SiteSetting, ...] = ()
        self._state = SwitchState.RECORD
        self._reason = ""
        self._plan: WindowPlan | None = None
        self._job: JobProblems | None = None
        self._shapes: int | None = None
        self._study: Study | None = None
        self._assignments: dict[str, Assignment] = {}
        self._trial: _Trial | None = None
        self._base: dict[str, float] = {}
        self._payback = Payback(
            steps_per_pair=2 * len(_timed([0.0] * (options.window_steps - 1))), has_one_clock=has_one_clock
        )
        self._found_journal = ""
        self._journal: list[str] = []
        self._journal_is_new = False
        self._num_void = 0
        self._num_drifted = 0
        self._num_rearms = 0
        self._num_freezes = 0
        self._num_watched = self._next_watched = 0
        self._watched_steps = options.watch_steps
        self._exchange_s = 0.0
        self._watcher: Watcher | None = None
        self._check: Check | None = None
        self._checked: tuple[SiteSetting, ...] = ()
        self._num_settled = self._num_checked = 0
        """Steps under settled settings, and steps of checks that these pay for."""
        self._is_extra = False
        self._may_check_extra = True
        self._is_overturned = False
        self._slow_phases = SlowPhases()
        self._settled_by = ""

    @property
    def plan(self) -> WindowPlan | None:
        """The last plan given."""
        return self._plan

    @property
    def study(self) -> Study | None:
        """The study under way or done, if one began."""
        return self._study

    def first(self) -> WindowPlan:
        """The plan of the first window: record the untouched job, for only a job that ran shows what can be set."""
        return self._record("the job as it is, untouched")

    def offer_journal(self, text: str) -> None:
        """A journal that some rank found, to go on with if it is of this job."""
        self._found_journal = text

    def next(self, report: Report, programs: Mapping[str, StepProgram], now_s: float) -> WindowPlan:
        """The plan after a window that all ranks report; `programs` holds every program that the report names."""
        assert self._plan is not None, "next before first"
        self._payback.took(self._plan, report, now_s)
        if self._state is SwitchState.WATCH:
            self._num_settled += self._plan.num_steps if self._settings else 0
            self._lengthen(report)
            self._space_out(self._plan, report)
        self._exchange_s = report.exchange_s
        if report.stop:
            return self._off(report.stop)
        if report.disagreement:
            return self._freeze(report.disagreement)
        if report.balance and not report.void:
            return self._freeze("ranks made different calls on a communicator")
        if report.hold:
            return self._held(report.hold)
        if self._sizes_vary(report):
            return self._record(f"the sizes of its calls vary: sizes within {self._octaves} octaves are taken as one")
        match self._state:
            case SwitchState.WATCH:
                return self._watched(report)
            case SwitchState.CHECK:
                return self._window_checked(report)
            case _ if report.void:
                return self._again(report.void, report)
            case SwitchState.VERDICT:
                return self._round_ran(report)
            case _:
                return self._measured_window(report, programs)

    def _held(self, reason: str) -> WindowPlan:
        """The same once more, whatever the window told: nothing is switched now."""
        assert self._plan is not None, "nothing to hold"
        if self._state in (SwitchState.RECORD, SwitchState.FROZEN):
            return self._again(reason)
        return self._give(self._state, self._reason, self._plan.num_steps, self._plan.first_measured)

    def _sizes_vary(self, report: Report) -> bool:
        """Whether the job cannot be told from step to step by its calls' sizes, but by wider classes of them.

        That is so once most windows are void for that reason, three at least: a step now and then that is not like the
        others, of an evaluation say, is measured again, and finer classes find more.
        """
        if self._state not in (SwitchState.RECORD, SwitchState.SEARCH, SwitchState.FROZEN) or report.octaves < 0:
            return False
        if report.octaves <= self._octaves:
            self._num_alike += 1
            return False
        self._varied.append(report.octaves)
        widths = [width for width in self._varied if width != UNLIKE]
        if len(widths) < MIN_VARIED or 2 * len(widths) <= len(self._varied) + self._num_alike:
            return False
        self._octaves, self._varied, self._num_alike, self._num_void = max(widths), [], 0, 0
        if self._started or self._saved:
            _log.warning("the saved settings are for classes of sizes that this job leaves: searching instead")
        self._started, self._saved, self._searched = (), (), ()
        return True

    def _measured_window(self, report: Report, programs: Mapping[str, StepProgram]) -> WindowPlan:
        """The plan after a window in which the collectives themselves were to be measured."""
        if not report.programs:
            return self._again("no step was measured")
        match self._state:
            case SwitchState.RECORD:
                return self._recorded(report, programs)
            case SwitchState.FROZEN:
                return self._record("the ranks agree again")
            case _ if report.shapes != self._shapes:
                return self._again("the step's calls changed")
            case _:
                return self._measured(report)

    # What is run next. ------------------------------------------------------------------------------------------------

    def _give(self, state: SwitchState, reason: str, num_steps: int, first_measured: int) -> WindowPlan:
        self._state, self._reason = state, reason
        plan = WindowPlan(
            window=self._window,
            state=state,
            reason=reason,
            num_steps=num_steps,
            first_measured=first_measured,
            steps_apart=self._steps_apart,
            epoch=self._epoch,
            settings=self._settings if self._plan is None or self._plan.epoch != self._epoch else (),
            cycles=self._cycles if self._plan is None else (),
            size_octaves=self._octaves,
            is_adopted=bool(self._adopted) and state in SETTLED and self._settings == self._adopted,
            is_overturned=self._is_overturned,
            journal=tuple(self._journal),
            journal_is_new=self._journal_is_new,
        )
        self._window += 1
        self._journal, self._journal_is_new, self._is_overturned = [], False, False
        self._plan = plan
        return plan

    def _set(self, settings: tuple[SiteSetting, ...]) -> bool:
        """Makes the settings those of the next plan; False if they are in force already."""
        if settings == self._settings:
            return False
        self._settings, self._epoch = settings, self._epoch + 1
        return True

    def _record(self, reason: str) -> WindowPlan:
        self._set(())
        self._remember()
        self._trial = self._study = self._job = self._check = None
        return self._give(SwitchState.RECORD, reason, self._options.window_steps, 1)

    def _freeze(self, reason: str) -> WindowPlan:
        _log.warning("online tuning is frozen, everything runs untouched: %s", reason)
        self._set(())
        self._remember()
        self._trial = self._study = self._check = None
        self._num_freezes += 1
        if self._num_freezes > MAX_FREEZES:
            return self._give(SwitchState.DONE, f"given up, everything runs untouched: {reason}", 1, 0)
        return self._give(SwitchState.FROZEN, reason, FROZEN_STEPS, FROZEN_STEPS - WATCHED_STEPS)

    def _remember(self) -> None:
        """What the search saw, before it is dropped."""
        if self._study is not None and self._job is not None:
            self._searched = earlier_search(self._job, self._study)

    def _again(self, reason: str, report: Report | None = None) -> WindowPlan:
        """The same window once more; after many, in long windows, untouched until something can be measured."""
        assert self._plan is not None, "nothing to repeat"
        self._num_void += 1
        if self._started and self._state is SwitchState.RECORD and self._num_void > MAX_VOID:
            return self._begin_with(self._started, report, f"started with saved settings, unchecked: {reason}")
        if self._num_void > MAX_VOID or self._state is SwitchState.FROZEN:
            return self._freeze(reason)
        return self._give(self._state, reason, self._plan.num_steps, self._plan.first_measured)

    def _watch(self, settings: tuple[SiteSetting, ...], reason: str) -> WindowPlan:
        self._set(settings)
        self._trial = self._check = None
        self._settled_by, self._num_watched, self._next_watched = reason, 0, 0
        return self._watch_on()

    def _watch_on(self) -> WindowPlan:
        """From here on, by the times to come."""
        self._num_drifted = 0
        self._watcher = Watcher(self._options.drift_ratio, self._options.drift_steps, self._slow_phases)
        if not self._options.watch_steps:
            return self._give(SwitchState.DONE, self._settled_by, 1, 0)
        return self._still_watching()

    def _still_watching(self) -> WindowPlan:
        """A window whose steps are only timed; in every `WATCHED_WINDOWS`-th at most the calls are measured as well."""
        steps = first_measured = self._watched_steps
        if self._num_watched >= self._next_watched:
            first_measured = max(0, steps - WATCHED_STEPS)
            self._next_watched = self._num_watched + WATCHED_WINDOWS
        self._num_watched += 1
        reason = "; ".join(filter(None, (self._settled_by, self._slow_phases.words())))
        return self._give(SwitchState.WATCH, reason, steps, first_measured)

    def _lengthen(self, report: Report) -> None:
        """As many steps in the windows to come as their agreement is worth."""
        if timed := _timed(report.steps_s):
            least = self._options.watch_steps
            each_s = max(AGREEING_SHARE * fmean(timed), AGREEING_LEAST_S)
            self._watched_steps = min(max(least, ceil(AGREEING_S / each_s)), MOST_LENGTHENED * least)

    def _space_out(self, plan: WindowPlan, report: Report) -> None:
        """After a measured window as many that are not as its cost is worth: PyTorch's profiler takes seconds."""
        timed = _timed(report.steps_s)
        if timed and any(plan.measures(step) for step in range(plan.num_steps)):
            each_s = max(MEASURING_SHARE * fmean(timed), MEASURING_S)
            num_windows = ceil((report.exchange_s - self._exchange_s) / (each_s * plan.num_steps))
            self._next_watched = max(self._next_watched, self._num_watched - 1 + num_windows)

    def _off(self, reason: str) -> WindowPlan:
        self._set(())
        return self._give(SwitchState.OFF, reason, 1, 0)

    # What a window told. ----------------------------------------------------------------------------------------------

    def _recorded(self, report: Report, programs: Mapping[str, StepProgram]) -> WindowPlan:
        self._num_void = 0
        self._shapes = report.shapes
        self._job = job = job_problems(programs[name] for name in report.programs)
        self._payback.arm(report, report.step_s)
        if started := self._started:
            sites = {site for name in report.programs for site in programs[name].sites_that_can_be_set}
            lacking = [setting.site for setting in started if setting.site not in sites]
            if not lacking:
                return self._begin_with(started, report, "started with saved settings")
            self._started = ()
            words = "the saved settings are of another job (%d of %d sites are not in this one): searching instead"
            _log.warning(words, len(lacking), len(started))
        if not job.groups:
            return self._watch((), "nothing to tune: no setting reaches a collective of this job")
        self._study = self._new_study(job)
        if self._verdict_steps() > self._options.max_steps:
            budget = f"max_steps is {self._options.max_steps}, the verdict alone takes {self._verdict_steps()} steps"
            return self._watch((), f"the budget is too small: {budget}")
        self._take_up_journal(job, self._study)
        self._assignments = job.default
        # A rank's groups are measured from the next window on; the first trial of a guarded tuner is the default.
        self._base = {}
        return self._next_trial()

    def _new_study(self, job: JobProblems) -> Study:
        return self._make_study(job.problems, warm_start(job, self._searched, self._saved))

    def _begin_with(self, settings: tuple[SiteSetting, ...], report: Report | None, trusted: str) -> WindowPlan:
        """In place of a search, once: after a drift the job is searched, and not by a journal of before."""
        self._found_journal = ""
        if not self._options.check_share:
            self._started = ()
            return self._watch(settings, trusted)
        timed = () if report is None else _timed(report.steps_s)
        return self._begin_check(settings, fmean(timed) if timed else 0.0, is_start=True)

    def _take_up_journal(self, job: JobProblems, study: Study) -> None:
        options = self._options
        how = self._num_ranks, options.tuner, options.tuner_options, options.seed, options.num_pairs
        name = job.fingerprint(*how, *([self._octaves] if self._octaves else ()))
        # Ranks whose journals are one file on a shared disk have written every line several times.
        lines, self._found_journal = list(dict.fromkeys(whole_lines(self._found_journal))), ""
        kept: Sequence[Entry] = ()
        try:
            kept = entries_of(lines, job.problems, name)
            study.replay(kept)
            if kept:
                _log.info("the journal holds %d measured settings of this job: going on behind them", len(kept))
        except BundleError as error:
            _log.warning("starting anew: %s", error)
            kept = ()
            self._study = self._new_study(job)
        header = header_line(name, f"online-{self._route_name}", job.problems, description="a running job")
        self._journal = [header, *(entry_to_json(entry, job.problems) for entry in kept)]
        self._journal_is_new = True

    def _measured(self, report: Report) -> WindowPlan:
        assert self._trial is not None, "measured without a trial"
        assert self._study is not None, "measured without a study"
        assert self._job is not None, "measured without a job"
        step, measured = (
            self._trial.step,
            {name: report.times[name] for name in self._job.groups if name in report.times},
        )
        outcomes: dict[str, Outcome] = {name: outcome for name, outcome in measured.items() if name in step.assignments}
        if missing := step.assignments.keys() - outcomes.keys():
            return self._again(f"no rank measured {min(missing)!r}")
        self._num_void = 0
        step_s = report.step_s
        if self._trial.is_probation:
            too_slow = step_s > self._options.max_slowdown * self._payback.base_s
            if not too_slow:
                self._trial.is_probation = False
                return self._give(self._state, self._reason, self._options.window_steps - 1, 0)
            outcomes |= self._abandoned(outcomes, step_s)
        elif dict(step.assignments) == self._job.default:
            self._base = {name: outcome.makespan_s for name, outcome in measured.items()}
            self._payback.saw_default(step_s)
        self._keep(Entry(step=step, outcomes=outcomes))
        return self._next_trial()

    def _round_ran(self, report: Report) -> WindowPlan:
        """A window of the verdict: its whole steps, as long as the slowest rank took for them."""
        assert self._trial is not None, "a verdict without a step"
        timed = _timed(report.steps_s)
        if not timed or min(timed) <= 0:
            return self._again("no step was timed")
        self._num_void = 0
        step = self._trial.step
        if step.arm in (DEFAULT_ARM, SAME_ARM):
            self._payback.saw_default(fmean(timed))
        self._keep(Entry(step=step, outcomes={}, step_s=fmean(timed)))
        return self._next_trial()

    def _keep(self, entry: Entry) -> None:
        """Tells the study, and the journal."""
        assert self._study is not None, "an entry without a study"
        assert self._job is not None, "an entry without a job"
        self._study.report(entry.step, entry.outcomes, step_s=entry.step_s)
        self._journal.append(entry_to_json(entry, self._job.problems))

    def _abandoned(self, outcomes: Mapping[str, Outcome], step_s: float) -> dict[str, Outcome]:
        """The groups to blame for a step that took too long: those too slow themselves, else the worst."""
        ratios = {
            name: outcome.makespan_s / self._base[name]
            for name, outcome in outcomes.items()
            if not isinstance(outcome, Failure) and self._base.get(name)
        }
        slow = [name for name, ratio in ratios.items() if ratio > self._options.max_slowdown]
        blamed = slow or ([max(ratios, key=ratios.__getitem__)] if ratios else list(outcomes))
        took = f"{format_seconds(step_s)}, the default takes {format_seconds(self._payback.base_s)}"
        reason = f"abandoned after one step: the step took {took}"
        read = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Measurement)}
        return {name: Failure(reason, read.get(name)) for name in blamed}

    def _next_trial(self) -> WindowPlan:
        assert self._study is not None, "a trial without a study"
        assert self._job is not None, "a trial without a job"
        study, options = self._study, self._options
        if study.phase is StudyPhase.SEARCH:
            rest = self._verdict_steps()
            out_of_steps = self._payback.num_steps + rest + 2 * options.window_steps > options.max_steps
            if out_of_steps or self._payback.elapsed_s + rest * self._payback.base_s > options.max_seconds:
                study.stop_search()
        step = study.next()
        if step is None:
            return self._settle(study)
        self._assignments |= step.assignments
        self._set(self._job.settings(self._assignments))
        is_search = step.kind is StepKind.SEARCH
        state = SwitchState.SEARCH if is_search else SwitchState.VERDICT
        is_default = dict(self._assignments) == self._job.default
        self._trial = _Trial(step, is_probation=is_search and not is_default)
        where = "" if step.round is None else f" in round {step.round + 1}"
        reason = next(iter(step.reasons.values()), f"{step.arm}{where}")
        if self._trial.is_probation:
            return self._give(state, reason, PROBATION_STEPS, 1)
        # Whole steps judge: none of them is measured.
        return self._give(state, reason, options.window_steps, 1 if is_search else options.window_steps)

    def _settle(self, study: Study) -> WindowPlan:
        assert self._job is not None, "settled without a job"
        verdict = study.verdict
        is_adopted = verdict is not None and verdict.adopted
        self._adopted = self._job.settings(study.chosen) if is_adopted else ()
        return self._watch(self._adopted, self._payback.sentence(verdict))

    def _verdict_steps(self) -> int:
        """Training steps of the verdict."""
        assert self._study is not None, "no study"
        return self._study.num_verdict_steps * self._options.window_steps

    def _watched(self, report: Report) -> WindowPlan:
        assert self._watcher is not None, "watched without a watcher"
        if report.programs and not report.void:  # a void window says nothing of the calls
            self._shapes = report.shapes if self._shapes is None else self._shapes
            if report.shapes != self._shapes:
                return self._drifted("the step's calls changed")
            self._num_drifted = 0
        if changed := self._watcher.see(report.steps_s):
            return self._rearm(changed)
        if not self._settings:
            return self._still_watching()
        if self._check is not None:
            return self._next_check(self._check)
        # As many rounds as settle a clear case are saved up for, so that such settings leave at once.
        return self._begin_check(self._settings, 0.0) if self._can_pay(1 + LEAST_PAIRS) else self._still_watching()

    # Checks. ----------------------------------------------------------------------------------------------------------

    def _can_pay(self, num_rounds: int) -> bool:
        """Whether checks with so many more rounds are no more than their share of the settled steps so far."""
        num_steps = num_rounds * len(Arm) * self._options.window_steps
        return self._num_checked + num_steps <= self._options.check_share * self._num_settled

    def _begin_check(
        self, settings: tuple[SiteSetting, ...], default_s: float, *, is_start: bool = False, is_extra: bool = False
    ) -> WindowPlan:
        """`is_extra`: not out of `check_share`; so is a check at the start."""
        options = self._options
        self._checked, self._is_extra = settings, is_start or is_extra
        self._check = Check(
            num_pairs=options.num_pairs,
            seed=f"{options.seed}/{self._window}",
            max_slowdown=options.max_slowdown,
            default_s=default_s,
            is_start=is_start,
        )
        return self._next_check(self._check)

    def _next_check(self, check: Check) -> WindowPlan:
        """The check's next window; between two rounds it waits until the next one is paid for."""
        self._num_void = 0
        if check.is_between_rounds and not (self._is_extra or self._can_pay(1)):
            self._set(self._checked)
            return self._still_watching()
        self._set(self._checked if check.next_arm is Arm.TUNED else ())
        steps = PROBATION_STEPS if check.is_probation else self._options.window_steps
        self._num_checked += 0 if self._is_extra else steps
        what = "saved settings" if check.is_start else "what is set"
        reason = f"{what} against the default: {check.words}"
        return self._give(SwitchState.CHECK, reason, steps, steps)

    def _window_checked(self, report: Report) -> WindowPlan:
        check = self._check
        assert check is not None, "a check without one"
        timed = _timed(report.steps_s)
        if report.void or not timed or min(timed) <= 0:
            if check.is_start:
                return self._again(report.void or "no step was timed")
            self._check = None
            self._set(self._checked)  # there will be a better moment
            return self._still_watching()
        check.report(fmean(timed))
        if not check.is_over:
            return self._next_check(check)
        return self._kept(check) if check.is_kept else self._lost(check)

    def _kept(self, check: Check) -> WindowPlan:
        self._adopted, self._started, self._check = self._checked, (), None
        if check.is_start:
            return self._watch(self._checked, f"started with saved settings, which are faster here ({check.words})")
        self._set(self._checked)
        return self._still_watching()

    def _lost(self, check: Check) -> WindowPlan:
        self._adopted = self._started = ()
        self._check, self._is_overturned = None, True
        lost = "the saved settings are not faster" if check.is_start else "the settings are slower"
        reason = f"{lost} than the default here ({check.words})"
        _log.warning("%s: the default comes back", reason)
        if check.is_start:
            return self._record(f"{reason}: searching instead")
        self._set(())
        self._reason = self._settled_by
        return self._rearm(reason)

    def _drifted(self, reason: str) -> WindowPlan:
        self._num_drifted += 1
        return self._still_watching() if self._num_drifted < self._options.drift_windows else self._rearm(reason)

    def _rearm(self, reason: str) -> WindowPlan:
        """Tunes again, if that is still allowed."""
        if self._num_rearms >= self._options.max_rearms:
            if self._settings and self._options.check_share:
                return self._watched_on(reason)
            return self._give(SwitchState.DONE, f"{self._reason}; it has changed since ({reason})", 1, 0)
        self._num_rearms += 1
        _log.info("tuning again: %s", reason)
        return self._record(reason)

    def _watched_on(self, reason: str) -> WindowPlan:
        """Nothing is searched any more; what is set is checked instead, the first time whatever has been saved up."""
        _log.info("%s; it was tuned again %d times, the most that is allowed", reason, self._num_rearms)
        self._shapes = None
        if not (self._may_check_extra or self._can_pay(1 + LEAST_PAIRS)):
            return self._watch_on()
        is_extra, self._may_check_extra = self._may_check_extra, False
        return self._begin_check(self._settings, 0.0, is_extra=is_extra)


def _timed(steps_s: Sequence[float]) -> Sequence[float]:
    """The steps of a window that count: the first one settles, and the last one is not reported."""
    return steps_s[1:] or steps_s
