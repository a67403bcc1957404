"""What is set on one rank, and how that changes: only so that no two ranks ever run a step under different settings.

Ranks that cannot hear each other cannot act together, and collectives whose settings differ can hang or go wrong. So
whatever may be lost, and whenever, a rank must do by itself what the others do without it. Three rules:

1. *Settings of a trial are a lease for one window.* They count to the window's end, a step that all ranks know from
   its plan. A further window under them, even under the same ones, takes the word of all ranks (`Exchange.agree`).
   Without it every rank goes back to the untouched job at that step, by itself, with `Route.close`, which cannot fail.
2. *Settled settings stay.* They were better than the untouched job, so they hold until all ranks agree to change them;
   "off" is such a change, too. Without the word of all, every rank keeps them, for good.
3. *To the untouched job from a trial or from itself nobody needs to be asked.*

Why that holds for a rank R that loses the store in window w, while others may not. Every step up to the end of w was
agreed on, so until then R counts steps and changes nothing. At the end of w

- R has a lease: it goes untouched. The others cannot set anything without R's word, so whatever the plan of w + 1 says,
  or if R's report is missed and there is none, they are untouched from the same step on: rules 1 and 3.
- R runs untouched: it stays so. The same holds of the others.
- R is settled: it keeps what is set. The others cannot change it without R's word, nor can a rank that wants to stop:
  rule 2. They go on under the same settings, miss R's next report, and keep them for good.

When R loses the store within the agreement at the begin of w + 1, its last word is missing and the answer is "no", as
above; or it is given and R may not guess: `InDoubt` ends the job, because a job that ends is better than one that hangs
or computes nonsense. It takes a store that is lost within the last round trips of a switch, and not found again within
the timeout.

A switch that fails on one rank is a "no", too: each rank commits before its last word, between the same two steps, and
takes the commit back where the answer is "no" (`Route.take_back`). Only a rank that cannot do even that, with settled
settings before, ends the job.

Ranks are at most one window apart (a plan needs the reports of all), and settings belong to a step's number, not to a
moment: a rank that is a step ahead issues its calls under the settings of that step, as the others will when they get
there, and on a device in the same order. All ranks entered w under the same plan, so all agree on whether they are
settled and on how long w is; ranks whose steps differ in number are frozen by the leader's check of their reports.
"""

import logging
from typing import Final

from lagom_overlap.collective.sites import SiteSetting, table_of
from lagom_overlap.errors import BackendError
from lagom_overlap.online.ranks.exchange import Exchange, InDoubt, StoreLost
from lagom_overlap.online.ranks.messages import KEPT, SETTLED, SwitchState, WindowPlan
from lagom_overlap.online.routes.base import Route

_log = logging.getLogger(__name__)


class InForce:
    """The settings in force on one rank, `size_octaves` as in the plan; `is_settled` says that they are no trial's."""

    def __init__(self, exchange: Exchange, route: Route) -> None:
        self._exchange: Final = exchange
        self._route: Final = route
        self._epoch = 0
        self._agreed: list[int] = []
        self.settings: tuple[SiteSetting, ...] = ()
        self.size_octaves = 0
        self.is_settled = False

    def enter(self, plan: WindowPlan) -> WindowPlan:
        """Does what a plan says of settings, between two steps; the plan itself, or the last word in its place.

        Raises:
            StoreLost: if the store does not answer; then `alone` says what to do.
            BackendError: if this rank cannot know whether all switch, or not go back: the job has to end.
        """
        refused = ""
        if plan.state is SwitchState.OFF:
            refused = self._agree(plan.window) if self.is_settled and self.settings else ""
        elif plan.epoch not in (KEPT, self._epoch):
            refused = self._switch(plan)
        elif self.settings and not self.is_settled:
            refused = self._agree(plan.window)
        if refused:
            _log.info("no rank switches: %s", refused)
            return self._last_word(plan.window, refused)
        self.is_settled = plan.state in SETTLED
        return plan

    def alone(self, window: int, why: str) -> WindowPlan:
        """What a rank does from a window on that it cannot hear of."""
        return self._last_word(window, why)

    def end(self, plan: WindowPlan) -> None:
        """After the last word: "off" leaves nothing set."""
        if plan.state is SwitchState.OFF:
            self.settings = ()

    def forget(self, window: int) -> None:
        """Forgets the agreements of all windows up to this one, which every rank has left behind."""
        while self._agreed and self._agreed[0] <= window:
            self._exchange.forget_agreement(self._agreed.pop(0))

    def _last_word(self, window: int, why: str) -> WindowPlan:
        if self.is_settled:
            return WindowPlan(
                window=window, state=SwitchState.DONE, reason=f"what is set stays for good: {why}", epoch=KEPT
            )
        return WindowPlan(window=window, state=SwitchState.OFF, reason=why, epoch=KEPT)

    def _switch(self, plan: WindowPlan) -> str:
        """All ranks switch, or none; then why, the same on all."""

        def prepare() -> None:
            self._route.prepare(table_of(plan.settings, self._route.communicators(), plan.size_octaves), plan.epoch)

        try:
            refusal = self._exchange.get_ready(plan.window, prepare)
        except StoreLost:
            raise
        except Exception as error:  # ours: no rank switches
            refusal = f"rank {self._exchange.rank} failed: {error}"
        return self._agree(plan.window, refusal, plan)

    def _agree(self, window: int, refusal: str = "", switch: WindowPlan | None = None) -> str:
        """The answer of all; an interrupt that comes meanwhile has to wait, for all others act on the answer."""
        interrupt: BaseException | None = None
        self._agreed.append(window)
        try:
            refused = self._exchange.agree(window, refusal=refusal, change=lambda: self._commit(switch))
        except InDoubt:
            raise
        except StoreLost:
            self._take_back(switch)
            raise
        except Exception:
            raise
        except BaseException as error:
            interrupt = error
            words = f"rank {self._exchange.rank} was interrupted by {type(error).__name__}"
            refused = self._asked_again(window, words)
        if refused:
            self._take_back(switch)
        elif switch is not None:
            self._epoch, self.settings, self.size_octaves = switch.epoch, switch.settings, switch.size_octaves
        if interrupt is not None:
            raise interrupt
        return refused

    def _asked_again(self, window: int, refusal: str) -> str:
        """The answer; without the store it is "no", because this rank's last word is missing."""
        try:
            return self._exchange.agree(window, refusal=refusal)
        except InDoubt:
            raise
        except StoreLost:
            return refusal

    def _commit(self, plan: WindowPlan | None) -> None:
        if plan is not None:
            self._route.commit(plan.epoch)

    def _take_back(self, plan: WindowPlan | None) -> None:
        """What was in force before a switch is so again; nothing to do where this rank had not come so far.

        Raises:
            BackendError: if that fails, and settled settings would have to be in force.
        """
        try:
            if plan is not None:
                self._route.take_back(plan.epoch)
        except Exception as error:
            if not self.is_settled:  # the route is closed next, which cannot fail
                _log.warning("could not go back to the settings before: %s", error)
                return
            raise BackendError(
                f"rank {self._exchange.rank} could not go back to the settings before a switch that failed ({error}); "
                "the job ends here, because its collectives would hang"
            ) from error
