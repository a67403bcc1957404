"""Agreement of ranks through the job's own store: no extra collective, no synchronisation of a device.

Every decision is one key that is written once: the first rank writes it (compare-and-set), and all read what was
written. A rank whose wait for a decision times out writes the final decision instead; if the leader was quicker, the
rank reads the leader's decision, otherwise the leader and all others read the rank's. So no two ranks ever act on
different decisions, however late one of them is, and nobody waits longer than the timeout. The final decision without
an answer is "off", but once the job is settled it is "what is set stays": a rank that lost the store cannot read "off"
and keeps running with its settings.

    plan/<w>        what to do in window w: the leader's plan, or the last word of a rank
    report/<w>/<r>  what rank r, and those who report to it (`tree`), saw in window w
    at/<w>/<c>      where communicator c stands when window w begins, as the first of its ranks says (`stand_alike`)
    at/<w>/<c>#     how many of its ranks have said so
    owed/<w>        how many ranks of all communicators have not
    come/<w>        how many ranks have come to window w and stand where the others stand
    alike/<w>       "yes" by the last of them, or somebody's "no"
    ready/<w>       how many ranks are ready for what window w changes
    met/<w>         "yes" by the last of them, or somebody's "no"
    sure/<w>        how many ranks have made the change
    go/<w>          the answer: "yes" by the last of them, or somebody's "no"
    program/<f>     the step of fingerprint f, as the first rank saw it
    release         which release of this package the first rank runs
    journal/<r>     the journal that rank r found at its start
    place/<c>       how many ranks have met communicator c, which only the run's own id tells from others

A rank's traffic per window does not grow with the number of ranks: it reads the plan, and the reports of at most
`MOST_CHILDREN` others, which it merges into one. The load on the store's own process does grow with the ranks.

An agreement has three rounds: all have come, all are ready, all have made the change. No step runs meanwhile. A rank
that cannot make the change answers "no", like one that is not ready, and all ranks take the change back (`in_force`). A
rank that loses the store before the last round, however long it waits for slow ranks, has not answered, so the result
cannot become "yes". In the last round all ranks have changed, so it lasts only as long as they need to say so: a few
round trips. A rank that loses the store there cannot know the result; it asks over new connections until the timeout
and then raises `InDoubt`. No protocol can avoid that (two generals).

Nobody waits until the timeout for a rank that will not come: direct connections between the ranks show which ranks have
ended or moved on (`Presence`), and a wait ends with their message.

A rank's work to get ready may itself wait for other ranks, which may have refused. Meanwhile the rank watches for a
"no" (`get_ready`), so it stops together with all others, however long that work would wait.

If the store itself is lost, nothing can be agreed: `StoreLost`. A store that neither answers nor closes its connection,
because its machine or the link to it is gone, counts as lost after the timeout. `in_force` says what a rank then does.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import inf
from threading import Thread
from time import monotonic, sleep
from typing import Final, Protocol, TypeVar

from lagom_overlap.engines.bounded import BoundedCalls
from lagom_overlap.errors import BackendError, first_line
from lagom_overlap.online.program import StepProgram
from lagom_overlap.online.ranks.messages import KEPT, Report, SwitchState, WindowPlan, decode, encode
from lagom_overlap.online.ranks.tree import post_of
from lagom_overlap.signal_handlers import waiting

Result = TypeVar("Result")
ASK_AGAIN_S: Final = 0.2
"""Seconds between two attempts to reach a lost store. Chosen, not measured."""
HEAR_AGAIN_S: Final = 0.2
"""Seconds between two looks for a "no" while getting ready, and for a reason to stop waiting. Chosen: it bounds the
delay of a refusal and the load on the store."""


class Store(Protocol):
    """The part of a `torch.distributed.Store` that we use; its errors are `RuntimeError`s."""

    def set(self, key: str, value: str) -> None:
        """Writes."""

    def get(self, key: str) -> bytes:
        """Reads, waiting for the key to appear."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Reads several."""

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Returns when all keys are there, raises when the time is over."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Writes if the value is the expected one (empty: none yet); returns what is written now."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there; does not wait."""

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter and returns the sum."""

    def delete_key(self, key: str) -> bool:
        """Forgets."""


class StoreLost(BackendError):  # noqa: N818 - a state, as StopIteration is
    """Raised when the job's store does not answer: its process is gone, or the network to it."""


class ReportMissing(BackendError):  # noqa: N818
    """Raised when a rank did not report in time."""


class InDoubt(BackendError):  # noqa: N818
    """Raised when ranks may be set differently: one cannot hear whether the others change, or cannot change back."""


@dataclass(frozen=True, slots=True)
class CommunicatorPlace:
    """Where this process stands in the calls of a communicator, in words.

    Of the communicator's `num_ranks` this process has `num_here`; `num_ranks` 0 where they cannot be counted, because
    several communicators go by one name.
    """

    words: str
    num_ranks: int = 0
    num_here: int = 1


class Exchange:
    """One rank's end. `timeout_s` is the longest that one call waits; `reopen` makes a new connection to the store.

    `longest_s` says, whenever this rank begins to wait, what the job itself allows for that.
    `trouble` says why nobody should wait for the others any longer; it is empty as long as one may.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        num_ranks: int,
        timeout_s: float,
        reopen: Callable[[], Store] | None = None,
        trouble: Callable[[], str] = str,
        longest_s: Callable[[], float] = lambda: inf,
    ) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s}, must be positive")
        self._store = store
        self.rank = rank
        self.num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._longest_s = longest_s
        self._reopen = reopen
        self._trouble = trouble
        self._placed: dict[int, list[str]] = {}
        self._added: set[str] = set()
        """Counters that this rank counts in: once, also where an interrupt makes it come to a window again."""
        self._promised = -1
        self._calls = BoundedCalls("lagom-store")
        self.post = post_of(rank, num_ranks)
        self._most_height = post_of(0, num_ranks).height

    @property
    def timeout_s(self) -> float:
        """The longest that a call may wait now."""
        return min(self._timeout_s, self._longest_s())

    def greet(self, release: str) -> str:
        """The release of this package that the first rank runs; without equal releases nothing is agreed on.

        Raises:
            StoreLost: if the store does not answer.
        """
        return self._ask(lambda: self._store.compare_set("release", "", release)).decode(errors="replace")

    def plan(self, window: int, *, keeps: bool = False) -> WindowPlan:
        """The agreed plan of a window; the final decision if there is none in time (`miss`).

        Raises:
            StoreLost: if the store does not answer.
        """
        key = f"plan/{window}"
        if why := self._why_missing([key], self.timeout_s):
            reason = f"rank {self.rank} waited for rank 0's decision on window {window}: {why}"
            return self.miss(window, reason, keeps=keeps)
        return self._plan(self._ask(lambda: self._store.get(key)), window)

    def propose(self, plan: WindowPlan) -> WindowPlan:
        """Publishes the leader's plan; returns the agreed one, which is "off" if a rank had given up before."""
        key, text = f"plan/{plan.window}", encode(plan)
        return self._plan(self._written(key, text), plan.window)

    def is_decided(self, window: int) -> bool:
        """Whether the plan of a window is out; does not wait."""
        return self._ask(lambda: self._store.check([f"plan/{window}"]))

    def veto(self, window: int, reason: str) -> WindowPlan:
        """Switches everything off from this window on, unless its plan is out already; returns the agreed plan."""
        return self.propose(WindowPlan(window=window, state=SwitchState.OFF, reason=reason))

    def miss(self, window: int, reason: str, *, keeps: bool) -> WindowPlan:
        """Ends the tuning from this window on because a rank was not heard, unless its plan is out already.

        `keeps`, which must be the same on all ranks, leaves what is set; otherwise everything is switched off.
        """
        if not keeps:
            return self.veto(window, reason)
        return self.propose(
            WindowPlan(
                window=window, state=SwitchState.DONE, reason=f"what is set stays for good: {reason}", epoch=KEPT
            )
        )

    def report(self, window: int, report: Report) -> None:
        """Publishes the report of this rank, merged with those that report to it, for its parent in the tree."""
        text = encode(report)
        self._ask(lambda: self._store.set(f"report/{window}/{self.rank}", text))

    def reports(self, window: int) -> list[Report]:
        """The reports of a window by this rank's children, in order of rank.

        A rank higher in the tree waits longer, so that one that misses a report can still say so in time.

        Raises:
            ReportMissing: naming the ranks that did not report in time.
            StoreLost: if the store does not answer.
        """
        if not self.post.children:
            return []
        allowed_s = self.timeout_s * self.post.height / self._most_height
        keys = {rank: f"report/{window}/{rank}" for rank in self.post.children}
        if why := self._why_missing([*keys.values()], allowed_s):
            missing = [rank for rank, key in keys.items() if not self._ask(partial(self._store.check, [key]))]
            if missing:
                raise ReportMissing(f"rank {', '.join(map(str, missing))} did not report: {why}")
        return [decode(data, Report) for data in self._ask(partial(self._store.multi_get, [*keys.values()]))]

    def stand_alike(self, window: int, places: Mapping[str, CommunicatorPlace]) -> str:
        """Empty once all ranks have come, those of each communicator at the same call; else the reason.

        `places` is by communicator. The first of its ranks writes the place, the others compare theirs; the last rank
        checks that all ranks of every communicator have compared. Nothing that needs the other ranks, such as
        connecting to them, begins before all have come.

        Raises:
            StoreLost: if the store does not answer.
        """
        num_owed = 0
        for name, place in places.items():
            key = f"at/{window}/{name}"
            self._placed.setdefault(window, []).append(key)
            first = self._ask(partial(self._store.compare_set, key, "", place.words)).decode(errors="replace")
            if first != place.words:
                return f"rank {self.rank} stands at {place.words}, where another rank stands at {first}"
            if place.num_ranks:
                num_placed = self._count(f"{key}#", place.num_here)
                num_owed += (place.num_ranks if num_placed == place.num_here else 0) - place.num_here
        owed = f"owed/{window}"
        self._count(owed, num_owed)

        def why_not_all() -> str:
            missing = self._count(owed, 0)  # no communicator's share is below 0
            return f"{missing} of a communicator's ranks do not know of it" if missing else ""

        what_for = "for the others to come to a switch"
        return self._all_come(f"come/{window}", f"alike/{window}", what_for, why_not_all)

    def get_ready(self, window: int, work: Callable[[], None]) -> str:
        """Runs `work`, which prepares this rank for the change of a window; returns its refusal, empty if it is ready.

        Waits no longer than the timeout, and no longer than until another rank has refused. `work` may then still be
        waiting in its own thread; its result is ignored.

        Raises:
            StoreLost: if the store does not answer.
        """
        getting_ready = BoundedCalls("lagom-get-ready")
        began, work_done, met = monotonic(), getting_ready.start(work), f"met/{window}"
        try:
            while not waiting(lambda: wait([work_done], HEAR_AGAIN_S)).done:
                if self._ask(lambda: self._store.check([met])):  # no "yes" without this rank
                    return self._said(self._ask(lambda: self._store.get(met)))
                if trouble := self._trouble():
                    return f"rank {self.rank} was not ready to switch: {trouble}"
                if monotonic() - began > self.timeout_s:
                    return f"rank {self.rank} was not ready to switch within {self.timeout_s:g} s"
        finally:
            getting_ready.close()
        error = work_done.exception()
        if isinstance(error, Exception):  # whatever it is, it must not end the job
            return f"rank {self.rank} cannot switch: {first_line(error)}"
        if error is not None:
            raise error
        return ""

    def agree(self, window: int, *, refusal: str = "", change: Callable[[], None] = lambda: None) -> str:
        """Whether every rank makes the change of a window: empty if so, else one rank's refusal.

        All ranks call it between the same two steps, and all that return get the same answer. `change` is called once
        all are ready for it; if the answer is no, or there is none, the caller takes it back. A rank that was
        interrupted in it calls it again with a refusal, and follows the answer.

        Raises:
            StoreLost: if the store does not answer; the answer is not "yes" then, for anybody.
            InDoubt: if the store does not answer, and the answer may be either.
        """
        try:
            try:
                return self._answer(window, refusal, change)
            except StoreLost:
                raise
            except Exception as error:  # ours: the answer is "no", unless it is out already
                return self._refused(window, f"rank {self.rank} failed: {first_line(error)}")
        except StoreLost as error:
            if self._promised != window:
                raise
            return self._answer_after_all(window, error)

    def refuse(self, window: int, refusal: str) -> None:
        """Refuses the change of a window in advance, for a rank that may be gone when the others ask."""
        self._refused(window, refusal)

    def _answer(self, window: int, refusal: str, change: Callable[[], None]) -> str:
        """The second round and the last."""
        refusal = refusal or self._meet(window)
        if refusal:
            return self._refused(window, refusal)
        change()
        self._promised = window
        sure, go = f"sure/{window}", f"go/{window}"
        if self._ask(lambda: self._store.add(sure, 1)) == self.num_ranks:
            return self._settle(go, "yes")
        if why := self._why_missing([go], self.timeout_s):
            return self._refused(window, f"rank {self.rank} waited for the last word of all: {why}")
        return self._said(self._ask(lambda: self._store.get(go)))

    def _meet(self, window: int) -> str:
        """The second round: empty if all are ready."""
        return self._all_come(f"ready/{window}", f"met/{window}", "for the others to be ready to switch")

    def _all_come(self, counter: str, answer: str, what_for: str, why_not: Callable[[], str] = str) -> str:
        """Empty once every rank has come here; else the reason of the first rank that stopped waiting.

        The last rank to come may still refuse with `why_not`.
        """
        if self._count(counter, 1) == self.num_ranks:
            why = why_not()
            return self._settle(answer, f"no {why}" if why else "yes")
        if why := self._why_missing([answer], self.timeout_s):
            return self._settle(answer, f"no rank {self.rank} waited {what_for}: {why}")
        return self._said(self._ask(lambda: self._store.get(answer)))

    def _count(self, counter: str, amount: int) -> int:
        """The counter after this rank has counted in it; it does so once, whatever it asks again."""
        amount = 0 if counter in self._added else amount
        self._added.add(counter)  # before: an interrupted question may have been put all the same
        return self._ask(lambda: self._store.add(counter, amount))

    def _refused(self, window: int, refusal: str) -> str:
        """Answers "no" unless an answer exists; ranks that are still in an earlier round get it too."""
        answer = self._settle(f"go/{window}", f"no {refusal}")
        if answer:
            self._settle(f"met/{window}", f"no {answer}")
            self._settle(f"alike/{window}", f"no {answer}")
        return answer

    def _answer_after_all(self, window: int, lost: StoreLost) -> str:
        """The answer over a new connection, if there is one in time."""
        answers: list[str] = []
        deadline = monotonic() + self.timeout_s

        def ask() -> None:
            while self._reopen is not None and not answers and monotonic() < deadline:
                with suppress(Exception):
                    self._store = self._reopen()
                    answers.append(self._refused(window, f"rank {self.rank} had lost the store"))
                    return
                sleep(ASK_AGAIN_S)

        asking = Thread(target=ask, name="lagom-in-doubt", daemon=True)  # a new connection may block for longer
        with suppress(RuntimeError):  # no thread can be had: then there is no answer
            asking.start()
            asking.join(max(0.0, deadline - monotonic()))
        if answers:
            return answers[0]
        raise InDoubt(
            f"rank {self.rank} lost the job's store after its last word for a switch of settings ({lost}): "
            "it cannot know whether the others switch; the job ends here, because its collectives could hang"
        ) from lost

    def share_program(self, fingerprint: str, program: StepProgram) -> StepProgram:
        """The program that all ranks of this fingerprint work by: the first one published."""
        text = encode(program)
        return decode(self._ask(lambda: self._store.compare_set(f"program/{fingerprint}", "", text)), StepProgram)

    def program(self, fingerprint: str) -> StepProgram:
        """A program that some rank published before it reported its fingerprint."""
        return decode(self._ask(lambda: self._store.get(f"program/{fingerprint}")), StepProgram)

    def place(self, communicator: str) -> int:
        """A place in a communicator, from 0, that no other of its ranks has; asked for once."""
        return self._ask(lambda: self._store.add(f"place/{communicator}", 1)) - 1

    def share_journal(self, text: str) -> None:
        """Publishes the journal that this rank found."""
        self._ask(lambda: self._store.set(f"journal/{self.rank}", text))

    def journal(self, rank: int) -> str:
        """The journal that a rank found; it published it before its first report."""
        return self._ask(lambda: self._store.get(f"journal/{rank}")).decode()

    def close(self) -> None:
        """Frees the thread that speaks to the store; whoever asks again gets another one."""
        self._calls.close()

    def forget(self, window: int) -> None:
        """Removes this rank's keys of a window that every rank has left."""
        key = f"report/{window}/{self.rank}" if self.rank else f"plan/{window}"
        self._ask(lambda: self._store.delete_key(key))

    def forget_agreement(self, window: int) -> None:
        """Removes the agreement on a window that every rank has left."""
        for key in self._placed.pop(window, ()):
            self._ask(partial(self._store.delete_key, key))
            self._ask(partial(self._store.delete_key, f"{key}#"))
            self._added.discard(f"{key}#")
        self._added -= {f"{name}/{window}" for name in ("owed", "come", "ready")}
        if self.rank == 0:
            for name in ("owed", "come", "alike", "ready", "met", "sure", "go"):
                self._ask(partial(self._store.delete_key, f"{name}/{window}"))

    def _settle(self, go: str, word: str) -> str:
        return self._said(self._written(go, word))

    def _written(self, key: str, text: str) -> bytes:
        """What is written there now: this text, unless somebody was quicker."""

        def write() -> bytes:
            written = self._store.compare_set(key, "", text)
            if written == text.encode():
                # A TCPStore without libuv lets those who wait for the key sleep on after a compare-and-set.
                with suppress(Exception):  # it is written all the same
                    self._store.set(key, text)
            return written

        return self._ask(write)

    @staticmethod
    def _said(word: bytes) -> str:
        text = word.decode(errors="replace")
        return "" if text == "yes" else text.removeprefix("no ") or "refused"

    def _plan(self, data: bytes, window: int) -> WindowPlan:
        """The plan in the data; one that cannot be read means "off" on all ranks, because all read the same bytes."""
        try:
            plan = decode(data, WindowPlan)
        except ValueError as error:
            return WindowPlan(
                window=window, state=SwitchState.OFF, reason=f"the plan of window {window} cannot be read: {error}"
            )
        if plan.window != window:
            return WindowPlan(
                window=window, state=SwitchState.OFF, reason=f"found the plan of window {plan.window} for {window}"
            )
        return plan

    def _why_missing(self, keys: list[str], timeout_s: float) -> str:
        """Empty once all keys are there; else why this rank stops waiting.

        A failed wait alone does not mean that the store is lost; the next call shows that.
        """
        began = monotonic()
        arrival = self._calls.start(lambda: self._store.wait(keys, timedelta(seconds=timeout_s)))
        while not waiting(lambda: wait([arrival], HEAR_AGAIN_S)).done:
            if trouble := self._trouble():
                self._leave_waiting()
                return trouble
            if monotonic() - began > timeout_s + self.timeout_s:
                self._calls.close()  # later calls need not wait behind this one
                break
        else:
            if arrival.exception() is None:
                return ""
        return f"nothing came within {timeout_s:g} s"

    def _leave_waiting(self) -> None:
        """A connection that waits answers nothing else: the next question has another one."""
        self._calls.close()
        if self._reopen is not None:
            with suppress(Exception):  # without one, the next question says that the store is lost
                self._store = self._calls.call(self._reopen, self.timeout_s)

    def _ask(self, question: Callable[[], Result]) -> Result:
        try:
            return self._calls.call(question, self.timeout_s)
        except Exception as error:  # torch's stores raise RuntimeErrors; whatever it is, it must not end the job
            raise StoreLost(f"the job's store does not answer: {first_line(error)}") from error
