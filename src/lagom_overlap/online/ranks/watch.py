"""A settled job: watches whether its steps become slower, and checks now and then whether its settings still pay.

Its windows are long and their steps only timed; in some the calls are measured as well. Measuring, the agreement of the
ranks and the checks against the default are each kept to a small share of the job's time. Pure, like all decisions of
rank 0.
"""

import logging
from math import ceil
from statistics import fmean
from typing import Final

from lagom_overlap.collective.sites import SiteSetting
from lagom_overlap.online.options import OnlineOptions
from lagom_overlap.online.ranks.check import Arm, Check, CheckBudget
from lagom_overlap.online.ranks.messages import Report, SwitchState, WindowPlan, steps_that_count
from lagom_overlap.online.ranks.plans import PROBATION_STEPS, Plans
from lagom_overlap.online.watcher import SlowPhases, Watcher
from lagom_overlap.tuners.problem import SAME_PAIRS
from lagom_overlap.tuners.sequential import LEAST_PAIRS

_log = logging.getLogger(__name__)

WATCHED_STEPS: Final = 4
"""In a measured window of a settled job only these last steps are measured, except the very last."""
WATCHED_WINDOWS: Final = 8
"""In a settled job at most one window in this many is measured; in the others steps are only timed. Chosen."""
MEASURING_SHARE: Final = 0.001
"""The share of a settled job's time that measuring may take: half of the total that all of ours may take."""
MEASURING_S: Final = 25e-6
"""What measuring may always take per step, in seconds, however short the step is."""
AGREEING_S: Final = 5e-4
"""CPU seconds of a rank for the report and plan of a settled window, rounded up (measured: 460 us)."""
AGREEING_SHARE: Final = 0.0005
"""The share of a settled job's time that reports and plans may take; windows are longer where steps are short."""
AGREEING_LEAST_S: Final = 5e-6
"""What they may always take per step, in seconds, however short the step is."""
MOST_LENGTHENED: Final = 4
"""A settled window has at most this many times `watch_steps` steps, so that a drift is noticed in time."""


class Watch:
    """Watches and checks the settled settings, as windows that `plans` writes.

    Methods return the next plan, or the reason why the job has to be tuned again.
    """

    def __init__(self, plans: Plans, options: OnlineOptions) -> None:
        self._plans: Final = plans
        self._options: Final = options
        self._budget: Final = CheckBudget(options.check_share)
        self._slow_phases: Final = SlowPhases()
        self._watcher: Watcher | None = None
        self._shapes: int | None = None
        """The shapes of the watched step; None: those of the next measured step."""
        self._settled_by = ""
        self._num_steps = options.watch_steps
        self._num_windows = self._next_measured = 0
        self._num_unlike = 0
        """Measured windows in a row whose calls differed."""
        self._num_rearms = 0
        self._exchange_s = 0.0
        self._check: Check | None = None
        self.start_check: Check | None = None
        """The check of the saved settings that the job was started with, under way or over."""
        self._checked: tuple[SiteSetting, ...] = ()
        self._is_paid = True
        """Whether the check under way counts towards `check_share`."""
        self._may_check_unpaid = True

    @property
    def is_checking(self) -> bool:
        """Whether a check is under way, or waits for its next round."""
        return self._check is not None

    def took(self, plan: WindowPlan, report: Report) -> None:
        """Accounts for a finished window, and adapts the length and spacing of the next ones."""
        if plan.state is SwitchState.WATCH:
            self._budget.num_settled += plan.num_steps if self._plans.settings else 0
            self._lengthen(report)
            self._space_out(plan, report)
        self._exchange_s = report.exchange_s

    def settle(self, settings: tuple[SiteSetting, ...], reason: str, shapes: int | None) -> WindowPlan:
        """Settles these settings; `shapes` as in `Report`, None if not known."""
        self._plans.set(settings)
        self._shapes, self._check = shapes, None
        self._settled_by, self._num_windows, self._next_measured = reason, 0, 0
        return self._watch_on()

    def check_saved(self, settings: tuple[SiteSetting, ...], default_s: float, shapes: int | None) -> WindowPlan:
        """Begins a check of saved settings against the default, whose last step took `default_s` (0: not known)."""
        self._shapes = shapes
        plan = self._begin_check(settings, default_s, is_start=True, is_paid=False)
        self.start_check = self._check
        return plan

    @property
    def num_steps_left(self) -> int:
        """The most training steps that the check under way still takes; 0 without one."""
        return 0 if self._check is None else self._check.num_windows_left * self._options.window_steps

    def stop(self) -> None:
        """Ends watching."""
        self._check = None

    def watched(self, report: Report) -> WindowPlan | str:
        """After a window of watching."""
        assert self._watcher is not None, "watched without a watcher"
        if report.programs and not report.void:  # a void window says nothing of the calls
            self._shapes = report.shapes if self._shapes is None else self._shapes
            if report.shapes != self._shapes:
                self._num_unlike += 1
                is_new = self._num_unlike >= self._options.drift_windows
                return self._tune_again("the step's calls changed") if is_new else self._still_watching()
            self._num_unlike = 0
        if changed := self._watcher.see(report.steps_s):
            return self._tune_again(changed)
        if not self._plans.settings:
            return self._still_watching()
        if self._check is not None:
            return self._next_check(self._check)
        # Saves up for the rounds that decide a clear case, so that settings that became slower are dropped at once.
        if self._budget.can_pay(self._steps_of(1 + LEAST_PAIRS)):
            return self._begin_check(self._plans.settings, 0.0)
        return self._still_watching()

    def why_void(self, report: Report) -> str:
        """Why a window of the check at the start has to be repeated; empty if it is complete, and for later checks."""
        if self._check is None or not self._check.is_start:
            return ""
        return report.void or ("" if _is_timed(report) else "no step was timed")

    def checked(self, report: Report) -> WindowPlan | str:
        """After a window of a check."""
        check = self._check
        assert check is not None, "a check without one"
        if report.void or not _is_timed(report):
            self._check = None
            self._plans.set(self._checked)  # there will be a better moment
            return self._still_watching()
        check.report(fmean(steps_that_count(report.steps_s)))
        if not check.is_over:
            return self._next_check(check)
        self._check = None
        return self._kept(check) if check.is_kept else self._lost(check)

    # Windows. ---------------------------------------------------------------------------------------------------------

    def _watch_on(self) -> WindowPlan:
        """Starts a new watcher on the coming steps."""
        self._num_unlike = 0
        self._watcher = Watcher(self._options.drift_ratio, self._options.drift_steps, self._slow_phases)
        if not self._options.watch_steps:
            return self._plans.give(SwitchState.DONE, self._settled_by, 1, 0)
        return self._still_watching()

    def _still_watching(self) -> WindowPlan:
        """A window whose steps are only timed; in every `WATCHED_WINDOWS`-th at most the calls are measured as well."""
        steps = first_measured = self._num_steps
        if self._num_windows >= self._next_measured:
            first_measured = max(0, steps - WATCHED_STEPS)
            self._next_measured = self._num_windows + WATCHED_WINDOWS
        self._num_windows += 1
        reason = "; ".join(filter(None, (self._settled_by, self._slow_phases.words())))
        return self._plans.give(SwitchState.WATCH, reason, steps, first_measured)

    def _lengthen(self, report: Report) -> None:
        """Makes the next windows so long that agreement stays within its share of the time."""
        if timed := steps_that_count(report.steps_s):
            least = self._options.watch_steps
            each_s = max(AGREEING_SHARE * fmean(timed), AGREEING_LEAST_S)
            self._num_steps = min(max(least, ceil(AGREEING_S / each_s)), MOST_LENGTHENED * least)

    def _space_out(self, plan: WindowPlan, report: Report) -> None:
        """Delays the next measured window until the cost of the last one, PyTorch's profiler, is a small share."""
        timed = steps_that_count(report.steps_s)
        if timed and any(plan.measures(step) for step in range(plan.num_steps)):
            each_s = max(MEASURING_SHARE * fmean(timed), MEASURING_S)
            num_windows = ceil((report.exchange_s - self._exchange_s) / (each_s * plan.num_steps))
            self._next_measured = max(self._next_measured, self._num_windows - 1 + num_windows)

    def _tune_again(self, reason: str) -> WindowPlan | str:
        """The reason to tune again if that is allowed; else the plan to keep watching, or to leave the job alone."""
        if self._num_rearms >= self._options.max_rearms:
            if self._plans.settings and self._options.check_share:
                return self._watched_on(reason)
            words = f"{self._plans.reason}; it has changed since ({reason})"
            return self._plans.give(SwitchState.DONE, words, 1, 0)
        self._num_rearms += 1
        _log.info("tuning again, because %s", reason)
        return reason

    def _watched_on(self, reason: str) -> WindowPlan:
        """Checks the settings instead of searching again; the first time even if the budget does not allow it yet."""
        _log.info(
            "%s; it is not tuned again, because it was %d times, the most allowed (max_rearms)",
            reason,
            self._num_rearms,
        )
        self._shapes = None
        if not (self._may_check_unpaid or self._budget.can_pay(self._steps_of(1 + LEAST_PAIRS))):
            return self._watch_on()
        is_paid, self._may_check_unpaid = not self._may_check_unpaid, False
        return self._begin_check(self._plans.settings, 0.0, is_paid=is_paid)

    # Checks. ----------------------------------------------------------------------------------------------------------

    def _steps_of(self, num_rounds: int) -> int:
        return num_rounds * len(Arm) * self._options.window_steps

    def _begin_check(
        self, settings: tuple[SiteSetting, ...], default_s: float, *, is_start: bool = False, is_paid: bool = True
    ) -> WindowPlan:
        options = self._options
        self._checked, self._is_paid = settings, is_paid
        self._check = Check(
            num_pairs=options.num_pairs,
            seed=f"{options.seed}/{self._plans.next_window}",
            max_slowdown=options.max_slowdown,
            default_s=default_s,
            is_start=is_start,
            num_same=0 if options.searches else SAME_PAIRS,
        )
        return self._next_check(self._check)

    def _next_check(self, check: Check) -> WindowPlan:
        """The check's next window; between two rounds it waits until the next one is paid for."""
        if check.is_between_rounds and self._is_paid and not self._budget.can_pay(self._steps_of(1)):
            self._plans.set(self._checked)
            return self._still_watching()
        self._plans.set(self._checked if check.next_arm is Arm.TUNED else ())
        steps = PROBATION_STEPS if check.is_probation else self._options.window_steps
        self._budget.num_checked += steps if self._is_paid else 0
        subject = "the saved settings" if check.is_start else "the current settings"
        return self._plans.give(SwitchState.CHECK, f"{subject} and the default in turns, {check.words}", steps, steps)

    def _kept(self, check: Check) -> WindowPlan:
        self._plans.adopted = self._checked
        if check.is_start:
            how = "started with the saved settings, which" if self._options.searches else "the settings"
            reason = f"{how} are faster here: {check.words}"
            return self.settle(self._checked, reason, self._shapes)
        self._plans.set(self._checked)
        return self._still_watching()

    def _lost(self, check: Check) -> WindowPlan | str:
        self._plans.adopted, self._plans.is_overturned = (), True
        lost = "the saved settings are not faster" if check.is_start else "the settings are slower"
        reason = f"{lost} than the default here: {check.words}"
        _log.warning("the default comes back, because %s", reason)
        if check.is_start:
            return f"searching, because {reason}" if self._options.searches else reason
        self._plans.set(())
        self._plans.reason = self._settled_by
        return self._tune_again(reason)


def _is_timed(report: Report) -> bool:
    timed = steps_that_count(report.steps_s)
    return len(timed) > 0 and min(timed) > 0
