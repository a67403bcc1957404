"""A job that runs as it was started, its steps timed: untouched, with the variables of a file, or with an FSDP2 plan.

A plan is told to FSDP2 before the model's first forward, as `apply_fsdp2` in the job would, on all ranks or on none:
see `agreed_table`.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
from torch import nn

from lagom_overlap.engines.fx.fsdp2 import SettingCall, make_calls, setting_calls
from lagom_overlap.errors import JobError, LagomError
from lagom_overlap.export.plugin_table import checksum_of
from lagom_overlap.export.run_variables import CONFIG_VARIABLE, PLAN_CHECKSUM_VARIABLE, PLAN_VARIABLE, WORLD_VARIABLE
from lagom_overlap.export.saved import other_world
from lagom_overlap.online.agreed_table import on_all
from lagom_overlap.online.conclusions import command_text
from lagom_overlap.online.events import rank_of
from lagom_overlap.online.guest import say
from lagom_overlap.online.one_setting import OneSetting, meet_all
from lagom_overlap.online.options import DISABLE_VARIABLE, is_disabled
from lagom_overlap.online.ranks.exchange import Exchange, InDoubt, StoreLost
from lagom_overlap.record import read_regular
from lagom_overlap.results.conclusion import Conclusion
from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings

_MAX_BYTES: Final = 64 << 20
"""Chosen, far above any plan that is known."""


class AsStarted(OneSetting):
    """Tells FSDP2 the plan, if there is one, and leaves everything else alone."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._plan = environment.get(PLAN_VARIABLE, "")
        self._config = environment.get(CONFIG_VARIABLE, "")
        self._is_first = rank_of(environment) == 0
        self._is_applied, self._why = False, "no model with parameters to train made a step"

    def on_model(self, model: nn.Module) -> None:
        """Tells FSDP2 the plan's settings where all ranks can.

        Raises:
            InDoubt: as `tell_on_all`.
        """
        if not self._plan:
            return
        self._why = _told(model, self._environment)
        self._is_applied = not self._why
        if self._is_first and not self._is_applied:
            say([f"the plan is not applied: {self._why}"])

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


def _told(model: nn.Module, environment: Mapping[str, str]) -> str:
    try:
        exchange = meet_all()
    except StoreLost as error:  # the others wait for this rank's "yes" in vain, and refuse
        return str(error)
    return tell_on_all(model, exchange, environment)


def tell_on_all(model: nn.Module, exchange: Exchange, environment: Mapping[str, str]) -> str:
    """Tells FSDP2 the launcher's plan on all ranks, each of which calls this; returns why not, empty if it is told.

    Raises:
        InDoubt: if FSDP2 fails on some rank in the middle of it, or the store is lost there: FSDP2 cannot be told to
            forget, so from here on the ranks could issue different collectives.
    """
    calls: list[SettingCall] = []
    refusal, has_begun = "", False

    def change() -> None:
        nonlocal has_begun
        has_begun = True
        make_calls(calls)

    try:
        calls = _calls(model, environment, exchange.num_ranks)
    except OSError as error:
        refusal = f"cannot read the plan {environment[PLAN_VARIABLE]}: {error.strerror}"
    except (LagomError, msgspec.MsgspecError) as error:
        refusal = str(error)
    refused = on_all(exchange, environment[PLAN_CHECKSUM_VARIABLE], refusal, change)
    if refused and has_begun:
        raise InDoubt(
            f"not all ranks could tell FSDP2 the whole plan ({refused}); it cannot be taken back, so the job ends: "
            "its collectives could hang"
        )
    return refused


def _calls(model: nn.Module, environment: Mapping[str, str], num_ranks: int) -> list[SettingCall]:
    """What FSDP2 is to be told, by the plan as the launcher wrote it."""
    if is_disabled():
        raise JobError(f"{DISABLE_VARIABLE} is set")
    if why := other_world(environment.get(CONFIG_VARIABLE, ""), int(environment[WORLD_VARIABLE]), num_ranks):
        raise JobError(why)
    data = read_regular(Path(environment[PLAN_VARIABLE]), _MAX_BYTES)
    if checksum_of(data) != environment[PLAN_CHECKSUM_VARIABLE]:
        raise JobError(f"{environment[PLAN_VARIABLE]} is not the plan that was written at the start")
    return setting_calls(model, msgspec.json.decode(data, type=Fsdp2Settings))
