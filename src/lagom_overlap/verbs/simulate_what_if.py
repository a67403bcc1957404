"""Before how, whether: what changes to a job's collectives and overlap are predicted to gain or lose.

Asked of the same step under the same model: fewer channels for all collectives, another protocol, copy engines where
NCCL has them, another carve-out where products are persistent, and the overlap flags that the layout leaves open and
the framework has. What cannot run, or does not fit, is not asked. Flags that Megatron-LM or FSDP2 set by another name:
docs/formats.md.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from lagom_overlap.collective import Collective, CommConfig, Protocol, Transport
from lagom_overlap.cost import ContentionModel
from lagom_overlap.errors import LagomError
from lagom_overlap.jobfile.step import JobStep
from lagom_overlap.planners.carriers import Carrier, settings_carrier
from lagom_overlap.planners.megatron.settings import differing_keys
from lagom_overlap.planners.megatron.switch_search import SwitchContext, considered
from lagom_overlap.planners.memory import peak_of_spans
from lagom_overlap.planners.simulated import stands_still_s
from lagom_overlap.sim.iteration import IterationSimulator
from lagom_overlap.sim.training import Settings, TrainingTimes
from lagom_overlap.sim.what_if import (
    COPY_ENGINES,
    MOST_CHANNELS,
    PROTOCOLS,
    QUEUE_ERROR,
    AskedChange,
    Spent,
    WhatIf,
    best_first,
    what_if,
)
from lagom_overlap.timeline import Timeline
from lagom_overlap.timeline.metrics import overlap_metrics
from lagom_overlap.toml_tables import toml_value
from lagom_overlap.units import format_memory, format_percent
from lagom_overlap.workload import Iteration
from lagom_overlap.workload.fsdp2.reissue import reissued
from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings
from lagom_overlap.workload.fsdp2.visits import units_of, visits_of
from lagom_overlap.workload.parallel import Dispatcher, PipelineSchedule
from lagom_overlap.workload.step import changes_of
from lagom_overlap.workload.step.framework_file import can_overlap_experts, dispatchers, framework_file, switches
from lagom_overlap.workload.step.rules import Sharding

CARVE_OUTS: Final = (8, 16, 24)
"""SMs left free that are tried: what collectives of 8 to 24 channels occupy."""
_KEEPS: Final = "parameters kept after forward"
_KEEP_LINE: Final = "fully_shard(..., reshard_after_forward=False)"
_OF_QUEUES: Final = f"{format_percent(QUEUE_ERROR, 0)} of a gain by transfers that no longer wait in one queue"
_SAME_MEMORY: Final = 0.01
"""More of it than before that is worth a word."""
MAX_SLOTS: Final = 4096
"""Forwards of all stages beyond which only collectives are varied: flags build every stage again."""


def spent(times: TrainingTimes) -> Spent:
    """The stage that ends last, as the answers' errors need it."""
    comms = times.last_stage.comms.values()
    total_s, exposed_s = sum(comm.total_s for comm in comms), sum(comm.exposed_s for comm in comms)
    overlapped_s = min(max(0.0, total_s - exposed_s), times.iteration_s)
    return Spent(step_s=times.iteration_s, overlapped_s=overlapped_s, exposed_s=min(exposed_s, times.iteration_s))


def simulated_what_ifs(job: JobStep) -> tuple[WhatIf, ...]:
    """The answers for a job, best first."""
    simulator, times = job.simulator, job.times
    before, answers = spent(times), []
    collectives = simulator.collectives
    for asked, settings in _of_collectives(simulator.price.model):
        if not any(settings(collective) is not None for collective in collectives):
            continue
        try:
            after = simulator.times(settings)
        except LagomError:
            continue
        answers.append(what_if(asked, before, spent(after)))
    for asked, other in _of_the_job(job):
        if not other.fits:
            continue
        try:
            after = other.times
        except LagomError:
            continue
        if job.rules.queues_transfers(job.layout) and job.layout.overlap_p2p is not other.layout.overlap_p2p:
            more_s = QUEUE_ERROR * abs(times.iteration_s - after.iteration_s)
            answers.append(what_if(asked, before, spent(after), more_error_s=more_s, more_error=_OF_QUEUES))
        else:
            answers.append(what_if(asked, before, spent(after)))
    return best_first(answers)


def spent_of(timeline: Timeline) -> Spent:
    """A simulated step, as the answers' errors need it."""
    metrics = overlap_metrics(timeline)
    overlapped_s = metrics.comm_s - metrics.exposed_comm_s
    return Spent(step_s=timeline.makespan_s, overlapped_s=overlapped_s, exposed_s=stands_still_s(timeline))


def captured_what_ifs(
    flow: Iteration, issued: Iteration, model: ContentionModel, timeline: Timeline
) -> tuple[WhatIf, ...]:
    """The answers for a captured step that runs as `timeline`, best first: its collectives, and FSDP2's parameters.

    `flow` holds the step's data dependences alone, `issued` what the framework waits for, too.
    """
    simulator, before, answers = IterationSimulator(issued, model), spent_of(timeline), []
    if (kept := _kept(flow, issued)) is not None:
        after = IterationSimulator(kept, model).timeline({})
        peak = peak_of_spans(kept, {span.name: (span.start_s, span.end_s) for span in after.spans})
        if peak <= model.cluster.gpu.memory_bytes:
            asked = AskedChange(f"{_KEEPS} ({format_memory(peak)} per GPU)", _KEEP_LINE)
            answers.append(what_if(asked, before, spent_of(after)))
    for asked, settings in _of_collectives(model):
        configs = {op.name: config for op in issued.comms if (config := settings(op.collective)) is not None}
        if not configs:
            continue
        try:
            after = simulator.timeline(configs)
        except LagomError:
            continue
        answers.append(what_if(asked, before, spent_of(after)))
    return best_first(answers)


def _kept(flow: Iteration, issued: Iteration) -> Iteration | None:
    """The step as FSDP2 issues it with all parameters kept after forward; None where none is gathered again."""
    visits = visits_of(flow)
    again = {visit.unit for visit in visits if not visit.is_forward}
    units = units_of(visits)
    if not again:
        return None
    return reissued(flow, issued, Fsdp2Settings(units=units, kept=tuple(unit for unit in units if unit in again)))


def _of_collectives(model: ContentionModel) -> Iterator[tuple[AskedChange, Settings]]:
    for most in MOST_CHANNELS:
        yield AskedChange.channels(most), _capped(model, most)
    for most in MOST_CHANNELS[1:3]:
        line = f"NCCL_MAX_P2P_NCHANNELS={most}"
        asked = AskedChange(f"at most {most} channels for all-to-alls", line, line)
        yield asked, _capped(model, most, point_to_point=True)
    for protocol in PROTOCOLS:
        yield AskedChange.protocol(protocol), _with_protocol(model, protocol)
    yield COPY_ENGINES, _copied(model)


def _capped(model: ContentionModel, most: int, *, point_to_point: bool = False) -> Settings:
    """NCCL caps all-to-alls and transfers by a variable of their own."""

    def settings(collective: Collective) -> CommConfig | None:
        own = model.default_config(collective)
        if (
            not collective.is_nccl
            or collective.kind.traits.is_point_to_point is not point_to_point
            or (own.num_channels or 0) <= most
        ):
            return None
        return CommConfig(num_channels=most)

    return settings


def _with_protocol(model: ContentionModel, protocol: Protocol) -> Settings:
    def settings(collective: Collective) -> CommConfig | None:
        own = model.default_config(collective)
        if not collective.is_nccl or collective.kind.traits.is_point_to_point or own.protocol in (None, protocol):
            return None
        try:
            model.collective(collective, CommConfig(protocol=protocol))
        except (LagomError, ValueError):
            return None
        return CommConfig(protocol=protocol)

    return settings


def _copied(model: ContentionModel) -> Settings:
    config = CommConfig(transport=Transport.COPY_ENGINE)

    def settings(collective: Collective) -> CommConfig | None:
        if not collective.is_nccl:
            return None
        try:
            model.collective(collective, config)
        except (LagomError, ValueError):
            return None
        return config

    return settings


def _of_the_job(job: JobStep) -> Iterator[tuple[AskedChange, JobStep]]:
    for carved in CARVE_OUTS if job.sm_carveout is not None else ():
        if carved != job.sm_carveout:
            line = f"torch._C._set_sm_carveout_experimental({carved})"
            asked = AskedChange(f"products leave {carved} SMs free", line, f"[cost] sm_carveout = {carved}")
            yield asked, replace(job, sm_carveout=carved)
    layout = job.layout
    for release_change in changes_of(job.rules.name):
        undone: dict[str, Any] = {key: not value for key, value in release_change.rules.items()}
        if layout.data > 1 and any(getattr(job.rules, key) is value for key, value in release_change.rules.items()):
            asked = AskedChange(
                f"as before {release_change.software} {release_change.since}",
                release_change.avoided_by,
                release_change.avoided_by,
            )
            yield asked, replace(job, rules=replace(job.rules, **undone))
    if layout.num_micro_batches * layout.num_chunks > MAX_SLOTS:
        return
    for change, line, keys in switched_layouts(job):
        other = replace(job, layout=replace(layout, **keys))
        key = f"[parallel] {', '.join(f'{key} = {toml_value(value)}' for key, value in keys.items())}"
        takes_more = other.most_bytes > (1 + _SAME_MEMORY) * job.most_bytes
        what = f"{change} ({format_memory(other.most_bytes)} per GPU)" if takes_more else change
        yield AskedChange(what, f"{line}; in the job file {key}" if line else key, key), other


def switched_layouts(job: JobStep) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The overlap flags that are off and that the framework has, each switched on alone, on the same degrees.

    Each with the framework's own name for it and the keys of `[parallel]` that say it.
    """
    layout, rules = job.layout, job.rules
    for key, value, change in _flags(job):
        line = switches()[key].get(rules.name)
        if line is not None:
            yield change, line, {key: value}
    merged = dispatchers()[Dispatcher.MERGED].get(rules.name)
    if layout.expert > 1 and layout.dispatcher is Dispatcher.ALL_TO_ALL and merged is not None:
        yield "tokens sent once to each rank and node", merged, {"dispatcher": Dispatcher.MERGED}
    if layout.zero_stage == 3 and layout.replicas > 1 and rules.sharding is Sharding.FSDP2:
        fewer = {"kept_units": 0} if layout.kept_units else {}
        yield _KEEPS, _KEEP_LINE, {"zero_stage": 2, **fewer}


def planned_keys(job: JobStep) -> tuple[str, ...]:
    """Keys of `[parallel]` that `lagom plan` prices for the job's framework, and no answer here."""
    layout, tried = job.layout, set[str]()
    match settings_carrier(framework_file(job.rules.name).title):
        case Carrier.MEGATRON:
            context = SwitchContext(model=job.model, rules=job.rules, precision=job.precision, gpu=job.cluster.gpu)
            first = [*considered(layout, context)]  # some switches need another one: experts' overlap virtual stages
            others = (other for one in first for other in (one, *considered(one, context)))
            tried = {key for other in others for key in differing_keys(other, layout)}
        case Carrier.FSDP2 if layout.zero_stage == 3 and layout.shard > 1 and layout.pipeline == 1:
            tried = {"kept_units"}
    return tuple(sorted(tried.difference(*(keys for _, _, keys in switched_layouts(job)))))


def _flags(job: JobStep) -> Iterator[tuple[str, bool | int, str]]:
    """Keys of switches that could do something here, the value to try, and what it does."""
    layout = job.layout
    if layout.data > 1 and layout.zero_stage <= 1 and not (layout.overlap_gradients or layout.frozen):
        yield "overlap_gradients", True, "gradients reduced during the last backward"
    # Megatron-LM refuses it where gradients are not reduced so, too (`megatron/training/arguments.py`).
    if layout.shard > 1 and layout.zero_stage == 1 and layout.overlap_gradients and not layout.overlap_parameters:
        yield "overlap_parameters", True, "parameters gathered behind the first forward"
    if layout.sequence_parallel and not layout.overlap_tensor:
        yield "overlap_tensor", True, "tensor parallelism in parts"
    if layout.tensor > 1 and not layout.sequence_parallel and not layout.async_tensor:
        yield "async_tensor", True, "input gradients' all-reduce behind the weight gradients"
    if layout.schedule is PipelineSchedule.INTERLEAVED and not layout.overlap_p2p:
        yield "overlap_p2p", True, "pipeline transfers behind computation"
    if can_overlap_experts(job.model, layout) and not layout.overlap_experts:
        yield "overlap_experts", True, "all-to-alls behind another micro-batch"
    if layout.zero_stage == 3 and layout.prefetch == 1:
        yield "prefetch", 2, "one more unit gathered ahead"
    if layout.zero_stage == 3 and not layout.forward_prefetch:
        yield "forward_prefetch", 2, "two units gathered ahead in forward"
    if layout.zero_stage == 3 and not layout.backward_prefetch and layout.pipeline == 1:
        yield "backward_prefetch", 2, "two units gathered ahead in backward"
    if layout.zero_stage > 1 and layout.reduce_buffers == 1:
        yield "reduce_buffers", 2, "two reductions in flight"
    if layout.zero_stage > 1 and not layout.separate_reduce_group:
        yield "separate_reduce_group", True, "reductions on a communicator of their own"
