"""A job that `lagom run --config` started: the launcher's table and carve-out, as soon as all ranks can."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from torch import distributed as dist

from lagom_overlap.collective import LaunchConfig
from lagom_overlap.errors import JobError, LagomError
from lagom_overlap.export.env_file import CARVE_OUT_VARIABLE
from lagom_overlap.export.run_variables import CONFIG_VARIABLE, ENGINE_VARIABLE, TABLE_CHECKSUM_VARIABLE, WORLD_VARIABLE
from lagom_overlap.export.saved import other_engine, other_world
from lagom_overlap.nccl_plugin.library import TunerPlugin
from lagom_overlap.online.agreed_table import apply_on_all
from lagom_overlap.online.conclusions import command_text
from lagom_overlap.online.device import engine_in_use
from lagom_overlap.online.events import rank_of
from lagom_overlap.online.guest import say
from lagom_overlap.online.launch_steps import is_pipelined
from lagom_overlap.online.one_setting import OneSetting, meet_all
from lagom_overlap.online.ranks.exchange import StoreLost
from lagom_overlap.online.routes.carve_out import open_compute_route
from lagom_overlap.online.routes.compute import ComputeRoute
from lagom_overlap.results.conclusion import Conclusion

CHECKED_STEPS: Final = 2
"""Steps after which a table without a matching row is reported; the first step may not have all of the calls."""


class Fixed(OneSetting):
    """Puts the launcher's table in force and reports if no row of it matches a call.

    Torch's SM carve-out, if the environment names one, is set once for the whole job.
    """

    def __init__(self, plugin: TunerPlugin | None, environment: Mapping[str, str]) -> None:
        self._compute = carved_out(environment, rank_of(environment))
        self._plugin = plugin
        self._is_first, self._num_steps = rank_of(environment) == 0, 0
        self._is_said = False
        self._refused = self._misfit = ""
        self._is_pipelined = False
        self._config = environment.get(CONFIG_VARIABLE, "")
        self._counts = (0, 0)
        if self._plugin is None:
            self._say("the job's process groups are not on NCCL")
        elif why := _refusal(environment) or _apply(self._plugin, environment):
            self._plugin.enable(is_enabled=False)
            self._say(why)

    def on_step(self) -> None:
        """Reports once, after the first steps, if the table matches nothing."""
        self._num_steps += 1
        if self._num_steps > CHECKED_STEPS:
            self._say_misfit()

    def why_void(self) -> str:
        """Why nothing was set, as far as rank 0 can tell: another stage of a pipeline has other calls."""
        is_misfit = not self._counts[1] and not self._is_pipelined
        return self._refused or (self._misfit if is_misfit else "")

    def conclusion(self) -> Conclusion:
        """What of the table met a call."""
        command, config = command_text(), shlex.quote(self._config)
        num_asked, num_matched = self._counts
        if self._refused:
            return Conclusion("nothing was set", self._refused, f"lagom run --observe -- {command}")
        if not num_matched:
            why = self._misfit or "the job made no step"
            why += "; the other stages of its pipeline have calls of their own" if self._is_pipelined else ""
            return Conclusion("nothing was set on rank 0", why, f"lagom run --observe -- {command}")
        result = f"{num_matched} of {num_asked} calls that NCCL asked about were set"
        return Conclusion(result, f"their call sites are in {config}", f"lagom run --prove {config} -- {command}")

    def close(self) -> None:
        """Restores the job's own launches."""
        if self._num_steps:
            self._say_misfit()
        if self._plugin is not None:
            self._counts = self._plugin.counts()
        if self._compute is not None:
            self._compute.close()

    def _say_misfit(self) -> None:
        """Once: whether the table fits anything that the job calls."""
        if self._is_said or self._plugin is None:
            return
        num_asked, num_matched = self._plugin.counts()
        if not num_asked:
            self._misfit = "NCCL asked the plug-in about no call of rank 0: nothing that a table can set was called"
        elif not num_matched:
            self._misfit = f"its table has a row for none of rank 0's {num_asked} collectives so far: nothing is set"
        self._is_said = True
        if self._misfit:
            self._is_pipelined = is_pipelined()
            self._tell(self._misfit)

    def _say(self, why: str) -> None:
        self._is_said, self._refused = True, why
        self._tell(why)

    def _tell(self, why: str) -> None:
        if self._is_first:
            say([f"--config is not applied: {why}"])


def plugin_of(environment: Mapping[str, str]) -> TunerPlugin:
    """The plug-in, which decides by no table of the launcher's until all ranks agree, whatever fails before."""
    plugin = TunerPlugin(Path(environment["NCCL_TUNER_PLUGIN"]))
    if TABLE_CHECKSUM_VARIABLE in environment:
        plugin.enable(is_enabled=False)
    return plugin


def _refusal(environment: Mapping[str, str]) -> str:
    """Why what the launcher prepared must not be applied in this job; empty where it may.

    All ranks run the same PyTorch, and this is before the job's own first call. The file is not read again here: what
    one rank could not read, or another had replaced meanwhile, would part the ranks.
    """
    config, found_under = environment.get(CONFIG_VARIABLE, ""), environment.get(ENGINE_VARIABLE)
    found_with = environment.get(WORLD_VARIABLE, "")
    if found_with.isdecimal() and (refusal := other_world(config, int(found_with), dist.get_world_size())):
        return refusal
    return "" if found_under is None else other_engine(config, found_under, engine_in_use())


def _apply(plugin: TunerPlugin, environment: Mapping[str, str]) -> str:
    """Decides by the launcher's table where all ranks can; why they do not, empty where they do."""
    if TABLE_CHECKSUM_VARIABLE not in environment:
        return ""
    try:
        exchange = meet_all()
    except StoreLost as error:  # the others wait for this rank's "yes" in vain, and refuse
        return str(error)
    return apply_on_all(plugin, exchange, environment)


def carved_out(environment: Mapping[str, str], rank: int) -> ComputeRoute | None:
    """The computation's side as the environment wants it, set; None where it says nothing or nothing can be set.

    Raises:
        JobError: if the variable is no whole number.
    """
    text = environment.get(CARVE_OUT_VARIABLE, "")
    if not text:
        return None
    if not text.isdecimal():
        raise JobError(f"{CARVE_OUT_VARIABLE} is {text!r}, must be a whole number of SMs")
    compute, launch = open_compute_route(), LaunchConfig(sm_carveout=int(text))
    try:
        compute.check(launch)
    except LagomError as error:
        if rank == 0:
            say([f"{CARVE_OUT_VARIABLE}={text} has no effect: {error}"])
        return None
    compute.apply(launch)
    return compute
