"""`[tune] warm_start` and `lagom tune --warm-start`: where a search may begin, read and made comparable with this job.

    RUN                 a run folder of lagom tune (or its measurements.jsonl): all that was measured of groups with the
                        names and collectives of this job's, and what it ended with if that was adopted
    configs.toml        what it ended with alone: it joins the first probes
    simulator           the job's cluster and profile: each group is tuned there first, without noise
    nccl                NCCL's own cost table for the job's cluster: how its algorithms and protocols compare
    TRACE               profiler traces (a file, or a folder of them): groups with the same collectives are tuned on the
                        model fitted to the trace first

None of it is believed without measurements of this run (`tuners/machine/lessons.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from lagom_overlap.collective import CommConfig
from lagom_overlap.cost.nccl.choice import candidates
from lagom_overlap.cost.nccl.machines import on_topology
from lagom_overlap.errors import BundleError, JobError, LagomError, SpaceError
from lagom_overlap.hardware import Cluster
from lagom_overlap.jobfile.job import Job
from lagom_overlap.record import read_regular
from lagom_overlap.sim import GroupSimulator
from lagom_overlap.toml_tables import parse_toml
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.bundle import parse_header
from lagom_overlap.tuners.guard import make_tuner
from lagom_overlap.tuners.journal import entries_from_json
from lagom_overlap.tuners.problem import Assignment, Failure, GroupProblem, Measurement, Outcome
from lagom_overlap.tuners.registry import OURS
from lagom_overlap.tuners.warm_start import Earlier, ExpectedWay, WarmSource, WarmStart, Ways, earlier_of
from lagom_overlap.verbs.from_trace import FromTraceRequest, predicted_job

MEASUREMENTS: Final = "measurements.jsonl"
MAX_BYTES: Final = 1 << 30
MAX_CONFIGS_BYTES: Final = 1 << 24


def check_source(source: str) -> None:
    """Refuses a source that is not there, before anything is started.

    Raises:
        JobError: if it is no word that is known, and no file or folder.
    """
    if source not in list(WarmSource) and not Path(source).exists():
        raise JobError(
            f"warm start {source!r} does not exist; allowed: a run folder, a configs.toml, profiler traces, "
            f"{', '.join(WarmSource)}"
        )


def warm_start_of(source: str, job: Job, problems: Problems, *, seed: int = 0) -> WarmStart:
    """What a source says of the groups that are to be tuned; it may be nothing of some of them.

    Raises:
        JobError: if it is neither a source nor a file that is understood, needs a cluster that the job does not name,
            or says nothing of any group.
        LagomError: if a file of it is damaged.
    """
    check_source(source)
    if source == WarmSource.SIMULATOR:
        earlier = _of_simulator(job, problems, seed)
    elif source == WarmSource.NCCL:
        earlier = _of_nccl(job, problems)
    else:
        earlier = _of_path(Path(source), job, problems, seed)
    if not earlier.earlier and not earlier.ways:
        raise JobError(f"the warm start {source!r} says nothing of this job's groups: their collectives differ")
    return earlier


def _of_path(path: Path, job: Job, problems: Problems, seed: int) -> WarmStart:
    if (path / MEASUREMENTS).is_file() or path.name == MEASUREMENTS:  # also of a run that was killed
        return _of_run(path if path.is_file() else path / MEASUREMENTS, problems)
    if path.suffix == ".toml":
        return _of_configs(path, problems)
    return _of_trace(path, job, problems, seed)


# An earlier run.


def _of_run(path: Path, problems: Problems) -> WarmStart:
    where = f"warm start {str(path)!r}"
    try:
        lines = read_regular(path, MAX_BYTES).decode().splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{where} cannot be read: {error}") from None
    if lines and not lines[-1].endswith("\n"):  # cut off by whatever ended the run
        lines.pop()
    header = parse_header(lines[0] if lines else "", where)
    recorded = []
    for problem in problems:
        held = header.groups.get(problem.group.name)
        if held is not None and held.comms == problem.group.comm_names:
            recorded.append(replace(problem, spaces=held.spaces, default=held.default, baselines=held.baselines))
    if not recorded:
        return WarmStart(source=where)
    entries = entries_from_json(_only(lines[1:], {problem.group.name for problem in recorded}), tuple(recorded))
    earlier = tuple(earlier_of(problem, entries) for problem in recorded)
    count = sum(len(done) for held in earlier for done in held.runs.values())
    return WarmStart(source=f"{count} measurements of {len(earlier)} groups in {str(path)!r}", earlier=earlier)


def _only(lines: list[str], names: set[str]) -> list[str]:
    """The steps without the groups that this job does not have."""
    kept = []
    for number, line in enumerate(lines, start=2):
        try:
            row: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
            row["groups"] = {name: group for name, group in row["groups"].items() if name in names}
        except (msgspec.MsgspecError, KeyError, AttributeError) as error:
            raise BundleError(f"line {number} of the measurements is damaged: {error}") from None
        kept.append(msgspec.json.encode(row).decode())
    return kept


class _Configs(msgspec.Struct):
    """The part of configs.toml that is needed."""

    adopted: bool
    groups: dict[str, dict[str, dict[str, Any]]]


def _of_configs(path: Path, problems: Problems) -> WarmStart:
    where = f"warm start {str(path)!r}"
    try:
        saved = msgspec.convert(parse_toml(read_regular(path, MAX_CONFIGS_BYTES)), _Configs)
        earlier = []
        for problem in problems:
            table = saved.groups.get(problem.group.name, {})
            if any(table.get(name) for name in problem.group.comm_names):
                rows = zip(problem.group.comm_names, problem.default, strict=True)
                best = tuple(
                    msgspec.convert(table[name], CommConfig) if table.get(name) else default for name, default in rows
                )
                earlier.append(Earlier(problem=problem, best=best))
    except (OSError, ValueError, msgspec.MsgspecError, LagomError) as error:
        raise BundleError(f"{where} is no configs.toml of lagom tune: {error}") from None
    return WarmStart(source=f"settings of {len(earlier)} groups in {str(path)!r}", earlier=tuple(earlier))


# What was not measured.


def _cluster(job: Job, source: WarmSource) -> Cluster:
    cluster = job.cluster
    if cluster is None:
        raise JobError(f"the warm start {source.value!r} needs a cluster: give [cluster] preset = ... in the job file")
    return cluster


def _of_simulator(job: Job, problems: Problems, seed: int) -> WarmStart:
    _cluster(job, WarmSource.SIMULATOR)
    model = job.price
    simulators = {problem.group.name: GroupSimulator(problem.group, model) for problem in problems}

    def measure(problem: GroupProblem, assignment: Assignment) -> Outcome:
        try:
            times = simulators[problem.group.name].evaluate(assignment)
        except SpaceError as error:
            return Failure(str(error))
        return Measurement(makespan_s=times.makespan_s, comp_s=times.comp_s, comm_s=times.comm_s)

    words = f"the simulator ({model.cluster.name}, profile {job.spec.cost.profile})"
    return WarmStart(source=words, earlier=_rehearsed(problems, measure, seed))


def _of_trace(path: Path, job: Job, problems: Problems, seed: int) -> WarmStart:
    predicted = predicted_job(FromTraceRequest(traces=(path,), spec=job.spec, seed=seed))
    traced = [Earlier(problem=predicted.backend.problem(group)) for group in predicted.groups]
    pairs = {problem.group.name: each.problem.group for problem in problems for each in traced if each.is_like(problem)}

    def measure(problem: GroupProblem, assignment: Assignment) -> Outcome:
        return predicted.backend.measure(pairs[problem.group.name], assignment)

    known = tuple(problem for problem in problems if problem.group.name in pairs)
    words = f"the trace {str(path)!r}, of which {len(known)} groups of this job were found"
    return WarmStart(source=words, earlier=_rehearsed(known, measure, seed) if known else ())


def _rehearsed(
    problems: Problems, measure: Callable[[GroupProblem, Assignment], Outcome], seed: int
) -> tuple[Earlier, ...]:
    """Tunes the groups where nothing has to be run; what was asked there and what it ended with."""
    tuner = make_tuner(OURS, problems, seed=seed, options={}, guarded=False)
    named = {problem.group.name: problem for problem in problems}
    runs: dict[str, dict[Assignment, tuple[Measurement, ...]]] = {name: {} for name in named}
    while (trial := tuner.ask()) is not None:
        outcomes = {name: measure(named[name], assignment) for name, assignment in trial.assignments.items()}
        for name, outcome in outcomes.items():
            if isinstance(outcome, Measurement):
                runs[name][trial.assignments[name]] = (outcome,)
        tuner.tell(trial, outcomes)
    recommended = tuner.recommend()
    return tuple(Earlier(problem=named[name], runs=runs[name], best=recommended[name]) for name in named)


def _of_nccl(job: Job, problems: Problems) -> WarmStart:
    cluster = _cluster(job, WarmSource.NCCL)
    ways = {problem.group.name: ways_of_group for problem in problems if (ways_of_group := nccl_ways(problem, cluster))}
    return WarmStart(source=f"NCCL's cost table for {cluster.name}", ways=ways)


def nccl_ways(problem: GroupProblem, cluster: Cluster) -> Ways:
    """NCCL's latencies and rates for a group's largest collective; nothing for point-to-point, which has one way."""
    collectives = [comm.collective for comm in problem.group.comms if not comm.collective.kind.traits.is_point_to_point]
    if not collectives:
        return {}
    largest = max(collectives, key=lambda collective: collective.wire_bytes)
    ways = candidates(*on_topology(largest, cluster))
    return {(way.algorithm, way.protocol): ExpectedWay(way.latency_s, way.bytes_per_s) for way in ways}
