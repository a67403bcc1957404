"""What is known of a job before it is searched: saved settings, an earlier search, a journal."""

import logging
from collections.abc import Mapping

from lagom_overlap.collective import CommConfig
from lagom_overlap.collective.sites import Site, SiteSetting
from lagom_overlap.online.problems import JobProblems, TunedGroup
from lagom_overlap.tuners.study import Study
from lagom_overlap.tuners.warm_start import Earlier, WarmStart, earlier_of

_log = logging.getLogger(__name__)


def earlier_search(job: JobProblems, study: Study) -> tuple[Earlier, ...]:
    """Every group as a search of this job saw it, finished or not."""
    return tuple(earlier_of(problem, study.entries) for problem in job.problems)


class KnownBefore:
    """What a search of this job may begin with.

    `started` are the settings that the job was started with, until they were taken up or refused; `searched` is what an
    earlier search measured, `journal` the text of one that some rank read, until a search took it.
    """

    def __init__(self, started: tuple[SiteSetting, ...]) -> None:
        self.started = self._saved = started
        self.searched: tuple[Earlier, ...] = ()
        self.journal = ""

    def forget_settings(self) -> None:
        """Settings and measurements are of other size classes than the job has from now on."""
        if self._saved:
            _log.warning("the saved settings are for narrower size classes than this job needs: searching instead")
        self.started, self._saved, self.searched = (), (), ()

    def warm_start(self, job: JobProblems) -> WarmStart | None:
        """A warm start from an earlier search of this job and from saved settings; None if neither says anything.

        A job that is tuned again after a drift was measured before; a job started with saved settings has what was best
        elsewhere. Either may be out of date, so the search measures before it believes them (`tuners.warm_start`).
        Tuners that take no warm start begin cold.
        """
        configs = {setting.site: setting.config for setting in self._saved}
        from_saved = [
            Earlier(problem=group.problem, best=best)
            for group in job.groups.values()
            if (best := _set(group, configs)) != group.problem.default
        ]
        num_runs = sum(len(runs) for earlier in self.searched for runs in earlier.runs.values())
        if not num_runs and not from_saved:
            return None
        source = f"{num_runs} measurements of this job's earlier search, saved settings of {len(from_saved)} groups"
        return WarmStart(source=source, earlier=(*self.searched, *from_saved))


def _set(group: TunedGroup, configs: Mapping[Site, CommConfig]) -> tuple[CommConfig, ...]:
    """The group's assignment under the settings; a collective whose sites disagree keeps its default."""
    assignment = []
    for sites, default in zip(group.sites, group.problem.default, strict=True):
        site_configs = {configs.get(site, default) for site in sites}
        assignment.append(site_configs.pop() if len(site_configs) == 1 else default)
    return tuple(assignment)
