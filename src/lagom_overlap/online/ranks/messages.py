"""The messages between ranks through the job's store: strictly typed JSON, never pickled, never executed."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Final, TypeVar

import msgspec

from lagom_overlap.collective import CommunicatorId
from lagom_overlap.collective.sites import RoleCycle, SiteSetting
from lagom_overlap.errors import LagomError
from lagom_overlap.online.program import StepProgram
from lagom_overlap.online.routes.base import StepRecord
from lagom_overlap.tuners.problem import Measurement


class SwitchState(StrEnum):
    """What the tuner is doing, in a word; the same on all ranks."""

    RECORD = "record"
    SEARCH = "search"
    VERDICT = "verdict"
    WATCH = "watch"
    CHECK = "check"
    FROZEN = "frozen"
    DONE = "done"
    OFF = "off"

    @property
    def words(self) -> str:
        """What the tuner is doing, for people."""
        return _WORDS[self]


_WORDS: Final = {
    SwitchState.RECORD: "recording the untouched job",
    SwitchState.SEARCH: "trying settings",
    SwitchState.VERDICT: "comparing with the default",
    SwitchState.WATCH: "done, and watching the job's steps",
    SwitchState.CHECK: "checking that the settings still pay",
    SwitchState.FROZEN: "paused, everything runs untouched",
    SwitchState.DONE: "done",
    SwitchState.OFF: "off, everything runs untouched",
}


SETTLED: Final = (SwitchState.WATCH, SwitchState.DONE)
"""States in which settings are no trial's."""

UNLIKE: Final = 1 << 10
"""Instead of a class width: the steps make different calls, not the same calls with different sizes."""
LONG: Final = 16
"""Windows of at least this many steps report one step earlier; one unreported step more makes no difference there."""
KEPT: Final = -1
"""Instead of an epoch: the settings in force stay, although not every rank may read this plan."""


class WindowPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every rank does in one window of steps.

    The window has `num_steps` steps, of which `first_measured` and every `steps_apart`-th after it up to the last but
    one are measured (none in a window that is only run). `epoch` numbers the settings: a new number other than `KEPT`
    is a switch, and only then the plan holds `settings`; `is_adopted` says that a verdict of this job adopted them,
    `is_overturned` that adopted settings have lost a later check. `size_octaves` is the width of the size classes
    (0: none); it changes only while nothing is set. `cycles` are those of saved settings, in the first plan, for ranks
    that never record a step of their own. DONE and OFF are final: DONE keeps the settings for good, OFF removes them
    all. `journal` holds lines that ranks with a journal append to it, or begin it with if `journal_is_new`.
    """

    window: int
    state: SwitchState
    reason: str
    num_steps: int = 1
    first_measured: int = 0
    steps_apart: Annotated[int, msgspec.Meta(ge=1)] = 1
    epoch: int = 0
    settings: tuple[SiteSetting, ...] = ()
    cycles: tuple[RoleCycle, ...] = ()
    size_octaves: int = 0
    is_adopted: bool = False
    is_overturned: bool = False
    journal: tuple[str, ...] = ()
    journal_is_new: bool = False

    @property
    def is_last(self) -> bool:
        """Whether no plan follows."""
        return self.state in (SwitchState.DONE, SwitchState.OFF)

    @property
    def decided_after(self) -> int:
        """Steps after which the next plan is made; the reports for it are sent one step earlier.

        In long windows without measurements, which a settled job mostly consists of, the plan is made one step before
        the end, so that it has time to travel and no rank waits for it.
        """
        is_only_timed = self.first_measured >= self.num_steps - 1
        return self.num_steps - 1 if is_only_timed and self.num_steps >= LONG else self.num_steps

    def measures(self, step: int) -> bool:
        """Whether step number `step` of the window is measured."""
        is_within = self.first_measured <= step < self.num_steps - 1
        return is_within and (step - self.first_measured) % self.steps_apart == 0


class Calls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Digest of the calls on a communicator as `rank` reported it, and how many of its `size` ranks have reported."""

    rank: int
    digest: str
    num_ranks: int
    size: int


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's report of a window, or the merged one of a range of ranks; its size does not grow with the ranks.

    `num_steps` counts steps since the tuner began, of the first rank. `disagreement` says how ranks differ in steps or
    calls, `void` why times mean nothing, `hold` why nothing may be switched now, `stop` why a rank wants no more
    tuning, `unheard` whose report is missing; each names one rank, all are empty where all is well. `calls` are those
    of communicators that not all ranks of the range share, `MOST_CALLS` at most; `balance` is 0 for all ranks together
    if, and very nearly only if, all calls agree (`balance_of`); both are left out where the window is void. `programs`
    are the fingerprints of the measured steps in order of rank, `shapes` says which rank had which. `octaves` is the
    least width of classes of sizes by which these steps and the one measured before them are alike on every rank,
    `UNLIKE` if none does, -1 where nothing was measured. `times` are the largest that any rank saw, so are `step_s`
    (median measured step, 0: none), `steps_s` (each step of the window but the last, or the last two:
    `WindowPlan.decided_after`), `stepped_s` (all steps so far) and `exchange_s` (spent on agreement and on measuring so
    far). `journal_lines` is the length of the longest journal that a rank found, `journal_rank` that rank (first window
    only).
    """

    rank: int
    num_steps: int
    num_ranks: int = 1
    calls: dict[str, Calls] = {}
    balance: int = 0
    programs: tuple[str, ...] = ()
    shapes: int = 0
    octaves: int = -1
    times: dict[str, Measurement] = {}
    step_s: float = 0.0
    steps_s: tuple[float, ...] = ()
    stepped_s: float = 0.0
    exchange_s: float = 0.0
    disagreement: str = ""
    void: str = ""
    hold: str = ""
    stop: str = ""
    unheard: str = ""
    journal_lines: int = 0
    journal_rank: int = 0


def steps_that_count(steps_s: Sequence[float]) -> Sequence[float]:
    """The times of a window's steps without the first, which settles, unless it is the only one reported."""
    return steps_s[1:] or steps_s


MOST_CALLS: Final = 64
"""Communicators that a merged report lists; disagreement on others is detected by `balance`, but not named."""
MODULUS: Final = 2**61 - 1
"""A Mersenne prime: unequal digests cancel with a chance of 1 in 2^61 only."""
Message = TypeVar("Message", WindowPlan, Report, StepProgram)
_ENCODER: Final = msgspec.json.Encoder()


def encode(message: WindowPlan | Report | StepProgram) -> str:
    """The message as JSON text."""
    return _ENCODER.encode(message).decode()


def decode(data: bytes, kind: type[Message]) -> Message:
    """The message in some bytes.

    Raises:
        ValueError: if there is none of that kind, or it holds an impossible value.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, LagomError, RecursionError) as error:
        raise ValueError(f"not a {kind.__name__.lower()}: {error}") from error


def _number(*words: object) -> int:
    """A number below the modulus that looks random and is the same on every rank."""
    digest = hashlib.sha256("/".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:8]) % MODULUS


def balance_of(name: str, place: int, size: int, digest: str) -> int:
    """One rank's share of a communicator's balance, its `place`-th of `size` ranks.

    The factors of all places sum up to nothing, so equal digests cancel out; unequal ones do not, but for one chance in
    2^61. Shares of all communicators and ranks may be added in any order, modulo `MODULUS`.
    """
    factor = _number(name, place) - _number(name, (place + 1) % size)
    return factor * _number(digest) % MODULUS


def calls_of(
    records: Sequence[StepRecord], rank: int, num_ranks: int, places: Mapping[str, int] = MappingProxyType({})
) -> tuple[dict[str, Calls], int]:
    """The digest of each communicator's calls, in order, over the given steps; this rank's share of the balance.

    `places` are this rank's in communicators that go by their wire, by its name (`wires_of`); each of their ranks has
    another one. What is set is set by role, so ranks that know such a communicator by different roles disagree, too.
    """
    hashes: dict[CommunicatorId, hashlib._Hash] = defaultdict(hashlib.sha256)
    for record in records:
        for call in record.calls:
            words = f"{call.key.kind} {call.key.num_bytes} {call.key.occurrence};"
            hashes[call.key.communicator].update(words.encode())
    wires = wires_of(records)
    calls, balance = {}, 0
    for communicator, hashed in hashes.items():
        ranks, size = communicator.ranks, len(communicator.ranks)
        if wire := wires.get(communicator):
            hashed.update(f"{communicator.description}#{communicator.creation_order}".encode())
        name, digest = wire or _name(communicator), hashed.hexdigest()[:16]
        calls[name] = Calls(rank=rank, digest=digest, num_ranks=1, size=size)
        if wire:
            place = places.get(wire, size)
        else:
            place = ranks.index(rank) if rank in ranks and max(ranks) < num_ranks else size
        if place < size <= num_ranks:  # else not all of its ranks report
            balance += balance_of(name, place, size, digest)
    return calls, balance % MODULUS


def wires_of(records: Sequence[StepRecord]) -> dict[CommunicatorId, str]:
    """The communicators called in some steps that their ranks know by their wire, and its name."""
    return {
        call.key.communicator: f"of {len(call.key.communicator.ranks)} ranks, {wire}"
        for record in records
        for call in record.calls
        if (wire := record.wires.get(call.key.communicator))
    }


@lru_cache(maxsize=1024)
def _name(communicator: CommunicatorId) -> str:
    """The same on all ranks, and another for every communicator."""
    ranks = hashlib.sha256(repr(communicator.ranks).encode()).hexdigest()[:8]
    return f"{communicator.description}#{communicator.creation_order}/{len(communicator.ranks)}:{ranks}"


def shape_of(rank: int, program: str) -> int:
    """One rank's share of `shapes`."""
    return _number(rank, program)


def merged(reports: Sequence[Report]) -> Report:
    """Merges reports, given in order of rank.

    Raises:
        ValueError: if there is none.
    """
    if not reports:
        raise ValueError("no report to merge")
    longest = max(reports, key=lambda report: report.journal_lines)
    calls, quarrel = _merged_calls(reports)
    odd = next((report for report in reports if report.num_steps != reports[0].num_steps), None)
    if odd is not None:
        first = reports[0]
        words = f"rank {first.rank}: {first.num_steps}, rank {odd.rank}: {odd.num_steps}"
        quarrel = f"the ranks are at different steps ({words})"
    return Report(
        rank=reports[0].rank,
        num_ranks=sum(report.num_ranks for report in reports),
        num_steps=reports[0].num_steps,
        calls=calls,
        balance=sum(report.balance for report in reports) % MODULUS,
        programs=tuple(dict.fromkeys(program for report in reports for program in report.programs)),
        shapes=sum(report.shapes for report in reports) % MODULUS,
        octaves=max(report.octaves for report in reports),
        times=_slowest([report.times for report in reports]),
        step_s=max(report.step_s for report in reports),
        steps_s=tuple(max(steps) for steps in zip(*(report.steps_s for report in reports), strict=False)),
        stepped_s=max(report.stepped_s for report in reports),
        exchange_s=max(report.exchange_s for report in reports),
        disagreement=next((report.disagreement for report in reports if report.disagreement), quarrel),
        void=next((report.void for report in reports if report.void), ""),
        hold=next((report.hold for report in reports if report.hold), ""),
        stop=next((report.stop for report in reports if report.stop), ""),
        unheard=next((report.unheard for report in reports if report.unheard), ""),
        journal_lines=longest.journal_lines,
        journal_rank=longest.journal_rank,
    )


def _merged_calls(reports: Sequence[Report]) -> tuple[dict[str, Calls], str]:
    """The calls of communicators whose ranks are not all here yet, and the first difference in words."""
    by_name: dict[str, Calls] = {}
    quarrel = ""
    for report in reports:
        for name, calls in report.calls.items():
            other = by_name.get(name)
            if other is not None and other.digest != calls.digest and not quarrel:
                quarrel = f"ranks {other.rank} and {calls.rank} made different calls on communicator {name}"
            first = calls if other is None else other
            num_ranks = calls.num_ranks + (0 if other is None else other.num_ranks)
            by_name[name] = Calls(rank=first.rank, digest=first.digest, num_ranks=num_ranks, size=first.size)
    open_ = [(name, calls) for name, calls in by_name.items() if calls.num_ranks < calls.size]
    return dict(open_[:MOST_CALLS]), quarrel


def _slowest(reports: Sequence[dict[str, Measurement]]) -> dict[str, Measurement]:
    """Each group's times, each the largest that any rank saw."""
    by_group: dict[str, list[Measurement]] = {}
    for times in reports:
        for name, each in times.items():
            by_group.setdefault(name, []).append(each)
    return {
        name: Measurement(
            makespan_s=max(times.makespan_s for times in each),
            comp_s=max(times.comp_s for times in each),
            comm_s=tuple(max(lengths) for lengths in zip(*(times.comm_s for times in each), strict=True)),
            num_repeats=min(times.num_repeats for times in each),
            makespan_iqr_s=max(times.makespan_iqr_s for times in each),
        )
        for name, each in by_group.items()
    }
