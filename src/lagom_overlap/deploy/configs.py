"""`configs.toml`: what to deploy, for people and for the next run."""

from collections.abc import Mapping
from dataclasses import asdict

import tomli_w

from lagom_overlap.backends.base import Assignment, GroupProblem

_HEADER = """\
# Written by lagom tune. A collective with no keys is left untouched.
# adopted = false: the paired A/B did not show a gain, so nothing is set.
"""


def configs_toml(problems: tuple[GroupProblem, ...], assignments: Mapping[str, Assignment], *, adopted: bool) -> str:
    """The assignments as TOML: group -> collective -> the knobs that are set."""
    table: dict[str, object] = {"adopted": adopted}
    groups: dict[str, dict[str, dict[str, object]]] = {}
    for problem in problems:
        assignment = assignments[problem.group.name]
        groups[problem.group.name] = {
            name: {knob: value for knob, value in asdict(config).items() if value is not None}
            for name, config in zip(problem.group.comm_names, assignment, strict=True)
        }
    table["groups"] = groups
    return _HEADER + tomli_w.dumps(table)
