"""The paired comparison finds the best of the surface, and its bundle replays to the same tuners."""

import json
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import paired_tuners
from lagom_overlap.backends.base import Backend, BackendRequest
from lagom_overlap.errors import RankError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.reading import read_job
from lagom_overlap.tuners.problem import Measurement, Outcome
from lagom_overlap.verbs.compare import CompareRequest, run_compare

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
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert paired_tuners.main([str(job), "--pairs", "3", "--surface", "1", "--out", str(out), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (table,) = printed["jobs"]
    assert json.loads((out / "noiseless" / "table.json").read_text())["jobs"] == [table]
    rows = {row["arm"]: row for row in table["rows"]}
    tuners = {row["tuner"]: row for row in table["tuners"]}

    spec = read_job(job)
    (group,) = Job(spec).groups
    backend = Job(spec).open("simulated", Job(spec).request_for((group,)))
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
    for row in tuners.values():  # without noise the recording is the surface, and every search ends the same
        (arm,) = row["arms"]
        makespan_s = rows[arm]["makespan_s"]
        assert row["regret_on_surface"] == pytest.approx(makespan_s / best_s - 1)
        assert row["median_over_default"] == pytest.approx(rows["default"]["makespan_s"] / makespan_s)
        assert row["comp_share"] == pytest.approx(rows[arm]["comp_s"] / makespan_s)
    assert set(tuners) == set(paired_tuners.TUNERS)
    assert rows["default"]["over_default"] == rows["default again"]["over_default"] == 1

    request = CompareRequest(job=Job(spec), tuners=["lagom"], backend="recorded", bundle=out / "noiseless")
    replayed = run_compare(request)
    assert replayed.rows[0].makespan_s == pytest.approx(rows[tuners["lagom"]["arms"][0]]["makespan_s"])


def test_a_job_of_two_groups_is_refused(job: Path, tmp_path: Path) -> None:
    first = JOB[JOB.index("[[group]]") : JOB.index("[cluster]")]
    for name in ("block", "gather", "scatter"):
        first = first.replace(f'"{name}"', f'"{name} 2"')
    job.write_text(JOB.replace("[cluster]", first + "[cluster]"))
    assert paired_tuners.main([str(job), "--out", str(tmp_path / "out")]) == 2


def run(capsys: pytest.CaptureFixture[str], *given: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the only job's table if there is one, and what was said."""
    code = paired_tuners.main([*given, "--json"])
    said = capsys.readouterr()
    jobs = json.loads(said.out)["jobs"] if said.out else []
    return code, jobs[0] if jobs else {}, said.err


def test_each_distinct_result_of_several_searches_is_one_arm(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (str(job), "--pairs", "3", "--surface", "0", "--searches", "4", "--tuners", "random,default")
    code, table, _ = run(capsys, *given, "--out", str(tmp_path / "out"))
    assert code == 0
    settings = {row["arm"]: row["setting"] for row in table["rows"]}
    by_name = {row["tuner"]: row for row in table["tuners"]}
    assert by_name["default"]["num_kept_default"] == by_name["default"]["num_searches"] == 4
    assert by_name["default"]["median_over_default"] == by_name["default"]["worst_over_default"] == 1
    found = [arm for arm in settings if arm.startswith("random")]
    assert found[:2] == ["random", "random #2"][: len(found)]
    assert len({settings[arm] for arm in found}) == len(found) <= 4
    ratios = {row["arm"]: row["over_default"] for row in table["rows"]}
    ended = [ratios[arm] for arm in by_name["random"]["arms"]]
    assert len(ended) == 4
    assert by_name["random"]["worst_over_default"] == min(ended)
    assert by_name["random"]["median_over_default"] == pytest.approx(median(ended))
    assert "surface's best" not in settings, "nobody measured a surface"
    assert by_name["random"]["regret_on_surface"] is None


def test_guarded_searches_measure_the_default_too(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    used = {}
    for name, flags in {"bare": (), "guarded": ("--guarded",)}.items():
        given = (str(job), "--pairs", "3", "--surface", "0", "--tuners", "fixed_min", *flags)
        _, table, _ = run(capsys, *given, "--out", str(tmp_path / name))
        used[name] = table["tuners"][0]["mean_measurements"]
        assert table["guarded"] == (name == "guarded")
    assert used["bare"] == 1
    assert used["guarded"] > 1


def test_a_folder_that_exists_and_numbers_that_say_nothing_are_one_line_and_exit_two(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    for given, word in (
        (("--out", str(tmp_path / "out")), "exists already"),
        (("--pairs", "2", "--out", str(tmp_path / "new")), "--pairs is 2, must be at least 3"),
        (("--tuners", "lagon", "--out", str(tmp_path / "new")), "did you mean 'lagom'"),
        ((str(job), "--out", str(tmp_path / "new")), "two jobs have one name"),
    ):
        code, table, said = run(capsys, str(job), *given)
        assert (code, table) == (2, {})
        assert word in said
        assert said.count("\n") == 1


class Losing:
    """A backend that loses a rank at the calls named."""

    def __init__(self, backend: Backend, lost: set[int]) -> None:
        self._backend, self._lost = backend, lost
        self.description = backend.description
        self.num = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def measure(self, *given: Any) -> Outcome:
        self.num += 1
        if self.num in self._lost:
            raise RankError("rank 1 ended")
        return self._backend.measure(*given)


def losing(monkeypatch: pytest.MonkeyPatch, *lost: set[int]) -> list[Losing]:
    """Each backend that is opened, in turn, loses ranks so; the last for all after it."""
    opened: list[Losing] = []

    real = Job.open

    def open_it(job: Job, name: str, request: BackendRequest) -> Losing:
        opened.append(Losing(real(job, name, request), lost[min(len(opened), len(lost) - 1)]))
        return opened[-1]

    monkeypatch.setattr(Job, "open", open_it)
    return opened


def test_a_lost_rank_costs_one_measurement_and_changes_no_figure(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (str(job), "--pairs", "3", "--surface", "0", "--tuners", "lagom")
    _, whole, _ = run(capsys, *given, "--out", str(tmp_path / "whole"))
    opened = losing(monkeypatch, {4}, {12}, set())
    code, table, said = run(capsys, *given, "--out", str(tmp_path / "lost"))
    assert code == 0
    assert len(opened) == 3
    assert said.count("a rank was lost") == table["num_lost_ranks"] == 2
    assert table["rows"] == whole["rows"]


def test_rounds_that_were_complete_make_the_table_of_a_job_that_fails(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (str(job), "--pairs", "9", "--surface", "0", "--tuners", "default", "--out", str(tmp_path / "out"))
    # 4 fixed settings and the default twice, one search, rounds of 5 arms: the fifth round breaks, every rank after it.
    num_before = 2 * 5 + 1
    losing(monkeypatch, {num_before + 4 * 5 + 2}, {1})
    code, table, _ = run(capsys, *given)
    assert code == 2
    assert table["num_pairs"] == 4
    assert "rank 1 ended" in table["ended_by"]
    assert (tmp_path / "out" / "noiseless" / "table.json").exists()


def test_a_job_that_fails_early_leaves_the_next_one_its_turn(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.toml"
    other.write_text(JOB.replace('"noiseless"', '"other"'))
    losing(monkeypatch, {1}, {1}, {1}, {1}, set())
    given = (str(job), str(other), "--pairs", "3", "--surface", "0", "--tuners", "default")
    code, table, said = run(capsys, *given, "--out", str(tmp_path / "out"))
    assert code == 2
    assert table["job"] == "other"
    assert "noiseless: rank 1 ended" in said


def test_rounds_end_when_their_time_is_over_but_not_before_three(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (str(job), "--surface", "0", "--tuners", "default", "--round-seconds", "0")
    code, table, _ = run(capsys, *given, "--out", str(tmp_path / "out"))
    assert (code, table["num_pairs"], table["ended_by"]) == (0, 3, "time")
