"""One rank's part in the lock-step: windows of steps, each with an agreed plan, and a report before it ends.

    step 0 of a window     read the plan, switch if it has new settings (all ranks or none: `in_force`)
    measured steps         the route times every collective
    last step but one      report, unless others report to this rank
    last step              a rank with children merges their reports and reports itself; rank 0 publishes the next plan;
                           in long windows that only time the steps, both one step earlier (`WindowPlan.decided_after`)

Each rank counts its own steps; the setting of a collective never depends on that count (`in_force`). Ranks whose counts
differ reach their windows' ends at different calls and detect it there: then nobody switches any more.

A failure of ours becomes this rank's request to stop, written in place of the next plan, so that all ranks stop
measuring at the same window; the job itself is never disturbed. Only a switch that all agreed on, and that this rank
cannot make or cannot know about, ends the job, because its collectives would hang. A missing rank is not a request to
stop: it may have lost the store and keep running with its settings, so settled settings then stay for good, and those
of a trial end with their lease. No torch; the clock and the route are arguments.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

from msgspec import structs

from lagom_overlap.collective.sites import Cycles, SiteSetting, cycles_of
from lagom_overlap.errors import BackendError, first_line
from lagom_overlap.online.journal import JournalFile, whole_lines
from lagom_overlap.online.ranks.exchange import Exchange, ReportMissing, StoreLost
from lagom_overlap.online.ranks.in_force import InForce
from lagom_overlap.online.ranks.messages import Report, SwitchState, WindowPlan, merged
from lagom_overlap.online.ranks.presence import Presence
from lagom_overlap.online.routes.base import Route, StepRecord
from lagom_overlap.online.step_clock import HostClock, StepClock
from lagom_overlap.online.window import Observer, Totals, Window
from lagom_overlap.signal_handlers import handing_over

if TYPE_CHECKING:  # one rank has a leader, and it alone loads the search
    from lagom_overlap.online.ranks.leader import Leader

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Adopted:
    """Settings that a job was tuned to, the verdict in words, and how wide the classes of their sizes are."""

    settings: tuple[SiteSetting, ...]
    verdict: str
    size_octaves: int


class Member:
    """One rank; `leader` on rank 0 only. `is_exact_only` leaves alone what would change a reduction's order.

    Four questions, each answered by a reason or by nothing: `why_stop`, before this rank reports, why all are to go
    back to the untouched job; `why_not`, before a step is measured, why it must not be (another profiler runs);
    `why_hold`, in a step, why nothing may be switched now; `why_alone`, before a step, why this rank must not wait for
    others any more (they may make fewer steps). One that fails is a wish to stop.
    `presence` says who need not be waited for; None: only time does;
    `clock` counts what steps and agreement cost; `steps` times the steps that verdicts rest on, by the host's clock if
    not given.
    """

    def __init__(
        self,
        exchange: Exchange,
        route: Route,
        *,
        leader: "Leader | None" = None,
        journal: JournalFile | None = None,
        is_exact_only: bool = False,
        why_stop: Callable[[], str] = str,
        why_not: Callable[[], str] = str,
        why_hold: Callable[[], str] = str,
        why_alone: Callable[[], str] = str,
        presence: Presence | None = None,
        clock: Callable[[], float] = perf_counter,
        steps: StepClock | None = None,
    ) -> None:
        self._exchange = exchange
        self._route = route
        self._leader = leader
        self._journal = journal or JournalFile(None)
        self._why_stop = why_stop
        self._why_not = why_not
        self._why_hold = why_hold
        self._why_alone = why_alone
        self._presence = presence
        self._clock = clock
        self._steps = steps or HostClock(clock)
        self._is_timed = True
        self._in_force = InForce(exchange, route)
        self._observer = Observer(exchange, route, is_exact_only=is_exact_only)
        self._totals = Totals()
        self._stop = ""
        self._lost = ""
        self._step_began = 0.0
        self._is_measuring = False
        self._is_cut_off = False
        self._num_windows = self._num_entered = 0
        self._is_over = False
        self._is_closed = False
        self._adopted: Adopted | None = None
        self._window = Window(WindowPlan(window=0, state=SwitchState.RECORD, reason="the untouched job"))
        self._begin()

    @property
    def plan(self) -> WindowPlan:
        """The plan in force."""
        return self._window.plan

    @property
    def settings(self) -> tuple[SiteSetting, ...]:
        """The settings in force."""
        return self._in_force.settings

    @property
    def cycles(self) -> Cycles:
        """The calls of this rank's step on each communicator, as the settings in force go by them."""
        return self._in_force.cycles

    @property
    def size_octaves(self) -> int:
        """How wide the classes of sizes are that the settings in force go by."""
        return self._in_force.size_octaves

    @property
    def adopted(self) -> Adopted | None:
        """What a verdict of this job last adopted, in force or not, unless a later verdict overturned it."""
        return self._adopted

    @property
    def leader(self) -> "Leader | None":
        """Who decides, on rank 0."""
        return self._leader

    @property
    def num_steps(self) -> int:
        """Steps so far."""
        return self._totals.num_steps

    @property
    def is_over(self) -> bool:
        """Whether nothing more will change: settled for good, or off."""
        return self._is_over

    def stop(self, reason: str) -> None:
        """Asks all ranks to go back to the untouched job at the end of this window; too late where all is over."""
        if self._is_over and self.settings and not self._stop:
            _log.warning("too late for %r: what is set stays, because the ranks no longer agree on changes", reason)
        self._stop = self._stop or reason

    def begin_step(self) -> None:
        """Before the job's step; at a window's first one it waits for the plan, at most the timeout.

        Raises:
            BackendError: if all ranks agreed to switch and this one then could not, or cannot know whether they did.
        """
        if self._is_cut_off:
            self._is_cut_off = False
            self._guarded(self._end_measured)
        if not (self._is_over or self._lost) and (why := self._asked(self._why_alone)):
            self.leave(why)
            self._lost = why
        if not self._is_over and self._num_entered == self._num_windows:
            handing_over(partial(self._timed, self._enter))
        window = self._window
        self._is_measuring = not (self._is_over or self._lost) and window.plan.measures(window.step)
        if self._is_measuring:
            window.void = window.void or self._asked(self._why_not)
            self._is_measuring = not window.void
        try:
            if self._is_measuring:
                self._begin_measured()
            elif not self._is_closed:
                self._route.begin_step(is_measured=False)
        except Exception as error:
            self._failed(error)
        self._step_began = self._clock()
        if not self._is_over:
            self._is_timed = False
            self._guarded(self._steps.begin)

    def mark_end(self) -> None:
        """The step's work ends here, unless it is said again: what follows is data and checkpoints."""
        if not self._is_over:
            self._is_timed = True
            self._guarded(self._end_timed)

    def end_step(self) -> None:
        """After the job's step."""
        if self._is_over:
            return
        try:
            if not self._is_timed:
                self._end_timed()
            elif self._route.goes_on():  # collectives after the last update (gathered parameters) are the step's
                self._steps.end()
        except Exception as error:
            self._failed(error)
        if self._is_measuring:
            self._guarded(self._steps.wait)
        window, totals = self._window, self._totals
        window.hold = window.hold or self._asked(self._why_hold)
        totals.stepped_s += self._clock() - self._step_began
        totals.num_steps += 1
        if self._is_measuring:
            handing_over(partial(self._guarded, self._take))
        window.step += 1
        if window.step >= window.reported_after:
            handing_over(partial(self._end_window, window))

    def leave(self, reason: str) -> None:
        """Tells the others not to wait for this rank; never waits itself.

        What is settled stays; a trial ends with its lease, at the same call here as on the others.
        """
        if self._is_over or self._lost:
            return
        window, words = self._window.plan.window, f"rank {self._exchange.rank}: {reason}"
        try:
            next_ = self._exchange.miss(window + 1, words, keeps=self._in_force.is_settled)
            self._exchange.refuse(window + 1, words)  # "off" is a change, too, where settings are settled
            if not next_.is_last:  # it was out already; the one after it is not, because it needs this rank's report
                self._exchange.miss(window + 2, words, keeps=next_.state is SwitchState.WATCH)
        except Exception as error:  # the store's, or ours: nobody is left to tell
            _log.debug("could not tell the others: %s", error)
        if self._presence is not None:
            self._presence.leave()

    def close(self, reason: str) -> None:
        """Leaves, and keeps no thread or connection; a rank that makes steps all the same has others."""
        self.leave(reason)
        self._exchange.close()
        if self._presence is not None:
            self._presence.close()

    def release(self, reason: str) -> None:
        """Closes for good: a step made all the same is this rank's alone."""
        self.close(reason)
        self._lost = self._lost or reason

    def fail_step(self, reason: str) -> None:
        """In place of `end_step` where the job's step raised: nobody waits, and the step counts all the same.

        What ends a measurement may wait for a device, which after such an error is no good idea: the next step does it.
        """
        self.leave(reason)
        self._window.void = self._window.void or reason
        self._is_cut_off, self._is_measuring = self._is_measuring, False
        self.end_step()

    # Windows. ---------------------------------------------------------------------------------------------------------

    def _end_window(self, window: Window) -> None:
        """After one of a window's last steps: what is due then."""
        plan = window.plan
        if window.step == window.reported_after:
            self._reaching(self._report)
        if window.step == plan.decided_after:
            if self._leader is not None:
                self._reaching(self._decide)
            elif self._exchange.post.children:
                self._reaching(self._relay)
        if window.step >= plan.num_steps:
            self._window = Window(plan)
            self._num_windows += 1
            self._guarded(self._steps.forget)

    def _begin(self) -> None:
        """Publishes the journal found here, and on rank 0 the first plan."""
        journal = self._journal.read()
        self._totals.num_journal_lines = len(whole_lines(journal))
        try:
            if journal:
                self._exchange.share_journal(journal)
            if self._leader is not None:
                self._exchange.propose(self._leader.first())
        except StoreLost as error:
            self._lose(error)
        except Exception as error:  # ours: it must not end the job
            self._failed(error)
            if self._leader is not None:  # the others wait for the first plan, and no wish to stop comes before it
                words = f"rank 0 could not begin: {first_line(error)}"
                self._reaching(lambda: self._exchange.veto(0, words))

    def _enter(self) -> None:
        """The next window: its plan, and the switch if it brings other settings."""
        number = self._num_windows
        try:
            with self._waiting(2 * number):
                self._window = Window(self._next_plan(number))
            self._num_entered = number + 1
        except BackendError:
            self._is_over = True
            if self._presence is not None:
                self._presence.leave()
            raise
        try:
            self._take_in(self._window.plan, number)
        finally:
            self._in_force.raise_interrupt()

    def _take_in(self, plan: WindowPlan, number: int) -> None:
        """What the plan of a window that has begun says besides its settings."""
        if plan.is_adopted:
            self._adopted = Adopted(self.settings, plan.reason, self.size_octaves)
        elif plan.state is SwitchState.WATCH or plan.is_overturned:
            self._adopted = None
        if plan.is_last:
            self._end(plan)
        if plan.journal:
            self._guarded(lambda: self._journal.write(plan.journal, is_new=plan.journal_is_new))
        if number >= 2 and not plan.is_last:
            self._reaching(lambda: self._forget(number - 2))

    def _next_plan(self, number: int) -> WindowPlan:
        """What all ranks do in a window, or this one alone if it cannot hear of it."""
        if self._lost:
            return self._in_force.alone(number, self._lost)
        try:
            plan = self._exchange.plan(number, keeps=self._in_force.is_settled)
        except Exception as error:  # the store's, or ours: without a plan this rank gives no word for any change
            if not isinstance(error, StoreLost):
                _log.exception("online tuning failed on rank %d", self._exchange.rank)
            self._note_lost(error)
            return self._in_force.alone(number, self._lost)
        try:
            return self._in_force.enter(plan)
        except StoreLost as error:
            self._note_lost(error)
            return self._in_force.alone(number, self._lost)

    def _forget(self, window: int) -> None:
        self._exchange.forget(window)
        self._in_force.forget(window)

    def _end(self, plan: WindowPlan) -> None:
        """Settled for good, or off: from now on a step costs nothing."""
        self._is_over = True
        self._exchange.close()
        if self._presence is not None:
            self._presence.close()
        if plan.state is SwitchState.OFF:
            self._in_force.end(plan)
            self._is_closed = True
            self._guarded(self._route.close)
            # All ranks are off by the same word: one line is enough, but for a rank that could not hear it.
            is_said_here = self._exchange.rank == 0 or bool(self._lost)
            level = logging.WARNING if is_said_here else logging.INFO
            _log.log(level, "online tuning is off, everything runs untouched: %s", plan.reason)

    def _lose(self, error: StoreLost) -> None:
        """Without the store nothing can be agreed on: what is settled stays for good, a trial to its window's end."""
        self._note_lost(error)
        _log.warning("online tuning stops on rank %d: %s", self._exchange.rank, self._lost)

    def _note_lost(self, error: Exception) -> None:
        """From here on this rank agrees on nothing: the others need not wait for it, which their connections say."""
        self._lost = first_line(error)
        if self._presence is not None:
            self._presence.leave(is_cut_off=True)

    def _end_timed(self) -> None:
        self._steps.end()
        self._route.mark_end()

    def _begin_measured(self) -> None:
        """A measured step begins on an idle device: what the job has under way until then is its own time."""
        began = self._clock()
        self._guarded(self._steps.wait)
        self._totals.stepped_s += self._clock() - began
        self._timed(lambda: self._route.begin_step(is_measured=True))

    def _end_measured(self) -> StepRecord:
        """The route's record; starting, ending and reading a profiler takes time that is part of what tuning costs."""
        began = perf_counter()
        try:
            return self._route.end_step()
        finally:
            self._totals.exchange_s += perf_counter() - began

    def _take(self) -> None:
        record = self._end_measured()
        self._window.keep(record)
        if not record.is_timed:
            self._window.void = self._window.void or "the step could not be timed"

    def _report(self) -> None:
        if why := self._asked(self._why_stop):
            self.stop(why)
        self._guarded(self._time_steps)
        self._window.own = self._observer.report(self._window, self._totals, self._stop)
        if self._window.plan.state is SwitchState.RECORD and self._window.own.programs:
            self._in_force.cycles = cycles_of(call.key for call in self._window.records[-1].calls)
        if not self._exchange.post.children:
            with self._waiting(2 * self._window.plan.window + 1):  # it does not wait, but it has come so far
                self._exchange.report(self._window.plan.window, self._window.own)

    def _time_steps(self) -> None:
        self._window.steps_s = self._steps.times_s()

    def _merged(self) -> Report:
        """What this rank and all that report to it saw; waits for them."""
        assert self._window.own is not None, "merged before its own report"
        window = self._window.plan.window
        with self._waiting(2 * window + 1):
            return merged([self._window.own, *self._exchange.reports(window)])

    @contextmanager
    def _waiting(self, boundary: int) -> Iterator[None]:
        """This rank may wait for others: at the begin of window w (boundary 2w), or for its reports (2w + 1)."""
        if self._presence is None:
            yield
            return
        presence = self._presence
        self._guarded(lambda: presence.wait_at(boundary, calls_so_far(self._route)))
        try:
            yield
        finally:
            self._presence.go_on(boundary)

    def _relay(self) -> None:
        """Between the leaves and rank 0: reports for all below; without one of them, that is what it reports."""
        assert self._window.own is not None, "relayed before its own report"
        window = self._window.plan.window
        if self._exchange.is_decided(window + 1):  # a rank has left: nobody need wait for its report
            return
        try:
            try:
                report = self._merged()
            except ReportMissing as error:
                report = structs.replace(self._window.own, unheard=f"rank {self._exchange.rank}: {error}")
            self._exchange.report(window, report)
        except StoreLost:
            raise
        except Exception as error:  # a report that cannot be read: rank 0 will miss this one
            _log.warning("no report of window %d: %s", window, error)

    def _decide(self) -> None:
        """Rank 0: the next plan; the last word if a rank is missing or the decision fails."""
        assert self._leader is not None, "only rank 0 decides"
        window = self._window.plan.window
        try:
            if self._exchange.is_decided(window + 1):  # a rank has left: nobody need wait for its report
                return
            report = self._merged()
            if report.unheard:
                raise ReportMissing(report.unheard)
            if window == 0 and report.journal_lines:  # the longest that any rank found, wherever rank 0 runs now
                self._leader.offer_journal(self._exchange.journal(report.journal_rank))
            self._observer.fetch(() if report.stop else report.programs)
            self._exchange.propose(self._leader.next(report, self._observer.programs, monotonic()))
        except ReportMissing as error:
            self._exchange.miss(window + 1, str(error), keeps=self._in_force.is_settled)
        except StoreLost:
            raise
        except Exception as error:  # ours, not the job's: it must not end the job
            _log.exception("deciding on window %d failed", window)
            self._exchange.veto(window + 1, f"rank 0 could not decide: {first_line(error)}")

    def _reaching(self, work: Callable[[], object]) -> None:
        """Runs what needs the store, if this rank still has it."""
        if self._lost:
            return
        try:
            self._timed(work)
        except StoreLost as error:
            self._lose(error)
        except Exception as error:  # ours: the others miss what this rank was to say
            self._failed(error)

    def _guarded(self, work: Callable[[], object]) -> None:
        """Runs a part of ours; its failure is a wish to stop, never the job's."""
        try:
            work()
        except Exception as error:
            self._failed(error)

    def _asked(self, why: Callable[[], str]) -> str:
        """The answer to one of the four questions."""
        try:
            return why()
        except Exception as error:
            self._failed(error)
            return ""

    def _failed(self, error: Exception) -> None:
        _log.exception("online tuning failed on rank %d", self._exchange.rank)
        self.stop(f"failed: {first_line(error)}")

    def _timed(self, work: Callable[[], object]) -> None:
        began = perf_counter()
        try:
            work()
        finally:
            self._totals.exchange_s += perf_counter() - began


def calls_so_far(route: Route) -> dict[str, int]:
    """How many calls this rank has issued, by what all ranks of the communicator call it."""
    return {count.wire: count.num_calls for count in route.counts().values()}
