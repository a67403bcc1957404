"""A job that is settled: whether its steps stay as they are, and now and then whether its settings still pay.

Its windows are long and their steps only timed; in some the calls are measured as well. What that costs, and what the
agreement of ranks costs, is kept to a small part of the job's time, and so is what checks against the default cost.
Pure, like all that rank 0 decides.
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
from lagom_overlap.online.slow_phases import SlowPhases
from lagom_overlap.online.watcher import Watcher
from lagom_overlap.tuners.sequential import LEAST_PAIRS

_log = logging.getLogger(__name__)

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


class Watch:
    """Watches and checks what is settled, as windows that `plans` writes.

    What it returns is the next plan, or in words why the job has to be tuned again.
    """

    def __init__(self, plans: Plans, options: OnlineOptions) -> None:
        self._plans: Final = plans
        self._options: Final = options
        self._budget: Final = CheckBudget(options.check_share)
        self._slow_phases: Final = SlowPhases()
        self._watcher: Watcher | None = None
        self._shapes: int | None = None
        """Of the step that is watched; None: of the next one that is measured."""
        self._settled_by = ""
        self._num_steps = options.watch_steps
        self._num_windows = self._next_measured = 0
        self._num_unlike = 0
        """Windows in a row whose calls were others."""
        self._num_rearms = 0
        self._exchange_s = 0.0
        self._check: Check | None = None
        self._checked: tuple[SiteSetting, ...] = ()
        self._is_paid = True
        """Whether the check under way is paid for out of `check_share`."""
        self._may_check_unpaid = True

    @property
    def is_checking(self) -> bool:
        """Whether a check is under way, or waits for its next round."""
        return self._check is not None

    def took(self, plan: WindowPlan, report: Report) -> None:
        """A window is over: what it cost, and what the windows to come may."""
        if plan.state is SwitchState.WATCH:
            self._budget.num_settled += plan.num_steps if self._plans.settings else 0
            self._lengthen(report)
            self._space_out(plan, report)
        self._exchange_s = report.exchange_s

    def settle(self, settings: tuple[SiteSetting, ...], reason: str, shapes: int | None) -> WindowPlan:
        """From now on these settings are in force; `shapes` as in `Report`, None where nobody knows."""
        self._plans.set(settings)
        self._shapes, self._check = shapes, None
        self._settled_by, self._num_windows, self._next_measured = reason, 0, 0
        return self._watch_on()

    def check_saved(self, settings: tuple[SiteSetting, ...], default_s: float, shapes: int | None) -> WindowPlan:
        """Saved settings against the default; a step of that took `default_s` last, 0 where nobody knows."""
        self._shapes = shapes
        return self._begin_check(settings, default_s, is_start=True, is_paid=False)

    def stop(self) -> None:
        """Something else than watching begins."""
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
        # As many rounds as settle a clear case are saved up for, so that such settings leave at once.
        if self._budget.can_pay(self._steps_of(1 + LEAST_PAIRS)):
            return self._begin_check(self._plans.settings, 0.0)
        return self._still_watching()

    def why_void(self, report: Report) -> str:
        """Why a window of a check at the start has to be run again; empty if it tells what it should, or later."""
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
        """From here on, by the times to come."""
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
        """As many steps in the windows to come as their agreement is worth."""
        if timed := steps_that_count(report.steps_s):
            least = self._options.watch_steps
            each_s = max(AGREEING_SHARE * fmean(timed), AGREEING_LEAST_S)
            self._num_steps = min(max(least, ceil(AGREEING_S / each_s)), MOST_LENGTHENED * least)

    def _space_out(self, plan: WindowPlan, report: Report) -> None:
        """Puts the next measured window off until the last one's cost is a small share: PyTorch's profiler is dear."""
        timed = steps_that_count(report.steps_s)
        if timed and any(plan.measures(step) for step in range(plan.num_steps)):
            each_s = max(MEASURING_SHARE * fmean(timed), MEASURING_S)
            num_windows = ceil((report.exchange_s - self._exchange_s) / (each_s * plan.num_steps))
            self._next_measured = max(self._next_measured, self._num_windows - 1 + num_windows)

    def _tune_again(self, reason: str) -> WindowPlan | str:
        """Why, if that is still allowed; else the job is watched on, or left alone."""
        if self._num_rearms >= self._options.max_rearms:
            if self._plans.settings and self._options.check_share:
                return self._watched_on(reason)
            words = f"{self._plans.reason}; it has changed since ({reason})"
            return self._plans.give(SwitchState.DONE, words, 1, 0)
        self._num_rearms += 1
        _log.info("tuning again: %s", reason)
        return reason

    def _watched_on(self, reason: str) -> WindowPlan:
        """Nothing is searched any more; what is set is checked instead, the first time whatever has been saved up."""
        _log.info("%s; it was tuned again %d times, the most that is allowed", reason, self._num_rearms)
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
        what = "saved settings" if check.is_start else "what is set"
        return self._plans.give(SwitchState.CHECK, f"{what} against the default: {check.words}", steps, steps)

    def _kept(self, check: Check) -> WindowPlan:
        self._plans.adopted = self._checked
        if check.is_start:
            reason = f"started with saved settings, which are faster here ({check.words})"
            return self.settle(self._checked, reason, self._shapes)
        self._plans.set(self._checked)
        return self._still_watching()

    def _lost(self, check: Check) -> WindowPlan | str:
        self._plans.adopted, self._plans.is_overturned = (), True
        lost = "the saved settings are not faster" if check.is_start else "the settings are slower"
        reason = f"{lost} than the default here ({check.words})"
        _log.warning("%s: the default comes back", reason)
        if check.is_start:
            return f"{reason}: searching instead"
        self._plans.set(())
        self._plans.reason = self._settled_by
        return self._tune_again(reason)


def _is_timed(report: Report) -> bool:
    timed = steps_that_count(report.steps_s)
    return len(timed) > 0 and min(timed) > 0
