"""`lagom plan --for megatron`: Megatron-LM's overlap switches for a job, each judged by `lagom simulate`'s iteration.

A switch is a change of the job's `[parallel]`; the iteration with it is that of the job with the key typed by hand, all
micro-batches and stages, under contention, refused where a stage does not fit its GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from lagom_overlap.errors import JobError, LagomError
from lagom_overlap.export.tp_overlap import TP_OVERLAP_FILE, tp_overlap_yaml
from lagom_overlap.jobfile.step import JobStep
from lagom_overlap.planners.base import Plan, PlanProblem
from lagom_overlap.planners.carriers import SETTINGS_PLANNERS, Carrier
from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.megatron.settings import (
    OVERLAP_EXPERTS,
    MegatronSettings,
    arguments,
    differing_keys,
    environment,
    not_modelled,
)
from lagom_overlap.planners.megatron.switch_search import (
    Found,
    Judge,
    Judged,
    SwitchContext,
    SwitchEffect,
    SwitchVerdict,
    changed,
    search,
    taken,
)
from lagom_overlap.planners.simulated import SimulatedPlan, Simulation
from lagom_overlap.results.plan import MegatronEffects
from lagom_overlap.sim.training import training_timeline
from lagom_overlap.sim.what_if import AskedChange, WhatIf, what_if
from lagom_overlap.toml_tables import toml_value
from lagom_overlap.units import format_memory, format_percent, format_seconds
from lagom_overlap.verbs.simulate_what_if import spent
from lagom_overlap.workload.parallel import ParallelLayout, PipelineSchedule
from lagom_overlap.workload.parallel.layout_check import check_model
from lagom_overlap.workload.step.framework_file import has_switch

ARGUMENTS_FILE: Final = "megatron_args.sh"
UNTRIED: Final = (
    "The planning budget ended before every switch was priced: lines without a figure were not priced alone. "
    "[plan] budget_s allows more."
)
NOTHING_GAINS: Final = "No switch gains: the job's own are advised, and the argument file says them."
PLAIN_PIPELINE: Final = (
    f"All-to-alls behind another micro-batch ({OVERLAP_EXPERTS}) are not asked: in a pipeline Megatron-LM has that "
    'with virtual stages only (parallel.schedule = "interleaved").'
)
_JUDGING_STEPS: Final = 150
"""Per operator, of an iteration with other switches: what `OPERATOR_STEPS` is for a graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronPlan:
    """A plan of switches, the iteration before and after, the gain, and what each switch does."""

    plan: Plan
    before: SimulatedPlan
    after: SimulatedPlan
    gain: WhatIf
    effects: MegatronEffects


def with_layout(job: JobStep, layout: ParallelLayout) -> JobStep | None:
    """The job with another layout, checked as a job file is; None where it cannot be built."""
    try:
        check_model(job.model, layout, job.seq_len)
    except JobError:
        return None
    return replace(job, layout=layout)


def _judge(job: JobStep, limit_bytes: int | None, deadline: Deadline, num_ops: int) -> Judge:
    """Judges layouts by the job's whole iteration; the job's own fits."""

    def judge(layout: ParallelLayout) -> Judged | None:
        other = job if layout == job.layout else with_layout(job, layout)
        if other is None:
            return None
        if other is not job and not (other.fits and (limit_bytes is None or other.most_bytes <= limit_bytes)):
            return Judged(spent=None, memory_bytes=other.most_bytes)
        deadline.spend(_JUDGING_STEPS * num_ops)
        try:
            return Judged(spent=spent(other.times), memory_bytes=other.most_bytes)
        except LagomError:
            return None

    return judge


def megatron_plan(job: JobStep, problem: PlanProblem, wanted: MegatronSettings | None = None) -> MegatronPlan:
    """The switches that pay on the whole iteration, each predicted with the others applied.

    `wanted` are taken as they are. What the problem's budget leaves untried is said in the plan's notes.

    Raises:
        JobError: if the wanted switches exclude each other on this job, or do not fit the memory.
    """
    deadline = problem.deadline()
    switches = found_switches(
        job,
        deadline,
        limit_bytes=problem.memory_limit_bytes,
        num_ops=len(problem.iteration.ops),
        wanted=None if wanted is None else wanted.applied(job.layout),
    )
    advised = job if switches.layout == job.layout else with_layout(job, switches.layout)
    if advised is None:
        check_model(job.model, switches.layout, job.seq_len)
    assert advised is not None
    before, after = simulated_iteration(job), simulated_iteration(advised)
    gain = what_if(AskedChange("the plan", ""), spent(job.times), spent(advised.times))
    plan = Plan(
        planner=SETTINGS_PLANNERS[Carrier.MEGATRON],
        rewrites=(),
        iteration=problem.unplanned,
        lower_bound_s=None,
        settings=MegatronSettings.of(switches.layout),
        notes=(
            *((NOTHING_GAINS,) if switches.layout == job.layout else ()),
            *((UNTRIED,) if switches.was_cut else ()),
            *_plain_pipeline(advised),
            *deadline.remarks(),
        ),
    )
    effects = _effects(job, advised, switches)
    return MegatronPlan(plan=plan, before=before, after=after, gain=gain, effects=effects)


def found_switches(
    job: JobStep,
    deadline: Deadline,
    *,
    limit_bytes: int | None = None,
    num_ops: int = 0,
    wanted: ParallelLayout | None = None,
) -> Found:
    """The switches that pay, or the wanted ones, and what each does to the job's iteration.

    `num_ops` is the work of a simulation, where the deadline counts work.
    """
    judge = _judge(job, limit_bytes, deadline, num_ops)
    context = SwitchContext(model=job.model, rules=job.rules, precision=job.precision, gpu=job.cluster.gpu)

    def may_try() -> bool:
        return deadline.left_s > 0

    if wanted is None:
        return search(job.layout, context, judge, may_try)
    return taken(job.layout, wanted, context, judge, may_try)


def simulated_iteration(job: JobStep) -> SimulatedPlan:
    """The job's iteration as `lagom simulate` tells it: its seconds, what shows of communication, the fullest GPU."""
    times = job.times
    return SimulatedPlan(
        timeline=training_timeline(times),
        peak_bytes=job.most_bytes,
        simulation=Simulation.CONTENTION,
        makespan_s=times.iteration_s,
        exposed_s=spent(times).exposed_s,
    )


def _plain_pipeline(job: JobStep) -> tuple[str, ...]:
    layout = job.layout
    is_plain = layout.pipeline > 1 and layout.schedule is not PipelineSchedule.INTERLEAVED
    asks = is_plain and layout.expert > 1 and has_switch(job.rules.name, "overlap_experts")
    return (PLAIN_PIPELINE,) if asks else ()


def by_default(job: JobStep) -> ParallelLayout:
    """The job's layout with every overlap switch as Megatron-LM has it where a launch says nothing of it."""
    layout, rules = job.layout, job.rules
    defaults: dict[str, Any] = {
        "overlap_tensor": False,
        "overlap_experts": False,
        "async_tensor": layout.tensor > 1 and not layout.sequence_parallel and has_switch(rules.name, "async_tensor"),
    }
    if layout.zero_stage <= 1:
        defaults |= {"overlap_gradients": rules.overlaps_gradients, "overlap_parameters": False}
        defaults["bucket_bytes"] = rules.default_bucket_bytes(layout, job.precision) or layout.bucket_bytes
    if layout.schedule is PipelineSchedule.INTERLEAVED:
        defaults |= {"overlap_p2p": has_switch(rules.name, "overlap_p2p"), "micro_batch_group": 0}
    other = changed(job.model, layout, defaults)
    return layout if other is None else other


def _effects(job: JobStep, advised: JobStep, found: Found) -> MegatronEffects:
    layout, framework, gpu = advised.layout, job.rules.name, job.cluster.gpu
    plain = with_layout(job, by_default(job))
    return MegatronEffects(
        num_gpus=layout.num_gpus,
        arguments=arguments(layout, job.rules, job.precision, gpu),
        settings=MegatronSettings.of(layout),
        changes=differing_keys(layout, job.layout),
        environment=environment(framework, layout, gpu),
        default_s=(job if plain is None else plain).times.iteration_s,
        before_s=job.times.iteration_s,
        after_s=advised.times.iteration_s,
        switches=found.switches,
        not_modelled=not_modelled(framework, layout, gpu),
    )


def megatron_files(job: JobStep | None, effects: MegatronEffects | None) -> Mapping[str, bytes]:
    """What a job of Megatron-LM reads, by file name; nothing for another plan."""
    if effects is None:
        return {}
    assert job is not None, "switches are those of a job"
    files, words = {}, list(effects.arguments)
    if effects.settings.overlap_tensor:
        files[TP_OVERLAP_FILE] = tp_overlap_yaml(job.rules.name, job.cluster.gpu, job.model.hidden, job.precision)
        words.append(f"--tp-comm-overlap-cfg {TP_OVERLAP_FILE}")
    lines = [
        "# Written by lagom plan --for megatron; source it, then give ${MEGATRON_OVERLAP_ARGS} to the launch.",
        "# All that it says of overlap; what is not said is Megatron-LM's default. Predicted, not run:",
        f"# {_iterations(effects)}",
        *(f"# {line}" for line in _switch_lines(effects)),
        *(f"# not modelled: {one.argument}: {one.why}" for one in effects.not_modelled),
    ]
    for rule in effects.environment:
        said = f"export {rule.variable}={rule.value}" if rule.value else f"unset {rule.variable}"
        lines += [f"# {rule.variable}: {rule.why}", said]
    lines.append(f'MEGATRON_OVERLAP_ARGS="{" ".join(words)}"')
    return {ARGUMENTS_FILE: ("\n".join(lines) + "\n").encode(), **files}


def megatron_lines(effects: MegatronEffects) -> tuple[str, ...]:
    """The advice for a terminal and the report."""
    changes = ", ".join(f"{key} = {toml_value(value)}" for key, value in effects.changes.items())
    return (
        f"launch on {effects.num_gpus} GPUs: {' '.join(effects.arguments) or 'no switch'}",
        f"keys of [parallel] that change: {changes or 'none'}",
        *(
            f"environment: {rule.variable} {f'= {rule.value}' if rule.value else 'unset, or more than 1'}: {rule.why}"
            for rule in effects.environment
        ),
        _iterations(effects),
        *_switch_lines(effects),
        f"not modelled (why: {ARGUMENTS_FILE}): {', '.join(one.argument for one in effects.not_modelled)}",
    )


def _iterations(effects: MegatronEffects) -> str:
    return (
        f"whole iteration, with contention: Megatron-LM's defaults {format_seconds(effects.default_s)}, the job's "
        f"switches {format_seconds(effects.before_s)}, advised {format_seconds(effects.after_s)}"
    )


def _switch_lines(effects: MegatronEffects) -> tuple[str, ...]:
    return tuple(_line(one) for one in effects.switches)


def _line(one: SwitchEffect) -> str:
    """What the switch takes off the iteration (below zero it adds), and what is advised of it."""
    gain = "" if one.share is None else format_percent(one.share, signed=True)
    state = "on" if one.advised else "off"
    was = "" if one.advised == one.in_job else f", the job has it {'on' if one.in_job else 'off'}"
    default = ", Megatron-LM's default" if one.by_default == one.advised else ""
    more = ""
    if one.verdict is SwitchVerdict.TOO_LARGE and one.memory_bytes is not None:
        more = f" ({format_memory(one.memory_bytes)} per GPU)"
    elif one.low is not None and one.high is not None and one.verdict is not SwitchVerdict.NEUTRAL:
        low, high = (format_percent(share, signed=True) for share in (one.low, one.high))
        more = f" ({low} to {high} by the model's own error)"
    return f"{gain:>8} {one.switch}: {one.verdict}{more}; {state}{default}{was}"
