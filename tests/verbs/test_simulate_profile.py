"""`lagom simulate --profile`: measured here, written as a cluster file that simulate and tune take."""

import json
import tomllib
from pathlib import Path

import msgspec
import pytest

from lagom_overlap.cli.main import main
from lagom_overlap.cost.operators import load_operators
from lagom_overlap.errors import JobError, OutputError
from lagom_overlap.hardware import load_preset
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.spec import JobSpec, parse_job
from lagom_overlap.verbs.simulate_profile import run_profile
from lagom_overlap.verbs.tune import TuneRequest, run_tune

pytestmark = pytest.mark.torch

GROUP = {
    "name": "small",
    "block": {"seq_len": 32, "hidden": 64, "heads": 4, "ffn": 128},
    "comm": [{"name": "ag", "kind": "all_gather", "bytes": "1 MiB"}],
}


def job(**more: object) -> JobSpec:
    return parse_job({"job": {"name": "p"}, "group": [GROUP], **more}, "job.toml")


def test_a_profile_becomes_a_cluster_file_that_tune_searches_on(tmp_path: Path) -> None:
    result = run_profile(Job(job()), tmp_path / "p", repeats=2)
    assert result.files[0] == tmp_path / "p" / "machine.toml"
    assert {row.pieces for row in result.operators} == {1, 2, 4}
    assert result.held_out_mean_abs_error is not None
    assert result.num_not_held_out > 0
    cluster = load_preset(str(result.files[0]))
    operators = load_operators(cluster.gpu)
    assert operators.fitted_on == "a profile of this machine"
    assert cluster.gpu.name == operators.name == "this machine"
    spec = job(cluster={"preset": str(result.files[0])}, tune={"tuner": "fixed_min", "pairs": 3})
    found = run_tune(TuneRequest(job=Job(spec), out=tmp_path / "run"))
    assert found.default is not None
    assert found.default.makespan_s > 0


def test_the_verb_prints_one_object_or_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        '[job]\nname = "p"\n[[group]]\nname = "g"\nop = [{ name = "a", memory = "64 KiB" }]\n'
        'comm = [{ name = "c", kind = "all_reduce", bytes = 1024 }]\n'
    )
    assert main(["simulate", str(path), "--profile", "--json", "--out", str(tmp_path / "a")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["held_out_mean_abs_error"] is None
    assert tomllib.loads(Path(printed["files"][0]).read_text())["operators"]["stream_bytes_per_s"] > 0
    assert main(["simulate", str(path), "--profile", "--out", str(tmp_path / "b")]) == 0
    assert "nothing could be held out" in capsys.readouterr().out
    assert main(["simulate", str(path), "--profile"]) == 2
    assert "give --out DIR" in capsys.readouterr().err


def test_a_job_of_a_model_and_a_folder_that_exists_are_refused(tmp_path: Path) -> None:
    raw = {
        "job": {"name": "m"},
        "model": {"name": "phi-2", "seq_len": 128},
        "cluster": {"preset": "a40_nvlink"},
        "parallel": {"fsdp": 8},
    }
    with pytest.raises(JobError, match="has a \\[model\\]"):
        run_profile(Job(msgspec.convert(raw, JobSpec)), tmp_path / "p")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    with pytest.raises(OutputError):
        run_profile(Job(job()), tmp_path / "there")
