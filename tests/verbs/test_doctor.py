"""`lagom doctor` on machines that are not this one."""

import json

import pytest

from lagom_overlap.cli import main
from lagom_overlap.jobfile.conflicts import conflicts
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
