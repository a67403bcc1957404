"""`lagom doctor` on machines that are not this one."""

import json
from dataclasses import replace

import pytest

from lagom_overlap.cli import main
from lagom_overlap.engines.torch_versions import releases_tested
from lagom_overlap.jobfile.conflicts import conflicts
from lagom_overlap.nccl_plugin.box import Box
from lagom_overlap.nccl_plugin.capability import CapabilityMap, MapKey, write_map
from lagom_overlap.verbs import doctor


def checks(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    return {check["name"]: check for check in report["checks"]}, report["support"]


@pytest.mark.parametrize(
    ("version", "ok", "words"),
    [
        (None, False, "not found"),
        ((2, 19, 3), False, "takes no tuner plug-in"),
        ((2, 29, 7), True, "2.29.7: takes our tuner plug-in, interface v5"),
        ((2, 32, 6), True, "interface v7"),
    ],
)
def test_the_nccl_found_here_is_said_and_stands_in_the_matrix(monkeypatch, capsys, version, ok, words):
    monkeypatch.setattr(doctor, "installed_nccl", lambda: version)
    found, support = checks(capsys)
    assert found["NCCL"]["ok"] is ok
    assert words in found["NCCL"]["found"]
    here = [row["nccl"] for row in support if row["is_here"]]
    assert here == ([] if version is None else [".".join(map(str, version))])
    assert len({row["nccl"] for row in support}) == len(support) >= 8


def test_variables_in_the_way_are_named_with_what_they_do(monkeypatch, capsys):
    monkeypatch.setenv("NCCL_PROTO", "LL")
    found, _ = checks(capsys)
    assert not found["NCCL variables"]["ok"]
    assert "NCCL_PROTO=LL" in found["NCCL variables"]["found"]
    assert "fixes the protocols" in found["NCCL variables"]["remedy"]


def test_the_table_for_people_fits_80_columns(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "installed_nccl", lambda: (2, 30, 7))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "2.30.7  2.14, 2.15" in out


def test_the_map_of_this_box_is_said_with_what_it_is_of(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "installed_nccl", lambda: (2, 30, 7))
    monkeypatch.setattr(doctor, "this_box", lambda: None)
    found, _ = checks(capsys)
    assert "no NVIDIA GPU" in found["capability map"]["found"]
    box = Box(gpu="NVIDIA H100 80GB HBM3", num_gpus=1, topology="0" * 16)
    monkeypatch.setattr(doctor, "this_box", lambda: box)
    found, _ = checks(capsys)
    assert found["capability map"]["ok"] is False
    assert found["capability map"]["remedy"] == "lagom selftest --nccl"
    key = MapKey(nccl=(2, 30, 7), gpu=box.gpu, num_gpus=1, ranks_per_gpu=2, topology=box.topology)
    known = CapabilityMap(key=key, measured_on="2026-11-22", max_channels=64, rows=())
    write_map(known, tmp_path / "lagom-overlap" / "capability")
    found, _ = checks(capsys)
    assert found["capability map"]["ok"] is True
    for word in ("NCCL 2.30.7", "1 x NVIDIA H100 80GB HBM3 with 2 ranks each", "2026-11-22", "64 channels"):
        assert word in found["capability map"]["found"]


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({}, []),
        ({"NCCL_DEBUG": "INFO", "NCCL_ALGO": ""}, []),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, ["CUDA_DEVICE_MAX_CONNECTIONS"]),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, []),
        ({"NCCL_CTA_POLICY": "DEFAULT"}, []),
        ({"NCCL_CTA_POLICY": "EFFICIENCY", "NCCL_BUFFSIZE": "1"}, ["NCCL_BUFFSIZE", "NCCL_CTA_POLICY"]),
    ],
)
def test_only_what_takes_something_away_is_a_conflict(environment, named):
    assert [conflict.variable for conflict in conflicts(environment)] == named


@pytest.mark.parametrize(
    ("version", "ok", "words"),
    [
        ("2.13.0+cpu", True, "tests passed under 2.13.0"),
        ("2.99.1", False, "2.99.1 is newer than what was tested, 2.10 to"),
        ("2.7.0", False, "2.7.0 is none of what was tested"),
        ("2.10.1", False, "3 failed"),
        (None, False, "needs torch"),
    ],
)
def test_a_pytorch_beyond_the_matrix_is_said(monkeypatch, capsys, version, ok, words):
    known = releases_tested()[0]
    bad = replace(known, torch="2.10.1+cpu", with_ranks=replace(known.with_ranks, failed=("a", "b", "c")))
    monkeypatch.setattr(doctor, "releases_tested", lambda: (bad, *releases_tested()))
    monkeypatch.setattr(doctor, "package_versions", lambda: {} if version is None else {"torch": version})
    found, _ = checks(capsys)
    assert found["PyTorch tested"]["ok"] is ok
    assert words in found["PyTorch tested"]["found"]
    assert ok or found["PyTorch tested"]["remedy"]


@pytest.mark.parametrize(
    ("version", "engine", "is_said"),
    [("2.15.0+cu132", None, True), ("2.15.0+cu132", "1", True), ("2.15.0+cu132", "0", False), ("2.14.1", None, False)],
)
def test_a_pytorch_whose_engine_lets_ddp_overlap_nothing_is_said(monkeypatch, capsys, version, engine, is_said):
    monkeypatch.setattr(doctor, "package_versions", lambda: {"torch": version})
    monkeypatch.setattr(doctor, "installed_nccl", lambda: (2, 30, 7))
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    if engine is not None:
        monkeypatch.setenv("TORCH_DIST_USE_NCCL2", engine)
    found, _ = checks(capsys)
    assert ("overlap" in found) is is_said
    if is_said:
        assert found["overlap"]["remedy"] == "TORCH_DIST_USE_NCCL2=0"


@pytest.mark.torch
@pytest.mark.parametrize(
    ("has", "own", "bindings", "words"),
    [
        (False, False, False, "not in this torch"),
        (True, True, False, "in torch's own library"),
        (True, False, True, "over the package cuda-bindings"),
        (True, False, False, "cuda-bindings, which is not installed"),
    ],
)
def test_where_green_contexts_are_is_said(monkeypatch, has, own, bindings, words):
    torch = pytest.importorskip("torch")
    from lagom_overlap.engines import carve_out

    for holder, name, is_there in ((torch.cuda, "GreenContext", has), (torch._C, "_CUDAGreenContext", own)):
        if is_there:
            monkeypatch.setattr(holder, name, object(), raising=False)
        else:
            monkeypatch.delattr(holder, name, raising=False)
    monkeypatch.setattr(carve_out, "find_spec", lambda name: object() if bindings else None)
    assert words in carve_out.green_contexts()
