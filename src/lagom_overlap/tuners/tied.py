"""A tuner around a tuner, for collectives that a running job cannot tell apart: they get one setting.

The inner tuner searches every group for itself. Where it ends with several settings for collectives that are tied, each
of these settings is tried on all of them, and so is none: what makes the groups fastest in sum is recommended.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lagom_overlap.collective import CommConfig
from lagom_overlap.tuners.base import Problems, Trial, Tuner, problems_by_name
from lagom_overlap.tuners.problem import Assignment, GroupProblem, Outcome

Tie = tuple[tuple[str, int], ...]
"""Collectives by group and place in it that share one setting."""


@dataclass(frozen=True, slots=True)
class Tied:
    """Implements `Tuner`; `seconds` says how long a group takes under an assignment (inf where it cannot run)."""

    tuner: Tuner
    problems: Problems
    ties: Sequence[Tie]
    seconds: Callable[[GroupProblem, Assignment], float]

    def ask(self) -> Trial | None:
        """See `Tuner`."""
        return self.tuner.ask()

    def tell(self, trial: Trial, outcomes: Mapping[str, Outcome]) -> None:
        """See `Tuner`."""
        self.tuner.tell(trial, outcomes)

    def recommend(self) -> Mapping[str, Assignment]:
        """The inner tuner's recommendation with one setting for what is tied."""
        named = problems_by_name(self.problems)
        recommended = {name: problem.default for name, problem in named.items()} | dict(self.tuner.recommend())
        for tie in self.ties:
            defaults = {(group, at): named[group].default[at] for group, at in tie}
            wanted = {(group, at): recommended[group][at] for group, at in tie}
            if wanted == defaults or len(set(wanted.values())) == 1:
                continue
            settings = dict.fromkeys(config for place, config in wanted.items() if config != defaults[place])
            candidates = [defaults, *(dict.fromkeys(tie, config) for config in settings)]
            changed = [_changed(recommended, each) for each in candidates]
            best = min(changed, key=lambda each: self._total_s(named, each))
            recommended |= best
        return recommended

    def _total_s(self, named: Mapping[str, GroupProblem], assignments: Mapping[str, Assignment]) -> float:
        return sum(
            named[name].group.count * self.seconds(named[name], assignment) for name, assignment in assignments.items()
        )


def _changed(
    assignments: Mapping[str, Assignment], settings: Mapping[tuple[str, int], CommConfig]
) -> dict[str, Assignment]:
    """The assignments of the groups that hold one of the settings' collectives, with these."""
    return {
        name: tuple(settings.get((name, at), config) for at, config in enumerate(assignments[name]))
        for name in dict.fromkeys(group for group, _ in settings)
    }
