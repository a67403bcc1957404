"""Some cells of the fault matrix on real ranks; `benchmarks/faults.py` runs all of them."""

import pytest

pytest.importorskip("torch")

from fault_matrix import FAULTS, POINTS, Cell, cells, run

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
