"""The settings in force on one rank, and how they change: a collective always has one setting on all of its ranks.

Each rank counts its own steps: one may skip an update that the others make. And ranks that cannot reach each other
cannot act together. So a setting depends on neither, but only on what all ranks of a communicator share before they
issue a call: how many calls it has had, and which call this is. Four rules:

1. *Ranks switch at the same place.* Before a switch, ranks compare how many calls each of their communicators has had
   and which calls make up its step (`Exchange.stand_alike`); if any differ, no rank switches. They stand still until
   all have switched, so the next call of a communicator is the first under the new settings, on all its ranks. A rank
   that finds that another thread of the job made a call meanwhile refuses the switch.
2. *From there on a call's row follows from the communicator's calls since the switch* (`routes.base.TableCursor`).
3. *Settings of a trial are a lease*: they hold for as many calls of a communicator as the steps of one window have, and
   then expire. No message or agreement is needed to end a trial. A further window under the same settings is a switch
   like any other.
4. *Settled settings stay.* They were better than the untouched job, so they hold until all ranks agree on a change at
   the same place; "off" is such a change, too. Without the agreement of all, every rank keeps them for good.

Therefore no two ranks ever issue a call under different settings, even if one loses the store, dies, or counts steps
differently. Between two switches nothing that a rank does alone changes the setting of a call (rule 2): not the end of
a window (3), not "off" (3 and 4: a closed route keeps a lease in force to its end), not the loss of the store. And a
switch needs the agreement of every rank, given while it stands where the others stand (1).

If a rank loses the store during the agreement, either its answer is missing, and the result is "no"; or it has
answered, and must not guess the result: then `InDoubt` ends the job, because a job that ends is better than one that
hangs or computes wrong results. That takes a store that is lost within the last round trips of a switch and not found
again within the timeout.

A switch that fails on one rank is a "no", too: each rank commits before its final answer, between the same two calls,
and takes the commit back if the result is "no" (`Route.take_back`). Only a rank that cannot take it back ends the job.
"""

import logging
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Final

from msgspec import structs

from lagom_overlap.collective import CommunicatorId, ConfigTable
from lagom_overlap.collective.sites import NO_CYCLES, Cycles, RoleCycle, SiteSetting, cycles_for, table_of
from lagom_overlap.errors import BackendError
from lagom_overlap.online.ranks.exchange import CommunicatorPlace, Exchange, InDoubt, StoreLost
from lagom_overlap.online.ranks.messages import KEPT, SETTLED, SwitchState, WindowPlan
from lagom_overlap.online.routes.base import NOTHING, CallCount, Route

_log = logging.getLogger(__name__)


class InForce:
    """The settings in force on one rank; `size_octaves` as in the plan, `is_settled`: they are not a trial's.

    `cycles` are the calls of this rank's step as last recorded untouched.
    """

    def __init__(self, exchange: Exchange, route: Route) -> None:
        self._exchange: Final = exchange
        self._route: Final = route
        self._epoch = 0
        self._num_switches = 0
        self._agreed: list[int] = []
        self._saved_cycles: tuple[RoleCycle, ...] = ()
        self._stood: Mapping[CommunicatorId, CallCount] = {}
        """Where this rank stood when it last said so."""
        self._interrupt: BaseException | None = None
        self.cycles: Cycles = NO_CYCLES
        self.settings: tuple[SiteSetting, ...] = ()
        self.size_octaves = 0
        self.is_settled = False

    def enter(self, plan: WindowPlan) -> WindowPlan:
        """Applies a plan's settings between two steps; returns the plan, or the final decision in its place.

        Raises:
            StoreLost: if the store does not answer; then `alone` says what to do.
            BackendError: if this rank cannot know whether all switch, or not go back: the job has to end.
        """
        refused = ""
        self._saved_cycles = plan.cycles or self._saved_cycles
        if plan.state is SwitchState.OFF:
            if self.is_settled and self.settings:
                refused = self._agree(plan.window, self._refusal(lambda: self._standing(plan.window)))
        elif plan.epoch not in (KEPT, self._epoch):
            refused = self._switch(plan)
        elif self.settings and plan.epoch != KEPT and not (self.is_settled and plan.state in SETTLED):
            refused = self._switch(structs.replace(plan, settings=self.settings))
        if refused:
            _log.info("no rank switches: %s", refused)
            if self.is_settled:
                self._route.settle()  # what was opened for the switch is closed again
            return self._last_word(plan.window, refused)
        if plan.state in SETTLED and not self.is_settled:
            self._route.settle()
        self.is_settled = plan.state in SETTLED
        return plan

    def alone(self, window: int, why: str) -> WindowPlan:
        """The plan of a rank from the first window on whose plan it cannot get."""
        return self._last_word(window, why)

    def raise_interrupt(self) -> None:
        """Re-raises an interrupt that came during an agreement, once this rank has followed its result."""
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            raise interrupt

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
        self._num_switches += 1
        number = self._num_switches

        def get_ready() -> str:
            table = self._table(plan)
            return self._standing(plan.window, table) or self._exchange.get_ready(
                plan.window, lambda: self._route.prepare(table, number)
            )

        return self._agree(plan.window, self._refusal(get_ready), plan)

    def _refusal(self, look: Callable[[], str]) -> str:
        """What this rank has against a change; where it cannot even look, nobody makes the change."""
        try:
            return look()
        except StoreLost:
            raise
        except Exception as error:  # ours
            return f"rank {self._exchange.rank} failed: {error}"

    def _table(self, plan: WindowPlan) -> ConfigTable:
        """What a plan sets, for good or as a lease of its window."""
        names = self._route.communicators()
        cycles = {**cycles_for(self._saved_cycles, names), **self.cycles}
        lease_steps = None if plan.state in SETTLED or not plan.settings else plan.num_steps
        return table_of(plan.settings, names, plan.size_octaves, cycles=cycles, lease_steps=lease_steps)

    def _standing(self, window: int, table: ConfigTable = NOTHING) -> str:
        """Why this rank may not switch where it stands; empty if it may, as far as the others have come here yet."""
        self._route.communicators()  # groups that the job has made since are counted, too
        places = {}
        self._stood = self._route.counts()
        for name, count in self._stood.items():
            keys = table.cycles.get(name, ())
            role = f"{name.description}#{name.creation_order}"
            step = sha256(f"{role} {[(str(key.kind), key.num_bytes) for key in keys]}".encode()).hexdigest()[:16]
            words = f"{count.num_calls} calls on {role}, {len(keys)} in a step ({step})"
            places[count.wire] = CommunicatorPlace(words, count.num_ranks, count.num_here)
        return self._exchange.stand_alike(window, places)

    def _agree(self, window: int, refusal: str = "", switch: WindowPlan | None = None) -> str:
        """The answer of all; an interrupt that comes meanwhile has to wait, for all others act on the answer."""
        self._agreed.append(window)
        try:
            refused = self._exchange.agree(window, refusal=refusal, change=lambda: self._commit(switch))
        except InDoubt:
            raise
        except StoreLost:
            self._take_back(switch)
            raise
        except Exception as error:  # ours, after its own words about it failed, too
            raise InDoubt(
                f"rank {self._exchange.rank} failed within a switch of settings ({error}): it cannot know whether the "
                "others switch; the job ends here, because its collectives could hang"
            ) from error
        except BaseException as error:
            self._interrupt = error
            words = f"rank {self._exchange.rank} was interrupted by {type(error).__name__}"
            refused = self._asked_again(window, words)
        if refused:
            self._take_back(switch)
        elif switch is not None:
            self._epoch, self.settings, self.size_octaves = switch.epoch, switch.settings, switch.size_octaves
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
            self._route.commit(self._num_switches)
        counts = self._route.counts()
        if any(counts.get(name) != count for name, count in self._stood.items()):
            raise BackendError("another thread made calls while the ranks agreed")

    def _take_back(self, plan: WindowPlan | None) -> None:
        """What was in force before a switch is so again; nothing to do where this rank had not come so far.

        Raises:
            BackendError: if that fails.
        """
        try:
            if plan is not None:
                self._route.take_back(self._num_switches)
        except Exception as error:
            raise BackendError(
                f"rank {self._exchange.rank} could not go back to the settings before a switch that failed ({error}); "
                "the job ends here, because its collectives would hang"
            ) from error
