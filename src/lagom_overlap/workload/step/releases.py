"""What single releases of a framework change in how it issues a step: `[[release]]` of its file (`framework_file`).

The file says how the releases before any of them have it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from lagom_overlap.errors import JobError
from lagom_overlap.toml_tables import from_table
from lagom_overlap.workload.step.framework_file import framework_file, framework_names
from lagom_overlap.workload.step.rules import IssueRules


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseChange:
    """What `framework` does from release `since` of `software` on.

    `rules` are the fields of `IssueRules` that change, `what` says it in words, `avoided_by` is the variable that makes
    the step as it was before.
    """

    framework: str
    software: str
    since: str
    what: str
    avoided_by: str
    rules: dict[str, bool]

    def is_in(self, release: str) -> bool:
        """Whether that release has it."""
        return _numbers(release) >= _numbers(self.since)

    def is_avoided(self, environment: Mapping[str, str]) -> bool:
        """Whether the environment makes the step as it was before."""
        name, _, value = self.avoided_by.partition("=")
        return environment.get(name) == value


def _numbers(release: str) -> tuple[int, ...]:
    """Major and minor of `2.15`, `2.15.0+cu132` and the like."""
    return tuple(int(number) for number in release.split(".")[:2])


@cache
def release_changes() -> tuple[ReleaseChange, ...]:
    """All that are known."""
    return tuple(
        from_table({"framework": name, **table}, ReleaseChange, f"frameworks/{name}.toml", "release.")
        for name in framework_names()
        for table in framework_file(name).release
    )


def changes_of(framework: str) -> tuple[ReleaseChange, ...]:
    """Those of one framework."""
    return tuple(change for change in release_changes() if change.framework == framework)


def rules_in_release(rules: IssueRules, release: str | None) -> IssueRules:
    """The framework's rules as of a release; without one, those of the releases before any change.

    Raises:
        JobError: if a release is given of a framework whose releases are not told apart.
    """
    if release is None:
        return rules
    changes = changes_of(rules.name)
    if not changes:
        known = ", ".join(sorted({change.framework for change in release_changes()}))
        raise JobError(
            f"parallel.framework_release is {release!r}, but releases of framework {rules.name} are not told apart; "
            f"allowed with: {known}"
        )
    for change in changes:
        if change.is_in(release):
            changed: dict[str, Any] = dict(change.rules)
            rules = replace(rules, **changed)
    return rules
