"""Detects ranks that will not come: a thread of each rank ends waits that are in vain.

The store shows neither that a rank was killed nor that it is inside a collective that the waiting ranks have not
issued, so a rank that waits there does so for the whole timeout. Therefore ranks talk to their neighbours in the tree
(`links`), which forward news:

    Gone     a connection ended without a goodbye: that rank was killed, or its machine is gone
    Left     a goodbye: that rank comes to no boundary (window) beyond the one that it has reached
    Waits    the collectives issued, by communicator, of ranks that have long waited at a boundary (see `Presence`)
    Beyond   a rank that is not there has issued more: it can never come there with the same counts

Only news is forwarded: one gone rank is enough; of the ranks that left, the one that will be missed first; of the ranks
that wait at a boundary, the smallest count of each communicator. So no rank hears about every other. A rank that is
merely slow, even stopped, is no trouble.

All this only shortens waits. Without sockets, or if a neighbour runs without us or has closed its end, nothing arrives
from there and the timeout applies. Nothing here raises into the job. No torch.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from threading import Thread
from time import monotonic
from typing import Final, TypeAlias, TypeVar

from lagom_overlap.online.ranks.exchange import Store
from lagom_overlap.online.ranks.links import Links, Message, Natural, Word

_log = logging.getLogger(__name__)

PATIENCE_S: Final = 0.25
"""Shorter waits are not announced: at most boundaries the ranks arrive within milliseconds of each other."""
AGAIN_S: Final = 0.1
"""Seconds between two looks at this rank's own counts, and between two bundles of counts that it forwards. Chosen."""
CLOSE_S: Final = 1.0
"""The longest that `close` waits for the thread, which is late only if the store or a name server hangs."""
MOST_CALLS: Final = 1024
"""Communicators in one message: at most 50 bytes each, so that it stays within `links.MOST_BYTES`."""
MOST_BOUNDARIES: Final = 4
"""Boundaries that are kept: ranks are at most one window (two boundaries) apart."""
MOST_COMMUNICATORS: Final = 1 << 16
"""Communicators that are kept per boundary. Bounds memory."""
ROLL_CALL_S: Final = 2.0
"""How long a rank waits for others before it asks who is here, and asks again: ranks say so as soon as their process
group is there, which comes about on all of them within moments."""
AT_ONCE: Final = 1024
"""Ranks whose entries are read in one request: some 20 KB."""
MOST_NAMED: Final = 4
"""Absent ranks that a message names; the rest is "and more"."""
FAR: Final = 1 << 62
"""The boundary announced by a rank whose thread ends while the rank goes on, so that nobody misses it."""

Calls: TypeAlias = dict[Word, tuple[Natural, Natural]]
"""By communicator (`_short`): the least number of collectives issued, and a rank that stopped there."""


class Gone(Message, frozen=True):
    """See above."""

    rank: Natural


class Left(Message, frozen=True):
    """See above; -1 for a rank that has reached no boundary."""

    rank: Natural
    reached: int


class Waits(Message, frozen=True):
    """See above."""

    boundary: Natural
    calls: Calls


class Beyond(Message, frozen=True):
    """Rank `ahead` has issued more than rank `behind`, which waits."""

    boundary: Natural
    ahead: Natural
    behind: Natural


@dataclass(frozen=True, slots=True)
class _Stop:
    """Where the training thread waits."""

    boundary: int
    counts: Mapping[str, int]
    since_s: float


@dataclass(frozen=True, slots=True)
class _Passed:
    """The last window's begin that this rank has come to: collectives issued by then, and in the window before it.

    `behind` are those behind the last that can be set.
    """

    boundary: int
    issued: Mapping[str, int]
    grown: Mapping[str, int]
    behind: Mapping[str, int]


class Presence:
    """One rank's end. The training thread reports where it waits and asks for trouble.

    `counts` says how many collectives that can be set this rank has issued so far on each communicator, by a name that
    all its members share. `issued` counts all of them, also small ones and those of the job's own: a rank may be inside
    one of these. Ranks that do the same may count differently there (gloo counts sends and receives), so it is compared
    since the window's begin, and only between ranks that issued equally many in the window before. A communicator
    without any in that window is no part of the step: a thread that saves checkpoints may use it.
    `marks` says how many of all those it had issued at the last one that can be set: ranks that stand behind the same
    one are compared by what they issued since, also where one of them skipped a step, and counts more in its window.
    The thread calls all three. `store` is for the thread alone, so it should be a connection of its own. The two
    threads share single fields, each of which one of them writes: neither waits for the other.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        num_ranks: int,
        counts: Callable[[], Mapping[str, int]],
        issued: Callable[[], Mapping[str, int]] = dict,
        marks: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._counts = counts
        self._issued = issued
        self._marks = marks
        # Written by the training thread.
        self._thread: Thread | None = None
        self._links: Links | None = None
        self._at: _Stop | None = None
        self._reached = -1
        self._passed: _Passed | None = None
        self._leaves: Left | None = None
        self._is_closing = False
        # Written by the thread.
        self._gone = -1
        self._left: Left | None = None
        self._beyond: dict[int, Beyond] = {}
        self._waits: dict[int, Calls] = {}
        self._news: dict[int, Calls] = {}
        self._goodbyes: set[int] = set()
        self._told: object = None
        self._has_left = False
        self._compared_s = self._passed_on_s = 0.0

    def start(self) -> None:
        """Begins; a connection comes about when the neighbour has begun, too."""
        if self._num_ranks == 1:
            return
        try:
            kinds = Gone | Left | Waits | Beyond
            links = Links(self._store, self, kinds=kinds, rank=self._rank, num_ranks=self._num_ranks)
            self._links = links
            self._thread = Thread(target=self._run, args=(links,), name="lagom-presence", daemon=True)
            self._thread.start()
        except Exception as error:
            self._say_deaf(error)
            self._thread = None
            if self._links is not None:
                self._links.close()

    def wait_at(self, boundary: int, counts: Mapping[str, int]) -> None:
        """The training thread begins to wait at a boundary, having issued so many collectives (not to be changed)."""
        since = {**self._since_passed(), **self._since_last(counts)}
        if boundary % 2 == 0:  # a window's begin, which all ranks come to; to its report they come at different steps
            issued, before = self._issued(), {} if self._passed is None else self._passed.issued
            grown = {name: count - before[name] for name, count in issued.items() if name in before}
            self._passed = _Passed(boundary, issued, grown, self._behind())
        self._reached = max(self._reached, boundary)
        self._at = _Stop(boundary, {**counts, **since}, monotonic())
        self._rouse()

    def _since_passed(self) -> dict[str, int]:
        """All collectives since the window's begin, by names that only ranks to be compared share."""
        if (passed := self._passed) is None:
            return {}
        return {
            f"{name} since {passed.boundary}, {passed.grown.get(name)} before": count - passed.issued[name]
            for name, count in self._issued().items()
            if name in passed.issued and passed.grown.get(name) != 0
        }

    def _behind(self) -> dict[str, int]:
        """Collectives of all kinds since the last that can be set, by communicator."""
        issued = self._issued()
        return {name: issued[name] - mark for name, mark in self._marks().items() if name in issued}

    def _since_last(self, counts: Mapping[str, int]) -> dict[str, int]:
        """The same by names that only ranks share which stand behind the same call, and stood alike behind others."""
        passed = {} if self._passed is None else self._passed.behind
        behind = self._behind()
        return {
            f"{name} after {counts[name]}, {passed.get(name)} before": number
            for name, number in behind.items()
            if name in counts
        }

    def go_on(self, boundary: int) -> None:
        """It has left that boundary."""
        if self._at is not None and self._at.boundary <= boundary:
            self._at = None

    def trouble(self) -> str:
        """Why waiting at the training thread's boundary is in vain; empty if it is not.

        A rank that is gone is trouble at every boundary.
        """
        if self._gone >= 0:
            return f"rank {self._gone} is gone"
        if (at := self._at) is None:
            return ""
        if (left := self._left) is not None and left.reached < at.boundary:
            return f"rank {left.rank} takes no further part"
        if (beyond := self._beyond.get(at.boundary)) is not None:
            went = f"rank {beyond.ahead} went on beyond the calls that rank {beyond.behind} stopped at"
            return f"{went}: their steps differ"
        return ""

    def leave(self, *, is_cut_off: bool = False) -> None:
        """This rank comes to no further boundary; it still passes on what others say.

        `is_cut_off`: nor do the others get what it had to say at the last one.
        """
        self._leaves = self._leaves or Left(self._rank, self._reached - is_cut_off)
        self._rouse()

    def close(self) -> None:
        """Leaves, and ends the thread and all connections."""
        self.leave()
        self._is_closing = True
        self._rouse()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        self._thread = None

    def _rouse(self) -> None:
        if self._links is not None:
            self._links.rouse()

    # The thread. ------------------------------------------------------------------------------------------------------

    def _run(self, links: Links) -> None:
        try:
            links.meet()
            while not self._is_closing:
                links.work(self._do_what_is_due())
        except Exception as error:
            self._say_deaf(error)
        finally:
            with suppress(Exception):
                self._say_goodbye(self._leaves or Left(self._rank, FAR))
            links.close()

    def _say_deaf(self, error: Exception) -> None:
        """No sockets, no store, or an error of ours."""
        _log.debug("rank %d does not hear whether others are gone: %s", self._rank, error, exc_info=True)

    def _do_what_is_due(self) -> float | None:
        """Does what is due; returns the seconds until something is due again, None if nothing is."""
        now, dues = monotonic(), []
        if self._leaves is not None:
            self._say_goodbye(self._leaves)
        if (at := self._at) is not None and at is not self._told:
            if now >= at.since_s + PATIENCE_S:
                self._told = at
                calls = {name: (count, self._rank) for name, count in self._named(lambda: at.counts).items()}
                self._hear_waits(Waits(at.boundary, calls))
            else:
                dues.append(at.since_s + PATIENCE_S)
        if self._awaited():
            if now >= self._compared_s + AGAIN_S:
                self._compared_s = now
                self._compare()
            dues.append(self._compared_s + AGAIN_S)
        if self._news:
            if now >= self._passed_on_s + AGAIN_S:
                self._passed_on_s, news, self._news = now, self._news, {}
                self._tell(*_bundles(news))
            else:
                dues.append(self._passed_on_s + AGAIN_S)
        return max(0.0, min(dues) - now) if dues else None

    def _awaited(self) -> list[int]:
        """Boundaries at which others wait, this rank is not, and may still come."""
        if self._gone >= 0 or self._leaves is not None:
            return []
        return [boundary for boundary in self._waits if boundary > self._reached and boundary not in self._beyond]

    def _compare(self) -> None:
        """Whether this rank has issued more than one that waits for it."""
        own = self._named(self._all_counts)
        for boundary in self._awaited():  # after the counts: a rank that has come there meanwhile is not beyond
            waits = self._waits[boundary]
            behind = (waits[name][1] for name, count in own.items() if name in waits and count > waits[name][0])
            if (rank := next(behind, None)) is not None:
                self._hear_beyond(Beyond(boundary, ahead=self._rank, behind=rank))

    def _all_counts(self) -> dict[str, int]:
        counts = self._counts()
        return {**counts, **self._since_passed(), **self._since_last(counts)}

    def _named(self, counts: Callable[[], Mapping[str, int]]) -> dict[str, int]:
        try:
            return {_short(name): count for name, count in counts().items()}
        except Exception as error:  # changed while it was read, perhaps: there is a next time
            _log.debug("no counts on rank %d: %s", self._rank, error)
            return {}

    def hear(self, rank: int, message: Gone | Left | Waits | Beyond) -> None:
        """See `Hearer`."""
        match message:
            case Gone():
                self._hear_gone(message)
            case Left():
                if message.rank == rank:
                    self._goodbyes.add(rank)
                if self._left is None or message.reached < self._left.reached:
                    self._left = message
                    self._tell(message)
            case Waits():
                self._hear_waits(message)
            case Beyond():
                self._hear_beyond(message)

    def lose(self, rank: int) -> None:
        """See `Hearer`."""
        if rank not in self._goodbyes:
            self._hear_gone(Gone(rank))

    def catch_up(self) -> Iterator[Message]:
        """See `Hearer`."""
        if self._gone >= 0:
            yield Gone(self._gone)
        if self._left is not None:
            yield self._left
        if self._has_left and self._leaves is not None:
            yield self._leaves
        yield from self._beyond.values()
        yield from _bundles(self._waits)

    def _hear_gone(self, message: Gone) -> None:
        if self._gone < 0:
            self._gone = message.rank
            self._tell(message)

    def _hear_beyond(self, message: Beyond) -> None:
        if message.boundary not in self._beyond and _has_room(self._beyond, message.boundary):
            self._beyond[message.boundary] = message
            self._tell(message)

    def _hear_waits(self, message: Waits) -> None:
        if not _has_room(self._waits, message.boundary):
            return
        waits = self._waits.setdefault(message.boundary, {})
        for name, waiting in message.calls.items():
            least = waits.get(name)
            if (least is None and len(waits) < MOST_COMMUNICATORS) or (least is not None and waiting[0] < least[0]):
                waits[name] = waiting
                self._news.setdefault(message.boundary, {})[name] = waiting

    def _tell(self, *messages: Message) -> None:
        if self._links is not None:
            self._links.tell(*messages)

    def _say_goodbye(self, left: Left) -> None:
        if not self._has_left:
            self._has_left = True
            self._tell(left)


_Kept = TypeVar("_Kept")


def _has_room(by_boundary: dict[int, _Kept], boundary: int) -> bool:
    """Whether a boundary is kept; the lowest makes room for it where there are too many."""
    if boundary in by_boundary or len(by_boundary) < MOST_BOUNDARIES:
        return True
    lowest = min(by_boundary)
    if boundary > lowest:
        del by_boundary[lowest]
    return boundary > lowest


def _bundles(by_boundary: Mapping[int, Calls]) -> Iterator[Waits]:
    for boundary, calls in by_boundary.items():
        rows = [*calls.items()]
        for first in range(0, len(rows), MOST_CALLS):
            yield Waits(boundary, dict(rows[first : first + MOST_CALLS]))


@lru_cache(maxsize=4096)
def _short(name: str) -> str:
    """A communicator's name, of whatever length, in 16 characters."""
    return hashlib.blake2b(name.encode(errors="replace"), digest_size=8).hexdigest()


# Who takes part at all: ranks write it into the store at their start. -------------------------------------------------


def say_here(store: Store, rank: int, mode: str, release: str) -> None:
    """Says, once, that a rank takes part, how, and by which release; a mode that begins with "off" says why not.

    A rank where nothing of ours is loaded says nothing.
    """
    store.set(f"here/{rank}", f"{release} {mode}")
    store.add(_class(mode, release), 1)  # behind the word: whoever is counted can be read


def say_off(store: Store, rank: int, mode: str, release: str, why: str) -> None:
    """Takes back what a rank has said, once."""
    word = f"{release} off ({why})"
    if store.compare_set(f"here/{rank}", f"{release} {mode}", word) == word.encode():
        store.add(_class(mode, release), -1)


def absent(store: Store, num_ranks: int, mode: str, release: str) -> str:
    """Which ranks take no part, or another one, in a line; empty if all do the same. Does not wait.

    One round trip, if all do; else a hundred or so, and the words of `AT_ONCE` ranks at a time, until `MOST_NAMED` are
    found: so one rank should ask for all, once all have had time to say it (after their first collective).
    """
    if store.add(_class(mode, release), 0) >= num_ranks:  # more, where process groups were made again on one store
        return ""
    named: list[str] = []
    for first in range(0, num_ranks, AT_ONCE):
        named += islice(_odd(store, range(first, min(first + AT_ONCE, num_ranks)), mode, release), MOST_NAMED + 1)
        if len(named) > MOST_NAMED:
            return ", ".join(named[:MOST_NAMED]) + ", and more"
    return ", ".join(named)


class RollCall:
    """Asks whether all ranks take part (`absent`) while this one waits for them, until all do.

    `open_store` makes a connection of its own to where the ranks say so.
    """

    def __init__(self, open_store: Callable[[], Store], num_ranks: int, mode: str, release: str) -> None:
        self._open_store = open_store
        self._what = num_ranks, mode, release
        self._store: Store | None = None
        self._next_s: float | None = None
        self._is_complete = False

    def trouble(self) -> str:
        """Who takes no part; empty as long as it is too early to say so, and once all do."""
        if self._is_complete:
            return ""
        now = monotonic()
        if self._next_s is None:
            self._next_s = now + ROLL_CALL_S
        if now < self._next_s:
            return ""
        self._next_s = now + ROLL_CALL_S
        try:
            self._store = self._store or self._open_store()
            missing = absent(self._store, *self._what)
        except Exception as error:  # whoever waits finds out about the store by itself
            _log.debug("no roll call: %s", error)
            return ""
        self._is_complete = not missing
        return missing


def _odd(store: Store, ranks: range, mode: str, release: str) -> Iterator[str]:
    """Those that take another part, in words; by halves where words are missing, since a store says only "not all"."""
    keys = [f"here/{rank}" for rank in ranks]
    if store.check(keys):
        for rank, word in zip(ranks, store.multi_get(keys), strict=True):
            its_release, _, its_mode = " ".join(word.decode(errors="replace").split())[:200].partition(" ")
            if its_mode.startswith("off"):
                yield f"rank {rank} is {its_mode}"
            elif its_release != release:
                yield f"rank {rank} runs lagom-overlap {its_release}, not {release}"
            elif its_mode != mode:
                yield f"rank {rank} runs in mode {its_mode}, not {mode}"
    elif len(ranks) == 1:
        yield f"rank {ranks[0]} does not run lagom"
    else:
        half = len(ranks) // 2
        yield from _odd(store, ranks[:half], mode, release)
        yield from _odd(store, ranks[half:], mode, release)


def _class(mode: str, release: str) -> str:
    return f"num_here/{release}/{mode}"
