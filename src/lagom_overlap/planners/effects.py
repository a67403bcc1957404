"""What one setting of a framework is predicted to bring."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lagom_overlap.toml_tables import toml_value

MIN_GAIN: Final = 0.01
"""Of the step: below, a prediction says nothing; steps of one program scatter by as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchAdvice:
    """One setting: the predicted step with all advised settings but this one, and with this one too (s).

    `key` is what `--set` takes to say the same of the job, "" of a step that has no such keys.
    """

    switch: str
    without_s: float
    with_s: float
    key: str = ""

    @property
    def gain(self) -> float:
        """What it takes off the step, as a share of the step without it, as every verb tells a gain."""
        return 1.0 - self.with_s / self.without_s


def as_sets(keys: Mapping[str, bool | int | str]) -> str:
    """Keys of `[parallel]` as they follow `--set`, which takes words without quotes."""
    values = {key: value if isinstance(value, str) else toml_value(value) for key, value in keys.items()}
    return " --set ".join(f"parallel.{key}={value}" for key, value in values.items())
