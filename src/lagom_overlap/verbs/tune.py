"""`lagom tune`: a job file becomes groups, a study is driven through a backend, the verdict is written down."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import tomli_w

from lagom_overlap.backends.base import Backend
from lagom_overlap.collective import CommConfig, LaunchConfig, launch_of
from lagom_overlap.errors import BackendError, BundleError
from lagom_overlap.interrupts import held_back
from lagom_overlap.jobfile.describe import ENDED_BY_ITSELF, ONE_SIDED, OUT_OF_BUDGET
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.run_folder import RunFolder, RunKind, RunProcess, RunRecord
from lagom_overlap.jobfile.whole_step import WholeStep
from lagom_overlap.report.tune.page import render_tuning
from lagom_overlap.results.tune import MeasuredSearch, TuneResult
from lagom_overlap.trace.chrome_writer import chrome_trace
from lagom_overlap.tuners.bundle import BundleHeader, header_line, parse_header
from lagom_overlap.tuners.guard import make_tuner
from lagom_overlap.tuners.journal import Entry, StepKind, entries_from_json
from lagom_overlap.tuners.problem import Assignment, GroupProblem
from lagom_overlap.tuners.registry import (
    check_takes_warm_start,
    check_tuner_name,
    search_measurements,
    searches_launches,
)
from lagom_overlap.tuners.study import Study
from lagom_overlap.tuners.verdict import DEFAULT_ARM, TUNED_ARM
from lagom_overlap.verbs.measure import Journal, Observer, Run, ignore
from lagom_overlap.verbs.warm_start import check_run, warm_start_of

AGAIN: Final = ("simulated", "fake_nccl", "recorded")
"""Backends that answer the same when asked the same in the same order, in no time."""
RUN_FILES: Final = ("configs.toml", "run.json", "report.html", "timeline.json")
"""What is written at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Journaled:
    """A run that was cut off, to go on with in its own folder: the lines of its journal, the header first.

    None: it was cut off before its first measurement. `is_whole`: all was measured, and only files of it are missing.
    """

    folder: Path
    lines: tuple[str, ...]
    is_whole: bool = False


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
    resumes: "Journaled | None" = None

    @property
    def asked(self) -> Mapping[str, object]:
        """What the command line added, as run.json keeps it."""
        return {
            "backend": self.backend,
            "tuner": self.tuner,
            "bundle": self.bundle,
            "warm_start": self.warm_start,
        }

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
        check_run(request.warm_source)
    RunFolder.check(request.out)
    started = time.monotonic()
    backend = job.open(request.backend_name, backend_request)
    try:
        problems = tuple(backend.problem(group) for group in groups)
        warm = None if request.warm_source is None else warm_start_of(request.warm_source, problems)
        begun = () if warm is None else (f"The search began with {warm.source}.",)
        tuner = make_tuner(
            request.tuner_name, problems, seed=seed, options=request.options, guarded=spec.tune.guard, warm=warm
        )
        max_measurements = search_measurements(spec.tune.budget.measurements, request.tuner_name)
        study = Study(
            problems, job.tied(tuner, problems), seed=seed, num_pairs=spec.tune.pairs, max_measurements=max_measurements
        )
        header = header_line(
            backend_request.job_fingerprint,
            request.backend_name,
            problems,
            description=backend.description,
            notes=(*_backend_notes(request, backend), *begun),
            arm_words=job.arm_words(request.backend_name, backend),
            limits=backend_request.limits,
        )
        if request.resumes is None:
            kept: tuple[Entry, ...] = ()
            folder = RunFolder.create(request.out, spec.job.name)
        else:
            kept = _replayed(request, request.resumes, header, study, backend)
            folder = RunFolder(request.resumes.folder)
            begun = (*begun, f"Resumed: an earlier process had made {len(kept)} of the measurements.")
        folder.write(msgspec.structs.replace(_record(request), process=RunProcess.this()), skips_unwritable=True)
        journal = Journal(folder.path / "measurements.jsonl", problems)
        journal.start(header, kept)
        run = Run(
            study=study,
            backend=backend,
            problems=problems,
            max_seconds=spec.tune.budget.seconds,
            max_measurements=max_measurements,
        )
        try:
            run.drive(observe, journal.keep)
        except BackendError:  # nothing goes on in the folder any more: it can be resumed
            folder.write(_record(request), skips_unwritable=True)
            raise
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


def _record(request: TuneRequest) -> RunRecord:
    return RunRecord.now(
        RunKind.TUNE,
        seed=request.effective_seed,
        job=request.job.spec,
        request=request.asked,
        from_trace=request.job.from_trace,
    )


def _replayed(
    request: TuneRequest, journaled: Journaled, header: str, study: Study, backend: Backend
) -> tuple[Entry, ...]:
    """The journal's entries, which the study has taken as if they had just been measured.

    Of what a machine measured, the last round of the verdict is left out: a pair counts only if both its halves were
    measured one right after the other. A model or a recording runs what it ran before, which brings its noise to where
    it was.

    Raises:
        BundleError: if the journal is damaged, or of another job, machine, tuner or seed.
    """
    path = journaled.folder / "measurements.jsonl"
    if not journaled.lines:
        return ()
    if _offered(parse_header(journaled.lines[0], f"{str(path)!r}")) != _offered(parse_header(header, "this job")):
        raise BundleError(f"{str(path)!r} cannot be resumed: the job, or what this machine offers for it, has changed")
    problems = tuple(backend.problem(group) for group in request.job.groups)
    kept = entries_from_json(journaled.lines[1:], problems, first_line=2)
    is_again = request.backend_name in AGAIN
    if not is_again and not journaled.is_whole and kept and kept[-1].step.kind is StepKind.VERDICT:
        last = kept[-1].step.round
        whole = [entry for entry in kept if entry.step.kind is StepKind.SEARCH or entry.step.round != last]
        same = [entry for entry in kept if entry not in whole]
        pairs = len(same) // 2 * 2 if last is None else 0  # of the default against itself, the pairs are whole
        kept = (*whole, *same[:pairs])
    study.replay(kept)
    if is_again:
        groups = {group.name: group for group in request.job.groups}
        for entry in kept:
            for name, assignment in entry.step.assignments.items():
                backend.measure(groups[name], assignment)
    return kept


def _offered(header: BundleHeader) -> object:
    """What of a header must be the same for measurements to be of one run."""
    return header.job_fingerprint, header.backend, header.groups


def _notes(request: TuneRequest, run: Run) -> tuple[str, ...]:
    notes = _backend_notes(request, run.backend)
    if run.out_of_budget:
        return (*notes, OUT_OF_BUDGET)
    asked, done = request.job.spec.tune.budget.measurements, run.study.num_measurements
    if asked is None or run.interrupted or not 1 < done < asked:  # a fixed setting is measured once
        return notes
    return (*notes, ENDED_BY_ITSELF.format(tuner=request.tuner_name, done=done, asked=asked))


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
    record = _record(request)
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


_HEADER = "# Written by lagom tune. A collective with no keys is left untouched.\n"
_REFUSED = "# The paired A/B did not show a gain, so nothing is set.\n"


def configs_toml(problems: tuple[GroupProblem, ...], assignments: Mapping[str, Assignment], *, adopted: bool) -> str:
    """What to set, as TOML: `groups`, group -> collective -> knobs, and `launches`, group -> the computation's side.

    Nothing is set where the assignments were not adopted, nor for a collective that keeps its default: what the default
    spells out is the engine's own choice and need not be forced. `launches` is absent where nothing of it is set.
    """
    table: dict[str, object] = {"adopted": adopted}
    groups: dict[str, dict[str, dict[str, object]]] = {}
    for problem in problems:
        assignment = assignments[problem.group.name]
        rows = zip(problem.group.comm_names, assignment, problem.default, strict=True)
        groups[problem.group.name] = {
            name: _knobs(config) if adopted and config != default else {} for name, config, default in rows
        }
    table["groups"] = groups
    launches = {problem.group.name: launch_of(assignments[problem.group.name]) for problem in problems}
    if adopted and any(not launch.is_untouched for launch in launches.values()):
        table["launches"] = {name: _knobs(launch) for name, launch in launches.items() if not launch.is_untouched}
    return _HEADER + ("" if adopted else _REFUSED) + tomli_w.dumps(table)


def _knobs(config: CommConfig | LaunchConfig) -> dict[str, object]:
    return {knob: value for knob, value in asdict(config).items() if value is not None}
