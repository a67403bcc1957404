"""Which of Megatron-LM's overlap switches shorten a job: each is a change of its layout, judged by a simulation.

From the job's own switches one dimension after the other takes the value whose iteration is shortest and that fits, all
others as they stand, until nothing changes. A change must gain `LEAST` of the iteration, as of `lagom simulate`'s
answers; of numbers of chunks within `LEAST` of the best the fewest is taken. Gradients and parameters travel behind
computations wherever that takes neither time nor memory, as published recipes have it. What the job has switched on is
switched off only where that gains more than the model's own error: it is some recipe's choice, and a prediction within
its error is no reason against it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from lagom_overlap.errors import JobError
from lagom_overlap.hardware import Gpu
from lagom_overlap.planners.megatron.settings import (
    CHUNKS,
    GROUP,
    OVERLAP_EXPERTS,
    OVERLAP_GRADIENTS,
    OVERLAP_PARAMETERS,
    OVERLAP_TENSOR,
    SEQUENCE_PARALLEL,
    bucket_argument,
    differing_keys,
    dispatcher_argument,
)
from lagom_overlap.sim.what_if import LEAST, AskedChange, GainEstimate, Spent, WhatIf, what_if
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel import Dispatcher, ParallelLayout, PipelineSchedule
from lagom_overlap.workload.precision import Precision
from lagom_overlap.workload.step.framework_file import can_overlap_experts, has_dispatcher, has_switch
from lagom_overlap.workload.step.rules import IssueRules

ASYNC_TENSOR: Final = "all-reduce of input gradients behind the weights' product (no switch)"
OVERLAP_P2P: Final = "transfers of stages behind computation (without --no-overlap-p2p-communication)"
_BUCKET_FACTORS: Final = (0.25, 4.0)
"""Of Megatron's rule: smaller buckets start earlier, larger ones waste less latency."""
_GROUP_FACTORS: Final = (2, 4)
"""Of the stages: more micro-batches in a row hide their transfers, and hold as many activations."""
_MAX_ROUNDS: Final = 4
"""A second round finds what the first one's changes make worth while; a fourth has not been seen to change anything."""
_Changes = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A layout's whole iteration, None where a stage does not fit, and the memory of the fullest GPU."""

    spent: Spent | None
    memory_bytes: int


Judge = Callable[[ParallelLayout], Judged | None]
"""None: the layout cannot be built."""


class SwitchVerdict(StrEnum):
    """What a switch does to the iteration."""

    GAINS = "gains"
    NEUTRAL = "neutral"
    LOSES = "predicted to lose"
    TOO_LARGE = "does not fit"
    UNTRIED = "not priced alone: the planning budget ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchEffect:
    """A switch: whether Megatron-LM has it by default, the job has it, it is advised; the iteration without and with.

    `without_s` and `with_s` (s; None: not simulated) differ in the switch alone, all others as advised; `without_keys`
    and `with_keys` are what of the job's `[parallel]` to change for each. `low` and `high` bound the gain by the
    model's own error, as shares of the iteration without the switch. `memory_bytes` are the fullest GPU's with it.
    """

    switch: str
    by_default: bool
    in_job: bool
    advised: bool
    verdict: SwitchVerdict
    without_keys: Mapping[str, bool | int | str]
    with_keys: Mapping[str, bool | int | str]
    without_s: float | None = None
    with_s: float | None = None
    low: float | None = None
    high: float | None = None
    memory_bytes: int | None = None

    @property
    def share(self) -> float | None:
        """The gain as a share of the iteration without the switch; None where either was not simulated."""
        if self.without_s is None or self.with_s is None:
            return None
        return 1.0 - self.with_s / self.without_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The advised layout and what each switch does to it."""

    layout: ParallelLayout
    switches: tuple[SwitchEffect, ...]
    was_cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchContext:
    """What is known of a job besides its layout."""

    model: TransformerModel
    rules: IssueRules
    precision: Precision
    gpu: Gpu


@dataclass(frozen=True, slots=True)
class _Option:
    """Keys of a layout with values; without a name they are the absence of the others' switches.

    `against` is the place of the option without the switch (None: the job's own), `includes` those whose switches
    it has, too.
    """

    switch: str
    changes: _Changes
    against: int | None = None
    by_default: bool = False
    includes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Dimension:
    """Options that exclude each other; `prefers_first`: of those that are as good the first one.

    `is_free`: whatever takes neither time nor memory is taken, however little it gains.
    """

    options: tuple[_Option, ...]
    prefers_first: bool = False
    is_free: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of a layout that its options set."""
        return tuple(dict.fromkeys(key for option in self.options for key in option.changes))

    def place(self, layout: ParallelLayout) -> int | None:
        """The option that a layout has; None if it has another value."""
        has = (all(getattr(layout, key) == value for key, value in one.changes.items()) for one in self.options)
        return next((place for place, is_it in enumerate(has) if is_it), None)

    def has(self, layout: ParallelLayout, place: int) -> bool:
        """Whether a layout has the switch of an option."""
        own = self.place(layout)
        return own is not None and (own == place or place in self.options[own].includes)

    def switches_off(self, layout: ParallelLayout, place: int) -> bool:
        """Whether a layout has a switch that the option at a place lacks."""
        own = self.place(layout)
        return own != place and (not self.options[place].switch or (own is not None and self.has(layout, place)))


@dataclass(slots=True)
class _Trials:
    """Layouts, each judged once."""

    judge: Judge
    may_try: Callable[[], bool]
    known: dict[ParallelLayout, Judged | None] = field(default_factory=dict)
    was_cut: bool = False

    def of(self, layout: ParallelLayout | None) -> Judged | None:
        """What is known of a layout, or found out; None if it cannot be built, or the budget is spent."""
        if layout is None:
            return None
        if layout not in self.known:
            if self.known and not self.may_try():
                self.was_cut = True
                return None
            self.known[layout] = self.judge(layout)
        return self.known[layout]


def search(job: ParallelLayout, context: SwitchContext, judge: Judge, may_try: Callable[[], bool]) -> Found:
    """The layout with the switches that pay; `judge` knows the job's own, which fits."""
    trials = _Trials(judge, may_try)
    layout = _without_choice(job, context)
    begin = trials.of(layout)
    if begin is None or begin.spent is None:
        layout = job
    for _ in range(_MAX_ROUNDS):
        before = layout
        for make in _DIMENSIONS:
            dimension = make(layout, job, context)
            if dimension is not None:
                layout = _best(trials, layout, dimension, context)
        if layout == before:
            break
    return Found(layout=layout, switches=effects(trials, layout, job, context), was_cut=trials.was_cut)


def _without_choice(job: ParallelLayout, context: SwitchContext) -> ParallelLayout:
    """The job's layout with what Megatron-LM does whatever a launch says, and without what it refuses.

    It hides the input gradients' all-reduce; it refuses two interleaved stages that wait for transfers (d98e8a64,
    `training/arguments.py`).
    """
    keys: dict[str, Any] = {}
    if job.tensor > 1 and not job.sequence_parallel and _has(context, "async_tensor"):
        keys["async_tensor"] = True
    if job.schedule is PipelineSchedule.INTERLEAVED and job.pipeline == 2 and _has(context, "overlap_p2p"):
        keys["overlap_p2p"] = True
    return replace(job, **keys)


def taken(
    job: ParallelLayout, wanted: ParallelLayout, context: SwitchContext, judge: Judge, may_try: Callable[[], bool]
) -> Found:
    """A layout that somebody chose, and what each switch does to it."""
    trials = _Trials(judge, may_try)
    return Found(layout=wanted, switches=effects(trials, wanted, job, context), was_cut=trials.was_cut)


def _best(trials: _Trials, layout: ParallelLayout, dimension: _Dimension, context: SwitchContext) -> ParallelLayout:
    """The layout with the option that gains most, if one gains enough."""
    own = trials.of(layout)
    assert own is not None, layout
    assert own.spent is not None, layout
    timed: list[tuple[float, ParallelLayout]] = []
    for place, option in enumerate(dimension.options):
        other = changed(context.model, layout, option.changes)
        judged = trials.of(other)
        if other is None or judged is None or judged.spent is None:
            continue
        gain = what_if(AskedChange(option.switch, ""), own.spent, judged.spent)
        is_sure = gain.verdict is GainEstimate.GAIN or not dimension.switches_off(layout, place)
        takes_nothing = dimension.is_free and gain.gain_s >= 0 and judged.memory_bytes <= own.memory_bytes
        if (gain.share >= LEAST or takes_nothing) and is_sure:
            timed.append((judged.spent.step_s, other))
    if not timed:
        return layout
    best_s = min(step_s for step_s, _ in timed)
    slack = LEAST if dimension.prefers_first else 0.0
    return next(other for step_s, other in timed if step_s <= (1.0 + slack) * best_s)


def changed(model: TransformerModel, layout: ParallelLayout, changes: _Changes) -> ParallelLayout | None:
    """The layout with other values; None where they exclude each other, or Megatron-LM refuses them."""
    try:
        other = replace(layout, **changes)
    except JobError:
        return None
    return None if other.overlap_experts and not can_overlap_experts(model, other) else other


def effects(
    trials: _Trials, layout: ParallelLayout, job: ParallelLayout, context: SwitchContext
) -> tuple[SwitchEffect, ...]:
    """What each switch that the job could have does to the advised layout."""
    effects: list[SwitchEffect] = []
    for make in _DIMENSIONS:
        dimension = make(layout, job, context)
        if dimension is None:
            continue
        own = {key: getattr(job, key) for key in dimension.keys}
        for place, option in enumerate(dimension.options):
            other = changed(context.model, layout, option.changes)
            if not option.switch or other is None:
                continue
            against = own if option.against is None else dimension.options[option.against].changes
            base = changed(context.model, layout, against)
            effect = None if base is None or base == other else _effect(trials, option, base, other, job)
            if effect is not None:
                had, advised = dimension.has(job, place), dimension.has(layout, place)
                effects.append(replace(effect, in_job=had, advised=advised))
    return tuple(sorted(effects, key=lambda one: -(-1.0 if one.share is None else one.share)))


def _effect(
    trials: _Trials, option: _Option, base: ParallelLayout, other: ParallelLayout, job: ParallelLayout
) -> SwitchEffect | None:
    """The iteration without and with an option; None where it cannot be built."""
    without, judged = trials.of(base), trials.of(other)
    plain = SwitchEffect(
        switch=option.switch,
        by_default=option.by_default,
        in_job=False,
        advised=False,
        verdict=SwitchVerdict.UNTRIED,
        without_keys=differing_keys(base, job),
        with_keys=differing_keys(other, job),
    )
    if judged is None:
        return None if other in trials.known else plain
    if judged.spent is None:
        return replace(plain, verdict=SwitchVerdict.TOO_LARGE, memory_bytes=judged.memory_bytes)
    if without is None or without.spent is None:
        return replace(plain, with_s=judged.spent.step_s, memory_bytes=judged.memory_bytes)
    gain = what_if(AskedChange(option.switch, ""), without.spent, judged.spent)
    return replace(
        plain,
        verdict=_verdict(gain),
        without_s=without.spent.step_s,
        with_s=judged.spent.step_s,
        low=gain.low_s / without.spent.step_s,
        high=gain.high_s / without.spent.step_s,
        memory_bytes=judged.memory_bytes,
    )


def _verdict(gain: WhatIf) -> SwitchVerdict:
    if abs(gain.share) < LEAST:
        return SwitchVerdict.NEUTRAL
    return SwitchVerdict.GAINS if gain.share > 0 else SwitchVerdict.LOSES


_Make = Callable[[ParallelLayout, ParallelLayout, SwitchContext], _Dimension | None]
"""Of the layout as it stands, the job's own, and what else is known: the options, None where the job has none."""


def _gradients(layout: ParallelLayout, job: ParallelLayout, context: SwitchContext) -> _Dimension | None:
    if layout.replicas == 1 or layout.zero_stage > 1 or layout.frozen or not _has(context, "overlap_gradients"):
        return None
    options = [
        _Option("", {"overlap_gradients": False, "overlap_parameters": False}),
        _Option(OVERLAP_GRADIENTS, {"overlap_gradients": True, "overlap_parameters": False}, against=0),
    ]
    if layout.shard > 1 and _has(context, "overlap_parameters"):
        both = {"overlap_gradients": True, "overlap_parameters": True}
        options.append(_Option(OVERLAP_PARAMETERS, both, against=1, includes=(1,)))
    return _Dimension(tuple(options), is_free=True)


def _buckets(layout: ParallelLayout, job: ParallelLayout, context: SwitchContext) -> _Dimension | None:
    rule = context.rules.default_bucket_bytes(layout, context.precision)
    if rule is None or layout.replicas == 1 or layout.zero_stage > 1 or not layout.overlap_gradients:
        return None
    sizes = [int(rule * factor) for factor in _BUCKET_FACTORS]
    tried = (_Option(bucket_argument(size, context.precision), {"bucket_bytes": size}, against=0) for size in sizes)
    return _Dimension((_Option("", {"bucket_bytes": rule}), *tried))


def _tensor(layout: ParallelLayout, job: ParallelLayout, context: SwitchContext) -> _Dimension | None:
    if layout.tensor == 1:
        return None
    sharded = {"sequence_parallel": True, "async_tensor": False}
    options = []
    if not job.sequence_parallel:
        is_async = _has(context, "async_tensor")
        whole = {"sequence_parallel": False, "overlap_tensor": False, "async_tensor": is_async}
        options.append(_Option(ASYNC_TENSOR if is_async else "", whole, by_default=True))
    name, place = "" if job.sequence_parallel else SEQUENCE_PARALLEL, len(options)
    options.append(_Option(name, {**sharded, "overlap_tensor": False}, against=0))
    if _has(context, "overlap_tensor"):
        options.append(_Option(OVERLAP_TENSOR, {**sharded, "overlap_tensor": True}, against=place, includes=(place,)))
    return _Dimension(tuple(options))


def _pipeline(layout: ParallelLayout, job: ParallelLayout, context: SwitchContext) -> _Dimension | None:
    """Chunks of a stage: each number that divides its layers; transfers overlap, as they do by default."""
    if layout.pipeline == 1:
        return None
    own: _Changes = {key: getattr(job, key) for key in ("schedule", "chunks", "overlap_p2p")}
    overlaps = _has(context, "overlap_p2p")
    if layout.pipeline_layout:
        if job.schedule is not PipelineSchedule.INTERLEAVED or not overlaps:
            return None
        on = _Option(OVERLAP_P2P, {**own, "overlap_p2p": True}, against=0, by_default=True)
        return _Dimension((_Option("", {**own, "overlap_p2p": False}), on))
    layers = (context.model.num_layers + (2 if layout.tables_as_layers else 0)) // layout.pipeline
    plain = {"schedule": PipelineSchedule.ONE_F_ONE_B, "chunks": 1, "overlap_p2p": False, "micro_batch_group": 0}
    options = [_Option("no interleaving", plain, by_default=True)]
    for chunks in range(2, layers + 1):
        if layers % chunks == 0:
            taken = {"schedule": PipelineSchedule.INTERLEAVED, "chunks": chunks, "overlap_p2p": overlaps}
            options.append(_Option(f"{CHUNKS} {chunks}", taken))
    return _Dimension(tuple(options), prefers_first=True)


def _groups(layout: ParallelLayout, job: ParallelLayout, context: SwitchContext) -> _Dimension | None:
    if layout.schedule is not PipelineSchedule.INTERLEAVED or not _has(context, "micro_batch_group"):
        return None
    most = layout.num_micro_batches
    sizes = sorted({size for factor in _GROUP_FACTORS if (size := factor * layout.pipeline) <= most} | {most})
    tried = (_Option(f"{GROUP} {size}", {"micro_batch_group": size}, against=0) for size in sizes)
    return _Dimension((_Option("", {"micro_batch_group": 0}), *tried))


def _experts(layout: ParallelLayout, job: ParallelLayout, context: SwitchContext) -> _Dimension | None:
    if not (can_overlap_experts(context.model, layout) and _has(context, "overlap_experts")):
        return None
    off, on = {"overlap_experts": False}, {"overlap_experts": True}
    return _Dimension((_Option("", off), _Option(OVERLAP_EXPERTS, on, against=0)))


def _dispatcher(layout: ParallelLayout, job: ParallelLayout, context: SwitchContext) -> _Dimension | None:
    ways = (Dispatcher.ALL_TO_ALL, Dispatcher.MERGED)
    if layout.expert == 1 or job.dispatcher not in ways or not has_dispatcher(context.rules.name, Dispatcher.MERGED):
        return None
    names = ("", dispatcher_argument(Dispatcher.MERGED, context.gpu))
    options = [_Option(name, {"dispatcher": way}, against=0) for name, way in zip(names, ways, strict=True)]
    return _Dimension(tuple(options))


def _has(context: SwitchContext, key: str) -> bool:
    return has_switch(context.rules.name, key)


_DIMENSIONS: Final[tuple[_Make, ...]] = (
    _pipeline, _gradients, _tensor, _dispatcher, _experts, _groups, _buckets,
)  # fmt: skip
"""In this order: interleaving decides what the others meet, buckets matter once gradients overlap."""


def considered(layout: ParallelLayout, context: SwitchContext) -> Iterator[ParallelLayout]:
    """Every layout that differs from a job's own in one dimension."""
    for make in _DIMENSIONS:
        dimension = make(layout, layout, context)
        for option in () if dimension is None else dimension.options:
            other = changed(context.model, layout, option.changes)
            if other is not None and other != layout:
                yield other
