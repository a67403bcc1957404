"""What `lagom run --online --compare` found: several tuners on one running job. JSON: docs/formats.md."""

from collections.abc import Mapping
from dataclasses import dataclass

from lagom_overlap.collective import CommConfig
from lagom_overlap.results.base import Result, Row
from lagom_overlap.tuners.sequential import Judgement


@dataclass(frozen=True, kw_only=True)
class TunerResult:
    """What a tuner ended with: the groups that it set, by collective, after how many trials and training steps.

    `judgement` compares whole steps with the default's; None where nothing is set, where there was no verdict, or where
    the settings `failed` in it, for that reason.
    """

    name: str
    settings: Mapping[str, Mapping[str, CommConfig]]
    judgement: Judgement | None
    num_measurements: int
    num_steps: int
    failed: str = ""


@dataclass(frozen=True, kw_only=True)
class ContestResult(Result):
    """Tuners in the order in which they searched; the first may be adopted, and is where `adopted` is its name.

    `num_verdict_steps` are the steps of the comparison, `default_step_s` is the last time of an untouched step.
    """

    tool: str = "lagom run --compare"
    tuners: tuple[TunerResult, ...]
    adopted: str | None
    num_verdict_steps: int
    default_step_s: float

    @property
    def best(self) -> TunerResult | None:
        """The tuner whose settings were proven faster than the default, by the largest ratio; None if none were."""
        proven = [each for each in self.tuners if each.judgement is not None and each.judgement.is_faster]
        return max(proven, key=lambda each: 0.0 if each.judgement is None else each.judgement.ratio, default=None)

    def summary(self) -> str:
        """Who was best."""
        if self.best is None or self.best.judgement is None:
            return "no tuner's settings are proven faster than the default"
        return f"{self.best.name} is best: {self.best.judgement.sentence()}"

    def table(self) -> list[Row]:
        """A row per tuner; a ratio above 1 is faster than the default, and limits that nothing rules out are None."""
        return [
            {
                "tuner": each.name,
                "groups_set": len(each.settings),
                "ratio": None if each.judgement is None else each.judgement.ratio,
                "low": None if each.judgement is None else each.judgement.low,
                "high": None if each.judgement is None else each.judgement.high,
                "decision": None if each.judgement is None else str(each.judgement.decision),
                "measurements": each.num_measurements,
                "steps": each.num_steps,
            }
            for each in self.tuners
        ]
