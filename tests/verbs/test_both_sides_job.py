"""A job file that allows carve-outs, from the file to what is written and exported."""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from lagom_overlap.cli import main
from lagom_overlap.collective import LaunchOrder, LaunchSpace, StreamPriority
from lagom_overlap.engines import carve_out
from lagom_overlap.engines.carve_out import CarveOutSupport
from lagom_overlap.errors import JobError
from lagom_overlap.export.run_variables import RunMode
from lagom_overlap.jobfile.job import limits_of
from lagom_overlap.jobfile.reading import parse_job
from lagom_overlap.registry import TUNERS, entry_point_names
from lagom_overlap.verbs.run import LaunchRequest, prepare

JOB = """
[job]
name = "hopper"
[cluster]
preset = "h100_dgx"
[cost]
sm_carveout = 0
[[group]]
name = "ffn"
[[group.op]]
name = "up"
gemm = [4096, 28672, 4096]
[[group.op]]
name = "down"
gemm = [4096, 4096, 14336]
[[group.comm]]
name = "ag"
kind = "all_gather"
bytes = "400 MiB"
[tune]
tuner = "both_sides"
pairs = 3
[tune.space]
algorithm = ["ring"]
protocol = ["simple"]
num_channels = [1, 2, 4, 8, 16, 24, 32]
chunk_bytes = ["512 KiB", "2 MiB"]
sm_carveout = [4, 8, 16]
launch_order = ["computation_first"]
stream_priority = ["normal"]
"""


@pytest.fixture(autouse=True)
def _registered() -> None:
    if "both_sides" not in entry_point_names(TUNERS):
        pytest.skip("this installation is older than the tuner both_sides: install the package again")


def tuned(tmp_path: Path, capsys: Any, text: str = JOB, *flags: str) -> dict[str, Any]:
    job = tmp_path / "job.toml"
    job.write_text(text)
    assert main(["tune", str(job), "--out", str(tmp_path / "run"), "--json", *flags]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_both_sides_are_searched_written_and_shown(tmp_path: Path, capsys: Any) -> None:
    result = tuned(tmp_path, capsys)
    carved = result["launches"]["ffn"]["sm_carveout"]
    assert carved in (4, 8, 16)
    assert result["configs"]["ffn"]["ag"]["num_channels"] <= carved
    assert result["verdict"]["adopted"] is True
    assert result["best"]["makespan_s"] < result["default"]["makespan_s"]
    written = tomllib.loads((tmp_path / "run" / "configs.toml").read_text())
    assert written["launches"] == {"ffn": {"sm_carveout": carved}}
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"computation: untouched → {carved} SMs carved out" in page


def test_it_ends_faster_than_the_same_search_of_the_collectives_alone(tmp_path: Path, capsys: Any) -> None:
    both = tuned(tmp_path, capsys)["best"]["makespan_s"]
    (tmp_path / "one").mkdir()
    alone = tuned(tmp_path / "one", capsys, JOB, "--tuner", "ours")
    assert both < 0.99 * alone["best"]["makespan_s"]
    assert any("was not searched" in note for note in alone["notes"])
    assert alone["launches"]["ffn"] == {"sm_carveout": None, "order": None, "priority": None}


def test_a_run_replays_to_the_same_result(tmp_path: Path, capsys: Any) -> None:
    first = tuned(tmp_path, capsys)
    (tmp_path / "again").mkdir()
    second = tuned(tmp_path / "again", capsys, JOB, "--backend", "recorded", "--bundle", str(tmp_path / "run"))
    for key in ("launches", "configs", "best", "num_measurements"):
        assert second[key] == first[key]


def test_a_job_without_these_keys_says_nothing_of_launches(tmp_path: Path, capsys: Any) -> None:
    text = "\n".join(line for line in JOB.splitlines() if line.split(" ")[0] not in KEYS)
    assert tuned(tmp_path, capsys, text)["launches"] == {}


KEYS = ("launch_order", "stream_priority", "sm_carveout")


def test_an_export_says_what_a_form_cannot_hold_and_the_environment_holds_it(tmp_path: Path, capsys: Any) -> None:
    carved = tuned(tmp_path, capsys)["launches"]["ffn"]["sm_carveout"]
    run = tmp_path / "run"
    assert main(["export", str(run), "--format", "env", "--format", "plugin", "--json"]) == 0
    env, plugin = json.loads(capsys.readouterr().out)["files"]
    assert f"LAGOM_SM_CARVEOUT={carved}\n" in (run / "nccl.env").read_text()
    assert any("computation's side" in note for note in plugin["not_carried"])
    assert not any("computation's side" in note for note in env["not_carried"])


def test_a_job_started_from_the_run_is_told_the_carve_out(tmp_path: Path, capsys: Any) -> None:
    carved = tuned(tmp_path, capsys)["launches"]["ffn"]["sm_carveout"]
    request = LaunchRequest(command=("true",), mode=RunMode.FIXED, config=tmp_path / "run", out=tmp_path / "launched")
    environment = {"PATH": os.environ["PATH"]}
    assert prepare(request, environment).environment["LAGOM_SM_CARVEOUT"] == str(carved)
    (tmp_path / "one").mkdir()
    tuned(tmp_path / "one", capsys, JOB, "--tuner", "ours")
    alone = LaunchRequest(
        command=("true",), mode=RunMode.FIXED, config=tmp_path / "one" / "run", out=tmp_path / "other"
    )
    assert "LAGOM_SM_CARVEOUT" not in prepare(alone, environment).environment


MODEL = """
[job]
name = "m"
[model]
name = "llama-2-7b"
seq_len = 2048
[cluster]
preset = "h100_dgx"
[parallel]
fsdp = 8
"""


def simulated(tmp_path: Path, capsys: Any, text: str) -> dict[str, Any]:
    job = tmp_path / "job.toml"
    job.write_text(text)
    assert main(["simulate", str(job), "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_simulate_predicts_the_iteration_at_every_carve_out_of_the_job(tmp_path: Path, capsys: Any) -> None:
    tried = "[tune.space]\nsm_carveout = [24, 8]\n"
    found = simulated(tmp_path, capsys, MODEL + "[cost]\nsm_carveout = 0\n" + tried)
    one_by_one = [
        {
            "sm_carveout": carved,
            "iteration_s": simulated(tmp_path, capsys, MODEL + f"[cost]\nsm_carveout = {carved}\n")["iteration_s"],
        }
        for carved in (8, 24)
    ]
    assert found["carve_outs"] == one_by_one
    assert any("another carve-out" in note for note in found["notes"])
    assert not simulated(tmp_path, capsys, MODEL + "[cost]\nsm_carveout = 0\n")["carve_outs"]
    plain = simulated(tmp_path, capsys, MODEL + tried)
    assert not plain["carve_outs"]
    assert any("plain kernels" in note for note in plain["notes"])


@pytest.mark.parametrize(
    ("support", "row"),
    [
        (
            CarveOutSupport(why_not="no CUDA device", caveat="", green_contexts="in torch 2.14", num_sms=None),
            {
                "ok": False,
                "found": "no CUDA device; green contexts: in torch 2.14",
                "remedy": "simulated with [tune.space] sm_carveout; a running job needs an NVIDIA GPU",
            },
        ),
        (
            CarveOutSupport(why_not="", caveat="", green_contexts="none", num_sms=132),
            {"ok": True, "found": "can be set, 0 to 131 SMs; green contexts: none", "remedy": ""},
        ),
        (
            CarveOutSupport(why_not="", caveat="only Hopper's kernels obey", green_contexts="none", num_sms=108),
            {
                "ok": True,
                "found": "can be set, 0 to 107 SMs, but only Hopper's kernels obey; green contexts: none",
                "remedy": "",
            },
        ),
    ],
)
def test_doctor_says_whether_a_carve_out_can_be_set_here(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, support: CarveOutSupport, row: dict[str, object]
) -> None:
    monkeypatch.setattr(carve_out, "carve_out_support", lambda: support)
    assert main(["doctor", "--json"]) == 0
    (check,) = [check for check in json.loads(capsys.readouterr().out)["checks"] if check["name"] == "SM carve-out"]
    assert check == {"name": "SM carve-out", **row}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("sm_carveout", "[]", "tune.space.sm_carveout is []"),
        ("sm_carveout", "[-1]", "tune.space.sm_carveout"),
        ("sm_carveout", '["8"]', "tune.space.sm_carveout"),
        ("launch_order", '["collective"]', "tune.space.launch_order"),
        ("launch_order", "[]", "tune.space.launch_order is []"),
        ("stream_priority", '["low"]', "tune.space.stream_priority"),
        ("sm_carveout", "[200]", "must lie in 0..131"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(tmp_path: Path, capsys: Any, key: str, value: str, words: str) -> None:
    lines = [f"{key} = {value}" if line.startswith(f"{key} = [") else line for line in JOB.splitlines()]
    job = tmp_path / "job.toml"
    job.write_text("\n".join(lines))
    assert main(["tune", str(job), "--out", str(tmp_path / "run")]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["gloo", "workers", "fake_nccl"])
def test_a_backend_that_cannot_set_it_says_so(tmp_path: Path, capsys: Any, backend: str) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    assert main(["tune", str(job), "--backend", backend, "--out", str(tmp_path / "run")]) == 2
    assert "cannot set the computation's side" in capsys.readouterr().err


def test_values_are_sorted_and_repeats_dropped() -> None:
    raw = tomllib.loads(JOB)
    raw["tune"]["space"] |= {"sm_carveout": [16, 0, 16], "stream_priority": ["high", "normal", "high"]}
    assert limits_of(parse_job(raw, "job").tune.space).launches == LaunchSpace(
        sm_carveouts=(0, 16),
        orders=(LaunchOrder.COMPUTATION_FIRST,),
        priorities=(StreamPriority.HIGH, StreamPriority.NORMAL),
    )
    with pytest.raises(JobError, match="allowed"):
        parse_job(raw | {"tune": {"space": {"sm_carve_out": [1]}}}, "job")
