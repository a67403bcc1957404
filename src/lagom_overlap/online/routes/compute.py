"""The seam between the online tuner and the computation's side, and a route that drives both sides as one.

The carve-out is one flag of the process, read at every launch, while the host runs ahead of the device and backward
launches from autograd's own threads. A flag that changed with every overlap group would have to be set between two
launches of two threads; so a running job has **one carve-out for the whole step**, the largest that any of its calls'
settings asks for, and it changes where all settings change: between two steps, when all ranks agreed. The search knows
(`LaunchScope.STEP`). Launch order and stream priority are the framework's and fixed when a job has started: they are
simulated and exported, and refused here.

Ranks of different roles may end up with different carve-outs; unlike a collective's setting that can hang nothing.
Needs no torch; torch's own carve-out is `carve_out`.
"""

import logging
from collections.abc import Mapping
from typing import Final, Protocol

from lagom_overlap.collective import (
    UNTOUCHED_LAUNCH,
    CommunicatorId,
    ConfigKey,
    ConfigSpace,
    ConfigTable,
    LaunchConfig,
    one_launch,
)
from lagom_overlap.errors import BackendError
from lagom_overlap.online.routes.base import CallCount, Route, StepRecord

_log = logging.getLogger(__name__)


class ComputeRoute(Protocol):
    """One rank's way to set how its computation is launched; `description` says in one line what it reaches."""

    description: str

    def check(self, launch: LaunchConfig) -> None:
        """Whether it can be set here; nothing changes.

        Raises:
            LagomError: if it cannot, in words.
        """

    def apply(self, launch: LaunchConfig) -> None:
        """Launches so from now on; called between two steps, after `check`."""

    def close(self) -> None:
        """Goes back to how the job launched before us; safe twice."""


class NoComputeRoute:
    """A rank whose computation cannot be set; `why_not` says why, and is what a setting is refused with."""

    def __init__(self, why_not: str) -> None:
        self._why_not = why_not
        self.description = f"the computation is left alone: {why_not}"

    def check(self, launch: LaunchConfig) -> None:
        """Refuses everything but the untouched launch."""
        if not launch.is_untouched:
            raise BackendError(f"the computation's side cannot be set ({launch}): {self._why_not}")

    def apply(self, launch: LaunchConfig) -> None:
        """Nothing to do: only the untouched launch gets here."""

    def close(self) -> None:
        """Nothing to undo."""


class BothSidesRoute:
    """A route of the collectives and one of the computation, switched together."""

    def __init__(self, route: Route, compute: ComputeRoute) -> None:
        self._route: Final = route
        self._compute: Final = compute
        self._prepared: dict[int, LaunchConfig] = {}
        self._launch = UNTOUCHED_LAUNCH
        self._before: tuple[int, LaunchConfig] | None = None
        self.name = route.name
        self.description = f"{route.description}; {compute.description}"

    @property
    def launch(self) -> LaunchConfig:
        """How the computation is launched now."""
        return self._launch

    def communicators(self) -> tuple[CommunicatorId, ...]:
        """The collectives' route's."""
        return self._route.communicators()

    def counts(self) -> Mapping[CommunicatorId, CallCount]:
        """The collectives' route's."""
        return self._route.counts()

    def space(self, key: ConfigKey) -> ConfigSpace | None:
        """The collectives' route's."""
        return self._route.space(key)

    def is_exact(self, key: ConfigKey) -> bool:
        """The collectives' route's."""
        return self._route.is_exact(key)

    def prepare(self, table: ConfigTable, epoch: int) -> None:
        """Checks the launch and makes the collectives ready.

        Raises:
            LagomError: if either side cannot be made ready.
        """
        launch = one_launch(table.launches.values())
        self._compute.check(launch)
        self._route.prepare(table, epoch)
        self._prepared = {epoch: launch}

    def commit(self, epoch: int) -> None:
        """Switches both sides.

        Raises:
            LagomError: if the collectives cannot be switched after all.
        """
        self._route.commit(epoch)
        self._before = (epoch, self._launch)
        self._relaunch(self._prepared.pop(epoch, UNTOUCHED_LAUNCH))

    def take_back(self, epoch: int) -> None:
        """Both sides are as they were before this epoch."""
        self._route.take_back(epoch)
        if self._before is not None and self._before[0] == epoch:
            self._relaunch(self._before[1])

    def _relaunch(self, launch: LaunchConfig) -> None:
        if launch == self._launch:
            return
        try:
            self._compute.apply(launch)
            self._launch = launch
        except Exception as error:  # a carve-out concerns this rank alone: it must not end a job of many
            _log.warning("the computation's side stays as it was: %s", error)

    def settle(self) -> None:
        """The collectives' route's."""
        self._route.settle()

    def begin_step(self, *, is_measured: bool) -> None:
        """The collectives' route's."""
        self._route.begin_step(is_measured=is_measured)

    def mark_end(self) -> None:
        """The collectives' route's."""
        self._route.mark_end()

    def goes_on(self) -> bool:
        """The collectives' route's."""
        return self._route.goes_on()

    def end_step(self) -> StepRecord:
        """The collectives' route's."""
        return self._route.end_step()

    def close(self) -> None:
        """Takes the hands off both sides."""
        self._launch = UNTOUCHED_LAUNCH
        try:
            self._compute.close()
        finally:
            self._route.close()
