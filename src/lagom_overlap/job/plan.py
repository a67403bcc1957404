"""`lagom plan`: a step becomes a plan, the plan becomes files, and runs beside the program if asked."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import quantiles
from typing import Any, Final

import msgspec

from lagom_overlap.deploy.fsdp2 import kept_parameters
from lagom_overlap.engines.planned.commands import PlanRun
from lagom_overlap.errors import JobError, WrongResultError
from lagom_overlap.job.build import check_planner_name, make_planner
from lagom_overlap.job.plan_advice import fsdp2_advice, megatron_arguments
from lagom_overlap.job.plan_file import check_plan, check_plan_file, plan_toml, read_plan
from lagom_overlap.job.plan_megatron import megatron_json, megatron_lines
from lagom_overlap.job.plan_problem import OURS, WHOLE, Check, PlanInput
from lagom_overlap.job.plan_result import decisions_of
from lagom_overlap.plan.base import Plan, PlanProblem
from lagom_overlap.plan.deadline import Work, ended_by_ctrl_c
from lagom_overlap.plan.memory import refuse_beyond
from lagom_overlap.plan.predict import Prediction, predict
from lagom_overlap.record import (
    create_folder,
    describe_machine,
    package_versions,
    uninterrupted,
    utc_now,
    write_private,
)
from lagom_overlap.report.plan_model import (
    BeforeAfter,
    ExecutionJson,
    IterationTimes,
    MegatronJson,
    PeakMemory,
    PlanJson,
    Spread,
)
from lagom_overlap.report.plan_page import render_plan
from lagom_overlap.report.plan_view import PlanView, critical_path, exposed_by, timeline_of
from lagom_overlap.timeline import Timeline
from lagom_overlap.trace.chrome import chrome_trace
from lagom_overlap.workload.digest import graph_digest

MEGATRON: Final = "megatron"
"""The planner whose switches are advised one by one."""
MAX_ERROR: Final = 0.02
"""The largest difference of outputs, relative to the largest value, that is rounding: five times that of bfloat16."""
_FILES: Final = ("run.json", "plan.toml", "report.html", "timeline.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is asked of a problem.

    `planner` and `work` (millions of steps, without a limit of seconds) override the job's; `apply` is a
    plan file that takes the planner's place; `out` is where to write.
    """

    planner: str | None = None
    work: float | None = None
    apply: Path | None = None
    execute: bool = False
    out: Path | None = None
    on_progress: Callable[[Any], None] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """The object that is printed, what the views show, and the folder that was written."""

    json: PlanJson
    view: PlanView
    folder: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan with its predictions and the seconds that it took; `interrupted`: the user ended the search."""

    plan: Plan
    before: Prediction
    after: Prediction
    solve_s: float
    interrupted: bool = False


def planned(given: PlanInput, planner: str, *, on_progress: Callable[[Any], None] | None = None) -> Planned:
    """The plan of a planner, judged by the one simulator that judges all.

    Raises:
        LagomError: if there is no such planner, or no plan fits the memory limit.
    """
    options = given.options if planner == given.planner else {}
    whole = given.is_on_cores and planner == OURS and "split" not in options
    if whole:
        options = {**options, "split": False}
    maker = make_planner(planner, options, on_progress=on_progress)
    start = time.monotonic()
    with ended_by_ctrl_c() as interrupted:
        plan = maker.plan(given.problem)
        was_ended = interrupted.is_set()
    if was_ended:
        plan = replace(plan, notes=(*plan.notes, "The search was ended by Ctrl-C: this is the best it had found."))
    if whole:
        plan = replace(plan, notes=(*plan.notes, WHOLE))
    return replace(judged(given, plan, time.monotonic() - start), interrupted=was_ended)


def judged(given: PlanInput, plan: Plan, solve_s: float) -> Planned:
    """A plan with its predictions.

    Raises:
        JobError: if it needs more memory than the limit.
    """
    before, after = predict(given.problem, given.issued), predict(given.problem, plan.iteration)
    refuse_beyond("the plan", after.peak_bytes, given.problem.memory_limit_bytes)
    return Planned(plan=plan, before=before, after=after, solve_s=solve_s)


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
        check_plan_file(request.apply)
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
        raise JobError('--execute needs a program on real ranks: give [program] and backend = "gloo" in the job file')
    if request.work is not None:
        given = replace(given, problem=replace(given.problem, work=Work(request.work)))
    if request.apply is not None:
        found = judged(given, read_plan(request.apply, given.problem, given.num_ranks), 0.0)
    else:
        found = planned(given, request.planner or given.planner, on_progress=request.on_progress)
    files = [] if request.out is None else [str(request.out / name) for name in _FILES]
    json = plan_json(given, found, files=files)
    view = _view(given, found, json, None)
    if request.out is not None:
        create_folder(request.out)
        _write(request.out, given, found, json, view)
    if request.execute:
        run = _run(given, found.plan)
        json = msgspec.structs.replace(json, execution=_execution(given, found, run))
        view = _view(given, found, json, run)
        if request.out is not None:
            _write(request.out, given, found, json, view)
    return PlanResult(json=json, view=view, folder=request.out)


def _megatron(given: PlanInput, plan: Plan) -> MegatronJson | msgspec.UnsetType:
    """Its switches one by one, where its own planner was asked."""
    if plan.planner != MEGATRON:
        return msgspec.UNSET
    return megatron_json(given.problem, given.num_ranks, given.pipeline)


def plan_json(given: PlanInput, found: Planned, *, files: list[str]) -> PlanJson:
    """What is printed with --json, but for a run."""
    before, after = found.before, found.after
    return PlanJson(
        planner=found.plan.planner,
        num_ops=len(given.problem.iteration.ops),
        num_comms=len(given.problem.iteration.comms),
        iteration_s=IterationTimes(
            before=before.overlap.makespan_s, after=after.overlap.makespan_s, lower_bound=found.plan.lower_bound_s
        ),
        exposed_comm_s=BeforeAfter(before=before.overlap.exposed_s, after=after.overlap.exposed_s),
        peak_memory_bytes=PeakMemory(
            before=before.peak_bytes, after=after.peak_bytes, limit=given.problem.memory_limit_bytes
        ),
        decisions=decisions_of(given.problem.iteration, found.plan),
        solve_s=found.solve_s,
        files=files,
        times=msgspec.UNSET if given.times is None else given.times,
        megatron=_megatron(given, found.plan),
    )


def _run(given: PlanInput, plan: Plan) -> PlanRun:
    assert given.ranks is not None
    digest = graph_digest(given.problem.iteration)
    run = given.ranks.run(plan.rewrites, rounds=given.rounds, seed=given.seed, graph=digest)
    if run.max_error > MAX_ERROR:
        raise WrongResultError(
            f"the plan's outputs differ from the program's by {run.max_error:.1e} of the largest value, or are not "
            f"finite; {MAX_ERROR:g} is allowed for rounding: the run is not reported"
        )
    return run


def _spread(values: list[float]) -> Spread:
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Spread(median=middle, q25=low, q75=high)


def _execution(given: PlanInput, found: Planned, run: PlanRun) -> ExecutionJson:
    assert given.ranks is not None
    ratios = [before / after for before, after in zip(run.before.makespan_s, run.after.makespan_s, strict=True)]
    arms = {"before": run.before, "after": run.after}
    return ExecutionJson(
        backend=given.ranks.description,
        num_ranks=given.num_ranks,
        rounds=len(run.before.makespan_s),
        max_error=run.max_error,
        is_bitwise_equal=run.max_error == 0,
        order_digest=run.order_digest,
        iteration_s={name: _spread(list(arm.makespan_s)) for name, arm in arms.items()},
        exposed_comm_s={name: _spread(list(arm.exposed_s)) for name, arm in arms.items()},
        predicted_iteration_s=BeforeAfter(before=found.before.overlap.makespan_s, after=found.after.overlap.makespan_s),
        predicted_exposed_comm_s=BeforeAfter(
            before=found.before.overlap.exposed_s, after=found.after.overlap.exposed_s
        ),
        speedup=_spread(ratios),
    )


def _view(given: PlanInput, found: Planned, json: PlanJson, run: PlanRun | None) -> PlanView:
    timelines = {
        "before": timeline_of(given.issued, found.before),
        "after": timeline_of(found.plan.iteration, found.after),
    }
    measured = {} if run is None else {"before": Timeline(run.before.spans), "after": Timeline(run.after.spans)}
    return PlanView(
        job=given.name,
        num_ranks=given.num_ranks,
        result=json,
        timelines=timelines,
        measured=measured,
        critical=critical_path(found.plan.iteration, found.after),
        exposed=exposed_by(timelines["after"], found.plan.iteration),
        notes=(*given.notes, *found.plan.notes),
        is_optimal=found.plan.is_optimal,
        advice=_advice(given, found.plan, json),
    )


def _advice(given: PlanInput, plan: Plan, json: PlanJson) -> dict[str, tuple[str, ...]]:
    """The plan as settings, by framework; nothing for a program, which runs the plan itself."""
    if given.is_program:
        return {}
    if isinstance(json.megatron, MegatronJson):
        return {"Megatron-LM, with how much longer it takes without each": megatron_lines(json.megatron)}
    said = {
        "FSDP2": _fsdp2_lines(given.problem, plan),
        "Megatron-LM": (" ".join(megatron_arguments(given.problem, plan)),),
    }
    return {f"{name} (part of the plan, without its prediction)": lines for name, lines in said.items() if any(lines)}


def _fsdp2_lines(problem: PlanProblem, plan: Plan) -> tuple[str, ...]:
    """Its calls, and whether to keep parameters after forward."""
    found, kept = fsdp2_advice(problem, plan), kept_parameters(problem, plan)
    if found is None:
        return ()
    return found.sentences() if kept is None else (*kept.applied_to(found).sentences(), kept.sentence())


def _write(folder: Path, given: PlanInput, found: Planned, json: PlanJson, view: PlanView) -> None:
    """All files, each whole; Ctrl-C waits until they are of one run."""
    record = {
        "job": given.name,
        "result": json,
        "notes": view.notes,
        "num_ranks": given.num_ranks,
        "machine": describe_machine(),
        "versions": package_versions(),
        "date": utc_now(),
    }
    text = plan_toml(given.name, found.plan, given.problem.iteration, given.num_ranks, _times_in_words(given))
    shown = {f"{name}, predicted": line for name, line in view.timelines.items()}
    shown |= {f"{name}, measured": line for name, line in view.measured.items()}
    contents = (
        msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n",
        text,
        render_plan(view).encode(),
        chrome_trace(shown),
    )
    with uninterrupted():
        for name, content in zip(_FILES, contents, strict=True):
            write_private(folder / name, content)


def _times_in_words(given: PlanInput) -> str:
    return "cost model" if given.times is None else given.times.file or "measured on ranks"
