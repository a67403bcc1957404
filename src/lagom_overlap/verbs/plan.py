"""`lagom plan`: a step becomes a plan, the plan becomes files, and runs against the program if asked."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from lagom_overlap.errors import BackendError, JobError
from lagom_overlap.jobfile.memory import beyond_note
from lagom_overlap.jobfile.registry import check_planner_name, make_planner
from lagom_overlap.jobfile.run_folder import RunFolder, RunKind, RunRecord
from lagom_overlap.planners.base import Plan
from lagom_overlap.planners.carriers import SETTINGS_PLANNERS, Carrier
from lagom_overlap.planners.deadline import SearchBudget, ended_by_ctrl_c
from lagom_overlap.planners.effects import MIN_GAIN
from lagom_overlap.planners.fsdp2 import memory_limit_bytes
from lagom_overlap.planners.megatron.settings import MegatronSettings
from lagom_overlap.planners.memory import refuse_beyond
from lagom_overlap.planners.simulated import NO_CONFIGS, SimulatedPlan, Simulation, simulated
from lagom_overlap.planners.times import ModelTimes
from lagom_overlap.record import package_versions
from lagom_overlap.report.plan import render_plan
from lagom_overlap.results.plan import (
    BeforeAfter,
    Fsdp2Effects,
    MegatronEffects,
    PeakMemory,
    PlannedIteration,
    PlannedStep,
    PlanResult,
)
from lagom_overlap.results.plan_decisions import decisions_of
from lagom_overlap.sim.what_if import AskedChange, GainEstimate, WhatIf, gain_text, what_if
from lagom_overlap.trace.chrome_writer import chrome_trace
from lagom_overlap.units import format_memory, format_percent, format_seconds
from lagom_overlap.verbs.plan_carrier import Carried, carried, nobody
from lagom_overlap.verbs.plan_file import check_plan, check_plan_file, plan_toml, read_plan
from lagom_overlap.verbs.plan_fsdp2 import fsdp2_lines, key_notes
from lagom_overlap.verbs.plan_megatron import megatron_files, megatron_lines, megatron_plan, simulated_iteration
from lagom_overlap.verbs.plan_problem import ONE_STAGE, OURS, WHOLE, Check, PlanInput, with_settings
from lagom_overlap.verbs.plan_run import executed
from lagom_overlap.verbs.simulate_what_if import spent, spent_of
from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings
from lagom_overlap.workload.rewrite.apply import rewritten

TORCHS_OWN: Final = "torch_overlap"
"""Named as the planner where PyTorch's own scheduler is shorter."""
_FILES: Final = ("run.json", "plan.toml", "report.html", "timeline.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is asked of a problem.

    `planner`, `carrier` and `work` (millions of steps, without a limit of seconds) override the job's; `apply` is a
    plan file that takes the planner's place; `out` is where to write.
    """

    planner: str | None = None
    carrier: Carrier | None = None
    work: float | None = None
    apply: Path | None = None
    execute: bool = False
    out: Path | None = None
    on_progress: Callable[[Any], None] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, the step simulated before and after it, and the seconds that it took.

    `interrupted`: the user ended the search. `megatron` is what Megatron-LM's switches do to the whole iteration, of a
    plan of those. `gain` is what settings gain of a whole iteration together (None: told by the timelines).
    """

    plan: Plan
    before: SimulatedPlan
    after: SimulatedPlan
    solve_s: float
    interrupted: bool = False
    megatron: MegatronEffects | None = None
    gain: WhatIf | None = None


def planned(given: PlanInput, planner: str, *, on_progress: Callable[[Any], None] | None = None) -> Planned:
    """The plan of a planner, judged by the one simulator that judges all.

    Raises:
        LagomError: if there is no such planner, or no plan fits the memory limit.
    """
    options = given.options if planner == given.planner or given.planner is None else {}
    whole = given.is_on_cores and planner == OURS and "split" not in options
    if whole:
        options = {**options, "split": False}
    maker = make_planner(planner, options, on_progress=on_progress)
    start = time.monotonic()
    with ended_by_ctrl_c() as interrupted:
        plan = maker.plan(given.problem)
        was_ended = interrupted.is_set()
    if was_ended:
        plan = replace(plan, notes=(*plan.notes, "The search was ended by a signal: this is the best it had found."))
    if whole:
        plan = replace(plan, notes=(*plan.notes, WHOLE))
    return replace(judged(given, plan, time.monotonic() - start), interrupted=was_ended)


def judged(given: PlanInput, plan: Plan, solve_s: float) -> Planned:
    """A plan with the step simulated before and after it; a plan without rewrites is the step as it was.

    Raises:
        JobError: if it needs more memory than the limit.
    """
    if plan.changes_nothing:
        plan = replace(plan, iteration=given.issued)
    if plan.planner == SETTINGS_PLANNERS[Carrier.FSDP2] and given.problem.whole is not None:
        return _judged_whole(given, plan, solve_s)
    before = simulated(given.problem, given.issued)
    after = simulated(given.problem, plan.iteration, plan.configs)
    refuse_beyond("the plan", after.peak_bytes, given.problem.memory_limit_bytes)
    return Planned(plan=plan, before=before, after=after, solve_s=solve_s)


def _judged_whole(given: PlanInput, plan: Plan, solve_s: float) -> Planned:
    """FSDP2's settings judged by the whole iteration, as `lagom simulate` tells it."""
    job = given.step
    assert job is not None, "a named model's"
    advised = with_settings(job, plan.settings) if isinstance(plan.settings, Fsdp2Settings) else job
    before, after = simulated_iteration(job), simulated_iteration(advised)
    refuse_beyond("the plan", after.peak_bytes, given.problem.memory_limit_bytes)
    gain = what_if(AskedChange("the plan", ""), spent(job.times), spent(advised.times))
    return Planned(plan=plan, before=before, after=after, solve_s=solve_s, gain=gain)


def _is_one_stage(given: PlanInput, found: Planned) -> bool:
    """Whether the figures are of one micro-batch through the first stage, not of the whole iteration."""
    return given.problem.pipeline > 1 and found.gain is None


def own_order(given: PlanInput) -> str:
    """What a plan is compared with, in words."""
    framework = given.problem.framework
    return "program order" if framework is None else f"{framework}'s own order"


def offered(given: PlanInput, found: Planned, *, is_run: bool = False) -> Planned:
    """What is offered of a plan: where it does not gain under contention, or fit the GPU as the step did, the step.

    `is_run`: ranks measure it next, so that a loss is not for the rates of contention that were measured here to tell.
    """
    before, after, gpu = found.before, found.after, given.problem.cluster.gpu
    gains = after.makespan_s < before.makespan_s
    fits = given.is_on_cores or after.peak_bytes <= max(gpu.memory_bytes, before.peak_bytes)
    is_open = after.simulation is Simulation.ALONE or (is_run and after.simulation is Simulation.MEASURED)
    if found.plan.changes_nothing or (fits and (gains or is_open)):
        return found  # what was not priced with contention, ranks can measure
    if fits:
        said = (
            f"No gain: with contention the plan of {found.plan.planner} takes {format_seconds(after.makespan_s)}, "
            f"{own_order(given)} {format_seconds(before.makespan_s)}; the step is left as it is."
        )
    else:
        said = (
            f"The plan of {found.plan.planner} holds {format_memory(after.peak_bytes)}, {gpu.name} has "
            f"{format_memory(gpu.memory_bytes)}; the step is left as it is. With [plan] memory_limit plans keep within."
        )
    kept = replace(
        found.plan,
        rewrites=(),
        iteration=given.issued,
        is_optimal=False,
        notes=(said,),
        configs=NO_CONFIGS,
        settings=None,
        effects=(),
    )
    return replace(found, plan=kept, after=before)


def check_request(request: PlanRequest) -> None:
    """Refuses what is wrong whatever the step is; reading the step may take minutes of measuring.

    Raises:
        LagomError: if there is no such planner, the plan file is none, or both are given.
    """
    if request.apply is not None and request.planner is not None:
        raise JobError("give --planner or --apply, not both")
    if request.apply is not None and request.work is not None:
        raise JobError("--work is for making a plan: --apply has one")
    if request.work is not None and not 0 < request.work < float("inf"):
        raise JobError(f"--work is {request.work:g} million steps, must be positive and finite")
    if request.apply is not None:
        named = check_plan_file(request.apply)
        if request.carrier not in (None, named):
            raise JobError(
                f"plan {str(request.apply)!r} is for {named or 'no carrier'}, --for asks for {request.carrier}"
            )
    if request.planner is not None:
        check_planner_name(request.planner)


def step_check(request: PlanRequest) -> Check:
    """What of a request is checked against a step before anything is measured: that a plan file is for it."""
    path = request.apply
    return (
        (lambda step, num_ranks: None) if path is None else (lambda step, num_ranks: check_plan(path, step, num_ranks))
    )


def run_plan(given: PlanInput, request: PlanRequest) -> PlanResult:
    """Plans or reads a plan, writes the folder, runs the plan if asked and adds what was measured to the folder.

    Raises:
        LagomError: for a user's mistake or a machine that failed; the folder then holds the plan all the same.
    """
    check_request(request)
    if request.execute and given.ranks is None:
        raise JobError(
            '--execute needs a program on real ranks: give [program] and backend = "gloo" in the job file (a capture '
            "has no code to run; on GPUs measure_fsdp2(build, plan) compares a plan's settings in your own launch)"
        )
    if request.work is not None:
        given = replace(given, problem=replace(given.problem, work=SearchBudget(request.work)))
    if request.apply is not None:
        carrier = check_plan_file(request.apply)
        read = read_plan(request.apply, given.problem, given.num_ranks)
        wanted = read.settings if isinstance(read.settings, MegatronSettings) else None
        found = judged(given, read, 0.0) if wanted is None else _megatron(given, wanted)
    else:
        asked = carried(given, carrier=request.carrier, planner=request.planner)
        carrier, is_named = asked.carrier, (request.planner or given.planner) is not None
        if carrier is Carrier.INDUCTOR:
            given = _only_order(given)
        found = _found(given, asked, request)
        if isinstance(found.plan.settings, Fsdp2Settings):  # of planner ours, where they are shorter than its order
            carrier = Carrier.FSDP2
        if carrier is Carrier.INDUCTOR:
            found = _against_torch(given, found, may_replace=not is_named)
    if request.execute and given.problem.is_blocking and carrier is not Carrier.FSDP2:
        raise JobError("--execute: FSDP2 issues this step and takes settings, no rewrites: plan it with --for fsdp2")
    names = (*_FILES, *megatron_files(given.step, found.megatron))
    files = () if request.out is None else tuple(request.out / name for name in names)
    result = plan_result(given, found, carrier=carrier, files=files)
    is_unchanged = carrier is Carrier.FSDP2 and found.plan.settings is None
    if request.execute and is_unchanged:
        notes = (*result.notes, "Nothing was run: FSDP2's own settings stay.")
        result = replace(result, notes=notes, planned=result.step)
    folder = None if request.out is None else RunFolder.create(request.out, given.name)
    if folder is not None:
        _write(folder, given, request, result)
    if not is_unchanged and request.execute and not found.interrupted:
        result = executed(given, found.plan, result)
        if folder is not None:
            _write(folder, given, request, result)
    return result


def _found(given: PlanInput, asked: Carried, request: PlanRequest) -> Planned:
    """The plan that is offered for a carrier."""
    if asked.carrier is Carrier.MEGATRON:
        return _megatron(given, None)
    return offered(given, planned(given, asked.planner, on_progress=request.on_progress), is_run=request.execute)


def _only_order(given: PlanInput) -> PlanInput:
    """As the compiler's pass plans by default: nothing is cut, no sum changes its order."""
    options = {**given.options, "split": False} if given.planner in (None, OURS) else given.options
    return replace(given, problem=replace(given.problem, exact=True), options=options, planner=given.planner or OURS)


def _against_torch(given: PlanInput, found: Planned, *, may_replace: bool) -> Planned:
    """The plan, or the order of PyTorch's own scheduler where that is shorter and may replace it; what either takes."""
    version = package_versions().get("torch", "")
    try:
        assert given.torchs_order is not None, "a program has a graph"
        order = given.torchs_order()
    except BackendError as error:
        return _noted(found, f"Not compared with PyTorch's own overlap scheduler: {error}.")
    theirs = simulated(given.problem, rewritten(given.problem.iteration, (order,)))
    words = f"PyTorch {version}'s own overlap scheduler, given the same times: {format_seconds(theirs.makespan_s)}"
    gains = (found.after.makespan_s - theirs.makespan_s) / found.after.makespan_s
    if not may_replace or gains < MIN_GAIN or not _fits(given, theirs):
        return _noted(found, f"{words}; the plan {format_seconds(found.after.makespan_s)}.")
    plan = replace(
        found.plan,
        planner=TORCHS_OWN,
        rewrites=(order,),
        iteration=rewritten(given.problem.iteration, (order,)),
        is_optimal=False,
        notes=(
            f"{words}, {format_percent(gains)} less than with planner {found.plan.planner}: this is its order. "
            "Inductor makes it by itself with "
            "torch._inductor.config.aten_distributed_optimizations.enable_overlap_scheduling = True.",
        ),
        configs=NO_CONFIGS,
    )
    return replace(found, plan=plan, after=theirs)


def _fits(given: PlanInput, step: SimulatedPlan) -> bool:
    limit = given.problem.memory_limit_bytes
    return limit is None or step.peak_bytes <= limit


def _noted(found: Planned, note: str) -> Planned:
    return replace(found, plan=replace(found.plan, notes=(*found.plan.notes, note)))


def _megatron(given: PlanInput, wanted: MegatronSettings | None) -> Planned:
    """Megatron-LM's switches: those wanted, or those that pay.

    Raises:
        JobError: if there is no whole iteration to judge them by, or the wanted ones do not suit the job or its memory.
    """
    start = time.monotonic()
    if given.options:
        raise JobError(
            f"[plan] options: {', '.join(given.options)}: switches of Megatron-LM are keys of [parallel], which "
            "`lagom simulate` predicts; `lagom compare --planners megatron` takes the options"
        )
    if given.step is None or not isinstance(given.problem.times, ModelTimes):
        raise JobError(
            "for megatron: switches are judged by the whole iteration of a named model (`lagom simulate`) under the "
            "cost model; times of a trace or of ranks say nothing of another schedule"
        )
    made = megatron_plan(given.step, given.problem, wanted)
    refuse_beyond("the plan", made.after.peak_bytes, given.problem.memory_limit_bytes)
    if wanted is not None:
        refuse_beyond("the plan", made.after.peak_bytes, given.problem.cluster.gpu.memory_bytes)
    return Planned(
        plan=made.plan,
        before=made.before,
        after=made.after,
        solve_s=time.monotonic() - start,
        megatron=made.effects,
        gain=made.gain,
    )


def plan_result(given: PlanInput, found: Planned, *, carrier: Carrier | None, files: tuple[Path, ...]) -> PlanResult:
    """A plan as it is reported, before any run."""
    before, after, plan, megatron = found.before, found.after, found.plan, found.megatron
    return PlanResult(
        job=given.name,
        num_ranks=given.num_ranks,
        planner=plan.planner,
        carrier=carrier,
        baseline=own_order(given) if megatron is None else megatron.baseline,
        simulation=after.simulation,
        num_ops=len(given.problem.iteration.ops),
        num_comms=len(given.problem.iteration.comms),
        iteration_s=PlannedIteration(before=before.makespan_s, after=after.makespan_s, lower_bound=plan.lower_bound_s),
        exposed_comm_s=BeforeAfter(before=before.exposed_s, after=after.exposed_s),
        peak_memory_bytes=PeakMemory(
            before=before.peak_bytes, after=after.peak_bytes, limit=_limit_bytes(given, found)
        ),
        is_optimal=plan.is_optimal,
        decisions=decisions_of(given.problem.iteration, plan) if plan.rewrites else (),
        solve_s=found.solve_s,
        times=given.times,
        fsdp2=_fsdp2(found),
        megatron=megatron,
        advice=_advice(plan, megatron),
        notes=(
            *given.notes,
            *((ONE_STAGE.format(stages=given.problem.pipeline),) if _is_one_stage(given, found) else ()),
            *(() if given.is_on_cores else beyond_note(before.peak_bytes, given.problem.cluster.gpu)),
            *plan.notes,
            *_how_sure(found),
            *_other_keys(given, found),
            *(() if carrier is not None else (nobody(given),)),
        ),
        files=files,
        planned=PlannedStep(
            plan=plan,
            timelines={"before": before.timeline, "after": after.timeline},
            is_whole=found.gain is not None,
        ),
    )


def _limit_bytes(given: PlanInput, found: Planned) -> int | None:
    """The most that the plan may hold: of switches and settings without a limit the GPU's, or what of it is usable."""
    limit, gpu = given.problem.memory_limit_bytes, given.problem.cluster.gpu.memory_bytes
    if found.megatron is not None:
        return gpu if limit is None else min(limit, gpu)
    return memory_limit_bytes(given.problem) if found.plan.planner == SETTINGS_PLANNERS[Carrier.FSDP2] else limit


def _other_keys(given: PlanInput, found: Planned) -> tuple[str, ...]:
    """What other keys of a named model's job gain; a plan of Megatron-LM's switches has tried them."""
    if given.step is None or found.megatron is not None or found.interrupted:
        return ()
    settings = found.plan.settings if isinstance(found.plan.settings, Fsdp2Settings) else given.problem.settings
    return tuple(key_notes(given.step, settings))


def _how_sure(found: Planned) -> tuple[str, ...]:
    """How far the model's own error may move a gain that was simulated with contention, as `lagom simulate` says it."""
    if found.plan.changes_nothing or found.after.simulation is not Simulation.CONTENTION:
        return ()
    gain = found.gain or what_if(
        AskedChange("the plan", ""), spent_of(found.before.timeline), spent_of(found.after.timeline)
    )
    if not gain.gain_s:  # the step as it was
        return ()
    none = "" if gain.verdict is GainEstimate.GAIN else ": it may be none"
    return (f"The gain is {gain_text(gain)} by the model's own error (lagom docs accuracy){none}.",)


def _fsdp2(found: Planned) -> Fsdp2Effects | None:
    """FSDP2's settings one by one, where its planner was asked."""
    plan = found.plan
    if plan.planner != SETTINGS_PLANNERS[Carrier.FSDP2]:
        return None
    settings = plan.settings if isinstance(plan.settings, Fsdp2Settings) else None
    return Fsdp2Effects(settings=settings, switches=plan.effects, not_advised=plan.not_advised)


def _advice(plan: Plan, megatron: MegatronEffects | None) -> dict[str, tuple[str, ...]]:
    """The plan as settings, by framework; nothing for a plan that rewrites a graph, which no setting says."""
    if megatron is not None:
        return {"Megatron-LM": megatron_lines(megatron)}
    if plan.planner == SETTINGS_PLANNERS[Carrier.FSDP2]:
        return {"FSDP2": fsdp2_lines(plan)}
    return {}


def _write(folder: RunFolder, given: PlanInput, request: PlanRequest, result: PlanResult) -> None:
    step = result.step
    shown = {f"{name}, predicted": line for name, line in step.timelines.items()}
    shown |= {f"{name}, measured": line for name, line in step.measured.items()}

    asked = {
        "planner": request.planner,
        "carrier": request.carrier,
        "work": request.work,
        "apply": request.apply,
        "execute": request.execute,
    }
    folder.write(
        RunRecord.now(RunKind.PLAN, seed=given.problem.seed, job=given.spec, request=asked),
        result,
        {
            "plan.toml": plan_toml(
                given.name,
                step.plan,
                given.problem.iteration,
                given.num_ranks,
                carrier=result.carrier,
                times=_times_in_words(given),
            ),
            "report.html": lambda: render_plan(result).encode(),
            "timeline.json": lambda: chrome_trace(shown),
            **megatron_files(given.step, result.megatron),
        },
    )


def _times_in_words(given: PlanInput) -> str:
    return "cost model" if given.times is None else given.times.file or "measured on ranks"
