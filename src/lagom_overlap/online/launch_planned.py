"""A job that runs as it was started, its steps timed: untouched, with the variables of a file, or with an FSDP2 plan.

A plan is told to FSDP2 before the model's first forward, as `apply_fsdp2` in the job would.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
from torch import distributed as dist
from torch import nn

from lagom_overlap.collective.sites import SiteSetting
from lagom_overlap.engines.fx.fsdp2 import apply_settings
from lagom_overlap.errors import LagomError
from lagom_overlap.export.saved import other_world
from lagom_overlap.online.conclusions import command_text
from lagom_overlap.online.events import rank_of
from lagom_overlap.online.guest import say
from lagom_overlap.online.launch_fixed import WORLD_VARIABLE
from lagom_overlap.online.run_jobs import CONFIG_VARIABLE
from lagom_overlap.record import read_regular
from lagom_overlap.results.conclusion import Conclusion
from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings

PLAN_VARIABLE: Final = "LAGOM_RUN_PLAN"
"""The file in which the launcher left the plan's settings."""
_MAX_BYTES: Final = 64 << 20


class AsStarted:
    """Tells FSDP2 the plan, if there is one, and leaves everything else alone."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._plan = environment.get(PLAN_VARIABLE, "")
        self._config = environment.get(CONFIG_VARIABLE, "")
        self._found_with = environment.get(WORLD_VARIABLE, "")
        self._is_first = rank_of(environment) == 0
        self._is_applied, self._why = False, "no model with parameters to train made a step"

    def on_model(self, model: nn.Module) -> None:
        """Tells FSDP2 the plan's settings; all ranks read the same, and refuse for the same reasons."""
        if not self._plan:
            return
        try:
            settings = msgspec.json.decode(read_regular(Path(self._plan), _MAX_BYTES), type=Fsdp2Settings)
            if why := other_world(self._config, int(self._found_with), dist.get_world_size()):
                self._why = why
            else:
                apply_settings(model, settings)
                self._is_applied = True
        except (LagomError, OSError, msgspec.MsgspecError) as error:
            self._why = str(error)
        if self._is_first and not self._is_applied:
            say([f"the plan is not applied: {self._why}"])

    def on_step(self) -> None:
        """Nothing."""

    def on_update(self) -> None:
        """Nothing."""

    @staticmethod
    def may_end() -> bool:
        """Always: what FSDP2 was told stays."""
        return True

    @staticmethod
    def steady() -> tuple[SiteSetting, ...]:
        """One setting throughout."""
        return ()

    def why_void(self) -> str:
        """Why the plan was not applied."""
        return self._why if self._plan and not self._is_applied else ""

    def conclusion(self) -> Conclusion:
        """Whether the plan was applied, or the steps only timed."""
        command, config = command_text(), shlex.quote(self._config)
        if not self._config:
            return Conclusion("the job ran untouched, its steps were timed", "nothing else was asked", command)
        if self._plan and not self._is_applied:
            return Conclusion("the plan was not applied", self._why, f"lagom run --observe -- {command}")
        what = "FSDP2 was told the plan" if self._plan else "the job ran with the environment file"
        return Conclusion(what, f"it is {config}", f"lagom run --prove {config} -- {command}")

    def close(self) -> None:
        """Nothing: what FSDP2 was told ends with the job."""
