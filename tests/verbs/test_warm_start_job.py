"""Warm starts of jobs: what a run says of a simulated job, of another one, and what is refused."""

import json
from pathlib import Path

import pytest

from lagom_overlap.errors import BundleError, JobError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.reading import read_job
from lagom_overlap.jobfile.spec import JobSpec
from lagom_overlap.tuners.base import Problems
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
    (whole,) = warm_start_of(str(run), problems).earlier
    for name in ("run.json", "configs.toml", "report.html", "timeline.json"):
        (run / name).unlink()
    path = run / "measurements.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    (held,) = warm_start_of(str(run), problems).earlier
    assert sum(map(len, held.runs.values())) == sum(map(len, whole.runs.values())) - 1


def test_a_run_gives_its_measurements_and_what_it_ended_with(run: Path, spec: JobSpec, problems: Problems) -> None:
    recorded = [json.loads(line) for line in (run / "measurements.jsonl").read_text(encoding="utf-8").splitlines()[1:]]
    (held,) = warm_start_of(str(run), problems).earlier
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
    (held,) = warm_start_of(str(run), problems).earlier
    assert held.best is None
    assert held.runs


def test_a_job_file_names_its_warm_start_as_seen_from_itself(run: Path, tmp_path: Path) -> None:
    spec = read_job(written(tmp_path, JOB.replace("pairs = 3", 'pairs = 3\nwarm_start = "run"')))
    assert spec.tune.warm_start == str(run)
    found = run_tune(TuneRequest(job=Job(spec), out=tmp_path / "again"))
    assert any("The search began with" in note and "measurements of 1 groups" in note for note in found.notes)
    first, second = (tmp_path / "again" / "measurements.jsonl").read_text(encoding="utf-8").splitlines()[1:3]
    assert "warm start" not in first
    assert "warm start" in second


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


def test_what_is_no_run_folder_is_refused_in_words(problems: Problems, tmp_path: Path) -> None:
    for name in ("nowhere", "."):
        with pytest.raises(JobError, match=r"is no run folder of lagom tune: there is no measurements\.jsonl in it"):
            warm_start_of(str(tmp_path / name), problems)
    (tmp_path / "measurements.jsonl").write_text("{}\n", encoding="utf-8")
    with pytest.raises(BundleError, match="line 1 is no header"):
        warm_start_of(str(tmp_path), problems)


def test_a_damaged_line_is_named(run: Path, spec: JobSpec, problems: Problems) -> None:
    path = run / "measurements.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([*lines[:3], "{", *lines[4:]]), encoding="utf-8")
    with pytest.raises(BundleError, match="line 4"):
        warm_start_of(str(run), problems)


def test_tuners_that_take_none_are_refused_before_anything_runs(spec: JobSpec, tmp_path: Path) -> None:
    check_takes_warm_start("ours")
    check_takes_warm_start("lagom", "ours")  # one of several is enough
    with pytest.raises(JobError, match="takes no warm start"):
        run_tune(TuneRequest(job=Job(spec), tuner="lagom", out=tmp_path / "x", warm_start="anywhere"))
    assert not (tmp_path / "x").exists()
