"""Rank 0's decisions, as a state machine: reports of a window in, the next one's plan out.

    RECORD --(ranks agree on steps and calls)--> SEARCH --(tuner done or budget)--> VERDICT --> WATCH or DONE
    any   --(sequences or step numbers differ)--> FROZEN --(they agree again)--> RECORD
    RECORD --(saved settings)--> CHECK --(faster than the default)--> WATCH, else RECORD
    WATCH --(now and then, see `check`)--> CHECK --(not slower than the default)--> WATCH, else as after a drift
    WATCH --(drift, or another step)--> RECORD, at most `max_rearms` times
    any   --(a rank wants to stop)--> OFF

`search` has the trials and verdicts, `watch` the settled settings. This module checks what both rely on: that the ranks
agree, that the measured times are valid, and what the job is. Pure: no clock, file, store or torch; the same reports
give the same plans.
"""

import logging
from collections.abc import Mapping
from statistics import fmean
from typing import Final

from lagom_overlap.collective.sites import RoleCycle, SiteSetting
from lagom_overlap.collective.size_class import LEAST_BYTES, WIDTHS
from lagom_overlap.online.options import OnlineOptions
from lagom_overlap.online.payback import Payback
from lagom_overlap.online.problems import JobProblems, job_problems
from lagom_overlap.online.program import StepProgram
from lagom_overlap.online.ranks.check import Check
from lagom_overlap.online.ranks.known import KnownBefore, earlier_search
from lagom_overlap.online.ranks.messages import Report, SwitchState, WindowPlan, steps_that_count
from lagom_overlap.online.ranks.plans import Plans, WindowSizes
from lagom_overlap.online.ranks.search import Search, StudyFactory
from lagom_overlap.online.ranks.watch import WATCHED_STEPS, Watch
from lagom_overlap.results.contest import ContestResult
from lagom_overlap.tuners.study import Study
from lagom_overlap.units import format_bytes

_log = logging.getLogger(__name__)

MAX_VOID: Final = 20
"""Void windows in a row after which the tuner freezes and waits in long windows. Chosen, not measured."""
FROZEN_STEPS: Final = 50
"""Steps of a window while ranks disagree, or nothing can be measured: long, because each window costs an agreement."""
MAX_FREEZES: Final = 20
"""Freezes after which the tuner gives up for good. Bounds the agreements with a job that cannot be tuned."""


class Leader:
    """Tunes one job; `steps_apart` as in `WindowPlan`.

    `started` are saved settings, by size classes `size_octaves` wide, from a job of these `cycles`: they replace a
    search if the job has all of their sites and is faster with them. A search that is needed anyway may begin with
    them, and with the measurements of an earlier search (`KnownBefore`).
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
        self._known = KnownBefore(started)
        self._sizes = WindowSizes()
        self._plans = Plans(steps_apart=steps_apart, cycles=cycles, size_octaves=size_octaves)
        self._watch = Watch(self._plans, options)
        self._search: Search | None = None
        self._shapes: int | None = None
        num_timed = len(steps_that_count([0.0] * (options.window_steps - 1)))
        self._payback = Payback(steps_per_pair=2 * num_timed, has_one_clock=has_one_clock)
        self._num_void = 0
        self._num_freezes = 0
        self._num_steps = 0
        self.contest: ContestResult | None = None
        """What came of the last search of several tuners."""

    @property
    def plan(self) -> WindowPlan | None:
        """The last plan given."""
        return self._plans.last

    @property
    def study(self) -> Study | None:
        """The study under way or done, if one began."""
        return None if self._search is None else self._search.study

    @property
    def priorities(self) -> Mapping[str, Mapping[str, float]]:
        """Lagom's H by group and collective, in the trial under way; empty without one."""
        return {} if self._search is None else self._search.priorities

    @property
    def start_check(self) -> Check | None:
        """The check of the settings that the job was started with, under way or over; None if none began."""
        return self._watch.start_check

    @property
    def num_steps_left(self) -> int:
        """The most steps until the state under way has ended: of a search with its verdict, a check or a recording."""
        match self._plans.state:
            case SwitchState.SEARCH | SwitchState.VERDICT if self._search is not None:
                return self._search.num_steps_left
            case SwitchState.CHECK:
                return self._watch.num_steps_left
            case SwitchState.RECORD:
                return self._options.window_steps
            case _:
                return 0

    def first(self) -> WindowPlan:
        """The plan of the first window: record the untouched job, because only a running job shows what can be set."""
        return self._record("to learn which collectives it issues and what they take")

    def offer_journal(self, text: str) -> None:
        """Takes a journal that some rank read; the search resumes from it if it belongs to this job."""
        self._known.journal = text

    def next(self, report: Report, programs: Mapping[str, StepProgram], now_s: float) -> WindowPlan:
        """The plan after a window that all ranks report; `programs` holds every program that the report names."""
        plan = self._plans.last
        assert plan is not None, "next before first"
        self._num_steps += plan.num_steps
        self._payback.took(plan, report, now_s)
        self._watch.took(plan, report)
        if report.stop:
            self._plans.set(())
            return self._plans.give(SwitchState.OFF, report.stop, 1, 0)
        if report.disagreement:
            return self._freeze(report.disagreement)
        if report.balance and not report.void:
            return self._freeze("ranks made different calls on a communicator")
        if report.hold:
            return self._held(report.hold)
        if self._sizes_vary(report):
            octaves = self._plans.size_octaves
            within = "all" if octaves == WIDTHS[-1] else f"those within a factor of {2**octaves}"
            return self._record(f"the sizes of its collectives vary: {within} are taken for one")
        match plan.state:
            case SwitchState.WATCH:
                return self._or_record(self._watch.watched(report))
            case SwitchState.CHECK:
                return self._window_checked(report)
            case _ if report.void:
                return self._again(report.void, report)
            case SwitchState.VERDICT:
                return self._round_ran(report)
            case _:
                return self._measured_window(report, programs)

    def _held(self, reason: str) -> WindowPlan:
        """The same plan once more, whatever the window reported: nothing may be switched now."""
        if self._plans.state in (SwitchState.RECORD, SwitchState.FROZEN):
            return self._again(reason)
        return self._plans.same_again()

    def _sizes_vary(self, report: Report) -> bool:
        """Whether the calls' sizes change from step to step, so that the job needs wider size classes."""
        if self._plans.state not in (SwitchState.RECORD, SwitchState.SEARCH, SwitchState.FROZEN) or report.octaves < 0:
            return False
        wider = self._sizes.wider(report.octaves, self._plans.size_octaves)
        if wider is None:
            return False
        self._plans.size_octaves, self._sizes, self._num_void = wider, WindowSizes(), 0
        self._known.forget_settings()
        return True

    # Before and instead of a search. ----------------------------------------------------------------------------------

    def _record(self, reason: str) -> WindowPlan:
        self._end_search()
        return self._plans.give(SwitchState.RECORD, reason, self._options.window_steps, 1)

    def _or_record(self, next_: WindowPlan | str) -> WindowPlan:
        """The next plan, or the job is recorded anew for the reason given, if it may be searched."""
        if not isinstance(next_, str):
            return next_
        return self._record(next_) if self._options.searches else self._watch.settle((), next_, self._shapes)

    def _freeze(self, reason: str) -> WindowPlan:
        _log.warning("online tuning pauses, everything runs untouched: %s", reason)
        self._end_search()
        self._num_freezes += 1
        if self._num_freezes > MAX_FREEZES:
            return self._plans.give(
                SwitchState.DONE, f"gave up after {MAX_FREEZES} pauses, everything runs untouched: {reason}", 1, 0
            )
        return self._plans.give(SwitchState.FROZEN, reason, FROZEN_STEPS, FROZEN_STEPS - WATCHED_STEPS)

    def _end_search(self) -> None:
        """Clears the settings and ends the search; its measurements are remembered."""
        self._plans.set(())
        self._watch.stop()
        if self._search is not None:
            self._known.searched, self._search = earlier_search(self._search.job, self._search.study), None

    def _again(self, reason: str, report: Report | None = None) -> WindowPlan:
        """The same window once more; after many void ones freezes until something can be measured."""
        self._num_void += 1
        if not self._options.searches and self._options.check_share and self._num_void > MAX_VOID:
            return self._watch.settle((), f"the settings could not be judged: {reason}", self._shapes)
        if self._known.started and self._plans.state is SwitchState.RECORD and self._num_void > MAX_VOID:
            why = f"started with the saved settings, unchecked: {reason}"
            return self._begin_with(self._known.started, report, why)
        if self._num_void > MAX_VOID or self._plans.state is SwitchState.FROZEN:
            return self._freeze(reason)
        return self._plans.same_again(reason)

    def _begin_with(self, settings: tuple[SiteSetting, ...], report: Report | None, reason: str) -> WindowPlan:
        """Starts with saved settings instead of a search, once; a search after a drift ignores the old journal."""
        self._known.journal = ""
        if not self._options.check_share:
            self._known.started = ()
            return self._watch.settle(settings, reason, self._shapes)
        self._num_void = 0
        timed = () if report is None else steps_that_count(report.steps_s)
        return self._watch.check_saved(settings, fmean(timed) if timed else 0.0, self._shapes)

    def _window_checked(self, report: Report) -> WindowPlan:
        if why := self._watch.why_void(report):
            return self._again(why)
        self._num_void = 0
        next_ = self._or_record(self._watch.checked(report))
        if not self._watch.is_checking:
            self._known.started = ()
        return next_

    # What a window told of the job. -----------------------------------------------------------------------------------

    def _measured_window(self, report: Report, programs: Mapping[str, StepProgram]) -> WindowPlan:
        """The plan after a window in which the collectives themselves were to be measured."""
        if not report.programs:
            return self._again("no step was measured")
        match self._plans.state:
            case SwitchState.RECORD:
                return self._recorded(report, programs)
            case SwitchState.FROZEN:
                return self._record("the ranks agree again")
            case _ if report.shapes != self._shapes:
                return self._again("the step's calls changed")
        assert self._search is not None, "measured without a search"
        if why := self._search.why_void(report):
            return self._again(why)
        self._num_void = 0
        return self._or_settle(self._search, self._search.measured(report))

    def _round_ran(self, report: Report) -> WindowPlan:
        assert self._search is not None, "a verdict without a search"
        if why := self._search.why_void(report):
            return self._again(why)
        self._num_void = 0
        return self._or_settle(self._search, self._search.round_ran(report))

    def _or_settle(self, search: Search, next_: WindowPlan | None) -> WindowPlan:
        """The next plan, or what the search came to is settled."""
        if next_ is not None:
            return next_
        self._plans.adopted, sentence = search.outcome()
        self.contest = search.contest()
        return self._watch.settle(self._plans.adopted, sentence, self._shapes)

    def _recorded(self, report: Report, programs: Mapping[str, StepProgram]) -> WindowPlan:
        self._num_void = 0
        self._shapes = report.shapes
        job = job_problems(programs[name] for name in report.programs)
        self._payback.arm(report, report.step_s)
        if started := self._known.started:
            sites = {site for name in report.programs for site in programs[name].sites_that_can_be_set}
            lacking = [setting.site for setting in started if setting.site not in sites]
            if not lacking:
                return self._begin_with(started, report, "started with saved settings")
            self._known.started = ()
            if not self._options.searches:
                many = f"{len(lacking)} of {len(started)} call sites of the settings are not among this job's calls"
                return self._watch.settle((), f"nothing is set: {many}", self._shapes)
            words = "the saved settings belong to another job (%d of %d sites are not in this one): searching instead"
            _log.warning(words, len(lacking), len(started))
        if not self._options.searches:
            return self._watch.settle((), "nothing is set: the settings are not of this job", self._shapes)
        if not job.groups:
            words = (
                "nothing to tune: no setting reaches a collective of this job; calls below "
                f"{format_bytes(LEAST_BYTES)} are left alone"
            )
            return self._watch.settle((), words, self._shapes)
        return self._search_job(job)

    def _search_job(self, job: JobProblems) -> WindowPlan:
        options = self._options
        self._search = search = Search(
            job,
            plans=self._plans,
            options=options,
            payback=self._payback,
            make_study=self._make_study,
            warm=self._known.warm_start(job),
            steps_left=max(0, options.job_steps - self._num_steps),
        )
        if search.num_verdict_steps > options.most_steps:
            budget = (
                f"max_steps is {options.max_steps}, comparing with the default takes {search.num_verdict_steps} steps"
            )
            return self._watch.settle((), f"the budget is too small: {budget}", self._shapes)
        how = self._num_ranks, options.tuner, options.tuner_options, options.seed, options.num_pairs
        octaves = (self._plans.size_octaves,) if self._plans.size_octaves else ()
        compared = (options.compare,) if options.compare else ()
        journal, self._known.journal = self._known.journal, ""
        search.take_up_journal(journal, job.fingerprint(*how, *octaves, *compared), self._route_name)
        return self._or_settle(search, search.next_trial())
