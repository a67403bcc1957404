"""`lagom tune`: a job file becomes groups, a study is driven through a backend, the verdict is written down."""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from lagom_overlap import __version__
from lagom_overlap.backends.base import Assignment, Backend, Measurement
from lagom_overlap.backends.bundle import header_line
from lagom_overlap.deploy.configs import configs_toml
from lagom_overlap.job.build import groups_of, make_tuner, open_backend, request_of
from lagom_overlap.job.describe import arm_words, notes_of
from lagom_overlap.job.measure import Observer, Run, ignore
from lagom_overlap.job.result import TuneJson, configs_json, times_of_assignment, verdict_json
from lagom_overlap.job.spec import JobSpec
from lagom_overlap.record import create_folder, describe_machine, package_versions, utc_now, write_private
from lagom_overlap.report.html import render_html
from lagom_overlap.report.model import TuneReport
from lagom_overlap.timeline import Timeline
from lagom_overlap.trace.chrome import chrome_trace
from lagom_overlap.tune.base import Problems
from lagom_overlap.tune.journal import Entry, StepKind, entry_to_json
from lagom_overlap.tune.study import Study
from lagom_overlap.workload import OverlapGroup

RUNS_FOLDER: Final = "lagom-runs"
"""Where a run is written when no folder is named, below the current one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """Groups and a backend made ready elsewhere, in place of the job file's; `record` is kept in run.json."""

    groups: tuple[OverlapGroup, ...]
    backend: Backend
    backend_name: str
    notes: tuple[str, ...]
    arm_words: Mapping[str, str]
    record: msgspec.Struct


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
    def options(self) -> Mapping[str, object]:
        """The tuner's options: those of the job file, if it is the job file's tuner that runs."""
        return self.spec.tune.options if self.tuner_name == self.spec.tune.tuner else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """What a run found: the object that is printed, the report's data, the folder it was written to."""

    json: TuneJson
    report: TuneReport
    folder: Path


def default_folder(job_name: str) -> Path:
    """A fresh folder name below `lagom-runs/`, by job and time."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", job_name).strip(".-") or "job"
    stamp = utc_now().replace(":", "").replace("-", "")
    return Path(RUNS_FOLDER) / f"{safe}-{stamp}"


@dataclass(slots=True)
class _Journal:
    """The measurements of a run, on disk as soon as they are made."""

    path: Path
    problems: Problems
    entries: list[Entry] = field(default_factory=list)

    def start(self, header: str) -> None:
        write_private(self.path, header.encode() + b"\n")

    def keep(self, entry: Entry) -> None:
        self.entries.append(entry)
        with self.path.open("ab") as file:
            file.write(entry_to_json(entry, self.problems).encode() + b"\n")


def _timelines(entries: list[Entry], arm: str) -> dict[str, Timeline]:
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
    folder = request.out or default_folder(spec.job.name)
    started = time.monotonic()
    backend = request.ground.backend if request.ground else open_backend(spec, request.backend_name, backend_request)
    try:
        problems = tuple(backend.problem(group) for group in groups)
        tuner = make_tuner(request.tuner_name, problems, seed=seed, options=request.options, guarded=spec.tune.guard)
        study = Study(
            problems,
            tuner,
            seed=seed,
            num_pairs=spec.tune.pairs,
            max_measurements=spec.tune.budget.measurements,
        )
        if request.out is None:
            folder.parent.mkdir(exist_ok=True)
        create_folder(folder)
        journal = _Journal(folder / "measurements.jsonl", problems)
        journal.start(header_line(backend_request.job_fingerprint, request.backend_name, problems))
        run = Run(
            study=study,
            backend=backend,
            problems=problems,
            max_seconds=spec.tune.budget.seconds,
            max_measurements=spec.tune.budget.measurements,
            num_pairs=spec.tune.pairs,
        )
        run.drive(observe, journal.keep)
    finally:
        backend.close()
    return _write(request, folder, run, journal, time.monotonic() - started)


def _write(request: TuneRequest, folder: Path, run: Run, journal: _Journal, duration_s: float) -> TuneResult:
    study, problems = run.study, journal.problems
    recommended = study.recommended
    default: dict[str, Assignment] = {problem.group.name: problem.default for problem in problems}
    adopted = study.verdict is not None and study.verdict.adopted
    machine, versions, date = describe_machine(), package_versions(), utc_now()
    before, after = _timelines(journal.entries, "default"), _timelines(journal.entries, "tuned")
    notes = request.ground.notes if request.ground else notes_of(request.spec, request.backend_name)
    names = ["run.json", "configs.toml", "report.html", "timeline.json", "measurements.jsonl"]
    result = TuneJson(
        tool="lagom tune",
        version=__version__,
        seed=request.effective_seed,
        backend=request.backend_name,
        tuner=request.tuner_name,
        guarded=request.spec.tune.guard,
        job=request.spec.job.name,
        interrupted=run.interrupted,
        num_measurements=study.num_measurements,
        default=times_of_assignment(problems, journal.entries, "default", default),
        best=times_of_assignment(problems, journal.entries, "tuned", recommended),
        configs=configs_json(problems, recommended),
        verdict=verdict_json(study.verdict),
        notes=list(notes),
        files=[str(folder / name) for name in names],
    )
    report = TuneReport(
        job=request.spec.job.name,
        backend=request.backend_name,
        backend_description=run.backend.description,
        arm_words=request.ground.arm_words if request.ground else arm_words(request.backend_name),
        tuner=request.tuner_name,
        guarded=request.spec.tune.guard,
        seed=request.effective_seed,
        problems=problems,
        entries=tuple(journal.entries),
        recommended=recommended,
        verdict=study.verdict,
        timelines_before=before,
        timelines_after=after,
        machine=machine,
        versions=versions,
        date=date,
        duration_s=duration_s,
        repeats=request.spec.tune.repeats,
        notes=notes,
        interrupted=run.interrupted,
    )
    record: dict[str, object] = {"from_trace": request.ground.record} if request.ground else {}
    record |= {
        "job": request.spec,
        "result": result,
        "machine": machine,
        "versions": versions,
        "date": date,
        "duration_s": duration_s,
    }
    deployed = recommended if adopted else default
    write_private(folder / "run.json", msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    write_private(folder / "configs.toml", configs_toml(problems, deployed, adopted=adopted).encode())
    write_private(folder / "report.html", render_html(report).encode())
    stages = {f"before: {name}": line for name, line in before.items()}
    stages |= {f"after: {name}": line for name, line in after.items()}
    write_private(folder / "timeline.json", chrome_trace(stages))
    return TuneResult(json=result, report=report, folder=folder)
