"""`lagom tune`: a job file becomes groups, a study is driven through a backend, the verdict is written down."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from lagom_overlap.backends.base import Backend
from lagom_overlap.export.configs import configs_toml
from lagom_overlap.interrupts import held_back
from lagom_overlap.jobfile.describe import ONE_SIDED, OUT_OF_BUDGET
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.run_folder import RunFolder, RunKind, RunRecord
from lagom_overlap.jobfile.whole_step import WholeStep
from lagom_overlap.report.tune.page import render_tuning
from lagom_overlap.results.tune import MeasuredSearch, TuneResult
from lagom_overlap.trace.chrome_writer import chrome_trace
from lagom_overlap.tuners.bundle import header_line
from lagom_overlap.tuners.guard import make_tuner
from lagom_overlap.tuners.registry import (
    check_takes_warm_start,
    check_tuner_name,
    search_measurements,
    searches_launches,
)
from lagom_overlap.tuners.study import Study
from lagom_overlap.tuners.verdict import DEFAULT_ARM, TUNED_ARM
from lagom_overlap.verbs.measure import Journal, Observer, Run, ignore
from lagom_overlap.verbs.warm_start import check_source, warm_start_of

RUN_FILES: Final = ("configs.toml", "run.json", "report.html", "timeline.json")
"""What is written at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """A job and what the command line adds; None leaves the job's own word."""

    job: Job
    backend: str | None = None
    tuner: str | None = None
    seed: int | None = None
    bundle: Path | None = None
    out: Path | None = None
    warm_start: str | None = None

    @property
    def backend_name(self) -> str:
        """The backend that will run."""
        return self.job.backend_name(self.backend)

    @property
    def tuner_name(self) -> str:
        """The tuner that will search."""
        return self.tuner or self.job.spec.tune.tuner

    @property
    def effective_seed(self) -> int:
        """The seed of the tuner, the noise and the shuffling."""
        return self.job.spec.tune.seed if self.seed is None else self.seed

    @property
    def warm_source(self) -> str | None:
        """Where the search begins, if anywhere."""
        return self.warm_start or self.job.spec.tune.warm_start

    @property
    def options(self) -> Mapping[str, object]:
        """The tuner's options: those of the job file, if it is the job file's tuner that runs."""
        return self.job.spec.tune.options if self.tuner_name == self.job.spec.tune.tuner else {}


def run_tune(request: TuneRequest, observe: Observer = ignore) -> TuneResult:
    """Searches, judges and writes the run folder.

    Everything that a user can get wrong is checked before the folder is made. A file that cannot be written in the end
    costs that file: the result's `files` lacks it.

    Raises:
        LagomError: for a user's mistake, or a machine that failed; what was measured until then stays in the folder.
    """
    job, spec, seed = request.job, request.job.spec, request.effective_seed
    job.check_fits(request.backend_name)
    groups, step = job.groups, WholeStep.of(job, request.backend_name)
    backend_request = job.request(seed=seed, bundle=request.bundle)
    check_tuner_name(request.tuner_name)
    if request.warm_source is not None:
        check_takes_warm_start(request.tuner_name)
        check_source(request.warm_source)
    RunFolder.check(request.out)
    started = time.monotonic()
    backend = job.open(request.backend_name, backend_request)
    try:
        problems = tuple(backend.problem(group) for group in groups)
        warm = None if request.warm_source is None else warm_start_of(request.warm_source, job, problems, seed=seed)
        begun = () if warm is None else (f"The search began with {warm.source}.",)
        tuner = make_tuner(
            request.tuner_name, problems, seed=seed, options=request.options, guarded=spec.tune.guard, warm=warm
        )
        max_measurements = search_measurements(spec.tune.budget.measurements, request.tuner_name)
        study = Study(
            problems, job.tied(tuner, problems), seed=seed, num_pairs=spec.tune.pairs, max_measurements=max_measurements
        )
        folder = RunFolder.create(request.out, spec.job.name)
        journal = Journal(folder.path / "measurements.jsonl", problems)
        journal.start(
            header_line(
                backend_request.job_fingerprint,
                request.backend_name,
                problems,
                description=backend.description,
                notes=(*_backend_notes(request, backend), *begun),
                arm_words=job.arm_words(request.backend_name, backend),
                limits=backend_request.limits,
            )
        )
        run = Run(
            study=study,
            backend=backend,
            problems=problems,
            max_seconds=spec.tune.budget.seconds,
            max_measurements=max_measurements,
        )
        run.drive(observe, journal.keep)
    finally:
        backend.close()
    with held_back():
        return _write(request, folder, run, journal, step=step, duration_s=time.monotonic() - started, begun=begun)


def _backend_notes(request: TuneRequest, backend: Backend) -> tuple[str, ...]:
    job = request.job
    notes, keys = job.notes(request.backend_name, backend), job.spec.tune.space.launch_keys
    if keys and not searches_launches(request.tuner_name):
        return (*notes, ONE_SIDED.format(keys=", ".join(keys), tuner=request.tuner_name))
    return notes


def _notes(request: TuneRequest, run: Run) -> tuple[str, ...]:
    notes = _backend_notes(request, run.backend)
    return (*notes, OUT_OF_BUDGET) if run.out_of_budget else notes


def _write(
    request: TuneRequest,
    folder: RunFolder,
    run: Run,
    journal: Journal,
    *,
    step: WholeStep | None,
    duration_s: float,
    begun: tuple[str, ...],
) -> TuneResult:
    job, spec, study, problems = request.job, request.job.spec, run.study, journal.problems
    record = RunRecord.now(
        RunKind.TUNE,
        seed=request.effective_seed,
        job=spec,
        from_trace=job.from_trace,
    )
    result = TuneResult(
        job=spec.job.name,
        backend=request.backend_name,
        backend_description=run.backend.description,
        arm_words=job.arm_words(request.backend_name, run.backend),
        tuner=request.tuner_name,
        guarded=spec.tune.guard,
        seed=request.effective_seed,
        verdict=study.verdict,
        machine=record.machine,
        versions=record.versions,
        date=record.date,
        duration_s=duration_s,
        repeats=spec.tune.repeats,
        step_s=step.untouched_s if step else None,
        tuned_step_s=step.seconds(problems, study.recommended) if step else None,
        group_steps_s=step.alone(problems, study.recommended) if step else {},
        predicted=job.predicted_gain(problems, study.recommended),
        num_stages=1 if job.step is None else job.step.layout.pipeline,
        notes=(*_notes(request, run), *begun, *(step.notes if step else ())),
        interrupted=run.interrupted,
        files=tuple(folder.path / name for name in (*RUN_FILES, journal.path.name)),
        measured=MeasuredSearch(problems=problems, entries=tuple(journal.entries), recommended=study.recommended),
    )
    is_beyond_error = result.predicted is None or result.predicted.is_beyond_error
    adopted = study.verdict is not None and study.verdict.adopted and is_beyond_error
    stages = {f"before: {name}": line for name, line in result.search.timelines_under(DEFAULT_ARM).items()}
    stages |= {f"after: {name}": line for name, line in result.search.timelines_under(TUNED_ARM).items()}
    contents = {
        "configs.toml": lambda: configs_toml(problems, study.recommended, adopted=adopted).encode(),
        "report.html": lambda: render_tuning(result).encode(),
        "timeline.json": lambda: chrome_trace(stages),
    }
    # A result that took hours to measure is worth more than its files.
    written = folder.write(record, result, contents, skips_unwritable=True)
    kept = {*written, *(() if journal.failure else (journal.path,))}
    return replace(result, files=tuple(path for path in result.files if path in kept), measured=result.search)
