"""`--set KEY=VALUE`: keys of a job file from the command line."""

import json
from pathlib import Path

import pytest

from lagom_overlap.cli import main

JOB = (
    '[job]\nname = "small"\n[model]\nname = "phi-2"\nseq_len = 256\n'
    '[cluster]\npreset = "a40_nvlink"\nnodes = 1\n[parallel]\nfsdp = 8\n'
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)


def test_a_key_that_is_set_counts_in_every_verb_as_if_it_stood_in_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.toml").write_text(JOB.replace("seq_len = 256", "seq_len = 128"))

    def told(*words: str) -> object:
        assert main([*words, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        return {key: value for key, value in found.items() if key not in ("solve_s", "rows")}, [
            {key: value for key, value in row.items() if key != "solve_s"} for row in found.get("rows", [])
        ]

    for name, *rest in (("plan", "--planner", "program_order"), ("compare", "--planners", "program_order")):
        assert told(name, "job.toml", *rest, "--set", "model.seq_len=128") == told(name, "other.toml", *rest)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("tune", "job.toml", "--set", "parallel.fsdp=4,8"),
            "parallel.fsdp with several values: `lagom simulate` compares",
        ),
        (("plan", "job.toml", "--set", "parallel.nonesuch=4"), "unknown key 'parallel.nonesuch'"),
        (("simulate", "job.toml", "--set", "tune.tuner=nonesuch"), "unknown tuner 'nonesuch'"),
        (("tune", "job.toml", "--set", "plan.planner=nonesuch"), "unknown planner 'nonesuch'"),
        (("plan", "job.toml", "--set", "job.backend=nonesuch"), "unknown backend 'nonesuch'"),
        (("simulate", "job.toml", "--set", "tune.options.nonesuch=1"), "has no option 'nonesuch'"),
        (("compare", "job.toml", "--set", "cluster.preset=nonesuch"), "unknown cluster preset 'nonesuch'"),
        (("tune", "--from-trace", "x", "--set", "a.b=1"), "--set sets keys of a job file"),
    ],
)
def test_a_mistake_is_one_line(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
