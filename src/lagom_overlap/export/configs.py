"""`configs.toml`: what to deploy, for people and for the next run."""

from collections.abc import Mapping
from dataclasses import asdict

import tomli_w

from lagom_overlap.collective import CommConfig, LaunchConfig, launch_of
from lagom_overlap.tuners.problem import Assignment, GroupProblem

_HEADER = "# Written by lagom tune. A collective with no keys is left untouched.\n"
_REFUSED = "# The paired A/B did not show a gain, so nothing is set.\n"


def configs_toml(problems: tuple[GroupProblem, ...], assignments: Mapping[str, Assignment], *, adopted: bool) -> str:
    """What to set, as TOML: `groups`, group -> collective -> knobs, and `launches`, group -> the computation's side.

    Nothing is set where the assignments were not adopted, nor for a collective that keeps its default: what the default
    spells out is the engine's own choice and need not be forced. `launches` is absent where nothing of it is set.
    """
    table: dict[str, object] = {"adopted": adopted}
    groups: dict[str, dict[str, dict[str, object]]] = {}
    for problem in problems:
        assignment = assignments[problem.group.name]
        rows = zip(problem.group.comm_names, assignment, problem.default, strict=True)
        groups[problem.group.name] = {
            name: _knobs(config) if adopted and config != default else {} for name, config, default in rows
        }
    table["groups"] = groups
    launches = {problem.group.name: launch_of(assignments[problem.group.name]) for problem in problems}
    if adopted and any(not launch.is_untouched for launch in launches.values()):
        table["launches"] = {name: _knobs(launch) for name, launch in launches.items() if not launch.is_untouched}
    return _HEADER + ("" if adopted else _REFUSED) + tomli_w.dumps(table)


def _knobs(config: CommConfig | LaunchConfig) -> dict[str, object]:
    return {knob: value for knob, value in asdict(config).items() if value is not None}
