"""Some cells of the fault matrix on real ranks; `benchmarks/faults.py` runs all of them."""

import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")

from fault_matrix import FAULTS, POINTS, Cell, cells, left_behind, run

pytestmark = [pytest.mark.torch, pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("point", "fault"),
    [
        ("ready", "kill"),
        ("after the last word", "lost"),
        ("before the last word", "bug"),
        ("a step of watch", "stop_long"),
        ("getting ready", "stdio"),
        ("after the switch", "fork"),
        ("after the decision", "twin"),
    ],
)
def test_a_fault_in_the_middle_of_a_switch_ends_the_job_as_without_us_or_leaves_it_running(
    point: str, fault: str
) -> None:
    outcome = run(Cell(point, fault))
    assert not outcome.faults, f"{outcome.faults}\n{outcome.words}"


def test_the_matrix_has_every_fault_at_every_point() -> None:
    whole = list(cells())
    assert len(whole) == sum(Cell(point, fault).is_real for point in POINTS for fault in FAULTS)
    assert {cell.num_ranks for cell in whole} == {2, 3, 4}
    assert {(cell.point, cell.victim == 0) for cell in whole} >= {("ready", True), ("ready", False)}


def test_a_process_and_a_file_that_a_job_leaves_are_seen(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").touch()
    assert left_behind(tmp_path, set()) == []
    (tmp_path / ".journal.jsonl.1").touch()
    with subprocess.Popen(["sleep", "600"], cwd=tmp_path) as process:
        found = left_behind(tmp_path, set())
        process.kill()
    assert found == [".journal.jsonl.1", f"process {process.pid}: sleep"]
