"""`lagom tune`: a job file becomes groups, a study is driven through a backend, the verdict is written down."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from lagom_overlap import __version__
from lagom_overlap.backends.base import Assignment, Backend, Measurement
from lagom_overlap.backends.bundle import header_line
from lagom_overlap.deploy.configs import configs_toml
from lagom_overlap.job.build import (
    check_takes_warm_start,
    check_tuner_name,
    groups_of,
    make_tuner,
    open_backend,
    request_of,
    searches_launches,
)
from lagom_overlap.job.describe import ONE_SIDED, OUT_OF_BUDGET, arm_words, notes_of
from lagom_overlap.job.ground import Ground
from lagom_overlap.job.measure import Observer, Run, ignore
from lagom_overlap.job.result import TuneJson, configs_json, launches_json, times_of_assignment, verdict_json
from lagom_overlap.job.run_folder import Journal, check_folder, create_run_folder
from lagom_overlap.job.spec import JobSpec
from lagom_overlap.job.warm_start import check_source, warm_start_of
from lagom_overlap.record import describe_machine, package_versions, uninterrupted, utc_now, write_private
from lagom_overlap.report.html import render_html
from lagom_overlap.report.model import TuneReport
from lagom_overlap.timeline import Timeline
from lagom_overlap.trace.chrome import chrome_trace
from lagom_overlap.tune.journal import Entry, StepKind
from lagom_overlap.tune.study import Study

RUN_FILES: Final = ("configs.toml", "report.html", "timeline.json", "run.json")
"""What is written at the end, in this order: a folder with run.json is whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """A job and what the command line says beside it; None leaves the job's own word.

    `ground`, if given, is what is tuned in place of the job's groups and backend.
    """

    spec: JobSpec
    ground: Ground | None = None
    backend: str | None = None
    tuner: str | None = None
    seed: int | None = None
    bundle: Path | None = None
    out: Path | None = None
    warm_start: str | None = None

    @property
    def backend_name(self) -> str:
        """The backend that will run."""
        if self.ground is not None:
            return self.ground.backend_name
        return self.backend or self.spec.job.backend

    @property
    def tuner_name(self) -> str:
        """The tuner that will search."""
        return self.tuner or self.spec.tune.tuner

    @property
    def effective_seed(self) -> int:
        """The seed of the tuner, the noise and the shuffling."""
        return self.spec.tune.seed if self.seed is None else self.seed

    @property
    def warm_source(self) -> str | None:
        """Where the search begins, if anywhere."""
        return self.warm_start or self.spec.tune.warm_start

    @property
    def options(self) -> Mapping[str, object]:
        """The tuner's options: those of the job file, if it is the job file's tuner that runs."""
        return self.spec.tune.options if self.tuner_name == self.spec.tune.tuner else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """What a run found: the object that is printed, the report's data, the folder it was written to."""

    json: TuneJson
    report: TuneReport
    folder: Path


def _timelines(entries: Sequence[Entry], arm: str) -> dict[str, Timeline]:
    """The last timeline of every group in a verdict arm."""
    found: dict[str, Timeline] = {}
    for entry in entries:
        if entry.step.kind is StepKind.VERDICT and entry.step.arm == arm:
            for name, outcome in entry.outcomes.items():
                if isinstance(outcome, Measurement) and outcome.timeline is not None:
                    found[name] = outcome.timeline
    return found


def run_tune(request: TuneRequest, observe: Observer = ignore) -> TuneResult:
    """Searches, judges and writes the run folder.

    Everything that a user can get wrong is checked before the folder is made.

    Raises:
        LagomError: for a user's mistake, or a machine that failed; what was measured until then stays in the folder.
    """
    spec, seed = request.spec, request.effective_seed
    groups = request.ground.groups if request.ground else groups_of(spec)
    backend_request = request_of(spec, groups, seed=seed, bundle=request.bundle)
    check_tuner_name(request.tuner_name)
    if request.warm_source is not None:
        check_takes_warm_start(request.tuner_name)
        check_source(request.warm_source)
    check_folder(request.out)
    started = time.monotonic()
    backend = request.ground.backend if request.ground else open_backend(spec, request.backend_name, backend_request)
    try:
        problems = tuple(backend.problem(group) for group in groups)
        warm = None if request.warm_source is None else warm_start_of(request.warm_source, spec, problems, seed=seed)
        begun = () if warm is None else (f"The search began with {warm.source}.",)
        tuner = make_tuner(
            request.tuner_name, problems, seed=seed, options=request.options, guarded=spec.tune.guard, warm=warm
        )
        study = Study(
            problems,
            tuner,
            seed=seed,
            num_pairs=spec.tune.pairs,
            max_measurements=spec.tune.budget.measurements,
        )
        folder = create_run_folder(request.out, spec.job.name)
        journal = Journal(folder / "measurements.jsonl", problems)
        journal.start(
            header_line(
                backend_request.job_fingerprint,
                request.backend_name,
                problems,
                description=backend.description,
                notes=(*_backend_notes(request, backend), *begun),
                arm_words=_arm_words(request, backend),
                limits=backend_request.limits,
            )
        )
        run = Run(
            study=study,
            backend=backend,
            problems=problems,
            max_seconds=spec.tune.budget.seconds,
            max_measurements=spec.tune.budget.measurements,
        )
        run.drive(observe, journal.keep)
    finally:
        backend.close()
    with uninterrupted():
        return _write(request, folder, run, journal, duration_s=time.monotonic() - started, begun=begun)


def _backend_notes(request: TuneRequest, backend: Backend) -> tuple[str, ...]:
    if request.ground:
        return request.ground.notes
    notes, keys = notes_of(request.spec, request.backend_name, backend), request.spec.tune.space.launch_keys
    if keys and not searches_launches(request.tuner_name):
        return (*notes, ONE_SIDED.format(keys=", ".join(keys), tuner=request.tuner_name))
    return notes


def _arm_words(request: TuneRequest, backend: Backend) -> Mapping[str, str]:
    return request.ground.arm_words if request.ground else arm_words(request.backend_name, backend)


def _notes(request: TuneRequest, run: Run) -> tuple[str, ...]:
    notes = _backend_notes(request, run.backend)
    return (*notes, OUT_OF_BUDGET) if run.out_of_budget else notes


def _write(
    request: TuneRequest, folder: Path, run: Run, journal: Journal, *, duration_s: float, begun: tuple[str, ...]
) -> TuneResult:
    spec, study, problems, entries = request.spec, run.study, journal.problems, tuple(journal.entries)
    default: dict[str, Assignment] = {problem.group.name: problem.default for problem in problems}
    adopted = study.verdict is not None and study.verdict.adopted
    report = TuneReport(
        job=spec.job.name,
        backend=request.backend_name,
        backend_description=run.backend.description,
        arm_words=_arm_words(request, run.backend),
        tuner=request.tuner_name,
        guarded=spec.tune.guard,
        seed=request.effective_seed,
        problems=problems,
        entries=entries,
        recommended=study.recommended,
        verdict=study.verdict,
        timelines_before=_timelines(entries, "default"),
        timelines_after=_timelines(entries, "tuned"),
        machine=describe_machine(),
        versions=package_versions(),
        date=utc_now(),
        duration_s=duration_s,
        repeats=spec.tune.repeats,
        notes=(*_notes(request, run), *begun),
        interrupted=run.interrupted,
    )
    result = TuneJson(
        tool="lagom tune",
        version=__version__,
        seed=report.seed,
        backend=report.backend,
        tuner=report.tuner,
        guarded=report.guarded,
        job=report.job,
        interrupted=report.interrupted,
        num_measurements=study.num_measurements,
        default=times_of_assignment(problems, entries, "default", default),
        best=times_of_assignment(problems, entries, "tuned", study.recommended),
        configs=configs_json(problems, study.recommended),
        launches=launches_json(problems, study.recommended),
        verdict=verdict_json(study.verdict),
        notes=list(report.notes),
        files=[str(folder / name) for name in (*RUN_FILES, journal.path.name)],
    )
    stages = {f"before: {name}": line for name, line in report.timelines_before.items()}
    stages |= {f"after: {name}": line for name, line in report.timelines_after.items()}
    contents = (
        configs_toml(problems, study.recommended, adopted=adopted).encode(),
        render_html(report).encode(),
        chrome_trace(stages),
        _record(request, report, result),
    )
    for name, content in zip(RUN_FILES, contents, strict=True):
        write_private(folder / name, content)
    return TuneResult(json=result, report=report, folder=folder)


def _record(request: TuneRequest, report: TuneReport, result: TuneJson) -> bytes:
    record: dict[str, object] = {"from_trace": request.ground.record} if request.ground else {}
    record |= {
        "job": request.spec,
        "result": result,
        "backend": report.backend_description,
        "machine": report.machine,
        "versions": report.versions,
        "date": report.date,
        "duration_s": report.duration_s,
    }
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"
