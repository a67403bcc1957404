"""From the programs of all ranks to what a study tunes, and back to settings of sites.

The groups of all ranks are tuned together as one set. A site belongs to one place of one group only, whichever groups
the other ranks see it in: two settings for one call of a communicator would make it hang, or one would be measured
under the other's name. Ranks claim sites in order, and the first claim counts.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from lagom_overlap.collective import CommConfig, launch_of
from lagom_overlap.collective.sites import Site, SiteSetting
from lagom_overlap.online.program import StepGroup, StepProgram, groups_of
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.problem import Assignment, GroupProblem
from lagom_overlap.workload import CommOp, CompOp, MemoryBound, OverlapGroup

_UNKNOWN = CompOp(name="computation", work=MemoryBound(1))
"""What overlaps the calls is measured as a whole; its kernels are not told apart."""


@dataclass(frozen=True, slots=True)
class TunedGroup:
    """A problem and the sites of each of its calls."""

    problem: GroupProblem
    sites: tuple[tuple[Site, ...], ...]

    def settings(self, assignment: Assignment) -> list[SiteSetting]:
        """The assignment, site by site; calls that are untouched on both sides need none."""
        launch = launch_of(assignment)
        return [
            SiteSetting(site, config, UNSET if launch.is_untouched else launch)
            for config, sites in zip(assignment, self.sites, strict=True)
            if not (config.is_untouched and launch.is_untouched)
            for site in sites
        ]


@dataclass(frozen=True, slots=True)
class JobProblems:
    """All groups of a job that can be tuned, by name."""

    groups: Mapping[str, TunedGroup]

    @property
    def problems(self) -> Problems:
        """What a study takes."""
        return tuple(group.problem for group in self.groups.values())

    @property
    def default(self) -> dict[str, Assignment]:
        """Everything untouched."""
        return {name: group.problem.default for name, group in self.groups.items()}

    def settings(self, assignments: Mapping[str, Assignment]) -> tuple[SiteSetting, ...]:
        """The assignments of some groups as settings of their sites."""
        return tuple(row for name, assignment in assignments.items() for row in self.groups[name].settings(assignment))

    def fingerprint(self, *words: object) -> str:
        """Names this job: its groups, and what else the caller says."""
        content = msgspec.json.encode((list(self.groups), [group.sites for group in self.groups.values()], words))
        return hashlib.sha256(content).hexdigest()[:16]


def job_problems(programs: Iterable[StepProgram]) -> JobProblems:
    """The groups of all ranks' programs, those of equal name as one."""
    owner: dict[Site, tuple[str, int]] = {}
    groups: dict[str, StepGroup] = {}
    sites: dict[str, list[dict[Site, None]]] = {}
    for program in programs:
        for group in groups_of(program):
            claims = _claims(group, owner)
            if not all(claims):
                continue
            first = groups.setdefault(group.name, group)
            sites_by_place = sites.setdefault(group.name, [{} for _ in first.calls])
            for place, claimed in enumerate(claims):
                sites_by_place[place].update(dict.fromkeys(claimed))
                owner.update(dict.fromkeys(claimed, (group.name, place)))
    return JobProblems(
        {
            name: TunedGroup(_problem(group), tuple(tuple(sites_by_place) for sites_by_place in sites[name]))
            for name, group in groups.items()
        }
    )


def _claims(group: StepGroup, owner: Mapping[Site, tuple[str, int]]) -> list[list[Site]]:
    """The sites that each place of a group may claim: not another group's, and not an earlier place's."""
    place_of_site: dict[Site, int] = {}
    return [
        [
            site
            for site in _sites(group, place)
            if owner.get(site, (group.name, place)) == (group.name, place)
            and place_of_site.setdefault(site, place) == place
        ]
        for place in range(len(group.calls))
    ]


def _sites(group: StepGroup, place: int) -> list[Site]:
    return [Site(group.calls[place], occurrence) for occurrence in group.occurrences[place]]


def _problem(group: StepGroup) -> GroupProblem:
    comms = tuple(
        CommOp(name=f"{place}:{call.kind}", collective=call.collective, communicator=call.description)
        for place, call in enumerate(group.calls)
    )
    return GroupProblem(
        group=OverlapGroup(
            name=group.name, computations=(_UNKNOWN,), comms=comms, count=group.count, occurrences=group.occurrences
        ),
        spaces=group.spaces,
        default=(CommConfig(),) * len(comms),
    )
