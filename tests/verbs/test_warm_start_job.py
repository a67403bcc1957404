"""Warm starts of jobs: every source on a simulated job, what it says of another job, and what is refused."""

import json
from pathlib import Path

import pytest
from test_from_trace import default_config, true_group, truth
from test_from_trace import written as written_trace

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.cost.nccl.choice import candidates
from lagom_overlap.cost.nccl.machines import on_topology
from lagom_overlap.errors import BundleError, JobError
from lagom_overlap.hardware import load_preset
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.spec import JobSpec, parse_job, read_job
from lagom_overlap.sim import GroupSimulator
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.problem import Measurement
from lagom_overlap.tuners.registry import check_takes_warm_start
from lagom_overlap.verbs.tune import TuneRequest, run_tune
from lagom_overlap.verbs.warm_start import warm_start_of

JOB = """
[job]
name = "warm"
backend = "simulated"
ranks = 8

[cluster]
preset = "a40_nvlink"
nodes = 1

[[group]]
name = "layer"
count = 4
op = [{ name = "mm", gemm = [4096, 4096, 4096] }, { name = "mm2", gemm = [4096, 4096, 4096] }]
comm = [{ name = "ag", kind = "all_gather", bytes = "64 MiB" }]

[tune]
pairs = 3
"""


def written(folder: Path, text: str = JOB) -> Path:
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    return read_job(written(tmp_path))


@pytest.fixture
def problems(spec: JobSpec) -> Problems:
    groups = Job(spec).groups
    backend = Job(spec).open("simulated", Job(spec).request_for(groups))
    return tuple(backend.problem(group) for group in groups)


@pytest.fixture
def run(spec: JobSpec, tmp_path: Path) -> Path:
    run_tune(TuneRequest(job=Job(spec), out=tmp_path / "run"))
    return tmp_path / "run"


def rewritten(run: Path, change: dict[str, str]) -> None:
    path = run / "measurements.jsonl"
    text = path.read_text(encoding="utf-8")
    for old, new in change.items():
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def test_a_run_that_was_killed_in_the_middle_of_a_line_gives_what_it_had(
    run: Path, spec: JobSpec, problems: Problems
) -> None:
    (whole,) = warm_start_of(str(run), Job(spec), problems).earlier
    for name in ("run.json", "configs.toml", "report.html", "timeline.json"):
        (run / name).unlink()
    path = run / "measurements.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    (held,) = warm_start_of(str(run), Job(spec), problems).earlier
    assert sum(map(len, held.runs.values())) == sum(map(len, whole.runs.values())) - 1


def test_a_run_gives_its_measurements_and_what_it_ended_with(run: Path, spec: JobSpec, problems: Problems) -> None:
    recorded = [json.loads(line) for line in (run / "measurements.jsonl").read_text(encoding="utf-8").splitlines()[1:]]
    for source in (run, run / "measurements.jsonl"):
        (held,) = warm_start_of(str(source), Job(spec), problems).earlier
        measured = [done for runs in held.runs.values() for done in runs]
        assert sorted(done.makespan_s for done in measured) == sorted(
            row["groups"]["layer"]["measured"]["makespan_s"] for row in recorded
        )
        tuned = next(row for row in recorded if row["arm"] == "tuned")
        config = tuned["groups"]["layer"]["configs"]["ag"]
        assert held.best is not None
        assert held.best[0].num_channels == config["num_channels"]


def test_what_did_not_win_is_no_setting_to_begin_with(run: Path, spec: JobSpec, problems: Problems) -> None:
    rewritten(run, {'"arm":"tuned"': '"arm":"other"', '"arm":"default"': '"arm":"tuned"'})
    rewritten(run, {'"arm":"other"': '"arm":"default"'})
    (held,) = warm_start_of(str(run), Job(spec), problems).earlier
    assert held.best is None
    assert held.runs


def test_configs_toml_gives_the_settings_alone(run: Path, spec: JobSpec, problems: Problems) -> None:
    (held,) = warm_start_of(str(run / "configs.toml"), Job(spec), problems).earlier
    assert held.best == warm_start_of(str(run), Job(spec), problems).earlier[0].best
    assert not held.runs


def test_the_simulator_is_tuned_first_and_a_search_on_it_ends_no_worse(spec: JobSpec, tmp_path: Path) -> None:
    cold = run_tune(TuneRequest(job=Job(spec), out=tmp_path / "cold"))
    warm = run_tune(TuneRequest(job=Job(spec), out=tmp_path / "warm", warm_start="simulator"))
    assert warm.best.makespan_s <= 1.01 * cold.best.makespan_s  # type: ignore[union-attr]
    assert any("The search began with the simulator" in note for note in warm.notes)
    assert not any("began" in note for note in cold.notes)
    first, second = (tmp_path / "warm" / "measurements.jsonl").read_text(encoding="utf-8").splitlines()[1:3]
    assert "warm start" not in first
    assert "warm start" in second


def test_nccls_table_is_nccls(spec: JobSpec, problems: Problems) -> None:
    ways = warm_start_of("nccl", Job(spec), problems).ways["layer"]
    table = candidates(*on_topology(Collective(CollectiveKind.ALL_GATHER, 64 << 20, 8), load_preset("a40_nvlink", 1)))
    assert {(way.algorithm, way.protocol): way.bytes_per_s for way in table} == {
        way: held.bytes_per_s for way, held in ways.items()
    }


def test_a_job_file_names_its_warm_start_as_seen_from_itself(run: Path, tmp_path: Path) -> None:
    spec = read_job(written(tmp_path, JOB.replace("pairs = 3", 'pairs = 3\nwarm_start = "run"')))
    assert spec.tune.warm_start == str(run)
    found = run_tune(TuneRequest(job=Job(spec), out=tmp_path / "again"))
    assert any("The search began with" in note and "measurements of 1 groups" in note for note in found.notes)
    words = read_job(written(tmp_path, JOB.replace("pairs = 3", 'pairs = 3\nwarm_start = "nccl"')))
    assert words.tune.warm_start == "nccl"


def test_a_run_of_groups_that_this_job_does_not_have_is_refused(run: Path, tmp_path: Path) -> None:
    other = read_job(written(tmp_path, JOB.replace('"layer"', '"another"')))
    with pytest.raises(JobError, match="says nothing of this job's groups"):
        run_tune(TuneRequest(job=Job(other), out=tmp_path / "other", warm_start=str(run)))
    assert not (tmp_path / "other").exists()


def test_groups_beside_those_of_the_job_are_left_out(run: Path, tmp_path: Path) -> None:
    more = JOB.replace("[tune]", JOB[JOB.index("[[group]]") : JOB.index("[tune]")].replace("layer", "other") + "[tune]")
    both = read_job(written(tmp_path, more.replace('"ag"', '"ag2"', 2).replace('"ag2"', '"ag"', 1)))
    run_tune(TuneRequest(job=Job(both), out=tmp_path / "both"))
    spec = read_job(written(tmp_path))
    found = run_tune(TuneRequest(job=Job(spec), out=tmp_path / "one", warm_start=str(tmp_path / "both")))
    assert any("of 1 groups" in note for note in found.notes)


@pytest.mark.parametrize(
    "case",
    [
        ("nowhere", JobError, "does not exist; allowed: a run folder"),
        ("bad.toml", BundleError, "no configs.toml of lagom tune"),
        ("measurements.jsonl", BundleError, "line 1 is no header"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(
    case: tuple[str, type[Exception], str], spec: JobSpec, problems: Problems, tmp_path: Path
) -> None:
    source, error, words = case
    (tmp_path / "bad.toml").write_text("a = 1\n", encoding="utf-8")
    (tmp_path / "measurements.jsonl").write_text("{}\n", encoding="utf-8")
    with pytest.raises(error, match=words):
        warm_start_of(str(tmp_path / source), Job(spec), problems)


def test_a_damaged_line_is_named(run: Path, spec: JobSpec, problems: Problems) -> None:
    path = run / "measurements.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([*lines[:3], "{", *lines[4:]]), encoding="utf-8")
    with pytest.raises(BundleError, match="line 4"):
        warm_start_of(str(run), Job(spec), problems)


def test_without_a_cluster_there_is_no_simulator_and_no_table(problems: Problems) -> None:
    group = [{"name": "layer", "op": [{"name": "mm", "gemm": [8, 8, 8]}], "comm": []}]
    group[0]["comm"] = [{"name": "ag", "kind": "all_gather", "bytes": "64 MiB"}]
    bare = parse_job({"job": {"name": "bare"}, "group": group}, "job")
    for source in ("simulator", "nccl"):
        with pytest.raises(JobError, match="needs a cluster"):
            warm_start_of(source, Job(bare), problems)


def test_tuners_that_take_none_are_refused_before_anything_runs(spec: JobSpec, tmp_path: Path) -> None:
    check_takes_warm_start("ours")
    check_takes_warm_start("lagom", "ours")  # one of several is enough
    with pytest.raises(JobError, match="takes no warm start"):
        run_tune(TuneRequest(job=Job(spec), tuner="lagom", out=tmp_path / "x", warm_start="simulator"))
    assert not (tmp_path / "x").exists()


def test_the_simulator_tells_times_of_the_default_too(spec: JobSpec, problems: Problems) -> None:
    (held,) = warm_start_of("simulator", Job(spec), problems).earlier
    assert all(isinstance(done, Measurement) for runs in held.runs.values() for done in runs)
    assert problems[0].default in held.runs


def test_a_trace_gives_the_groups_whose_collectives_are_the_jobs(tmp_path: Path) -> None:
    model = truth()
    trace = written_trace(tmp_path / "rank0.json.gz", model, true_group(model))
    text = JOB.replace("a40_nvlink", "h100_dgx").replace("64 MiB", "256 MiB")
    spec = read_job(written(tmp_path, text))
    groups = Job(spec).groups
    backend = Job(spec).open("simulated", Job(spec).request_for(groups))
    problems = tuple(backend.problem(group) for group in groups)
    found = warm_start_of(str(trace), Job(spec), problems)
    (held,) = found.earlier
    assert "1 groups of this job" in found.source
    config = default_config(model, true_group(model))
    untouched = held.runs[problems[0].default][0]
    wire_s = GroupSimulator(true_group(model), model).evaluate((config,)).comm_s[0]
    assert 0.3 < untouched.comm_s[0] / wire_s < 3  # the trace's slow wire, not the preset's own
    other = read_job(written(tmp_path, text.replace("256 MiB", "8 MiB")))
    small = tuple(backend.problem(group) for group in Job(other).groups)
    with pytest.raises(JobError, match="says nothing"):
        warm_start_of(str(trace), Job(other), small)
