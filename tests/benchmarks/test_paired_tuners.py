"""The paired comparison finds the best of the surface, and its bundle replays to the same tuners."""

import json
from itertools import product
from pathlib import Path

import pytest

import paired_tuners
from lagom_overlap.backends.base import Measurement
from lagom_overlap.job.build import groups_of, open_backend, request_of
from lagom_overlap.job.compare import run_compare
from lagom_overlap.job.spec import read_job

JOB = """
[job]
name = "noiseless"
backend = "simulated"
ranks = 8
[[group]]
name = "block"
op = [{ name = "mm", gemm = [4096, 4096, 4096] }]
[[group.comm]]
name = "gather"
kind = "all_gather"
bytes = "16 MiB"
[[group.comm]]
name = "scatter"
kind = "reduce_scatter"
bytes = "16 MiB"
[cluster]
preset = "a40_pcie"
[tune]
space = { algorithm = ["ring"], protocol = ["simple"], num_channels = [1, 8], chunk_bytes = ["64 KiB", "512 KiB"] }
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "noiseless.toml"
    path.write_text(JOB)
    return path


def test_rows_agree_with_every_assignment_measured_by_hand(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    given = ["paired_tuners.py", str(job), "--pairs", "3", "--surface", "1", "--out", str(out), "--json"]
    monkeypatch.setattr("sys.argv", given)
    paired_tuners.main()
    (table,) = json.loads(capsys.readouterr().out)["jobs"]
    rows = {row["arm"]: row for row in table["rows"]}

    spec = read_job(job)
    (group,) = groups_of(spec)
    backend = open_backend(spec, "simulated", request_of(spec, (group,)))
    problem = backend.problem(group)
    offered = [(*space, default) for space, default in zip(problem.spaces, problem.default, strict=True)]
    times = {}
    for assignment in product(*offered):
        measured = backend.measure(group, assignment)
        assert isinstance(measured, Measurement)
        times[assignment] = measured.makespan_s
    best_s = min(times.values())
    fixed_s = min(time for (first, second), time in times.items() if first == second)
    assert table["num_assignments"] == len(times)
    assert rows["surface's best"]["makespan_s"] == pytest.approx(best_s)
    assert rows["best fixed"]["makespan_s"] == pytest.approx(fixed_s)
    for name in paired_tuners.TUNERS:  # without noise the recording is the surface, and every search ends the same
        assert rows[name]["regret_on_surface"] == pytest.approx(rows[name]["makespan_s"] / best_s - 1)
    assert rows["default"]["over_default"] == 1

    replayed = run_compare(spec, ["lagom"], backend_name="recorded", bundle=out / "noiseless")
    assert replayed.rows[0].makespan_s == pytest.approx(rows["lagom"]["makespan_s"])


def test_a_job_of_two_groups_is_refused(job: Path, tmp_path: Path) -> None:
    first = JOB[JOB.index("[[group]]") : JOB.index("[cluster]")]
    for name in ("block", "gather", "scatter"):
        first = first.replace(f'"{name}"', f'"{name} 2"')
    job.write_text(JOB.replace("[cluster]", first + "[cluster]"))
    with pytest.raises(SystemExit, match="2 groups"):
        paired_tuners.run_job(job, tmp_path / "out", 3, 1)
