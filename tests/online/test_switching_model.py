"""Every interleaving of three ranks that switch settings, with one fault: a search of all states that they can be in.

The ranks are `Member`s as they run in a job; only the store, the route and what rank 0 decides are played. A rank is
its answers so far: given the same ones it asks the same question next, so a state is the answers of all ranks and what
the store holds. The search answers one question of one rank at a time, in every order, and puts the fault at each of
them. What changes nothing that others see, and will not be answered otherwise later, is answered at once: its place
makes no difference.

The job's collectives need all ranks, all under the same settings; one of them is in flight while the next is issued.
Ranks mark their steps each by itself: in the usual
shape one after each collective, in others a rank makes one step out of two, or a step in which nothing is called.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import pytest

from lagom_overlap.collective import CollectiveKind, CommunicatorId, ConfigTable
from lagom_overlap.collective.sites import RoleCycle, SiteSetting
from lagom_overlap.errors import BackendError
from lagom_overlap.online.ranks import exchange as exchange_module
from lagom_overlap.online.ranks import member as member_module
from lagom_overlap.online.ranks.exchange import Exchange
from lagom_overlap.online.ranks.in_force import InForce
from lagom_overlap.online.ranks.member import Member
from lagom_overlap.online.ranks.messages import KEPT, Report, SwitchState, WindowPlan
from lagom_overlap.online.routes.base import CallCount, TableCursor

NUM_RANKS = 3
LOST, TIMEOUT, REFUSED, BROKEN = "lost", "timeout", "refused", "broken"
"""Answers: the connection broke, the time of a wait is over, the route is not ready, or breaks as it switches."""
DEAD = "dead"
"""In place of a rank's further answers."""
FAULTS = ("", "lost for good", "lost and found", "late", "refused", "broken", "dead")


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    """A traceback in the log for each of tens of thousands of faults is most of what a search would take."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


EVERYONE = CommunicatorId(description="all", ranks=tuple(range(NUM_RANKS)))
CALL = (CollectiveKind.ALL_GATHER, 1 << 20)
CYCLE = RoleCycle(description="all", num_ranks=NUM_RANKS, creation_order=0, calls=(CALL,))
EVEN: dict[int, tuple[int, int]] = {}
"""By rank that is not as the others: the place of its step that is none of theirs, and the collectives in it."""
UNEVEN: dict[str, dict[int, tuple[int, int]]] = {
    "a rank skips an update": {1: (1, 2)},
    "rank 0 skips an update": {0: (2, 2)},
    "a rank makes one update more": {2: (2, 0)},
    "rank 0 makes one update more": {0: (1, 0)},
    "two ranks skip at different steps": {1: (0, 2), 2: (2, 2)},
}
Question = tuple[Any, ...]
Answers = tuple[Any, ...]


def setting(num_channels: int) -> tuple[SiteSetting, ...]:
    call = {
        "description": "all",
        "num_ranks": NUM_RANKS,
        "creation_order": 0,
        "kind": "all_gather",
        "num_bytes": 1 << 20,
    }
    what = {"site": {"call": call, "occurrence": 0}, "config": {"num_channels": num_channels}}
    return (msgspec.convert(what, SiteSetting),)


def plan(state: SwitchState, epoch: int = 0, settings: tuple[SiteSetting, ...] = ()) -> WindowPlan:
    """Its window is its place in the script."""
    return WindowPlan(window=0, state=state, reason="as written", epoch=epoch, settings=settings)


SCRIPTS = {
    "a trial, another one, the untouched job": (
        plan(SwitchState.RECORD),
        plan(SwitchState.SEARCH, 1, setting(1)),
        plan(SwitchState.SEARCH, 2, setting(2)),
        plan(SwitchState.SEARCH, 3),
    ),
    "a trial that goes on and is settled": (
        plan(SwitchState.RECORD),
        plan(SwitchState.VERDICT, 1, setting(1)),
        plan(SwitchState.VERDICT, 1),
        plan(SwitchState.WATCH, 1),
        plan(SwitchState.WATCH, 1),
    ),
    "settled settings that are taken back": (
        plan(SwitchState.RECORD),
        plan(SwitchState.WATCH, 1, setting(1)),
        plan(SwitchState.SEARCH, 2),
        plan(SwitchState.WATCH, 1, setting(1)),
        plan(SwitchState.OFF),
    ),
    "settled for good after a check": (
        plan(SwitchState.RECORD),
        plan(SwitchState.WATCH, 1, setting(1)),
        plan(SwitchState.CHECK, 2),
        plan(SwitchState.CHECK, 3, setting(1)),
        plan(SwitchState.DONE, KEPT),
    ),
}


class Paused(BaseException):
    """Ends an execution at the first question that has no answer yet; nothing of ours may catch it."""


class Inline:
    """In place of `BoundedCalls`: the call itself."""

    def __init__(self, _name: str) -> None:
        pass

    def start(self, work: Any) -> Any:
        future: Future[Any] = Future()
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        return future

    def call(self, work: Any, _timeout_s: float) -> Any:
        return work()

    def close(self) -> None:
        pass


class InlineThread:
    """In place of a thread: its work, done when it starts."""

    def __init__(self, *, target: Any, **_: Any) -> None:
        self.start = target

    def join(self, _timeout_s: float) -> None:
        pass


class Player:
    """Asks one rank's questions; is its store and its route."""

    def __init__(self, answers: Answers, is_found_again: bool) -> None:
        self._answers = iter(answers)
        self._is_found_again = is_found_again
        self.is_lost = False
        self.asked: Question | None = None
        self.prepared = ConfigTable({})
        self.in_force = TableCursor(self.prepared, EVERYONE)
        self.is_leased = False
        self.before = (0, (self.in_force, False))
        self.called: list[str] = []

    def ask(self, *question: Any) -> Any:
        if self.asked is not None:
            raise Paused
        try:
            answer = next(self._answers)
        except StopIteration:
            self.asked = question
            raise Paused from None
        return answer

    def _store(self, *question: Any) -> Any:
        if self.is_lost:
            raise RuntimeError("Connection reset by peer")
        answer = self.ask(*question)
        if answer == LOST:
            self.is_lost = True
        if answer in (LOST, TIMEOUT):
            raise RuntimeError(answer)
        return answer

    def reopen(self) -> "Player":
        if not self._is_found_again:
            raise RuntimeError("Connection refused")
        self.is_lost = False
        return self

    # The store.

    def set(self, key: str, value: str) -> None:
        self._store("set", key, value.encode())

    def get(self, key: str) -> bytes:
        found: bytes = self._store("get", key)
        return found

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return list(self._store("multi_get", *keys))

    def wait(self, keys: list[str], _timeout: timedelta) -> None:
        self._store("wait", *keys)

    def compare_set(self, key: str, _expected: str, desired: str) -> bytes:
        found: bytes = self._store("compare_set", key, desired.encode())
        return found

    def check(self, keys: list[str]) -> bool:
        return bool(self._store("check", *keys))

    def add(self, key: str, amount: int) -> int:
        return int(self._store("add", key, amount))

    def delete_key(self, key: str) -> bool:
        return bool(self._store("delete_key", key))

    # The route.

    def communicators(self) -> tuple[CommunicatorId, ...]:
        return (EVERYONE,)

    def counts(self) -> dict[CommunicatorId, CallCount]:
        return {EVERYONE: CallCount("all", len(self.called), NUM_RANKS)}

    def prepare(self, table: ConfigTable, _epoch: int) -> None:
        if self.ask("prepare") == REFUSED:
            raise BackendError("no space left on device")
        self.prepared = table

    def commit(self, epoch: int) -> None:
        """It breaks after the switch, which is worse than before it."""
        is_broken = self.ask("commit") == BROKEN
        self.before = (epoch, (self.in_force, self.is_leased))
        self.in_force, self.is_leased = TableCursor(self.prepared, EVERYONE), self.prepared.lease_steps is not None
        if is_broken:
            raise RuntimeError("a bug of ours")

    def take_back(self, epoch: int) -> None:
        if self.before[0] == epoch:
            self.in_force, self.is_leased = self.before[1]

    def settle(self) -> None:
        pass

    def begin_step(self, *, is_measured: bool) -> None:
        pass

    def close(self) -> None:
        if not self.is_leased:
            self.in_force = TableCursor(ConfigTable({}), EVERYONE)

    def call(self) -> None:
        """The next collective of the job."""
        row = self.in_force.next_row(*CALL)
        self.called.append("" if row is None else str(row[1].num_channels))
        if len(self.called) > 1:
            self.ask("collective", len(self.called) - 2)


class Scripted:
    """In place of the leader."""

    def __init__(self, script: tuple[WindowPlan, ...]) -> None:
        self._plans = iter([msgspec.structs.replace(one, window=number) for number, one in enumerate(script)])

    def first(self) -> WindowPlan:
        return next(self._plans)

    def next(self, report: Report, _programs: Any, _now_s: float) -> WindowPlan:
        return next(self._plans)


@dataclass(frozen=True)
class Life:
    """One rank so far: what it asks next (None: nothing more), its setting in every call that it issued, its end."""

    asks: Question | None
    settings: tuple[str, ...]
    end: str = ""
    memory: str = ""
    """All that it goes on from after a step; two histories that leave the same are one."""


def steps_of(rank: int, num_calls: int, shape: dict[int, tuple[int, int]]) -> list[int]:
    """How many collectives each of a rank's steps has."""
    steps = [1] * num_calls
    place, length = shape.get(rank, (0, 1))
    steps[place : place + length] = [length] if length else []
    return [*steps[:place], 0, *steps[place:]] if length == 0 else steps


def live(
    rank: int, script: tuple[WindowPlan, ...], answers: Answers, fault: str, shape: dict[int, tuple[int, int]] = EVEN
) -> Life:
    """Runs a rank until it asks what is not answered."""
    player = Player(answers, fault == "lost and found")
    steps = steps_of(rank, len(script), shape)
    try:
        exchange = Exchange(player, rank=rank, num_ranks=NUM_RANKS, timeout_s=9.0, reopen=player.reopen)
        leader: Any = Scripted(script) if rank == 0 else None
        member = Member(exchange, player, leader=leader, clock=lambda: 0.0)  # type: ignore[arg-type]
        for step, num_calls in enumerate(steps):
            member.begin_step()
            if member.plan.state is not SwitchState.OFF:
                rows = [config for _, config in player.in_force._table]
                assert rows == [one.config for one in member.settings], "a rank runs what it does not know of"
            for _ in range(num_calls):
                player.call()
            if step + 1 < len(steps):  # there is no plan after the last
                member.end_step()
    except Paused:
        if player.asked is None or player.asked[0] != "collective":
            return Life(player.asked, tuple(player.called))
        rule = member._in_force
        memory = (
            member.plan,
            member._lost,
            member._stop,
            member.is_over,
            member.settings,
            rule.is_settled,
            rule._epoch,
        )
        row = vars(player.in_force) | {"_cycle": None, "_table": str(list(player.in_force._table))}
        more = (
            rule._agreed,
            exchange._promised,
            exchange._placed,
            sorted(exchange._added),
            player.is_lost,
            member._num_windows,
        )
        most = (member.num_steps, step, player.called, player.is_leased, str(row))
        return Life(player.asked, tuple(player.called), memory=repr((memory, more, most)))
    except BackendError as error:
        return Life(None, tuple(player.called), type(error).__name__)
    return Life(None, tuple(player.called), "done")


Store = frozenset[tuple[str, Any]]


@dataclass(frozen=True)
class State:
    """`ranks` are numbers of answers in `Histories`; `fault` is the one that came, empty as long as none did."""

    ranks: tuple[int, ...]
    store: Store
    fault: str


class Histories:
    """Every sequence of answers that a rank was given, as a number, and how the rank lived with it."""

    def __init__(self, script: tuple[WindowPlan, ...], fault: str, shape: dict[int, tuple[int, int]]) -> None:
        self._script, self._fault, self._shape = script, fault, shape
        self.is_uneven = bool(shape)
        self._answers: list[Answers] = [()]
        self._numbers: dict[tuple[int, Any], int] = {}
        self._lives: dict[tuple[int, int], Life] = {}
        self._by_memory: dict[tuple[int, Life], int] = {}

    def after(self, rank: int, number: int, answer: Any) -> int:
        """These answers and one more."""
        known = self._numbers.get((number, answer))
        if known is None:
            known = self._numbers[number, answer] = len(self._answers)
            self._answers.append((*self._answers[number], answer))
        life = self.life(rank, known)
        return self._by_memory.setdefault((rank, life), known) if life.memory else known

    def life(self, rank: int, number: int) -> Life:
        """What comes of a rank by these answers."""
        found = self._lives.get((rank, number))
        if found is None:
            answers = self._answers[number]
            if answers[-1:] == (DEAD,):
                found = replace(self._live(rank, answers[:-1]), asks=None, end=DEAD)
            else:
                found = self._live(rank, answers)
            self._lives[rank, number] = found
        return found

    def _live(self, rank: int, answers: Answers) -> Life:
        return live(rank, self._script, answers, self._fault, self._shape)


def successors(state: State, fault: str, lives: tuple[Life, ...], histories: Histories) -> Iterator[State]:
    """The states one answer away; only one rank's, where the order makes no difference."""
    moves: list[tuple[int, Any, Store, str]] = []
    waiting = []
    for rank, life in enumerate(lives):
        if life.asks is None:
            continue
        usual = [(rank, *option, state.fault) for option in answered(state, life.asks, lives)]
        may_fail = not state.fault and (rank < 2 or histories.is_uneven)  # the third is as the second
        faulty = [(rank, answer, state.store, fault) for answer in faults_at(life.asks, fault) if may_fail]
        if usual and is_alone(life.asks, state):
            moves = usual + faulty
            break
        moves += usual + faulty
        if life.asks[0] == "wait" and not usual:
            waiting.append(rank)
    if not any(answer != TIMEOUT for _, answer, _, _ in moves):  # nobody can go on, so the time of who waits is over
        moves += [(rank, TIMEOUT, state.store, state.fault) for rank in waiting]
    for rank, answer, store, came in moves:
        ranks = list(state.ranks)
        ranks[rank] = histories.after(rank, ranks[rank], answer)
        yield State(tuple(ranks), store, came)


def is_alone(asks: Question, state: State) -> bool:
    """Whether the answer, now that there is one, will stay the same, and makes no difference to what others hear."""
    if asks[0] == "compare_set":
        return (asks[1], asks[2]) in state.store
    if asks[0] == "add" and (asks[1].endswith("#") or asks[1].startswith("owed/")):
        return True  # sums, which nobody looks at before the last one has come
    if asks[0] == "add" and asks[1].startswith("come/"):
        # Who comes last to the first of three equal rounds is left open in the two others.
        return dict(state.store).get(asks[1], 0) + 1 < NUM_RANKS
    return asks[0] in ("collective", "prepare", "commit", "wait", "get", "multi_get", "delete_key") or (
        asks[0] in ("check", "set") and (not state.fault or asks[0] == "set")
    )


def answered(  # noqa: PLR0912 - one case for each question
    state: State, asks: Question, lives: tuple[Life, ...]
) -> Iterator[tuple[Any, Store]]:
    """The answer as things are, and the store after it; none as long as it has to wait."""
    written: dict[str, Any] = dict(state.store)
    match asks:
        case ("collective", call):
            if all(len(life.settings) > call for life in lives):
                yield None, state.store
        case ("prepare",) | ("commit",):
            yield None, state.store
        case ("wait", *keys):
            if all(key in written for key in keys):
                yield None, state.store
        case ("get", key):
            yield written[key], state.store
        case ("multi_get", *keys):
            yield tuple(written[key] for key in keys), state.store
        case ("check", *keys):
            yield all(key in written for key in keys), state.store
        case ("set", key, value):
            yield None, frozenset((written | {key: value}).items())
        case ("compare_set", key, value):
            yield written.get(key, value), frozenset(({key: value} | written).items())
        case ("add", key, amount):
            total = written.get(key, 0) + amount
            # A rank asks only whether it is the last one, of those at a place also whether it is the first.
            yield (
                total if total == NUM_RANKS or key.endswith("#") or key.startswith("owed/") else 1,
                frozenset((written | {key: total}).items()),
            )
        case ("delete_key", _):  # of a window that all have left: what is read later all the same would be found
            yield True, state.store
        case _:
            raise AssertionError(asks)


def faults_at(asks: Question, fault: str) -> list[str]:
    """What the fault answers instead."""
    kind = asks[0]
    match fault:
        case "dead":
            return [DEAD]
        case "refused":
            return [REFUSED] if kind == "prepare" else []
        case "broken":
            return [BROKEN] if kind == "commit" else []
        case "late":
            return [TIMEOUT] if kind == "wait" else []
        case "lost for good" | "lost and found":
            return [] if kind in ("prepare", "commit", "collective") else [LOST]
    return []


@dataclass
class Found:
    num_states: int = 0
    ends: Counter[tuple[str, ...]] = field(default_factory=Counter)


def search(script: tuple[WindowPlan, ...], fault: str, shape: dict[int, tuple[int, int]] = EVEN) -> Found:
    """All states; raises where two ranks issue a call under different settings, or where one waits for ever."""
    script = (msgspec.structs.replace(script[0], cycles=(CYCLE,)), *script[1:])
    histories = Histories(script, fault, shape)
    start = State((0,) * NUM_RANKS, frozenset(), "")
    seen, todo, found = {start}, [start], Found()
    while todo:
        state = todo.pop()
        found.num_states += 1
        lives = tuple(histories.life(rank, number) for rank, number in enumerate(state.ranks))
        check_alike(lives)
        after = list(successors(state, fault, lives, histories))
        if not after:
            check_end(lives)
            found.ends[tuple(sorted(life.end for life in lives))] += 1
        for one in after:
            if one not in seen:
                seen.add(one)
                todo.append(one)
    return found


def check_alike(lives: tuple[Life, ...]) -> None:
    for call in range(max(len(life.settings) for life in lives)):
        settings = {life.settings[call] for life in lives if len(life.settings) > call}
        assert len(settings) == 1, f"ranks run call {call} under {settings}: {lives}"


def check_end(lives: tuple[Life, ...]) -> None:
    """Nobody can go on: all are done, or one has ended the job, and the others wait in it, not in ours."""
    is_over = any(life.end not in ("", "done") for life in lives)
    for life in lives:
        assert life.end or (is_over and life.asks is not None and life.asks[0] == "collective"), f"stuck: {lives}"


@pytest.fixture(autouse=True)
def without_threads_and_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "BoundedCalls", Inline)
    monkeypatch.setattr(exchange_module, "Thread", InlineThread)
    monkeypatch.setattr(exchange_module, "sleep", lambda _: None)
    monkeypatch.setattr(exchange_module, "monotonic", partial(next, itertools.count()))  # a second between two looks
    monkeypatch.setattr(member_module, "perf_counter", lambda: 0.0)


UNEVEN_FAULTS = ("", "lost for good", "dead", "late")
WITH_EVERY_FAULT = ("a trial, another one, the untouched job", "settled settings that are taken back")
USUAL = {
    *((name, "") for name in SCRIPTS),
    *((name, fault) for name in WITH_EVERY_FAULT for fault in ("refused", "broken")),
    ("a trial, another one, the untouched job", "lost and found"),
    ("a trial, another one, the untouched job", "dead"),
    ("settled settings that are taken back", "lost for good"),
}
"""What `make test` searches: each script, and each fault but lateness, which is among the uneven ones below."""


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param(name, fault, marks=() if (name, fault) in USUAL else pytest.mark.long)
        for name in SCRIPTS
        for fault in FAULTS
        if not fault or name in WITH_EVERY_FAULT or fault not in UNEVEN_FAULTS  # with those below, every pair
    ],
)
def test_no_two_ranks_run_a_step_under_different_settings_and_none_waits_for_ever(name: str, fault: str) -> None:
    found = search(SCRIPTS[name], fault)
    assert found.num_states > 100
    if fault in ("", "late", "refused", "broken", "lost and found"):
        assert set(found.ends) == {("done",) * NUM_RANKS}


EVERY_PAIR = [
    (list(SCRIPTS)[(number + place) % len(SCRIPTS)], uneven, fault)
    for number, uneven in enumerate(UNEVEN)
    for place, fault in enumerate(UNEVEN_FAULTS)
]
"""Each way to differ with each fault and each script, each script with each fault; all 80 take a minute longer."""
LARGEST = {
    ("a trial that goes on and is settled", "a rank makes one update more", "late"),
    ("a trial, another one, the untouched job", "a rank makes one update more", "dead"),
    ("a trial, another one, the untouched job", "rank 0 makes one update more", "lost for good"),
    ("settled for good after a check", "a rank makes one update more", "lost for good"),
    ("settled settings that are taken back", "rank 0 makes one update more", "late"),
    ("settled settings that are taken back", "rank 0 skips an update", "lost for good"),
}
"""The six with most states, without which each way to differ, each fault and each script is still searched."""


@pytest.mark.parametrize(
    ("name", "uneven", "fault"),
    [pytest.param(*one, marks=pytest.mark.long if one in LARGEST else ()) for one in EVERY_PAIR],
)
def test_nor_do_ranks_that_count_their_steps_differently(name: str, uneven: str, fault: str) -> None:
    found = search(SCRIPTS[name], fault, UNEVEN[uneven])
    if fault in ("", "late"):
        assert set(found.ends) == {("done",) * NUM_RANKS}


def one_round(self: Exchange, window: int, *, refusal: str = "", change: Any = lambda: None) -> str:
    refusal = refusal or self._meet(window)
    if refusal:
        return self._refused(window, refusal)
    change()
    return ""


def never_taken_back(self: InForce, plan: WindowPlan | None) -> None:
    pass


def off_whatever_is_set(self: InForce, window: int, why: str) -> WindowPlan:
    return WindowPlan(window=window, state=SwitchState.OFF, reason=why, epoch=KEPT)


def wherever_it_stands(self: InForce, *_: Any) -> str:
    return ""


def at_once(self: Player) -> None:
    self.in_force = TableCursor(ConfigTable({}), EVERYONE)


@pytest.mark.parametrize(
    ("owner", "name", "weaker", "where"),
    [
        (Exchange, "agree", one_round, ("a trial, another one, the untouched job", "lost for good", EVEN)),
        (InForce, "_last_word", off_whatever_is_set, ("settled settings that are taken back", "lost for good", EVEN)),
        (InForce, "_take_back", never_taken_back, ("settled settings that are taken back", "broken", EVEN)),
        (InForce, "_take_back", never_taken_back, ("settled settings that are taken back", "late", EVEN)),
        (
            InForce,
            "_standing",
            wherever_it_stands,
            ("a trial, another one, the untouched job", "", UNEVEN["a rank makes one update more"]),
        ),
        (
            Player,
            "close",
            at_once,
            ("a trial, another one, the untouched job", "", UNEVEN["a rank makes one update more"]),
        ),
    ],
)
def test_the_search_finds_what_is_wrong_with_a_weaker_protocol(
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    weaker: Any,
    where: tuple[str, str, dict[int, tuple[int, int]]],
) -> None:
    """One round instead of two; a rank that cannot hear others takes settled settings away.

    A switch that was made before all agreed, and is not taken back; one that ranks make without comparing where they
    stand; a trial that ends on each rank when it stops, not when its lease does.
    """
    monkeypatch.setattr(owner, name, weaker)
    with pytest.raises(AssertionError, match=r"ranks run call \d under|runs what it does not know of"):
        search(SCRIPTS[where[0]], *where[1:])
