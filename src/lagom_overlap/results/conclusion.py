"""What every `lagom run` ends with, for people: what was found, why, and the next line to type."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_EMULATED: Final = "on emulated GPUs: "
ELSEWHERE: Final = "lagom emulate ... --"
"""What stands in a line to type for an emulation that a trace does not say how to start."""

UNKNOWN: Final = "COMMAND"
"""What stands in a line to type for the command of a training job that is not known."""
_MOST_SHOWN: Final = 300
"""Characters of a job's command that a line to type repeats."""


def command_line(words: Sequence[str]) -> str:
    """The command of a training job as a line to type holds it; `UNKNOWN` where it is not known, or too long."""
    text = shlex.join(words)
    return text if 0 < len(text) <= _MOST_SHOWN else UNKNOWN


def online_line(command: str, flags: Mapping[str, str | None]) -> str:
    """The line that searches in a job, as it was asked for; flags without a value are left out."""
    words = [f"{flag} {shlex.quote(value)}" for flag, value in flags.items() if value]
    return " ".join(["lagom run --online", *words, "--", command])


def line_under(launcher: str, line: str) -> str:
    """A line to type as it is typed where `launcher` (`lagom emulate ... --`) emulates the GPUs; empty: no change.

    Of our verbs `run` alone starts the job; the others need no GPU.
    """
    starts_job = line.startswith("lagom run ") or not line.startswith("lagom ")
    return f"{launcher} {line}" if launcher and starts_job else line


@dataclass(frozen=True, slots=True)
class Conclusion:
    """Three sentences, each on a line of its own; `next_line` is a command, or advice where none helps."""

    found: str
    why: str
    next_line: str

    def under(self, launcher: str) -> "Conclusion":
        """The same of a job whose GPUs `launcher` emulates (empty: as it is); twice is as good as once."""
        if not launcher:
            return self
        found = self.found if self.found.startswith(_EMULATED) else _EMULATED + self.found
        return Conclusion(found, self.why, line_under(launcher, self.next_line))

    def lines(self) -> list[str]:
        """The three lines."""
        return [f"result: {self.found}", f"why: {self.why}", f"next: {self.next_line}"]
