"""The disturbances do what their words say, and the benchmark's rows are complete."""

import json
from random import Random

import pytest

from lagom_overlap.tuners.problem import Measurement
from overlap_generator import draw_group
from robustness import DISTURBANCES, LATE_SHAPES, LONGER, drift, longer_computations, main, neighbour, warm_up

TOLD = Measurement(makespan_s=3.0, comp_s=2.0, comm_s=(1.0, 2.0))


def test_disturbances_change_the_times_that_they_name() -> None:
    assert warm_up(TOLD, 0, Random(1)).comp_s == pytest.approx(2.8)
    assert warm_up(TOLD, 3, Random(1)) == TOLD
    assert drift(TOLD, 10, Random(1)).makespan_s == pytest.approx(3.0 * 1.01**10)
    beside = neighbour(TOLD, 4, Random(1))
    assert (beside.comp_s, beside.comm_s, beside.makespan_s) == (2.0, (1.6, 3.2), pytest.approx(4.8))
    assert neighbour(TOLD, 0, Random(1)) == TOLD


def test_longer_computations_leave_the_first_group_as_it_was() -> None:
    group = draw_group(3, 0, 1)
    before = group.exact(group.problem.default)
    longer = longer_computations(group).exact(group.problem.default)
    assert longer.comp_s > before.comp_s
    assert longer.comp_s <= LONGER * before.comp_s * (1 + 1e-9)  # less of it is contended where communication ends
    assert group.exact(group.problem.default) == before


def test_every_disturbance_and_tuner_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--groups", "1", "--num-comms", "1", "--tuners", "default,lagom", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(row["disturbance"], row["tuner"]) for row in rows} == {
        (name, tuner) for name in (*DISTURBANCES, LATE_SHAPES) for tuner in ("default", "lagom")
    }
    assert all(row["mean_regret"] > -0.01 for row in rows)
