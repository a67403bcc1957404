"""One rank of a job that `lagom run` started: observing it, or tuning it, without a line of its code.

The session begins when the job has its process group. What fails is said on stderr, and the job goes on without us; but
a rank that cannot do as the others do, or cannot know what they do, ends the job, whose collectives would hang.
"""

import contextlib
import os
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Final, Protocol

from torch import distributed as dist
from torch import nn

from lagom_overlap.collective import LaunchConfig
from lagom_overlap.errors import BackendError, JobError, LagomError, OutputError
from lagom_overlap.export.env_file import CARVE_OUT_VARIABLE
from lagom_overlap.export.plugin_table import CHECKSUM_VARIABLE
from lagom_overlap.export.saved import other_engine, other_world
from lagom_overlap.nccl_plugin import TunerPlugin, read_record
from lagom_overlap.nccl_plugin.support import NcclVersion
from lagom_overlap.online.agreed_table import apply_on_all, meet
from lagom_overlap.online.device import engine_in_use, note_model
from lagom_overlap.online.events import JsonLines, PrometheusFile, rank_of
from lagom_overlap.online.guest import safely
from lagom_overlap.online.job_profiler import OWN_PROFILER
from lagom_overlap.online.launch_steps import TrainingSteps, is_trained, is_trained_in_parallel
from lagom_overlap.online.observe import Sampler, Shares, report_lines
from lagom_overlap.online.observe_profiler import ProfiledStep
from lagom_overlap.online.observe_record import record_lines
from lagom_overlap.online.options import MODE_VARIABLE, OnlineOptions, is_disabled
from lagom_overlap.online.ranks.exchange import StoreLost
from lagom_overlap.online.ranks.messages import SETTLED, SwitchState
from lagom_overlap.online.routes.carve_out import open_compute_route
from lagom_overlap.online.routes.compute import ComputeRoute
from lagom_overlap.online.routes.nccl import expanded, nccl_in_use
from lagom_overlap.online.run_jobs import FIRST_WORLD_VARIABLE, FOLDER_VARIABLE, note_rank
from lagom_overlap.online.tuner import OnlineTuner, store_of
from lagom_overlap.stderr import write_lines

CONFIG_VARIABLE: Final = "LAGOM_RUN_CONFIG"
ENGINE_VARIABLE: Final = "LAGOM_RUN_ENGINE"
"""The engine under which settings were found, as the launcher read it: what ranks decide by must be the same on all."""
WORLD_VARIABLE: Final = "LAGOM_RUN_WORLD"
"""With how many ranks they were found."""
SETTINGS_NAME: Final = "settings.json"
CHECKED_STEPS: Final = 2
"""Steps after which a table that fits nothing is said to."""
FLUSH_EVERY: Final = 50
"""Steps between two writes of the metrics where nothing happens."""


class Session(Protocol):
    """What is done with a job."""

    def on_model(self, model: nn.Module) -> None:
        """The model is known; its first step follows."""

    def on_step(self) -> None:
        """A step begins."""

    def on_update(self) -> None:
        """An optimizer has made its step."""

    def may_end(self) -> bool:
        """Whether this rank can end it alone, between two steps, while the others go on."""

    def close(self) -> None:
        """The job ends."""


class Rank:
    """A rank's files and its session; `close` takes every hook away."""

    def __init__(
        self,
        session: Session,
        events: JsonLines,
        metrics: PrometheusFile,
        accepts: Callable[[nn.Module], bool] = is_trained,
    ) -> None:
        self._session = session
        self._events = events
        self._metrics = metrics
        self._num_steps = 0
        self._began_s = 0.0
        self._steps = TrainingSteps(self._guarded_model, self._guarded_step, accepts, self._guarded_update)
        os.register_at_fork(after_in_child=partial(_take_hooks_away, weakref.ref(self)))

    def take_hooks_away(self) -> None:
        """Leaves this process alone, and says so to nobody: in a forked child the session is its parent's."""
        self._steps.close()
        OWN_PROFILER.unwatch()

    def close(self) -> None:
        """Ends the session; safe to call twice."""
        self._steps.close()
        self._session.close()
        OWN_PROFILER.unwatch()
        self._metrics.flush()
        self._events.write("end", steps=self._num_steps)

    def _guarded_model(self, model: nn.Module) -> None:
        safely(lambda: self._session.on_model(model))

    def _guarded_step(self) -> None:
        # The one error of ours that ends a job: this rank cannot do as the others, or cannot know what they do.
        safely(self._step, ends_the_job=BackendError)

    def _guarded_update(self) -> None:
        safely(self._session.on_update)

    def _step(self) -> None:
        if is_disabled() and self._session.may_end():
            self.close()
            return
        now = perf_counter()
        if self._num_steps:
            self._metrics.set("lagom_step_seconds", now - self._began_s)
        self._began_s = now
        self._num_steps += 1
        self._metrics.set("lagom_steps", self._num_steps)
        self._session.on_step()
        if self._num_steps % FLUSH_EVERY == 1:
            self._metrics.flush()


def _take_hooks_away(reference: "weakref.ref[Rank]") -> None:
    rank = reference()
    if rank is not None:
        rank.take_hooks_away()


class Observing:
    """Samples a few steps and says what could be reached; see `observe`."""

    def __init__(
        self,
        nccl: NcclVersion | None,
        events: JsonLines,
        metrics: PrometheusFile,
        *,
        rank: int,
        record: Path | None = None,
        plugin: TunerPlugin | None = None,
    ) -> None:
        OWN_PROFILER.watch()
        self._shares = Shares(nccl)
        self._sampler = Sampler(self._shares, ProfiledStep.begin, ProfiledStep.end, OWN_PROFILER.why_not)
        self._events, self._metrics, self._rank = events, metrics, rank
        self._record, self._plugin = record, plugin
        self._is_said = False

    def on_model(self, model: nn.Module) -> None:
        """Notes the model."""
        note_model(model)
        self._events.write("model", type=type(model).__name__)

    def on_step(self) -> None:
        """Samples; after the last sample the report."""
        if self._sampler.next_step():
            self._say()

    def on_update(self) -> None:
        """Nothing: the sampled step ends where the next one begins."""

    @staticmethod
    def may_end() -> bool:
        """Always: nothing of the job was changed."""
        return True

    def close(self) -> None:
        """The report of what there is, if it was not said."""
        self._sampler.close()
        self._say()

    def _say(self) -> None:
        if self._is_said:
            return
        self._is_said = True
        shares = self._shares
        num = max(1, shares.num_steps)
        for kind, time_s in shares.by_kind_s.items():
            self._metrics.set("lagom_communication_seconds", time_s / num, kind=kind)
            self._events.write("communication", kind=kind, seconds_per_step=time_s / num)
        for knob, ratio in shares.ratios().items():
            self._metrics.set("lagom_reachable_ratio", ratio, knob=knob)
            self._events.write("reachable", knob=knob, ratio=ratio)
        self._metrics.flush()
        if self._rank == 0:
            say(report_lines(shares, self._sampler.reason))
            if self._record is not None and self._plugin is not None and self._record.exists():
                self._plugin.flush_record()
                say(record_lines(read_record(self._record)))


class Tuning:
    """Hands the job to `OnlineTuner`, which starts from a file if there is one."""

    def __init__(
        self,
        events: JsonLines,
        metrics: PrometheusFile,
        *,
        folder: Path,
        config: Path | None,
        rank: int,
    ) -> None:
        self._events, self._metrics = events, metrics
        self._folder, self._config, self._rank = folder, config, rank
        self._tuner: OnlineTuner | None = None
        self._open: contextlib.AbstractContextManager[None] | None = None
        self._last: tuple[SwitchState, str, int] | None = None
        self._is_unsaved = False

    def on_model(self, model: nn.Module) -> None:
        """Makes the tuner, on all ranks at the same call of the model."""
        journal = self._folder / f"journal.{self._rank}.jsonl"
        self._tuner = OnlineTuner(model, config=self._config, journal=journal)
        self._events.write("model", type=type(model).__name__)

    def on_step(self) -> None:
        """Ends the step before and begins the next."""
        if self._tuner is None:
            return
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(None, None, None)
        tuner = self._tuner
        safely(lambda: self._note(tuner))  # a rank that did not begin the step would be missed by the others
        entered = tuner.step()
        entered.__enter__()
        self._open = entered

    def on_update(self) -> None:
        """The step's own work is done."""
        if self._tuner is not None:
            self._tuner.updated()

    def may_end(self) -> bool:
        """Once nothing is tuned here; before, the tuner itself sees that it is disabled, and takes all ranks off."""
        return self._tuner is None or self._tuner.state is SwitchState.OFF

    def close(self) -> None:
        """Takes no further part; a step that was cut off by the end of the job is not counted."""
        tuner = self._tuner
        if tuner is not None:
            safely(lambda: self._note(tuner))
        self._open = None
        if tuner is not None:
            tuner.close()

    def _note(self, tuner: OnlineTuner) -> None:
        """Says what changed, and saves the settings whenever they are settled anew."""
        now = (tuner.state, tuner.reason, len(tuner.settings))
        if now == self._last:
            return
        if tuner.state is SwitchState.CHECK and self._last is not None and self._last[0] in SETTLED:
            return  # told if it changes anything
        if self._last is None or self._last[0] is not tuner.state or self._last[2] != len(tuner.settings):
            self._metrics.forget("lagom_state")
            self._metrics.set("lagom_state", 1, state=tuner.state)
            if self._rank == 0 and self._last is not None:
                say([f"online tuning: {tuner.state} ({tuner.reason})"])
            if tuner.state in SETTLED:
                self._save(tuner)
        self._last = now
        self._metrics.set("lagom_settings", len(tuner.settings))
        self._metrics.flush()
        self._events.write("state", state=tuner.state, reason=tuner.reason, settings=len(tuner.settings))

    def _save(self, tuner: OnlineTuner) -> None:
        try:
            tuner.save(self._folder / SETTINGS_NAME)
        except OutputError as error:
            if not self._is_unsaved:
                say([f"the settings are not saved: {error}"])
            self._is_unsaved = True


def note_job(environment: MutableMapping[str, str]) -> None:
    """Notes the rank as the process group has it, and says where the files of a job that is not the first are."""
    note_rank(dist.get_rank(), environment)
    if FIRST_WORLD_VARIABLE in environment and dist.get_rank() == 0:
        say([f"this is not the first job of its lagom run; its files are in {environment[FOLDER_VARIABLE]}"])


def begin_session(environment: Mapping[str, str]) -> Rank:
    """The session of this rank, begun.

    Raises:
        LagomError: if the plug-in or a file of ours cannot be used.
    """
    mode, folder, rank = environment[MODE_VARIABLE], Path(environment[FOLDER_VARIABLE]), rank_of(environment)
    nccl = nccl_in_use()
    has_plugin = nccl is not None and (mode == "fixed" or (mode == "observe" and bool(environment.get("LAGOM_RECORD"))))
    plugin = plugin_of(environment) if has_plugin else None
    events = JsonLines(folder / f"events.{rank}.jsonl", rank=rank)
    metrics = PrometheusFile(folder / f"metrics.{rank}.prom", rank=rank)
    events.write("begin", mode=mode, world_size=dist.get_world_size(), backend=dist.get_backend())
    match mode:
        case "observe":
            pattern = environment.get("LAGOM_RECORD")
            record = expanded(pattern, rank) if pattern else None
            observing = Observing(nccl, events, metrics, rank=rank, record=record, plugin=plugin)
            return Rank(observing, events, metrics)
        case "online":
            config = environment.get(CONFIG_VARIABLE)
            tuning = Tuning(events, metrics, folder=folder, config=Path(config) if config else None, rank=rank)
            # On gloo an adapter has to fit the model; below the plug-in any framework will do.
            return Rank(tuning, events, metrics, is_trained_in_parallel if nccl is None else is_trained)
        case "fixed":
            return Rank(Fixed(plugin, environment), events, metrics)
        case _:
            raise JobError(f"{MODE_VARIABLE} is {mode!r}; allowed: observe, online, fixed")


class Fixed:
    """Puts the launcher's table in force, which does the rest by itself; says if it fits nothing.

    Torch's SM carve-out, if the environment names one, is set once for the whole job.
    """

    def __init__(self, plugin: TunerPlugin | None, environment: Mapping[str, str]) -> None:
        self._compute = carved_out(environment, rank_of(environment))
        self._plugin = plugin
        self._is_first, self._num_steps = rank_of(environment) == 0, 0
        self._is_said = False
        if self._plugin is None:
            self._say("the job's process groups are not on NCCL")
        elif why := _refusal(environment) or _apply(self._plugin, environment):
            self._plugin.enable(is_enabled=False)
            self._say(why)

    def on_model(self, model: nn.Module) -> None:
        """Nothing to do."""

    def on_step(self) -> None:
        """Says once what the first steps showed."""
        self._num_steps += 1
        if self._num_steps > CHECKED_STEPS:
            self._say_misfit()

    def on_update(self) -> None:
        """Nothing."""

    @staticmethod
    def may_end() -> bool:
        """Always: a table in force stays so, and needs no word of this rank's."""
        return True

    def close(self) -> None:
        """Launches as before us again."""
        if self._num_steps:
            self._say_misfit()
        if self._compute is not None:
            self._compute.close()

    def _say_misfit(self) -> None:
        """Once: whether the table fits anything that the job calls."""
        if self._is_said or self._plugin is None:
            return
        asked, matched = self._plugin.counts()
        if not asked:
            self._say("NCCL asked the plug-in about no call: nothing that a table can set was called")
        elif not matched:
            self._say(f"its table has a row for none of the job's {asked} collectives so far: nothing is set")
        self._is_said = True

    def _say(self, why: str) -> None:
        self._is_said = True
        if self._is_first:
            say([f"--config is not applied: {why}"])


def plugin_of(environment: Mapping[str, str]) -> TunerPlugin:
    """The plug-in, which decides by no table of the launcher's until all ranks agree, whatever fails before."""
    plugin = TunerPlugin(Path(environment["NCCL_TUNER_PLUGIN"]))
    if CHECKSUM_VARIABLE in environment:
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
    if CHECKSUM_VARIABLE not in environment:
        return ""
    timeout_s = OnlineOptions().timeout_s
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    try:
        exchange = meet(lambda name: store_of(name, timeout_s), rank=rank, num_ranks=num_ranks, timeout_s=timeout_s)
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


def say(lines: list[str]) -> None:
    """Lines for people, on stderr: stdout is the job's."""
    write_lines(*(f"lagom: {line}" for line in lines))
