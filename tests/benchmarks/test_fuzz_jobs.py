"""What `benchmarks/fuzz_jobs.py count` makes of the lines of both kinds of runs."""

import argparse
import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from fuzz_jobs import count

ALIKE = {"generator": 5, "mode": "route", "family": "ddp", "ranks": 2}
PERSISTENT = ALIKE | {"phase": "", "raised": ["ValueError", ""], "stats": {"0": {"used": 2}}, "cpu_s": 3.0}


def test_programs_of_persistent_ranks_and_of_fresh_processes_are_counted_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [PERSISTENT | {"seed": seed, "kind": kind} for seed, kind in enumerate(("equal", "hang"))]
    fresh = [ALIKE | {"seed": seed, "equal": equal} for seed, equal in enumerate((True, True, False))]
    for name, lines in (("ranks2_0of1_0", ranks), ("fresh_0of1_0", fresh)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    count(argparse.Namespace(folder=tmp_path))
    words = capsys.readouterr().out
    assert "kind: {'equal': 3, 'differs': 1, 'hang': 1}" in words
    assert "programs: 5, with settings in force: 2" in words
    assert "ended by an exception: {'ValueError': 2}" in words
    assert "CPU seconds: 6" in words
    assert [json.loads(line)["seed"] for line in words.splitlines() if line.startswith("{")] == ["2", "1"]
