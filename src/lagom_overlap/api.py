"""The verbs as functions: what `lagom_overlap.tune`, `plan`, `analyze`, ... are. Each returns its typed result.

A job is a path of a job file or what `load_job` made of one; further words override the job's, as the command line's
flags do. Errors that a user can mend are `lagom_overlap.LagomError`.
"""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias, overload

from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.reading import read_job
from lagom_overlap.jobfile.spec import JobSpec
from lagom_overlap.results.analyze import AnalyzeResult
from lagom_overlap.results.base import Result
from lagom_overlap.results.capture import CaptureResult
from lagom_overlap.results.compare import ComparePlannersResult, CompareResult
from lagom_overlap.results.plan import PlanResult
from lagom_overlap.results.simulate import SimulateCaptureResult, SimulateResult
from lagom_overlap.results.tune import TuneResult

FilePath: TypeAlias = str | PathLike[str]
JobSource: TypeAlias = FilePath | JobSpec


def load_job(path: FilePath) -> JobSpec:
    """The job file at `path`, checked; its own paths are seen from its folder.

    Raises:
        LagomError: if it is missing, no TOML, or holds what is not allowed.
    """
    return read_job(Path(path))


def load(run: FilePath) -> Result:
    """The result of a run folder, typed as the verb returned it: `TuneResult`, `RunResult`, `ProofResult`, ...

    All that `--json` prints is there. What stands behind a result is there as far as the folder holds it: the journal
    of a tuned job, the timeline of a simulated one; asked for what it lacks (a plan to simulate again, a trace's
    events), a result raises a `LagomError` that says so. A `RunResult` can be loaded while the job runs.

    Raises:
        LagomError: if it is no run folder, is damaged, has not ended, or is a run of `lagom reproduce`.
    """
    from lagom_overlap.verbs.load import load_run  # noqa: PLC0415  each verb imports what it needs

    return load_run(_given(run))


def _job(job: JobSource) -> JobSpec:
    return job if isinstance(job, JobSpec) else load_job(job)


def _path(path: FilePath | None) -> Path | None:
    return None if path is None else _given(path)


def _given(path: FilePath) -> Path:
    if not str(path):  # Path("") is the current folder
        raise JobError("a path is empty, must name a file or folder")
    return Path(path)


def tune(
    job: JobSource | None = None,
    *,
    from_trace: FilePath | None = None,
    tuner: str | None = None,
    backend: str | None = None,
    seed: int | None = None,
    warm_start: str | None = None,
    bundle: FilePath | None = None,
    out: FilePath | None = None,
) -> TuneResult:
    """Searches for settings of the job's collectives and judges them by a paired A/B against the default.

    `from_trace` predicts instead: groups and model come from profiler traces or from a run folder, nothing is run, and
    of a job only [tune], [cluster] and [cost] count. `bundle` is the run folder that `backend="recorded"` replays. The
    run folder is `out`, or a new one below lagom-runs/.

    Raises:
        LagomError: for what a user can mend, or a machine that failed; what was measured stays in the folder.
    """
    from lagom_overlap.verbs.own_trace import job_for  # noqa: PLC0415  each verb imports what it needs
    from lagom_overlap.verbs.tune import TuneRequest, run_tune  # noqa: PLC0415

    spec = None if job is None else _job(job)
    return run_tune(
        TuneRequest(
            job=job_for(spec, _path(from_trace), seed=seed, backend=backend, bundle=_path(bundle)),
            tuner=tuner,
            backend=backend,
            seed=seed,
            warm_start=warm_start,
            bundle=_path(bundle),
            out=_path(out),
        )
    )


@overload
def compare(
    job: JobSource,
    *,
    tuners: Sequence[str] | None = None,
    planners: None = None,
    backend: str | None = None,
    seed: int | None = None,
    warm_start: str | None = None,
    bundle: FilePath | None = None,
) -> CompareResult: ...
@overload
def compare(
    job: JobSource | CaptureResult,
    *,
    planners: Sequence[str],
    seed: int | None = None,
    cluster: str | None = None,
    times: str | None = None,
) -> ComparePlannersResult: ...
def compare(
    job: JobSource | CaptureResult,
    *,
    tuners: Sequence[str] | None = None,
    planners: Sequence[str] | None = None,
    backend: str | None = None,
    seed: int | None = None,
    warm_start: str | None = None,
    bundle: FilePath | None = None,
    cluster: str | None = None,
    times: str | None = None,
) -> CompareResult | ComparePlannersResult:
    """Several tuners on one job, measured side by side; with `planners`, plans of the step, compared by simulation.

    `cluster` and `times` are as of `plan`; `backend`, `warm_start` and `bundle` as of `tune`.

    Raises:
        LagomError: for what a user can mend, or a machine that failed.
        TypeError: if words of the one are given for the other.
    """
    if planners is None:
        if isinstance(job, CaptureResult) or cluster is not None or times is not None:
            raise TypeError("a capture, cluster and times are compared with planners=[...]")
        return _compare_tuners(
            _job(job), tuners, backend=backend, seed=seed, warm_start=warm_start, bundle=_path(bundle)
        )
    if any(given is not None for given in (tuners, backend, warm_start, bundle)):
        raise TypeError("tuners, backend, warm_start and bundle do not go with planners=[...]")
    from lagom_overlap.verbs.compare import check_planners, compare_planners  # noqa: PLC0415
    from lagom_overlap.verbs.plan_problem import PlanFlags, read_input  # noqa: PLC0415

    check_planners(planners)
    given = read_input(_step(job), PlanFlags(cluster=cluster, times=times))
    try:
        return compare_planners(given, planners, seed=seed)
    finally:
        given.close()


def _compare_tuners(spec: JobSpec, tuners: Sequence[str] | None, **given: Any) -> CompareResult:
    from lagom_overlap.jobfile.job import Job  # noqa: PLC0415
    from lagom_overlap.verbs.compare import DEFAULT_TUNERS, CompareRequest, run_compare  # noqa: PLC0415

    return run_compare(CompareRequest(job=Job(spec), tuners=tuple(tuners or DEFAULT_TUNERS), **given))


def _step(job: JobSource | CaptureResult) -> Any:
    """What is planned: a job, a captured step, or a file of either."""
    if isinstance(job, CaptureResult):
        return job.capture
    return job if isinstance(job, JobSpec) else Path(job)


def plan(
    job: JobSource | CaptureResult,
    *,
    planner: str | None = None,
    carrier: Literal["fsdp2", "inductor", "program", "megatron"] | None = None,
    cluster: str | None = None,
    times: str | None = None,
    work: float | None = None,
    apply: FilePath | None = None,
    execute: bool = False,
    out: FilePath | None = None,
) -> PlanResult:
    """Plans the step of a job or of a capture, and simulates it before and after.

    A capture (or its file) needs `cluster`, the preset of a machine. `times` is "model", "measure" or a trace of one
    rank; `carrier` is who runs the plan (None: the job's framework); `work` is how much is searched, in millions of
    steps; `apply` a plan.toml that takes the planner's place; `execute` runs the plan against the program on real
    ranks.

    Raises:
        LagomError: for what a user can mend, or a machine that failed.
    """
    from lagom_overlap.planners.carriers import Carrier  # noqa: PLC0415
    from lagom_overlap.verbs.plan import PlanRequest, check_request, run_plan, step_check  # noqa: PLC0415
    from lagom_overlap.verbs.plan_problem import PlanFlags, read_input  # noqa: PLC0415

    request = PlanRequest(
        planner=planner,
        carrier=None if carrier is None else Carrier(carrier),
        work=work,
        apply=_path(apply),
        execute=execute,
        out=_path(out),
    )
    check_request(request)
    given = read_input(_step(job), PlanFlags(cluster=cluster, times=times, execute=execute, check=step_check(request)))
    try:
        return run_plan(given, request)
    finally:
        given.close()


def analyze(
    traces: FilePath | Sequence[FilePath],
    *,
    against: FilePath | None = None,
    compat: Literal["hta"] | None = None,
    pattern: str | None = None,
    anonymise: bool = False,
    num_jobs: int = 1,
    out: FilePath | None = None,
) -> AnalyzeResult:
    """Says what overlap profiler traces show: files, or folders of them, one rank per parallel role.

    `against` is another run to compare with, `pattern` a regular expression of further kernels that communicate,
    `num_jobs` how many processes read. Nothing is written without `out`.

    Raises:
        LagomError: if a trace cannot be read or the folder cannot be made.
    """
    from lagom_overlap.verbs.analyze import AnalyzeRequest, Compat, run_analyze  # noqa: PLC0415

    several = (traces,) if isinstance(traces, str | PathLike) else traces
    return run_analyze(
        AnalyzeRequest(
            traces=tuple(map(Path, several)),
            against=() if against is None else (Path(against),),
            compat=None if compat is None else Compat(compat),
            pattern=pattern,
            is_anonymous=anonymise,
            num_jobs=num_jobs,
            out=_path(out),
        )
    )


def overlap_line(profiler: Any, keep: FilePath | None = None) -> str:
    """One line for a training log: how long a step takes, what of it is exposed communication, what is hidden.

    For `on_trace_ready` of `torch.profiler.profile`: `lambda prof: print(lagom_overlap.overlap_line(prof))`. A profiler
    exports its trace once: give `keep`, a file or a folder, to have the trace as well; in a folder each rank keeps its
    last one, as `lagom analyze` takes them. In place of the profiler a trace's path will
    do. Of a trace that cannot be read, the line says why; nothing is raised for it.
    """
    from lagom_overlap.verbs.overlap_line import overlap_line as line_of  # noqa: PLC0415

    source = Path(profiler) if isinstance(profiler, str | PathLike) else profiler
    return line_of(source, _path(keep))


def capture(
    target: str | JobSpec | Callable[[], Any],
    *,
    num_ranks: int | None = None,
    rank: int = 0,
    parallel: Mapping[str, int] | str | None = None,
    seq_len: int | None = None,
    micro_batch: int | None = None,
    out: FilePath | None = None,
) -> CaptureResult:
    """Captures one rank's training step without a GPU and without weights.

    `target` is a function that returns a `TrainingStep` (or SCRIPT.py:FUNCTION), run in a world of `num_ranks` fake
    ranks; a job or its file; or a model's name, with its degrees in `parallel` (`{"fsdp": 8}`). Nothing is written
    without `out`.

    Raises:
        LagomError: for what a user can mend, model code that fails, or an extra that is not installed.
    """
    from lagom_overlap.verbs.capture import CaptureRequest, run_capture  # noqa: PLC0415

    degrees = ",".join(f"{key}={n}" for key, n in parallel.items()) if isinstance(parallel, Mapping) else parallel
    return run_capture(
        CaptureRequest(
            target=target,
            num_ranks=num_ranks,
            rank=rank,
            parallel=degrees,
            seq_len=seq_len,
            micro_batch=micro_batch,
            out=_path(out),
        )
    )


def simulate(job: JobSource, *, out: FilePath | None = None) -> SimulateResult | SimulateCaptureResult:
    """Simulates one iteration of a job: of the whole layout, or of one rank where [model] names a capture.

    Nothing is written without `out`.

    Raises:
        LagomError: for what a user can mend.
    """
    from lagom_overlap.jobfile.job import Job  # noqa: PLC0415
    from lagom_overlap.verbs.simulate import SimulateRequest, run_simulate, simulate_capture  # noqa: PLC0415

    spec = _job(job)
    if spec.model is not None and spec.model.capture is not None:
        return simulate_capture(Job(spec), _path(out))
    return run_simulate(SimulateRequest(job=Job(spec), out=_path(out)))
