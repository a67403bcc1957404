"""What every `lagom run` ends with, for people: what was found, why, and the next line to type."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Conclusion:
    """Three sentences, each on a line of its own; `next_line` is a command, or advice where none helps."""

    found: str
    why: str
    next_line: str

    def lines(self) -> list[str]:
        """The three lines."""
        return [f"result: {self.found}", f"why: {self.why}", f"next: {self.next_line}"]
