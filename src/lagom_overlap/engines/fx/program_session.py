"""One rank's side of running a program: times of its operators alone; the program and its plan, round by round."""

import gc
import math
import random
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any, Final, Protocol

import torch
from torch import distributed as dist
from torch import fx
from torch.distributed import distributed_c10d

from lagom_overlap.capturing.fx import FxCapture
from lagom_overlap.engines.fx.agreement import check_agreement, signature
from lagom_overlap.engines.fx.apply import apply_rewrites, name_operators
from lagom_overlap.engines.fx.commands import (
    ArmRuns,
    PlanRun,
    Profiled,
    ProfileProgram,
    Refused,
    RunPlan,
    ScriptProgram,
)
from lagom_overlap.engines.fx.nodes import OP_NAME, is_collective, is_wait, op_name
from lagom_overlap.engines.fx.process_groups import ProcessGroups
from lagom_overlap.engines.fx.program import LoadedProgram, load_program
from lagom_overlap.engines.fx.side_by_side import RankMaxima, rates_side_by_side
from lagom_overlap.engines.fx.slide import check_replicated
from lagom_overlap.engines.fx.streams import StepRun, StreamedStep
from lagom_overlap.errors import LagomError
from lagom_overlap.timeline import SpanKind, Timeline
from lagom_overlap.timeline.metrics import overlap_metrics
from lagom_overlap.workload.iteration import graph_digest
from lagom_overlap.workload.rewrite.tables import rewrite_of

_SEED: Final = 0
"""Of a program's inputs, the same on every rank and in every process."""
WARM_UP_RUNS: Final = 2
"""Untimed runs of each arm: first touches, connections, caches."""


class Ranks(RankMaxima, Protocol):
    """The same, and what one rank alone knows."""

    def gather(self, value: int) -> tuple[int, ...]:
        """Every rank's number, by rank."""


class PlannedSession:
    """Executes commands about programs on one rank; every rank executes the same ones in the same order.

    The default process group must be open.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._rank = dist.get_rank()
        self._num_ranks = dist.get_world_size()
        self._ranks = ranks
        self._groups = ProcessGroups()
        self._loaded: dict[ScriptProgram, tuple[LoadedProgram, FxCapture]] = {}
        self._checks = count()

    def profile(self, command: ProfileProgram) -> Profiled | Refused:
        """The times of each operator alone: means, for those of many operators add up to a step's, medians do not."""
        loaded = self._load(command.program)
        if isinstance(loaded, Refused):
            return loaded
        program, captured = loaded
        name_operators(captured.graph_module.graph, captured.iteration)
        values: dict[fx.Node, Any] = {}
        module = captured.graph_module
        times = [self.alone_s(module, program.inputs, values) for _ in range(command.repeats + 1)][1:]
        names = list(times[0])
        slowest = self._ranks.maxima([fmean(one[name] for one in times) for name in names])  # a step's sum is of means
        seconds = dict(zip(names, slowest, strict=True))
        if not command.side_by_side:
            return Profiled(seconds)
        shapes = {op.name: op.collective for op in captured.iteration.comms}
        rates = rates_side_by_side(module, values, seconds, shapes, ranks=self._ranks, repeats=command.repeats)
        return Profiled(seconds, rates)

    def run(self, command: RunPlan) -> PlanRun | Refused:
        """The program and its plan in interleaved rounds, after their results were compared."""
        loaded = self._load(command.program)
        if isinstance(loaded, Refused):
            return loaded
        program, captured = loaded
        digest = graph_digest(captured.iteration)
        if self._ranks.gather(int(digest == command.graph))[0] == 0:  # others may exchange other numbers of rows
            return Refused(f"the plan is for graph {command.graph}, the program's graph on rank 0 is not that one")
        reason = ""
        try:
            rewrites = [rewrite_of(table) for table in command.rewrites]
            planned = apply_rewrites(captured.graph_module, captured.iteration, rewrites, self._groups)
        except LagomError as error:
            reason = str(error)
        able = self._ranks.gather(int(not reason))
        if not all(able):
            return Refused(reason or f"the plan cannot be applied to the graph of rank {able.index(0)}")
        try:
            agreed = check_agreement(
                signature(planned.graph, self._groups.ranks),
                distributed_c10d._get_default_store(),
                rank=self._rank,
                num_ranks=self._num_ranks,
                step=f"lagom/plan/{next(self._checks)}",
            )
            check_replicated(planned, program.inputs, self._ranks.gather)
        except LagomError as error:  # on all ranks: all read all orders and all verdicts
            return Refused(str(error))
        name_operators(captured.graph_module.graph, captured.iteration)
        arms = {
            "before": StreamedStep(captured.graph_module, self._groups, as_written=True),
            "after": StreamedStep(planned, self._groups),
        }
        try:
            max_error = self._ranks.maxima([_difference(arms, program.inputs)])[0]
            runs = self.rounds(arms, program.inputs, command.rounds, command.seed)
        finally:
            for arm in arms.values():
                arm.close()
        return PlanRun(before=runs["before"], after=runs["after"], max_error=max_error, order_digest=agreed)

    def _load(self, program: ScriptProgram) -> tuple[LoadedProgram, FxCapture] | Refused:
        """The program and its graph; refused on all ranks if one of them cannot load it."""
        reason = ""
        if program not in self._loaded:
            try:
                loaded = load_program(Path(program.script), program.function)
                self._loaded[program] = (loaded, loaded.captured(program.function))
            except LagomError as error:
                reason = str(error)
        able = self._ranks.gather(int(not reason))
        if not all(able):
            return Refused(reason or f"rank {able.index(0)} cannot load program {program.script!r}")
        return self._loaded[program]

    def alone_s(
        self, module: fx.GraphModule, inputs: Sequence[Any], values: dict[fx.Node, Any] | None = None
    ) -> dict[str, float]:
        """Seconds of each operator running alone; views before an operator count to it. `values` takes all results."""
        values = {} if values is None else values
        times: dict[str, float] = {}
        given = iter(inputs)
        start = perf_counter()
        for node in module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
                continue
            if node.op == "output":
                break
            if is_wait(node):
                values[node] = values[node.all_input_nodes[0]]
                continue
            if is_collective(node):
                self._ranks.barrier()
                start = perf_counter()
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            value = getattr(module, str(node.target)) if node.op == "get_attr" else node.target(*args, **kwargs)
            if is_collective(node):
                value = torch.ops._c10d_functional.wait_tensor.default(value)
            values[node] = value
            if OP_NAME in node.meta:
                now = perf_counter()
                times[op_name(node)] = now - start
                start = perf_counter()
        return times

    def rounds(
        self, arms: dict[str, StreamedStep], inputs: Sequence[Any], num_rounds: int, seed: int
    ) -> dict[str, ArmRuns]:
        """The arms `num_rounds` times each, in shuffled order within a round, after `WARM_UP_RUNS` untimed ones."""
        rng = random.Random(seed)
        order = list(arms)
        runs: dict[str, list[StepRun]] = {name: [] for name in arms}
        slowest: dict[str, list[list[float]]] = {name: [] for name in arms}
        gc.collect()
        gc.disable()  # a collection in the middle of a run would be measured
        try:
            for number in range(WARM_UP_RUNS + num_rounds):
                rng.shuffle(order)
                for name in order:
                    run = arms[name].run(inputs, barrier=self._ranks.barrier)
                    worst = self._ranks.maxima([run.makespan_s, _exposed_s(run)])
                    if number >= WARM_UP_RUNS:
                        runs[name].append(run)
                        slowest[name].append(worst)
        finally:
            gc.enable()
        return {
            name: ArmRuns(
                makespan_s=tuple(worst[0] for worst in slowest[name]),
                exposed_s=tuple(worst[1] for worst in slowest[name]),
                spans=runs[name][-1].spans,
            )
            for name in arms
        }


def _exposed_s(run: StepRun) -> float:
    """Time in which this rank computed nothing: the makespan less the union of its computations."""
    computed = Timeline(tuple(span for span in run.spans if span.kind is SpanKind.COMP))
    return run.makespan_s - overlap_metrics(computed).comp_s


def _difference(arms: dict[str, StreamedStep], inputs: Sequence[Any]) -> float:
    """The largest relative difference of the arms' outputs on this rank, both of the same random numbers."""
    outputs = {}
    with torch.random.fork_rng():
        for name in ("before", "after"):
            torch.manual_seed(_SEED)
            outputs[name] = arms[name].run(inputs).outputs
    before, after = outputs["before"], outputs["after"]
    pairs = zip(before, after, strict=True)
    return max((relative_error(*pair) for pair in pairs if isinstance(pair[0], torch.Tensor)), default=0.0)


def relative_error(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The largest difference relative to the largest finite value; what is no number in both is equal.

    The largest float there is where one of them alone is not finite: messages know no infinity.
    """
    if not (expected.is_floating_point() or expected.is_complex()):
        expected, found = expected.double(), found.double()
    differs = (expected != found) & ~(expected.isnan() & found.isnan())
    if not bool(differs.any()):
        return 0.0
    finite = expected[expected.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    error = float((expected - found)[differs].abs().max()) / (scale or 1.0)
    return error if math.isfinite(error) else sys.float_info.max
