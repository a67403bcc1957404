"""Ctrl-C, SIGTERM and SIGHUP keep the measurements made so far and leave no process behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from listening import LISTENING

JOB = """
[job]
name = "long"
backend = "gloo"
[[group]]
name = "g"
block = {{ seq_len = 32, hidden = 64, heads = 2, ffn = 128 }}
[[group.comm]]
name = "ag"
kind = "all_gather"
bytes = "{size}"
[tune]
tuner = "exhaustive"
pairs = 101
repeats = 3
"""

ENVIRONMENT = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}


def children_of(pid: int) -> set[int]:
    """All living descendants of a process."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text(encoding="utf-8")
        except OSError:
            continue
        fields = text.rpartition(")")[2].split()
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, todo = set(), [pid]
    while todo:
        for child in parents.get(todo.pop(), []):
            found.add(child)
            todo.append(child)
    return found


def wait_until(condition) -> None:
    """Returns once the condition holds; the test's timeout ends a wait in vain."""
    while not condition():
        time.sleep(0.05)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("signum", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.long),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.long),
    ],
)
def test_a_signal_keeps_what_was_measured_and_ends_every_process(tmp_path: Path, signum: signal.Signals, code: int):
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(size="4 MiB"), encoding="utf-8")
    out = tmp_path / "run"
    process = subprocess.Popen(
        [*LISTENING, sys.executable, "-m", "lagom_overlap", "tune", str(job), "--out", str(out), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        text=True,
    )
    measurements = out / "measurements.jsonl"
    try:
        wait_until(
            lambda: (
                process.poll() is not None
                or (measurements.exists() and len(measurements.read_text(encoding="utf-8").splitlines()) > 3)
            )
        )
        assert process.poll() is None, process.communicate()
        ranks = children_of(process.pid)
        assert len(ranks) >= 2
        process.send_signal(signum)
        stdout, stderr = process.communicate()
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, stderr
    result = json.loads(stdout)
    assert result["interrupted"] is True
    assert result["verdict"] is None
    assert result["num_measurements"] >= 1
    kept = measurements.read_text(encoding="utf-8").splitlines()
    assert len(kept) >= 4
    assert all(json.loads(line) for line in kept)
    assert (out / "report.html").stat().st_size > 0
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
