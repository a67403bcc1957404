"""`lagom tune --from-trace RUN`, where RUN is a run folder of ours: its default runs are the trace.

Of the recording only the runs of the untouched default are used. They tell how long the computation takes alone, and by
which factor collectives cost more there than in the calibration (another load, another clock), given the machine's
constants; those come from `calibration.json` in the same folder, fitted on other overlaps (one default
setting cannot tell how slices and channels act). What is predicted of the recording's other arms can be compared with
what was measured of them (`arms_of_run`).
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from lagom_overlap.backends.fitted import FittedBackend, overlap_of
from lagom_overlap.cost.overlap_fit import OverlapConstants, OverlapTimes, infer_from_default, scaled
from lagom_overlap.cost.overlap_preset import FILE_NAME, read_constants
from lagom_overlap.errors import BundleError, JobError
from lagom_overlap.jobfile.job import Job, PredictedJob
from lagom_overlap.jobfile.run_folder import RECORD, RunFolder, RunKind
from lagom_overlap.jobfile.spec import JobSpec
from lagom_overlap.record import read_regular
from lagom_overlap.tuners.bundle import parse_header
from lagom_overlap.tuners.journal import Entry, StepKind, entries_from_json
from lagom_overlap.tuners.problem import Assignment, GroupProblem, Measurement
from lagom_overlap.tuners.verdict import DEFAULT_ARM, SAME_ARM
from lagom_overlap.units import format_seconds
from lagom_overlap.verbs.from_trace import FromTraceRequest, predicted_job

_MAX_BYTES: Final = 1 << 30
"""Chosen: the journal of a long search has some MB."""


class OwnTraceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a predicted run keeps of the recording: default makespans as measured, computations alone as inferred.

    `scale` is how much dearer collectives were in the recording than in the calibration.
    """

    recorded_on: str
    calibration: str
    num_default_runs: dict[str, int]
    default_s: dict[str, float]
    comp_alone_s: dict[str, float]
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRun:
    """A run folder of `lagom tune`."""

    job: Job
    recorded_on: str
    problems: tuple[GroupProblem, ...]
    entries: tuple[Entry, ...]

    def runs_of(self, wanted: Mapping[str, Assignment]) -> dict[str, list[Measurement]]:
        """Every measurement of these assignments, by group."""
        runs: dict[str, list[Measurement]] = defaultdict(list)
        for entry in self.entries:
            for name, outcome in entry.outcomes.items():
                if isinstance(outcome, Measurement) and entry.step.assignments[name] == wanted[name]:
                    runs[name].append(outcome)
        return dict(runs)

    def arm(self, name: str) -> dict[str, list[Measurement]]:
        """The measurements of one arm of the verdict, by group."""
        runs: dict[str, list[Measurement]] = defaultdict(list)
        for entry in self.entries:
            if entry.step.kind is StepKind.VERDICT and entry.step.arm == name:
                for group, outcome in entry.outcomes.items():
                    if isinstance(outcome, Measurement):
                        runs[group].append(outcome)
        return dict(runs)


def is_own_run(path: Path) -> bool:
    """Whether a folder is a run of `lagom tune`."""
    return (path / RECORD).is_file() and (path / "measurements.jsonl").is_file()


def read_own_run(folder: Path) -> OwnRun:
    """A run folder.

    Raises:
        JobError: if it is another verb's.
        BundleError: if a file of it cannot be read or is damaged.
    """
    run, path = RunFolder.read(folder), folder / "measurements.jsonl"
    if run.kind is not RunKind.TUNE:
        raise JobError(f"{str(folder)!r} is a run of lagom {run.kind}, must be one of lagom tune")
    job = Job(run.spec())
    try:
        lines = read_regular(path, _MAX_BYTES).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"run folder {str(folder)!r} cannot be read: {error}") from None
    header = parse_header(lines[0] if lines else "", f"bundle {str(path)!r}")
    problems = []
    for group in job.groups:
        recorded = header.groups.get(group.name)
        if recorded is None or recorded.comms != group.comm_names:
            raise BundleError(f"bundle {str(path)!r} holds no group {group.name!r} with these collectives")
        problems.append(
            GroupProblem(
                group=group,
                spaces=recorded.spaces,
                default=recorded.default,
                baselines=recorded.baselines,
                launches=recorded.launches,
            )
        )
    entries = entries_from_json(lines[1:], tuple(problems), first_line=2)
    return OwnRun(job=job, recorded_on=header.backend, problems=tuple(problems), entries=entries)


def fitted_to_default(run: OwnRun, constants: OverlapConstants) -> tuple[FittedBackend, OwnTraceRecord]:
    """A backend that predicts the run's groups, from its default runs only.

    Raises:
        BundleError: if a group's default was never measured, or its collectives alone would take longer.
    """
    runs = run.runs_of({problem.group.name: problem.default for problem in run.problems})
    default_s, alone_s, count = dict[str, float](), dict[str, float](), dict[str, int]()
    scales = dict[str, float]()
    for problem in run.problems:
        name = problem.group.name
        if name not in runs:
            raise BundleError(f"the recording holds no run of group {name!r} under its default")
        default_s[name], count[name] = median(measurement.makespan_s for measurement in runs[name]), len(runs[name])
        try:
            overlap = overlap_of(problem.group, problem.default, 0.0)
            mean = Measurement.from_runs(runs[name])
            times = OverlapTimes(mean.makespan_s, mean.comp_s, mean.comm_s)
            inferred = infer_from_default(overlap, constants, times)
            alone_s[name], scales[name] = inferred.comp_alone_s, inferred.scale
        except (ValueError, KeyError) as error:
            raise BundleError(f"group {name!r}: the default runs do not tell the computation alone: {error}") from None
    kept = OwnTraceRecord(
        recorded_on=run.recorded_on,
        calibration="",
        num_default_runs=count,
        default_s=default_s,
        comp_alone_s=alone_s,
        scale=median(scales.values()),
    )
    return FittedBackend(scaled(constants, kept.scale), alone_s, run.job.limits), kept


@dataclass(frozen=True, slots=True)
class ArmCheck:
    """One arm of a recorded verdict: its measured makespans, and what was predicted from the default runs only."""

    arm: str
    predicted_s: float
    measured_s: tuple[float, ...]

    @property
    def error(self) -> float:
        """Predicted over the measured median, minus 1."""
        return self.predicted_s / median(self.measured_s) - 1


def arms_of_run(run: OwnRun, constants: OverlapConstants) -> tuple[ArmCheck, ...]:
    """Every arm of the recorded verdict but the default, predicted from the default runs and compared.

    Raises:
        BundleError: if the default was never measured.
    """
    backend, _ = fitted_to_default(run, constants)
    names = dict.fromkeys(e.step.arm for e in run.entries if e.step.arm not in (None, DEFAULT_ARM, SAME_ARM))
    arms = []
    for arm in names:
        first = next(entry for entry in run.entries if entry.step.arm == arm)
        outcomes = {
            problem.group.name: backend.measure(problem.group, first.step.assignments[problem.group.name])
            for problem in run.problems
        }
        counts = {problem.group.name: problem.group.count for problem in run.problems}
        predicted = [one.makespan_s * counts[g] for g, one in outcomes.items() if isinstance(one, Measurement)]
        measured = run.arm(str(arm))
        if len(predicted) < len(run.problems) or len(measured) < len(run.problems):
            continue
        rounds = zip(*(measured[name] for name in counts), strict=False)
        totals = tuple(
            sum(one.makespan_s * count for one, count in zip(row, counts.values(), strict=True)) for row in rounds
        )
        arms.append(ArmCheck(str(arm), sum(predicted), totals))
    return tuple(arms)


def job_of_run(folder: Path) -> PredictedJob:
    """The recorded job, predicted from its default runs and the calibration with them.

    Raises:
        LagomError: if the folder or its calibration cannot be read, or the default was never measured.
    """
    if not (folder / FILE_NAME).is_file():
        raise JobError(
            f"{str(folder)!r} is a run of lagom tune; to predict from it, put a {FILE_NAME} of the same machine into "
            "it (benchmarks/calibration_gloo.py --save writes one)"
        )
    run = read_own_run(folder)
    constants, note = read_constants(folder / FILE_NAME)
    backend, kept = fitted_to_default(run, constants)
    alone = ", ".join(f"{name} {format_seconds(value)}" for name, value in kept.comp_alone_s.items())
    return PredictedJob(
        spec=run.job.spec,
        traced=tuple(problem.group for problem in run.problems),
        backend=backend,
        caveats=(
            "Predicted from a trace: nothing was run. Of the recording only the default's runs are used.",
            f"Inferred from them: the computations alone take {alone}; collectives cost {kept.scale:.2f} times what "
            "they did in the calibration.",
            f"How slices and channels act comes from {FILE_NAME}: {note}",
        ),
        default_words="the recorded default (predicted)",
        trace_record=msgspec.structs.replace(kept, calibration=note),
    )


def job_for(
    spec: JobSpec | None,
    traces: Path | None,
    *,
    seed: int | None = None,
    backend: str | None = None,
    bundle: Path | None = None,
) -> Job:
    """The job that is tuned: a job file's, or the one that traces or a run folder of ours show.

    Raises:
        LagomError: if there is neither a job nor a trace, both say what is tuned, or the trace cannot be used.
    """
    if traces is None:
        if spec is None:
            raise JobError("give a job file, or --from-trace with profiler traces")
        return Job(spec)
    for flag, given in (("backend", backend), ("bundle", bundle)):
        if given is not None:
            raise JobError(f"--{flag} has no meaning with --from-trace: the times are predicted from the trace")
    if is_own_run(traces):
        if spec is not None:
            raise JobError("a job file has no meaning with --from-trace RUN: a run folder holds its own")
        return job_of_run(traces)
    return predicted_job(FromTraceRequest(traces=(traces,), spec=spec, seed=seed))
