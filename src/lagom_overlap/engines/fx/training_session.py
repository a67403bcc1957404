"""A framework's training step run for real on a rank: recorded by the profiler, or FSDP2's own against settings.

Both arms are the step that the user's function makes, built twice from one seed. They take turns, in shuffled order
within a round, and draw the same random numbers; losses of every step, and parameters and gradients at the end, are
compared bit for bit; losses alone where a setting changes results.
"""

import gc
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import msgspec
import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, schedule

from lagom_overlap.capturing.fake_tensor import TrainingStep, train_once
from lagom_overlap.engines.fx.commands import ArmRuns, PlanRun, Refused, RunSettings, ScriptProgram, Traced, TraceSteps
from lagom_overlap.engines.fx.fsdp2 import apply_settings
from lagom_overlap.engines.fx.program import TrainingStepError, load_program
from lagom_overlap.engines.fx.program_session import Ranks, relative_error
from lagom_overlap.errors import LagomError
from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings

WARM_UP_STEPS: Final = 2
"""Untimed steps of each arm: the first one of FSDP2 does more than the others, and makes the optimizer's state."""

Build = Callable[[], TrainingStep]


class TrainingSession:
    """Executes commands about training steps on one rank; every rank executes the same ones in the same order."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._builds: dict[ScriptProgram, Build] = {}

    def trace(self, command: TraceSteps) -> Traced | Refused:
        """Trains under the profiler; the first rank writes what it saw."""
        build = self._load(command.program)
        if isinstance(build, Refused):
            return build
        plan = schedule(wait=0, warmup=WARM_UP_STEPS, active=command.num_steps, repeat=1)

        def write(profiler: Any) -> None:
            if dist.get_rank() == 0:
                profiler.export_chrome_trace(command.path)

        step = _built(build, self._ranks)
        if isinstance(step, Refused):
            return step
        with (
            torch.enable_grad(),
            profile(activities=[ProfilerActivity.CPU], record_shapes=True, schedule=plan, on_trace_ready=write) as held,
        ):
            for _ in range(WARM_UP_STEPS + command.num_steps):
                self._ranks.barrier()
                train_once(step)
                held.step()
        return Traced()

    def run(self, command: RunSettings) -> PlanRun | Refused:
        """FSDP2's own step against the same with settings."""
        build = self._load(command.program)
        if isinstance(build, Refused):
            return build
        return compared(build, command.settings, self._ranks, rounds=command.rounds, seed=command.seed)

    def _load(self, program: ScriptProgram) -> Build | Refused:
        """What makes the step; refused on all ranks if one of them has none."""
        reason = ""
        if program not in self._builds:
            try:
                load_program(Path(program.script), program.function)
                reason = f"program {program.script!r}: {program.function}() makes no TrainingStep"
            except TrainingStepError as error:
                self._builds[program] = error.build
            except LagomError as error:
                reason = str(error)
        able = self._ranks.gather(int(not reason))
        if not all(able):
            return Refused(reason or f"rank {able.index(0)} cannot load program {program.script!r}")
        return self._builds[program]


@dataclass(frozen=True, slots=True)
class _Arm:
    """One of the two, and when each of its steps began and ended."""

    step: TrainingStep
    makespans_s: list[float]


def compared(build: Build, settings: Fsdp2Settings, ranks: Ranks, *, rounds: int, seed: int) -> PlanRun | Refused:
    """Trains both arms `rounds` steps each; every rank calls it, once the default process group is open."""
    arms: dict[str, _Arm] = {}
    for name in ("before", "after"):
        torch.manual_seed(seed)
        step = _built(build, ranks)
        if isinstance(step, Refused):
            return step
        arms[name] = _Arm(step, [])
    reason = ""
    try:
        apply_settings(arms["after"].step.model, settings)
    except LagomError as error:
        reason = str(error)
    able = ranks.gather(int(not reason))
    if not all(able):
        return Refused(reason or f"rank {able.index(0)} cannot be told the settings")
    order, rng, largest = list(arms), random.Random(seed), 0.0
    gc.collect()
    gc.disable()  # a collection in the middle of a step would be measured
    try:
        for number in range(WARM_UP_STEPS + rounds):
            rng.shuffle(order)
            losses = {}
            for name in order:
                seconds, losses[name] = _timed(arms[name].step, ranks, seed + number)
                if number >= WARM_UP_STEPS:
                    arms[name].makespans_s.append(seconds)
            largest = max(largest, *map(relative_error, losses["before"], losses["after"]))
    finally:
        gc.enable()
    if not settings.reduce_in_param_dtype:  # else states drift apart: Adam makes a step of whatever is rounded
        largest = max([largest, *map(relative_error, *(_state(arm.step) for arm in (arms["before"], arms["after"])))])
    digest = hashlib.sha256(msgspec.json.encode(settings)).hexdigest()[:16]
    runs = {name: ArmRuns(tuple(ranks.maxima(arm.makespans_s))) for name, arm in arms.items()}
    worst = ranks.maxima([largest])[0]
    return PlanRun(before=runs["before"], after=runs["after"], max_error=worst, order_digest=digest)


def _built(build: Build, ranks: Ranks) -> TrainingStep | Refused:
    """The user's step; refused on all ranks if one of them fails to make it."""
    step, reason = None, ""
    try:
        with torch.enable_grad():
            step = build()
        if not isinstance(step, TrainingStep):
            reason = f"the program's function returned {type(step).__name__}, must return a TrainingStep"
        elif next(step.model.parameters(), None) is None:
            reason = "the model of the TrainingStep has no parameters"
    except Exception as error:
        reason = f"the program failed: {type(error).__name__}: {error}"
    able = ranks.gather(int(not reason))
    if not all(able) or step is None:
        return Refused(reason or f"the program failed on rank {able.index(0)}")
    return step


def _timed(step: TrainingStep, ranks: Ranks, seed: int) -> tuple[float, list[torch.Tensor]]:
    """Seconds of one step on this rank, by the GPU's events where it has one; and its losses."""
    torch.manual_seed(seed)
    device = next(step.model.parameters()).device
    ranks.barrier()
    if device.type != "cuda":
        start = perf_counter()
        with torch.enable_grad():
            losses = train_once(step)
        return perf_counter() - start, losses
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]  # torch's own
    events[0].record()
    with torch.enable_grad():
        losses = train_once(step)
    events[1].record()
    torch.cuda.synchronize(device)
    return events[0].elapsed_time(events[1]) * 1e-3, losses


def _state(step: TrainingStep) -> list[torch.Tensor]:
    """This rank's parameters, and the gradients that no optimizer has cleared."""
    tensors = []
    for parameter in step.model.parameters():
        for value in (parameter.detach(), parameter.grad):
            if value is not None:
                tensors.append(value.to_local() if isinstance(value, DTensor) else value)
    return tensors
