"""What `lagom run --prove` found: default against configured steps of the user's own job. JSON: docs/formats.md."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from typing import Final

from lagom_overlap.results.base import Result, Row
from lagom_overlap.results.conclusion import Conclusion
from lagom_overlap.tuners.sequential import NOISY, Decision, Judgement
from lagom_overlap.units import format_percent

_MANY_PAIRS: Final = 1000
"""No job is worth more: five in the job take ten thousand steps."""


class ProofDecision(StrEnum):
    """How a proof ends."""

    ADOPT = "adopt"
    REJECT = "reject"
    NO_DIFFERENCE = "no difference"
    UNDECIDED = "undecided"


class ProofWay(StrEnum):
    """Where default and configured blocks alternate: in one run of the job, or as restarts of it."""

    IN_JOB = "in the job"
    RESTARTS = "restarts"


@dataclass(frozen=True, kw_only=True)
class ProofResult(Result):
    """One proof of `subject`, whose kind is `kind` in words.

    `default_s` and `configured_s` are the step times of the pairs' blocks in seconds, in order; a block is
    `steps_per_block` steps (None: a whole run of the job, of which it is the median step). `judgement` is the
    sequential test's; None where fewer than two pairs ran, and `reason` then says why. `machine`, `versions`, `command`
    and `date` say where and what; `next_line` is the line to type.
    """

    tool: str = "lagom run --prove"
    subject: str
    kind: str
    way: ProofWay
    decision: ProofDecision
    reason: str
    judgement: Judgement | None
    default_s: tuple[float, ...]
    configured_s: tuple[float, ...]
    steps_per_block: int | None
    next_line: str
    command: tuple[str, ...]
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    date: str

    @property
    def conclusion(self) -> Conclusion:
        """What every run ends with."""
        ending = Conclusion(f"{self.found}: {self.subject}", self.reason, self.next_line)
        return ending.under(self.machine.get("emulated_by", ""))

    @property
    def found(self) -> str:
        """The decision in words."""
        if self.decision is not ProofDecision.NO_DIFFERENCE or self.judgement is None:
            return self.decision
        return f"no difference above {format_percent(self.judgement.largest_unseen)}"

    def summary(self) -> str:
        """The three lines."""
        return "\n".join(self.conclusion.lines())

    def table(self) -> list[Row]:
        """A row per pair."""
        pairs = zip(self.default_s, self.configured_s, strict=False)
        return [
            {"pair": number, "default_s": default_s, "configured_s": configured_s, "ratio": default_s / configured_s}
            for number, (default_s, configured_s) in enumerate(pairs, 1)
        ]


def decision_of(judgement: Judgement | None) -> ProofDecision:
    """What a test says of the settings; a test that could rule nothing out has decided nothing."""
    if judgement is None:
        return ProofDecision.UNDECIDED
    match judgement.decision:
        case Decision.FASTER:
            return ProofDecision.ADOPT
        case Decision.SLOWER:
            return ProofDecision.REJECT
        case Decision.NO_DIFFERENCE if isfinite(judgement.largest_unseen):
            return ProofDecision.NO_DIFFERENCE
        case Decision.NO_DIFFERENCE if judgement.high - 1 < judgement.min_effect:
            return ProofDecision.REJECT  # surely no gain that counts, however much slower it is
        case _:
            return ProofDecision.UNDECIDED


def outlook(decision: ProofDecision, judgement: Judgement, num_needed: int | None, *, steps_per_pair: int = 0) -> str:
    """How many pairs would have decided, as a part of the sentence; empty where it is decided, or as good as that.

    `num_needed` is `sequential.more_pairs`'s.
    """
    if decision in (ProofDecision.ADOPT, ProofDecision.REJECT) or judgement.largest_unseen < NOISY:
        return ""
    if num_needed is None or num_needed > _MANY_PAIRS:
        return "; more pairs like these would not decide"
    if num_needed <= judgement.num_pairs:
        return "; a few more pairs like these would decide"
    steps = f" ({num_needed * steps_per_pair} steps)" if steps_per_pair else ""
    return f"; about {num_needed} pairs like these{steps} would decide"


def next_line(decision: ProofDecision, subject: str, command: str, *, flags: str = "", is_longest: bool = False) -> str:
    """The line to type after a proof of `subject`, in the shell's words.

    `flags` make the next proof longer; `is_longest`: this one had as many pairs as there can be, so only more steps in
    each would tell more.
    """
    again = f"lagom run --prove {subject} {flags}".strip()
    match decision:
        case ProofDecision.ADOPT:
            return f"lagom run --config {subject} -- {command}"
        case ProofDecision.UNDECIDED:
            needs_steps = is_longest or not flags
            return f"{again} -- {command}{'    # with more steps' if needs_steps else ''}"
        case ProofDecision.NO_DIFFERENCE if flags and not is_longest:
            return f"{command}    # as it is; closer limits: {again} -- ..."
        case _:
            return f"{command}    # as it is, without {subject}"
