"""One rank of a job that `lagom run` started: observing it, or tuning it, without a line of its code.

The session begins when the job has its process group. What fails is said on stderr, and the job goes on without us; but
a rank that cannot do as the others do, or cannot know what they do, ends the job, whose collectives would hang.
"""

import contextlib
import os
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import torch
from torch import distributed as dist
from torch import nn

from lagom_overlap.collective.sites import SiteSetting
from lagom_overlap.errors import BackendError, JobError, OutputError
from lagom_overlap.export.run_variables import (
    ADAPTERS_VARIABLE,
    COMPARE_VARIABLE,
    CONFIG_VARIABLE,
    FIRST_WORLD_VARIABLE,
    FOLDER_VARIABLE,
    JOB_STEPS_VARIABLE,
    MODE_VARIABLE,
    PAIRS_VARIABLE,
    PART_VARIABLE,
    TUNER_VARIABLE,
    RunMode,
)
from lagom_overlap.export.saved import SETTINGS_NAME
from lagom_overlap.online import conclusions
from lagom_overlap.online.device import DeviceEvent, job_device, nccl_in_use
from lagom_overlap.online.events import JsonLines, PrometheusFile, rank_of
from lagom_overlap.online.guest import safely, say
from lagom_overlap.online.job_profiler import OWN_PROFILER
from lagom_overlap.online.job_store import tell_others
from lagom_overlap.online.launch_steps import TrainingSteps, is_trained, is_trained_in_parallel
from lagom_overlap.online.options import OnlineOptions, is_disabled
from lagom_overlap.online.ranks.exchange import InDoubt
from lagom_overlap.online.ranks.messages import SETTLED, SwitchState
from lagom_overlap.online.ranks.presence import say_off
from lagom_overlap.online.run_jobs import note_rank
from lagom_overlap.online.step_clock import HostEvent, IntervalClock
from lagom_overlap.online.tuner import OnlineTuner
from lagom_overlap.record import emulated_by, write_private
from lagom_overlap.results.conclusion import Conclusion
from lagom_overlap.results.step_times import MOST_STEPS, RunSteps, write_step_times
from lagom_overlap.tuners.registry import OURS

if TYPE_CHECKING:  # one rank has one, of some jobs
    from lagom_overlap.results.contest import ContestResult

CONTEST_NAME: Final = "compare.json"
TRACES: Final = "traces"
"""Where `--observe` leaves a sampled step of the first ranks, for `lagom analyze`."""
FLUSH_EVERY: Final = 50
"""Steps between two writes of the metrics if nothing happens. Bounds the cost per step; chosen, not measured."""


class Session(Protocol):
    """What is done with a job."""

    def steady(self) -> tuple[SiteSetting, ...] | None:
        """The settings under which steps run as they would go on to; None while something is tried."""

    def why_void(self) -> str:
        """Why the times of its steps say nothing of what was asked for; empty if they do."""

    def conclusion(self) -> Conclusion:
        """What came of it, once it is closed."""

    def on_model(self, model: nn.Module) -> None:
        """The model is known; its first step follows."""

    def on_step(self) -> None:
        """A step begins."""

    def on_update(self) -> None:
        """An optimizer has made its step."""

    def may_end(self) -> bool:
        """Whether this rank can end it alone, between two steps, while the others go on."""

    def release(self) -> None:
        """The job has destroyed its process groups; what was found stays."""

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
        *,
        folder: Path | None = None,
        is_on_nccl: bool = False,
    ) -> None:
        """`folder`: where rank 0's step times go; None on the other ranks, who say nothing at the end either.

        `is_on_nccl`: the steps are timed by the GPU, of which the host runs ahead.
        """
        self._session = session
        self._events = events
        self._metrics = metrics
        self._num_steps = 0
        self._began_s = 0.0
        self._folder = folder
        self._steady: tuple[SiteSetting, ...] | None = None
        self._clock: IntervalClock | None = None
        self._is_on_nccl = is_on_nccl
        self._is_closed = False
        self._steps = TrainingSteps(self._guarded_model, self._guarded_step, accepts, self._guarded_update)
        os.register_at_fork(after_in_child=partial(_take_hooks_away, weakref.ref(self)))

    def take_hooks_away(self) -> None:
        """Leaves this process alone, and says so to nobody: in a forked child the session is its parent's."""
        self._steps.close()
        OWN_PROFILER.unwatch()

    def release(self) -> None:
        """The session needs no connections any more; what came of it is said at the job's end."""
        self._session.release()

    def close(self) -> None:
        """Ends the session and says what came of it; safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._steps.close()
        self._session.close()
        OWN_PROFILER.unwatch()
        self._metrics.flush()
        if self._folder is None:
            self._events.write("end", steps=self._num_steps)
            return
        ending = self._session.conclusion().under(emulated_by())
        self._events.write("end", steps=self._num_steps, result=ending.found, why=ending.why, next=ending.next_line)
        safely(lambda: self._keep_times(self._folder))
        if not os.environ.get(PART_VARIABLE):
            say(ending.lines())

    def _keep_times(self, folder: Path | None) -> None:
        if folder is None or self._clock is None or self._session.why_void():
            return
        if steps_s := self._clock.times_s():
            times = RunSteps(
                num_steps=self._num_steps,
                num_settings=len(self._steady or ()),
                clock="device" if self._is_on_nccl else "host",
                steps_s=steps_s,
            )
            write_step_times(folder, times)

    def _guarded_model(self, model: nn.Module) -> None:
        safely(lambda: self._session.on_model(model), ends_the_job=InDoubt)

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
        if self._folder is not None:
            self._time()
        self._began_s = now
        self._num_steps += 1
        self._metrics.set("lagom_steps", self._num_steps)
        self._session.on_step()
        if self._num_steps % FLUSH_EVERY == 1:
            self._metrics.flush()

    def _time(self) -> None:
        """Keeps the time of the step before, if one setting is in force; what was before another one is forgotten."""
        if self._clock is None:
            make = partial(DeviceEvent, job_device()) if self._is_on_nccl else HostEvent
            self._clock = IntervalClock(make, MOST_STEPS)
        if self._is_on_nccl and torch.cuda.is_current_stream_capturing():
            self._clock.skip()  # an event in a graph cannot be timed
            return
        steady = self._session.steady()
        if steady is not None and steady is not self._steady and steady != self._steady:  # mostly the same object
            self._clock.forget()
        self._steady = self._steady if steady is None else steady
        self._clock.begin(counts=steady is not None)


def _take_hooks_away(reference: "weakref.ref[Rank]") -> None:
    rank = reference()
    if rank is not None:
        rank.take_hooks_away()


class Tuning:
    """Hands the job to `OnlineTuner`, which starts from a file if there is one.

    `is_on_gloo` is told, not asked: at the end of a job its process groups are gone.
    Options without `searches` judge the file's settings (`lagom run --prove`), or set them (`--config` on gloo).
    """

    def __init__(
        self,
        events: JsonLines,
        metrics: PrometheusFile,
        *,
        folder: Path,
        config: Path | None,
        options: OnlineOptions,
        rank: int,
        is_on_gloo: bool,
        adapters: tuple[str, ...] = (),
    ) -> None:
        self._events, self._metrics = events, metrics
        self._is_on_gloo, self._adapters = is_on_gloo, adapters
        self._folder, self._config, self._rank, self._options = folder, config, rank, options
        self._proves = not options.searches and options.check_share > 0
        self._tuner: OnlineTuner | None = None
        self._ending: Conclusion | None = None
        self._proof: Conclusion | None = None
        self._is_proof_written = False
        self._open: contextlib.AbstractContextManager[None] | None = None
        self._last: tuple[SwitchState, str, int] | None = None
        self._is_unsaved = False
        self._num_saved = 0
        self._told_contest: ContestResult | None = None

    def on_model(self, model: nn.Module) -> None:
        """Makes the tuner, on all ranks at the same call of the model."""
        journal = self._folder / f"journal.{self._rank}.jsonl"
        try:
            self._tuner = OnlineTuner(
                model, config=self._config, journal=journal, adapters=self._adapters or None, options=self._options
            )
        except BaseException as error:
            tell_others(partial(say_off, why=str(error) or type(error).__name__))
            raise
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

    def steady(self) -> tuple[SiteSetting, ...] | None:
        """What is set, once it is settled."""
        tuner = self._tuner
        return tuner.settings if tuner is not None and tuner.state in SETTLED else None

    @staticmethod
    def why_void() -> str:
        """Empty: where nothing is set, the number of settings beside the times is 0."""
        return ""

    def conclusion(self) -> Conclusion:
        """What was found by the time it was closed."""
        return (
            self._proof
            or self._ending
            or conclusions.of_tuning(self._stand(), self._folder, conclusions.command_text())
        )

    def release(self) -> None:
        """Takes no further part, in no step: none can follow."""
        if self._tuner is not None:
            self._tuner.release()

    def close(self) -> None:
        """Takes no further part; a step that was cut off by the end of the job is not counted."""
        tuner = self._tuner
        if tuner is not None:
            safely(lambda: self._note(tuner))
        self._ending = self.conclusion()  # closing is no state of the search
        if self._proves and self._rank == 0:
            safely(self._prove)
        self._open = None
        if tuner is not None:
            tuner.close()

    def _stand(self) -> conclusions.Stand:
        tuner = self._tuner
        return conclusions.Stand(
            state=SwitchState.OFF if tuner is None else tuner.state,
            reason="" if tuner is None else tuner.reason,
            num_settings=0 if tuner is None else len(tuner.settings),
            num_steps=0 if tuner is None else tuner.num_steps,
            num_steps_left=0 if tuner is None else tuner.num_steps_left,
            has_model=tuner is not None,
            is_on_gloo=self._is_on_gloo,
            searches=self._options.searches,
            num_saved=self._num_saved,
        )

    def _prove(self) -> None:
        """Writes the proof and takes its words; once, when it is decided or the job ends."""
        if self._is_proof_written or self._config is None:
            return
        self._is_proof_written = True
        from lagom_overlap.report.proof import write_proof  # noqa: PLC0415 - one rank, once

        check = None if self._tuner is None else self._tuner.start_check
        proof = conclusions.of_proof(self._stand(), check, subject=self._config, options=self._options)
        self._proof = proof.conclusion
        write_proof(self._folder, proof)

    def _note(self, tuner: OnlineTuner) -> None:
        """Says what changed, and saves the settings whenever they are settled anew."""
        now = (tuner.state, tuner.reason, len(tuner.settings))
        if now == self._last:
            return
        if tuner.state is SwitchState.CHECK and self._last is not None and self._last[0] in SETTLED:
            return  # told if it changes anything
        is_new_state = self._last is None or self._last[0] is not tuner.state
        if is_new_state or (self._last is not None and self._last[2] != len(tuner.settings)):
            self._metrics.forget("lagom_state")
            self._metrics.set("lagom_state", 1, state=tuner.state)
            if self._rank == 0 and is_new_state:
                left = f", at most {tuner.num_steps_left} steps" if tuner.num_steps_left else ""
                reason = "" if tuner.reason in tuner.state.words else f": {tuner.reason}"
                say([f"online tuning: {tuner.state.words}{reason}{left}"])
            if tuner.state in SETTLED:
                self._save(tuner)
                if self._rank == 0 and tuner.contest is not None:
                    safely(partial(self._tell_contest, tuner.contest))
                if self._proves and self._rank == 0:
                    safely(self._prove)
        priorities = tuner.priorities
        if self._rank == 0 and priorities and not is_new_state:
            say([f"online tuning: {tuner.reason}"])  # each step of a climb, with its H
        self._metrics.forget("lagom_priority")
        for group, metrics in priorities.items():
            for comm, metric in metrics.items():
                self._metrics.set("lagom_priority", metric, group=group, collective=comm)
        self._last = now
        self._metrics.set("lagom_settings", len(tuner.settings))
        self._metrics.flush()
        self._events.write(
            "state",
            state=tuner.state,
            reason=tuner.reason,
            settings=len(tuner.settings),
            steps=tuner.num_steps,
            steps_left=tuner.num_steps_left or None,
        )

    def _tell_contest(self, contest: "ContestResult") -> None:
        """Says how the tuners did, once for each search of them, and keeps it."""
        if contest is not self._told_contest:
            # Not at the top: one rank, once.
            from lagom_overlap.report.contest import contest_lines  # noqa: PLC0415
            from lagom_overlap.results.base import encoded  # noqa: PLC0415

            self._told_contest = contest
            say(contest_lines(contest))
            write_private(self._folder / CONTEST_NAME, msgspec.json.format(encoded(contest), indent=2) + b"\n")

    def _save(self, tuner: OnlineTuner) -> None:
        try:
            tuner.save(self._folder / SETTINGS_NAME)
            self._num_saved = len(tuner.settings)
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
    has_plugin = nccl is not None and (
        mode == RunMode.FIXED or (mode == RunMode.OBSERVE and bool(environment.get("LAGOM_RECORD")))
    )
    plugin = None
    # Here and below what a mode needs, not at the top: a job that is tuned online needs none of it.
    if has_plugin:
        from lagom_overlap.online.launch_fixed import plugin_of  # noqa: PLC0415

        plugin = plugin_of(environment)
    events = JsonLines(folder / f"events.{rank}.jsonl", rank=rank)
    metrics = PrometheusFile(folder / f"metrics.{rank}.prom", rank=rank)
    session_of = partial(
        Rank, events=events, metrics=metrics, folder=folder if rank == 0 else None, is_on_nccl=nccl is not None
    )
    events.write("begin", mode=mode, world_size=dist.get_world_size(), backend=dist.get_backend())
    match mode:
        case RunMode.OBSERVE:
            from lagom_overlap.online.launch_observe import Observing  # noqa: PLC0415
            from lagom_overlap.online.routes.nccl import expanded  # noqa: PLC0415

            pattern = environment.get("LAGOM_RECORD")
            record = expanded(pattern, rank) if pattern else None
            observing = Observing(
                nccl, events, metrics, rank=rank, record=record, plugin=plugin, traces=folder / TRACES
            )
            return session_of(observing)
        case RunMode.ONLINE | RunMode.PROVE | RunMode.HELD:
            config = environment.get(CONFIG_VARIABLE)
            adapters = tuple(filter(None, environment.get(ADAPTERS_VARIABLE, "").split(",")))
            tuning = Tuning(
                events,
                metrics,
                folder=folder,
                config=Path(config) if config else None,
                options=options_of(mode, environment),
                rank=rank,
                is_on_gloo=nccl is None,
                adapters=adapters,
            )
            # On gloo an adapter has to fit the model, if none was named; below the plug-in any framework will do.
            accepts = is_trained_in_parallel if nccl is None and not adapters else is_trained
            return session_of(tuning, accepts=accepts)
        case RunMode.FIXED:
            from lagom_overlap.online.launch_fixed import Fixed  # noqa: PLC0415

            return session_of(Fixed(plugin, environment))
        case RunMode.PLANNED:
            from lagom_overlap.online.launch_planned import AsStarted  # noqa: PLC0415

            return session_of(AsStarted(environment))
        case _:
            raise JobError(f"{MODE_VARIABLE} is {mode!r}, allowed: {', '.join(RunMode)}")


def options_of(mode: str, environment: Mapping[str, str]) -> OnlineOptions:
    """Online tuning's of a mode; what only judges or holds settings is done with that, and does not watch."""
    match mode:
        case RunMode.PROVE:
            judges = OnlineOptions(searches=False, watch_steps=0, max_rearms=0)
            return replace(judges, num_pairs=int(environment.get(PAIRS_VARIABLE, judges.num_pairs)))
        case RunMode.HELD:
            return OnlineOptions(searches=False, watch_steps=0, max_rearms=0, check_share=0.0)
        case _:
            return OnlineOptions(
                tuner=environment.get(TUNER_VARIABLE, OURS),
                compare=tuple(filter(None, environment.get(COMPARE_VARIABLE, "").split(","))),
                job_steps=int(environment.get(JOB_STEPS_VARIABLE, "0")),
            )
