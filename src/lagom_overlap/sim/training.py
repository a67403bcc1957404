"""A training iteration of a model on a cluster: the built step of each stage, simulated and put together.

One rank per distinct role is simulated: the first, a middle and the last stage of one pipeline. Tensor-parallel ranks
run in step, data-parallel ones are equal. A stage's step is built with at most three micro-batches: the first, one in
between and the last differ, those in between repeat. Its forwards and backwards (slots) are then run against the other
stages' (`sim.pipeline`); what comes before the first slot and after the last one follows from the step.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from operator import sub
from typing import Final

import numpy as np

from lagom_overlap.collective import Collective, CommConfig
from lagom_overlap.cost.operators import FrameworkConstants, OperatorConstants
from lagom_overlap.cost.profile import Profile
from lagom_overlap.hardware import Cluster
from lagom_overlap.sim.columns import Columns
from lagom_overlap.sim.framework import FrameworkModel
from lagom_overlap.sim.iteration import IterationSimulator
from lagom_overlap.sim.pipeline import SlotRun, SlotTimes, run_pipeline
from lagom_overlap.sim.step_parts import CommTimes, Seconds, SimulatedStep, StepParts, StepWaits, parts_of
from lagom_overlap.sim.transfers import run_programs, stage_program
from lagom_overlap.timeline import Span, SpanKind, Timeline
from lagom_overlap.workload import CommOp
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.layer_kinds import LayerKind, Mixer, scan_flops
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel import ParallelLayout, stage_slots
from lagom_overlap.workload.parallel.stage import chunk_layers
from lagom_overlap.workload.precision import Precision
from lagom_overlap.workload.step import IssueRules, StepBuilder, load_rules
from lagom_overlap.workload.step.rank_groups import PIPELINE
from lagom_overlap.workload.step.rolled import RolledStep

Settings = Callable[[Collective], CommConfig | None]
"""How a collective is run; None: untouched."""
PlacedSettings = Mapping[int, Mapping[int, CommConfig]]
"""How single collectives are run, by simulated stage and by their place in its step; the others are untouched."""
MAX_BUILT: Final = 3
"""Micro-batches that a step is built with: the first, one that repeats, the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """One stage's iteration in seconds.

    `end_s` is when its last backward ends, `busy_s` what its slots take in all; what is left is the pipeline's bubble.
    `gradients_s` is what reductions, gathers and clipping add outside of the slots, `optimizer_s` the update.
    """

    rank: int
    busy_s: float
    end_s: float
    compute_s: float
    host_s: float
    comms: dict[str, CommTimes]
    gradients_s: float
    optimizer_s: float

    @property
    def bubble_s(self) -> float:
        """Waiting for other stages before the last backward."""
        return max(0.0, self.end_s - self.busy_s)

    @property
    def whole_s(self) -> float:
        """Until its update is done."""
        return self.end_s + self.gradients_s + self.optimizer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTimes:
    """One iteration: its time, what each stage does with it, the slots in order, what it computes."""

    iteration_s: float
    stages: tuple[StageTimes, ...]
    runs: tuple[tuple[SlotRun, ...], ...]
    model_flops: float

    @property
    def last_stage(self) -> StageTimes:
        """The stage that is done last: what it waits for is what the iteration waits for."""
        return max(self.stages, key=lambda stage: stage.whole_s)

    def mfu(self, num_gpus: int, peak_flops: float) -> float:
        """Model FLOPs per second over the GPUs' peak; recomputation does not count."""
        return self.model_flops / (self.iteration_s * num_gpus * peak_flops)


def model_flops(model: TransformerModel, global_batch: int, seq_len: int, *, frozen: bool = False) -> float:
    """FLOPs of one iteration without recomputation: 6 per matrix parameter and token, 12 s per attention column.

    Of `frozen` matrices 4, which have no gradients. For a GPT this is Narayanan et al. (arXiv 2104.04473, Eq. 3) with a
    factor 72 instead of 96; attention counts in full, causal or not. Multi-token prediction counts, its head too.
    """
    tokens = global_batch * seq_len
    kinds, heads = model.kind_counts, 1 + model.mtp_layers
    for kind in model.mtp_kinds * model.mtp_layers:
        kinds[kind] += 1
    matrices = sum(model.params_of(kind).active * count for kind, count in kinds.items())
    matrices += heads * model.vocab * model.hidden + 2 * model.mtp_layers * model.hidden**2
    mixing = sum(mixer_flops(model, kind.mixer, seq_len) * count for kind, count in kinds.items())
    return tokens * ((4.0 if frozen else 6.0) * matrices + 3.0 * mixing)


def mixer_flops(model: TransformerModel, mixer: Mixer, seq_len: int) -> float:
    """Forward FLOPs per token of what mixes tokens: of attention every key that it may see, causal or not."""
    match mixer:
        case Mixer.ATTENTION:
            return 4.0 * seq_len * model.attention_columns
        case Mixer.WINDOW:
            return 4.0 * min(seq_len, model.window) * model.attention_columns
        case Mixer.LATENT:
            assert model.latent is not None
            return 2.0 * seq_len * model.num_heads * (model.latent.qk_head_dim + model.latent.v_head_dim)
        case Mixer.MAMBA:
            assert model.mamba is not None
            return scan_flops(model.mamba)
        case Mixer.NONE:
            return 0.0


@dataclass(frozen=True, slots=True)
class _Built:
    """A stage's operators, their launch gaps, and what simulates them."""

    columns: Columns
    waits: StepWaits
    host_s: Seconds
    simulator: IterationSimulator

    def simulated(self, config_of: Callable[[CommOp], CommConfig | None]) -> SimulatedStep:
        starts_s, ends_s = self.simulator.run_as(config_of)
        return SimulatedStep(
            columns=self.columns,
            waits=self.waits,
            starts_s=np.array(starts_s),
            ends_s=np.array(ends_s),
            host_s=self.host_s,
        )


@dataclass(frozen=True, slots=True)
class _Role:
    """A stage's step as simulated: its parts, its end, a transfer to a neighbour."""

    parts: StepParts
    makespan_s: float
    transfer_s: float


class TrainingSimulator:
    """Prices one layout; `times` gives the iteration, `step` what is simulated of a stage."""

    def __init__(
        self,
        model: TransformerModel,
        layout: ParallelLayout,
        *,
        seq_len: int,
        cluster: Cluster,
        operators: OperatorConstants,
        framework: FrameworkConstants,
        profile: Profile,
        rules: IssueRules | None = None,
        precision: Precision | None = None,
        clips: bool | None = None,
        sm_carveout: int | None = None,
        rank_skew_s: float = 0.0,
    ) -> None:
        self._model, self._layout, self._seq_len, self._cluster = model, layout, seq_len, cluster
        self._steps = StepBuilder(
            model,
            layout,
            seq_len=seq_len,
            rules=rules or load_rules(framework.name),
            precision=precision,
            clips=clips,
        )
        rules = self._steps.rules
        self._gathers_at_first, self._queues = rules.stays_whole(layout), rules.queues_transfers(layout)
        self._exchanges = rules.exchanges_transfers(layout)
        self._built: dict[int, _Built] = {}
        self.price = FrameworkModel.of(
            cluster,
            profile,
            operators.in_training(),
            framework,
            sm_carveout,
            attention_kernel=layout.attention_kernel,
            rank_skew_s=rank_skew_s,
        )

    def step(self, rank: int = 0, num_micro_batches: int | None = None) -> IssuedStep:
        """The built step of a stage, placed on the cluster; by default with as many micro-batches as are simulated."""
        return self._rolled(rank, num_micro_batches).unrolled()

    def _rolled(self, rank: int, num_micro_batches: int | None = None) -> RolledStep:
        num = min(MAX_BUILT, self._layout.num_micro_batches) if num_micro_batches is None else num_micro_batches
        return self._steps.rolled(rank, num).placed_on(self._cluster)

    @property
    def collectives(self) -> set[Collective]:
        """Those of the first stage in a micro-batch."""
        return {op.collective for op in self._rolled(0, 1).ops if isinstance(op, CommOp)}

    def _build(self, step: RolledStep) -> _Built:
        columns = Columns(step)
        host_s = self.price.host_s(columns)
        return _Built(
            columns, StepWaits(*step.earlier()), host_s, self.price.simulator(step, columns=columns, host_s=host_s)
        )

    def _role(self, rank: int, settings: Settings | None) -> _Role:
        built = self._built.get(rank)
        if built is None:
            built = self._built[rank] = self._build(self._rolled(rank))
        return self._role_of(built, lambda op: None if settings is None else settings(op.collective))

    def _placed_role(self, rank: int, placed: Mapping[int, CommConfig]) -> _Role:
        """A stage with settings at some places of its step."""
        if not placed:
            return self._role(rank, None)
        step = self._rolled(rank)
        ops = list(step.ops)  # equal operators are one object: what is set apart becomes one of its own
        for place in placed:
            ops[place] = copy(ops[place])
        configs = {id(ops[place]): config for place, config in placed.items()}
        return self._role_of(self._build(replace(step, ops=tuple(ops))), lambda op: configs.get(id(op)))

    def _role_of(self, built: _Built, config_of: Callable[[CommOp], CommConfig | None]) -> _Role:
        step = built.simulated(config_of)
        transfer_s, goes_on = 0.0, self._layout.overlap_p2p or self._queues
        if goes_on or self._exchanges:
            sends = built.columns.flags(lambda op: isinstance(op, CommOp) and op.communicator == PIPELINE)
            # Of the last micro-batch reductions may slow them down.
            sends &= built.columns.batches == step.repeats
            transfer_s = float((step.ends_s - step.starts_s)[sends].max(initial=0.0))
        parts = parts_of(step, self.price, self._layout.chunks, waits_for_sends=not goes_on)
        return _Role(parts, step.makespan_s, transfer_s)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that are simulated; every other one is like one of them."""
        return tuple(dict.fromkeys(self._stage_like(rank) for rank in range(self._layout.pipeline)))

    def _stage_like(self, rank: int) -> int:
        """The stage that is simulated for this one: the first inner one with layers of the same kinds."""
        last = self._layout.pipeline - 1
        if rank in {0, last}:
            return rank
        chunks = chunk_layers(self._model, self._layout)

        def kinds(stage: int) -> list[tuple[bool, list[LayerKind]]]:
            places = range(stage, len(chunks), self._layout.pipeline)
            predicts = self._layout.mtp_chunk if self._model.mtp_layers else None
            return [(place == predicts, [self._model.kind_of(layer) for layer in chunks[place]]) for place in places]

        wanted = kinds(rank)
        return next(stage for stage in range(1, last) if kinds(stage) == wanted)

    def times(self, settings: Settings | None = None) -> TrainingTimes:
        """The iteration, with collectives run as `settings` say.

        Raises:
            SpaceError: if a collective cannot be run so.
        """
        return self._times({stage: self._role(stage, settings) for stage in self.stages})

    def times_at(self, placed: PlacedSettings) -> TrainingTimes:
        """The iteration, with some collectives of the simulated stages (`stages`, `step`) set apart.

        Raises:
            SpaceError: if a collective cannot be run so.
        """
        return self._times({stage: self._placed_role(stage, placed.get(stage, {})) for stage in self.stages})

    def _times(self, simulated: Mapping[int, _Role]) -> TrainingTimes:
        layout = self._layout
        roles = [simulated[self._stage_like(rank)] for rank in range(layout.pipeline)]
        slot_times = [self._slot_times(role) for role in roles]
        if self._exchanges:
            runs = run_programs([stage_program(layout, rank) for rank in range(layout.pipeline)], slot_times)
        else:
            orders = [stage_slots(layout, rank) for rank in range(layout.pipeline)]
            runs = run_pipeline(orders, slot_times, is_queued=self._queues and not layout.overlap_p2p)
        rows, iteration_s = [], 0.0
        for rank, (role, run) in enumerate(zip(roles, runs, strict=True)):
            row = self._row(rank, role, run[-1].end_s)
            whole_s = row.whole_s
            if layout.pipeline == 1 and layout.num_micro_batches <= MAX_BUILT:
                whole_s = role.makespan_s  # the same without the rounding of differences
            iteration_s = max(iteration_s, whole_s)
            rows.append(row)
        flops = model_flops(self._model, layout.global_batch, self._seq_len, frozen=layout.frozen)
        return TrainingTimes(iteration_s=iteration_s, stages=tuple(rows), runs=runs, model_flops=flops)

    def _slot_times(self, role: _Role) -> SlotTimes:
        """A stage's slots; without what sending takes, where exchanges are waited for on their own."""
        parts = role.parts
        forward_s, backward_s = parts.forward_s, parts.backward_s
        if self._exchanges:
            forward_s = tuple(map(sub, forward_s, parts.forward_sends_s))
            backward_s = tuple(map(sub, backward_s, parts.backward_sends_s))
        first_s = parts.first_forward_s if self._gathers_at_first else None
        return SlotTimes(forward_s, backward_s, role.transfer_s, first_s)

    def steps_s(self, times: TrainingTimes) -> tuple[float, ...]:
        """Each stage's step of one micro-batch with nothing to wait for (s); without a pipeline the whole iteration."""
        if self._layout.pipeline == 1:
            return (times.iteration_s,)
        steps = {
            stage: self._build(self._rolled(stage, 1)).simulated(lambda _: None).makespan_s for stage in self.stages
        }
        return tuple(steps[self._stage_like(rank)] for rank in range(self._layout.pipeline))

    def _row(self, rank: int, role: _Role, end_s: float) -> StageTimes:
        parts, num = role.parts, self._layout.num_micro_batches
        slots_s = sum(parts.forward_s) + sum(parts.backward_s)
        first_s = sum(parts.first_forward_s) - sum(parts.forward_s) if self._gathers_at_first else 0.0
        outside_s = role.makespan_s - parts.num_built * slots_s - first_s - parts.optimizer_s
        # The first and the last micro-batch may take less than the one that repeats: nothing to wait for, or to reduce
        # later. Then nothing is outside of the slots, and they take that much less.
        shorter_s = min(0.0, outside_s)
        return StageTimes(
            rank=rank,
            busy_s=num * slots_s + first_s + shorter_s,
            end_s=end_s + shorter_s,
            compute_s=parts.over_batches(num, "compute_s"),
            host_s=parts.over_batches(num, "host_s"),
            comms=parts.comms(num),
            gradients_s=max(0.0, outside_s),
            optimizer_s=parts.optimizer_s,
        )


def training_timeline(times: TrainingTimes) -> Timeline:
    """Forwards `F3` and backwards `B3` by micro-batch (`F3.1`: of chunk 1), then gradients and the optimizer."""
    spans = []
    for stage, runs in zip(times.stages, times.runs, strict=True):
        for run in runs:
            chunk = f".{run.slot.chunk}" if run.slot.chunk else ""
            name = f"{'F' if run.slot.forward else 'B'}{run.slot.micro_batch}{chunk}"
            spans.append(_compute(name, stage.rank, run.start_s, min(run.end_s, stage.end_s)))
        reduced_s = stage.end_s + stage.gradients_s
        if stage.gradients_s > 0:
            spans.append(
                Span(
                    name="gradients",
                    kind=SpanKind.COMM,
                    stream="dp",
                    start_s=stage.end_s,
                    end_s=reduced_s,
                    rank=stage.rank,
                )
            )
        spans.append(_compute("optimizer", stage.rank, reduced_s, reduced_s + stage.optimizer_s))
    return Timeline(tuple(spans))


def _compute(name: str, rank: int, start_s: float, end_s: float) -> Span:
    return Span(name=name, kind=SpanKind.COMP, stream="compute", start_s=start_s, end_s=end_s, rank=rank)
