"""One rank's part in the lock-step: windows of steps, one agreed plan each, a report before each ends.

    step 0 of a window     read the plan, switch if it names new settings (all ranks or none)
    measured steps         the route times every collective
    last step but one      report, unless others report to this rank
    last step              who has reports to read merges them and reports in turn; rank 0 publishes the next plan

Whatever fails here is this rank's wish to stop, written where the next plan would stand, so that all ranks stop at the
same step; the job itself is never disturbed. Only a commit that fails after all agreed ends the job, because its
collectives would hang. A rank that is not heard is no wish: it may have lost the store and run on with what is set, so
settled settings then stay, for good; those of a trial are taken away. No torch; the clock and the route are given.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from time import monotonic, perf_counter

from msgspec import structs

from lagom_overlap.collective import ConfigKey, ConfigSpace
from lagom_overlap.errors import BackendError
from lagom_overlap.runtime.exchange import Exchange, ReportMissing, StoreLost
from lagom_overlap.runtime.journal import JournalFile, whole_lines
from lagom_overlap.runtime.leader import Leader
from lagom_overlap.runtime.messages import KEPT, Plan, Report, State, calls_of, merged, shape_of
from lagom_overlap.runtime.program import (
    GroupTimes,
    Program,
    fingerprint,
    groups_of,
    median_times,
    program_of,
    times_of,
)
from lagom_overlap.runtime.route import Route, StepRecord
from lagom_overlap.runtime.sites import SiteSetting, table_of

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Window:
    """The window under way: what it is to do, how far it is, what was measured."""

    plan: Plan
    step: int = 0
    records: list[StepRecord] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    void: str = ""
    own: Report | None = None


class Member:
    """One rank; `leader` on rank 0 only. `is_exact_only` leaves alone what would change a reduction's order.

    `why_not` says, before a step is measured, why it must not be (another profiler runs), and is empty otherwise;
    `clock` times the steps.
    """

    def __init__(
        self,
        exchange: Exchange,
        route: Route,
        *,
        leader: Leader | None = None,
        journal: JournalFile | None = None,
        is_exact_only: bool = False,
        why_not: Callable[[], str] = str,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._exchange = exchange
        self._route = route
        self._leader = leader
        self._journal = journal or JournalFile(None)
        self._is_exact_only = is_exact_only
        self._why_not = why_not
        self._stop = ""
        self._num_steps = 0
        self._stepped_s = 0.0
        self._exchange_s = 0.0
        self._step_began = 0.0
        self._is_measuring = False
        self._is_cut_off = False
        self._programs: dict[str, Program] = {}
        self._clock = clock
        self._epoch = 0
        self._settings: tuple[SiteSetting, ...] = ()
        self._is_settled = False
        self._num_windows = 0
        self._is_over = False
        self._is_closed = False
        self._window = _Window(Plan(window=0, state=State.RECORD, reason="not begun"))
        self._num_journal_lines = self._begin()

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._window.plan

    @property
    def settings(self) -> tuple[SiteSetting, ...]:
        """The settings in force."""
        return self._settings

    @property
    def num_steps(self) -> int:
        """Steps so far."""
        return self._num_steps

    @property
    def is_over(self) -> bool:
        """Whether nothing more will change: settled for good, or off."""
        return self._is_over

    def stop(self, reason: str) -> None:
        """Asks all ranks to go back to the untouched job at the end of this window; too late where all is over."""
        if self._is_over and self._settings and not self._stop:
            _log.warning("too late for %r: what is set stays, the ranks agree on nothing any more", reason)
        self._stop = self._stop or reason

    def begin_step(self) -> None:
        """Before the job's step; at a window's first one it waits for the plan, at most the timeout.

        Raises:
            BackendError: if all ranks agreed to switch and this one then could not.
        """
        if self._is_cut_off:
            self._is_cut_off = False
            self._guarded(self._end_measured)
        if not self._is_over and self._window.step == 0:
            self._timed(self._enter)
        self._is_measuring = not self._is_over and self._window.plan.measures(self._window.step)
        if self._is_measuring:
            self._window.void = self._window.void or self._why_not()
            self._is_measuring = not self._window.void
        if not self._is_closed:
            self._guarded(self._begin_routed)
        self._step_began = self._clock()

    def end_step(self) -> None:
        """After the job's step."""
        if self._is_over:
            return
        self._window.steps_s.append(self._clock() - self._step_began)
        self._stepped_s += self._window.steps_s[-1]
        self._num_steps += 1
        if self._is_measuring:
            self._guarded(self._take)
        self._window.step += 1
        plan = self._window.plan
        if self._window.step == max(1, plan.num_steps - 1):
            self._timed(self._report)
        if self._window.step >= plan.num_steps:
            if self._leader is not None:
                self._timed(self._decide)
            elif self._exchange.post.children:
                self._timed(self._relay)
            self._window = _Window(plan, step=0)
            self._num_windows += 1

    def leave(self, reason: str) -> None:
        """Tells the others not to wait for this rank; never waits itself.

        What is set stays set here until the window ends, as it does on the others: a rank that goes on making steps
        takes its settings back at the same step as they do.
        """
        if self._is_over:
            return
        window = self._window.plan.window
        try:
            # The next plan may be out already; the one after it is not, because it needs this rank's report.
            for number in (window + 1, window + 2):
                self._exchange.veto(number, f"rank {self._exchange.rank}: {reason}")
        except StoreLost as error:
            _log.debug("could not tell the others: %s", error)

    def fail_step(self, reason: str) -> None:
        """In place of `end_step` where the job's step raised: nobody waits, and the step counts all the same.

        What ends a measurement may wait for a device, which after such an error is no good idea: the next step does it.
        """
        self.leave(reason)
        self._window.void = self._window.void or reason
        self._is_cut_off, self._is_measuring = self._is_measuring, False
        self.end_step()

    # Windows. ---------------------------------------------------------------------------------------------------------

    def _begin(self) -> int:
        """Publishes the journal found here, and on rank 0 the first plan; returns the journal's length."""
        found = self._journal.read()
        try:
            if found:
                self._exchange.share_journal(found)
            if self._leader is not None:
                self._exchange.propose(self._leader.first())
        except StoreLost as error:
            self._lose(error)
        return len(whole_lines(found))

    def _enter(self) -> None:
        """The next window: its plan, and the switch if it brings other settings."""
        number = self._num_windows
        try:
            plan = self._exchange.plan(number, keeps=self._is_settled)
            self._window = _Window(plan)
            if plan.state is State.OFF:
                self._end(plan)
                return
            refused = "" if plan.epoch in (KEPT, self._epoch) else self._switch(plan)
            if refused and plan.is_last:
                state = State.DONE if self._is_settled else State.OFF
                plan = structs.replace(plan, state=state, reason=refused)
                self._window = _Window(plan)
            self._is_settled = self._is_settled if refused else plan.state is State.WATCH
            if plan.journal:
                self._journal.write(plan.journal, is_new=plan.journal_is_new)
            if plan.is_last:
                self._end(plan)
            elif number >= 2:
                self._exchange.forget(number - 2)
        except StoreLost as error:
            self._lose(error)

    def _switch(self, plan: Plan) -> str:
        """All ranks switch, or none; then why, the same on all."""
        refusal = ""
        try:
            self._route.prepare(table_of(plan.settings, self._route.communicators()), plan.epoch)
        except Exception as error:  # whatever it is, it must not end the job
            refusal = f"rank {self._exchange.rank} cannot switch: {_line(error)}"
        refused, interrupt = self._agreed(plan.epoch, refusal)
        try:
            if refused:
                _log.warning("no rank switches: %s", refused)
                self.stop(refused)
            else:
                self._commit(plan)
        finally:
            if interrupt is not None:
                raise interrupt
        return refused

    def _agreed(self, epoch: int, refusal: str) -> tuple[str, BaseException | None]:
        """The answer of all, and an interrupt that came meanwhile: it has to wait, for all others act on the answer."""
        try:
            return self._exchange.agree(epoch, refusal=refusal), None
        except Exception:
            raise
        except BaseException as interrupt:
            words = f"rank {self._exchange.rank} was interrupted by {type(interrupt).__name__}"
            with suppress(StoreLost):
                return self._exchange.agree(epoch, refusal=words), interrupt
            raise

    def _commit(self, plan: Plan) -> None:
        """Switches; between the agreement and this nothing may come that can fail."""
        try:
            self._route.commit(plan.epoch)
        except Exception as error:
            self._is_over = True
            raise BackendError(
                f"rank {self._exchange.rank} could not switch to settings that all ranks agreed on ({error}); "
                "the job ends here, because its collectives would hang"
            ) from error
        old, self._epoch, self._settings = self._epoch, plan.epoch, plan.settings
        self._exchange.forget_epoch(old)

    def _end(self, plan: Plan) -> None:
        """Settled for good, or off: from now on a step costs nothing."""
        self._is_over = True
        if plan.state is State.OFF:
            self._settings = ()
            self._close()
            _log.warning("online tuning is off, everything runs untouched: %s", plan.reason)

    def _close(self) -> None:
        self._is_closed = True
        self._guarded(self._route.close)

    def _lose(self, error: StoreLost) -> None:
        """Without the store nothing can be agreed on, so nothing changes any more."""
        _log.warning("online tuning stops, what is set stays: %s", error)
        self._is_over = True

    def _begin_routed(self) -> None:
        self._timed(lambda: self._route.begin_step(is_measured=self._is_measuring))

    def _end_measured(self) -> StepRecord:
        """The route's record; starting, ending and reading a profiler takes time that is part of what tuning costs."""
        began = perf_counter()
        try:
            return self._route.end_step()
        finally:
            self._exchange_s += perf_counter() - began

    def _take(self) -> None:
        record = self._end_measured()
        self._window.records.append(record)
        if not record.is_timed:
            self._window.void = self._window.void or "the step could not be timed"

    def _report(self) -> None:
        try:
            self._window.own = self._own_report()
            if not self._exchange.post.children:
                self._exchange.report(self._window.plan.window, self._window.own)
        except StoreLost as error:
            self._lose(error)

    def _merged(self) -> Report:
        """What this rank and all that report to it saw; waits for them."""
        assert self._window.own is not None, "merged before its own report"
        return merged([self._window.own, *self._exchange.reports(self._window.plan.window)])

    def _relay(self) -> None:
        """Between the leaves and rank 0: reports for all below; without one of them, that is what it reports."""
        assert self._window.own is not None, "relayed before its own report"
        window = self._window.plan.window
        try:
            if self._exchange.is_decided(window + 1):  # a rank has left: nobody need wait for its report
                return
            try:
                report = self._merged()
            except ReportMissing as error:
                report = structs.replace(self._window.own, unheard=f"rank {self._exchange.rank}: {error}")
            self._exchange.report(window, report)
        except StoreLost as error:
            self._lose(error)
        except Exception as error:  # a report that cannot be read: rank 0 will miss this one
            _log.warning("no report of window %d: %s", window, error)

    def _own_report(self) -> Report:
        """What this rank saw; where that fails, its wish to stop."""
        rank = self._exchange.rank
        try:
            return self._summary()
        except StoreLost:
            raise
        except Exception as error:
            _log.exception("online tuning failed on rank %d", rank)
            return Report(rank=rank, num_steps=self._num_steps, stop=f"rank {rank}: no report: {_line(error)}")

    def _summary(self) -> Report:
        records, stop, times = self._window.records, self._stop, dict[str, GroupTimes]()
        shapes = {fingerprint(record) for record in records}
        shape = shapes.pop() if len(shapes) == 1 else ""
        if shape and not stop:
            try:
                program = self._program(shape, records)
                times = median_times([times_of(program, groups_of(program), record) for record in records])
            except ValueError as error:
                stop = f"the step cannot be understood: {error}"
        rank, void = self._exchange.rank, self._window.void
        if records and not shape and not void:
            void = "its measured steps were not alike"
        # What was not recorded whole is not compared: the window is measured again anyway.
        calls, balance = ({}, 0) if void else calls_of(records, rank, self._exchange.num_ranks)
        return Report(
            rank=rank,
            num_steps=self._num_steps,
            calls=calls,
            balance=balance,
            programs=(shape,) if shape and not stop else (),  # only what was shared: rank 0 waits for it
            shapes=shape_of(rank, shape),
            times={} if stop else times,
            step_s=median(record.duration_s for record in records) if records else 0.0,
            steps_s=tuple(self._window.steps_s),
            stepped_s=self._stepped_s,
            exchange_s=self._exchange_s,
            void=void and f"rank {rank}: {void}",
            stop=stop and f"rank {rank}: {stop}",
            journal_lines=self._num_journal_lines,
            journal_rank=rank,
        )

    def _program(self, shape: str, records: Sequence[StepRecord]) -> Program:
        """The program of this shape that all ranks work by."""
        if shape not in self._programs:
            spaces = [self._space(call.key) for call in records[0].calls]
            self._programs[shape] = self._exchange.share_program(shape, program_of(records, spaces))
        return self._programs[shape]

    def _space(self, key: ConfigKey) -> ConfigSpace | None:
        if self._is_exact_only and not self._route.is_exact(key):
            return None
        return self._route.space(key)

    def _decide(self) -> None:
        """Rank 0: the next plan; the last word if a rank is missing or the decision fails."""
        assert self._leader is not None, "only rank 0 decides"
        window = self._window.plan.window
        try:
            try:
                if self._exchange.is_decided(window + 1):  # a rank has left: nobody need wait for its report
                    return
                report = self._merged()
                if report.unheard:
                    raise ReportMissing(report.unheard)
                if window == 0 and report.journal_lines:  # the longest that any rank found, wherever rank 0 runs now
                    self._leader.offer_journal(self._exchange.journal(report.journal_rank))
                for shape in () if report.stop else report.programs:
                    if shape not in self._programs:
                        self._programs[shape] = self._exchange.program(shape)
                self._exchange.propose(self._leader.next(report, self._programs, monotonic()))
            except ReportMissing as error:
                self._exchange.miss(window + 1, str(error), keeps=self._is_settled)
            except StoreLost:
                raise
            except Exception as error:  # ours, not the job's: it must not end the job
                _log.exception("deciding on window %d failed", window)
                self._exchange.veto(window + 1, f"rank 0 could not decide: {_line(error)}")
        except StoreLost as error:
            self._lose(error)

    def _guarded(self, work: Callable[[], object]) -> None:
        """Runs a part of ours; its failure is a wish to stop, never the job's."""
        try:
            work()
        except Exception as error:
            _log.exception("online tuning failed on rank %d", self._exchange.rank)
            self.stop(f"failed: {_line(error)}")

    def _timed(self, work: Callable[[], None]) -> None:
        began = perf_counter()
        try:
            work()
        finally:
            self._exchange_s += perf_counter() - began


def _line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
