"""The sources of a regret add up: what holds of any group and any search."""

import pytest

import measured_generator
import regret_oracle
import regret_policies
import regret_sources
from measured_generator import TAIL, draw_group

pytestmark = pytest.mark.long


@pytest.mark.parametrize("num_comms", [1, pytest.param(3, marks=pytest.mark.long)])
def test_bounds_of_a_regret_are_in_order(num_comms: int) -> None:
    family = regret_sources.family_list(num_comms, 1)
    row = regret_sources.row_of("ours", draw_group(4, 0, num_comms), family)
    # The oracle is a local search: a little below it is possible.
    assert -0.01 <= row["two settings"] <= row["one setting"] <= row["twelve best"]
    assert row["asked"] <= row["all"] + 1e-12
    assert row["one setting"] <= row["list"] <= row["list told"]
    assert row["measurements"] <= 0.12
    assert measured_generator.TAIL == TAIL, "the generator is frozen: what was switched off is on again"
    assert len(family) == regret_sources.NUM_MEASURED


@pytest.mark.long
def test_who_knows_the_family_is_no_better_than_the_best_equal_setting_and_better_than_the_default() -> None:
    known = regret_oracle.family(2, 40)
    group = draw_group(4, 1, 2)
    found, equal = regret_oracle.regret(group, *known)
    default = group.exact(group.problem.default).makespan_s / group.oracle()[1] - 1
    assert equal <= found <= max(default, equal + 0.1)


def test_more_settings_leave_less_and_one_setting_is_the_exhaustive_best() -> None:
    group = draw_group(4, 2, 3)
    row = regret_policies.row_of(group)
    assert -0.01 <= row["three"] <= row["two"] <= row["one setting"]
    assert -0.01 <= row["own channels"] <= row["one setting"]
    best_s = min(regret_sources.alike(group))
    assert row["one setting"] == pytest.approx(best_s / group.oracle()[1] - 1)
    assert regret_policies.along(4, (1, 3)) == [0, 1, 1, 2]
