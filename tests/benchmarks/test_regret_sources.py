"""The sources of a regret add up: what holds of any group and any search."""

import pytest

import measured_generator
import regret_sources
from measured_generator import TAIL, draw_group


@pytest.mark.parametrize("num_comms", [1, 3])
def test_bounds_of_a_regret_are_in_order(num_comms: int) -> None:
    family = regret_sources.family_list(num_comms, 1)
    row = regret_sources.row_of("descent", draw_group(4, 0, num_comms), family)
    # The oracle is a local search: a little below it is possible.
    assert -0.01 <= row["two settings"] <= row["one setting"] <= row["twelve best"]
    assert row["asked"] <= row["all"] + 1e-12
    assert row["one setting"] <= row["list"] <= row["list told"]
    assert row["measurements"] <= 0.12
    assert measured_generator.TAIL == TAIL, "the generator is frozen: what was switched off is on again"
    assert len(family) == regret_sources.NUM_MEASURED
