"""A recording made by a known model: what is predicted from its default runs is what that model gives."""

import json
import shutil
import tomllib
from pathlib import Path

import msgspec
import pytest

from lagom_overlap.backends.fitted import FittedBackend
from lagom_overlap.cli import main
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.cost.overlap_fit import OverlapConstants, Way, WayConstants
from lagom_overlap.cost.overlap_preset import FILE_NAME, constants_to_json, read_constants
from lagom_overlap.errors import BundleError, JobError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.reading import parse_job
from lagom_overlap.verbs.own_trace import arms_of_run, fitted_to_default, job_of_run, read_own_run
from lagom_overlap.verbs.tune import TuneRequest, run_tune

AG, RS = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
ALONE_S = 0.2


def way(*values):
    return WayConstants(**dict(zip(WayConstants.__slots__, values, strict=True)))


CONSTANTS = OverlapConstants(
    ways={
        Way(AG, False): way(1.4e-9, 0.0, 0.7e-9, 0.0),
        Way(RS, False): way(2.4e-9, 0.0, 0.8e-9, 0.0),
        Way(AG, True): way(0.7e-9, 0.5e-3, 0.7e-9, 3e-3),
        Way(RS, True): way(1.5e-9, 0.7e-3, 0.7e-9, 9e-3),
    },
    channel_power=0.8,
    queueing=1.5,
)
NOTE = "a test's constants"


class Kept(msgspec.Struct):
    """What a run folder keeps besides."""

    what: str = "a test"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    base = tmp_path_factory.mktemp("recorded")
    example = Path(__file__).parents[2] / "examples" / "gpt_fsdp_gloo.toml"
    spec = parse_job(tomllib.loads(example.read_text()), "example")
    job = Job(spec)
    backend = FittedBackend(CONSTANTS, {group.name: ALONE_S for group in job.groups}, job.limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "open", lambda *_: backend)
        run_tune(TuneRequest(job=job, out=base / "run"))
    (base / "run" / FILE_NAME).write_bytes(constants_to_json(CONSTANTS, NOTE))
    return base / "run"


@pytest.fixture
def folder(recorded, tmp_path):
    return Path(shutil.copytree(recorded, tmp_path / "run"))


def test_constants_come_back_from_their_file(folder):
    assert read_constants(folder / FILE_NAME) == (CONSTANTS, NOTE)


def test_the_computation_alone_is_inferred_from_the_default_runs(folder):
    _, kept = fitted_to_default(read_own_run(folder), CONSTANTS)
    assert kept.comp_alone_s == {"block": pytest.approx(ALONE_S, rel=1e-6)}
    assert kept.recorded_on == "gloo"


def test_every_arm_of_the_recording_is_predicted(folder):
    arms = arms_of_run(read_own_run(folder), CONSTANTS)
    assert {arm.arm for arm in arms} == {"tuned", "engine_default", "fixed_min", "fixed_max"}
    for arm in arms:
        assert arm.error == pytest.approx(0, abs=1e-6)


def test_only_the_default_s_runs_are_read(folder):
    """All other rows damaged in their times: the prediction stays."""
    path = folder / "measurements.jsonl"
    lines = path.read_text().splitlines()
    changed = [lines[0]]
    for line in lines[1:]:
        row = json.loads(line)
        held = row["groups"]["block"]
        if any(config["num_channels"] is not None for config in held["configs"].values()):
            held["measured"]["makespan_s"] *= 3
        changed.append(json.dumps(row))
    path.write_text("\n".join(changed) + "\n")
    _, kept = fitted_to_default(read_own_run(folder), CONSTANTS)
    assert kept.comp_alone_s == {"block": pytest.approx(ALONE_S, rel=1e-6)}


def test_the_verb_predicts_from_a_run_folder(folder, tmp_path, capsys):
    assert main(["tune", "--from-trace", str(folder), "--out", str(tmp_path / "again"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    recorded = json.loads((folder / "run.json").read_text())["result"]
    assert found["backend"] == "predicted_from_trace"
    assert "nothing was run" in found["notes"][0]
    assert NOTE in found["notes"][2]
    assert found["default"]["makespan_s"] == pytest.approx(recorded["default"]["makespan_s"])
    assert found["best"]["makespan_s"] == pytest.approx(recorded["best"]["makespan_s"])


def test_without_a_calibration_it_says_what_makes_one(folder):
    (folder / FILE_NAME).unlink()
    with pytest.raises(JobError, match="calibration_gloo"):
        job_of_run(folder)


@pytest.mark.parametrize("content", ["", "{}", '{"format": "other"}', "[1]"])
def test_a_damaged_calibration_is_refused(folder, content):
    (folder / FILE_NAME).write_text(content)
    with pytest.raises(JobError, match="calibration"):
        job_of_run(folder)


@pytest.mark.parametrize("name", ["run.json", "measurements.jsonl"])
def test_a_damaged_run_is_refused(folder, name):
    (folder / name).write_text("{")
    with pytest.raises(BundleError):
        job_of_run(folder)


def test_a_job_file_beside_a_run_folder_is_refused(folder, capsys):
    example = Path(__file__).parents[2] / "examples" / "gpt_fsdp_gloo.toml"
    assert main(["tune", str(example), "--from-trace", str(folder)]) == 2
    assert "holds its own" in capsys.readouterr().err
