"""`lagom plan --work`: the same plan.toml from every run."""

import json

import pytest

from lagom_overlap.cli import main

JOB = """
[job]
name = "small"
[model]
name = "phi-2"
seq_len = 256
[cluster]
preset = "a40_nvlink"
nodes = 1
[parallel]
fsdp = 8
[plan]
planner = "ours"
options = { split = false }
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


def test_two_runs_with_the_same_work_write_the_same_plan(folder):
    for name in ("one", "two"):
        assert main(["plan", "job.toml", "--work", "0.5", "--out", name]) == 0
    first, second = ((folder / name / "plan.toml").read_bytes() for name in ("one", "two"))
    assert first == second
    notes = json.loads((folder / "one/run.json").read_text())["result"]["notes"]
    assert any("of 0.5 million steps; the same step and work give the same plan" in note for note in notes)


def test_the_jobs_own_work_is_used_with_its_seconds_above_it(folder):
    (folder / "job.toml").write_text(JOB + "work = 0.25\nbudget_s = 500\n")
    assert main(["plan", "job.toml", "--out", "out"]) == 0
    notes = json.loads((folder / "out/run.json").read_text())["result"]["notes"]
    assert any("of 0.25 million steps" in note for note in notes)


@pytest.mark.parametrize("work", ["0", "-1", "inf", "nan"])
def test_work_that_is_no_amount_is_refused(work, capsys):
    assert main(["plan", "job.toml", f"--work={work}"]) == 2
    assert "must be positive and finite" in capsys.readouterr().err


def test_work_is_not_for_a_plan_that_exists(capsys):
    assert main(["plan", "job.toml", "--work", "1", "--apply", "plan.toml"]) == 2
    assert "--apply has one" in capsys.readouterr().err


def test_no_work_in_a_job_is_refused(folder, capsys):
    (folder / "job.toml").write_text(JOB + "work = 0\n")
    assert main(["plan", "job.toml"]) == 2
    assert "work" in capsys.readouterr().err
