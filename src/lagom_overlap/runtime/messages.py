"""What ranks say to each other through the job's store: strictly typed JSON, never pickled, nothing in it is run."""

from enum import StrEnum
from typing import Final, TypeVar

import msgspec

from lagom_overlap.errors import LagomError
from lagom_overlap.runtime.program import GroupTimes, Program
from lagom_overlap.runtime.sites import SiteSetting


class State(StrEnum):
    """What the tuner is doing, in a word for people; the same on all ranks."""

    RECORD = "record"
    SEARCH = "search"
    VERDICT = "verdict"
    WATCH = "watch"
    FROZEN = "frozen"
    DONE = "done"
    OFF = "off"


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every rank does in one window of steps.

    The window has `num_steps` steps, of which `first_measured` and those after it up to the last but one are measured
    (none in a window that is only run). `epoch` names the settings: a new one is a switch, and only then `settings` are
    told. DONE and OFF are the last word: the former keeps its settings for good, the latter takes everything away.
    `journal` holds lines that those who keep a journal add to theirs, or with `journal_is_new` begin it with.
    """

    window: int
    state: State
    reason: str
    num_steps: int = 1
    first_measured: int = 0
    epoch: int = 0
    settings: tuple[SiteSetting, ...] = ()
    journal: tuple[str, ...] = ()
    journal_is_new: bool = False

    @property
    def is_last(self) -> bool:
        """Whether no plan follows."""
        return self.state in (State.DONE, State.OFF)

    def measures(self, step: int) -> bool:
        """Whether step number `step` of the window is measured."""
        return self.first_measured <= step < self.num_steps - 1


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank saw in one window.

    `num_steps` counts its steps since the tuner began. `sequences` is the hash of each communicator's calls in the
    measured steps, by the communicator's name. `program` is the fingerprint of the measured steps, empty if they
    differed; without measured steps of the program that the rank works by, `times` is empty. `step_s` is the median
    measured step (0: none), `stepped_s` the sum of all steps so far, `exchange_s` the time spent on agreement so far.
    `void` says why times mean nothing, `stop` why this rank wants no more tuning. `journal_lines` is the length of the
    journal that the rank found (first window only).
    """

    rank: int
    num_steps: int
    sequences: dict[str, str]
    program: str
    times: dict[str, GroupTimes]
    step_s: float
    stepped_s: float
    exchange_s: float
    void: str = ""
    stop: str = ""
    journal_lines: int = 0


Message = TypeVar("Message", Plan, Report, Program)
_ENCODER: Final = msgspec.json.Encoder()


def encode(message: Plan | Report | Program) -> str:
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
