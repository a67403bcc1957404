"""Ctrl-C keeps the measurements made so far and leaves no process behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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


def wait_for(condition, seconds: float = 40.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.gloo
@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured_and_ends_every_process(tmp_path: Path):
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(size="4 MiB"), encoding="utf-8")
    out = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "lagom_overlap", "tune", str(job), "--out", str(out), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        text=True,
    )
    measurements = out / "measurements.jsonl"
    try:
        started = wait_for(
            lambda: measurements.exists() and len(measurements.read_text(encoding="utf-8").splitlines()) > 3
        )
        assert started, process.communicate(timeout=5)
        ranks = children_of(process.pid)
        assert len(ranks) >= 2
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, stderr
    result = json.loads(stdout)
    assert result["interrupted"] is True
    assert result["verdict"] is None
    assert result["num_measurements"] >= 1
    kept = measurements.read_text(encoding="utf-8").splitlines()
    assert len(kept) >= 4
    assert all(json.loads(line) for line in kept)
    assert (out / "report.html").stat().st_size > 0
    assert wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), 10)
