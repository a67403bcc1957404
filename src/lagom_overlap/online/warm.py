"""What a running job's search begins with: its own earlier search, and the settings that it was started with.

A job that is tuned again, because it drifted, was measured before; a job that was started with saved settings knows
what was best elsewhere. Neither is believed without measurements of now (`tuners.warm_start`): what they say may
have changed. The tuner must take a warm start; those that do not, begin cold.
"""

from collections.abc import Iterable, Mapping, Sequence

from lagom_overlap.collective import CommConfig
from lagom_overlap.collective.sites import Site, SiteSetting
from lagom_overlap.online.problems import JobProblems, TunedGroup
from lagom_overlap.tuners.study import Study
from lagom_overlap.tuners.warm_start import Earlier, WarmStart, earlier_of


def earlier_search(job: JobProblems, study: Study) -> tuple[Earlier, ...]:
    """Every group as a search of this job saw it, finished or not."""
    return tuple(earlier_of(problem, study.entries) for problem in job.problems)


def warm_start(job: JobProblems, searched: Sequence[Earlier], saved: Iterable[SiteSetting]) -> WarmStart | None:
    """A warm start from an earlier search of the job, and from saved settings; None if neither says anything."""
    configs = {setting.site: setting.config for setting in saved}
    started = [
        Earlier(problem=group.problem, best=best)
        for group in job.groups.values()
        if (best := _set(group, configs)) != group.problem.default
    ]
    num_runs = sum(len(done) for held in searched for done in held.runs.values())
    if not num_runs and not started:
        return None
    words = f"{num_runs} measurements of this job's earlier search, saved settings of {len(started)} groups"
    return WarmStart(source=words, earlier=(*searched, *started))


def _set(group: TunedGroup, configs: Mapping[Site, CommConfig]) -> tuple[CommConfig, ...]:
    """What the settings make of a group: a collective whose sites are not set alike stays as it is by default."""
    found = []
    for sites, default in zip(group.sites, group.problem.default, strict=True):
        held = {configs.get(site, default) for site in sites}
        found.append(held.pop() if len(held) == 1 else default)
    return tuple(found)
