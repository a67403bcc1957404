"""Settled settings on rank 0: what a check leaves behind where it breaks off, told by plans alone."""

import msgspec
import pytest
from test_online_loop import options

from lagom_overlap.collective.sites import SiteSetting
from lagom_overlap.online.ranks.messages import Report, SwitchState, WindowPlan
from lagom_overlap.online.ranks.plans import Plans
from lagom_overlap.online.ranks.watch import Watch

CALL = {"description": "all", "num_ranks": 2, "creation_order": 0, "kind": "all_gather", "num_bytes": 1 << 20}
SETTINGS = (msgspec.convert({"site": {"call": CALL, "occurrence": 0}, "config": {"num_channels": 2}}, SiteSetting),)


def report_of(plan: WindowPlan, step_s: float = 1.0, void: str = "") -> Report:
    return Report(rank=0, num_steps=0, steps_s=(step_s,) * (plan.num_steps - 1), void=void)


@pytest.mark.parametrize("broken", [{"void": "a profiler ran"}, {"step_s": 0.0}])
def test_a_check_that_breaks_off_leaves_the_settings_in_force_and_another_one_follows(
    broken: dict[str, object],
) -> None:
    plans = Plans(steps_apart=1, cycles=(), size_octaves=0)
    watch = Watch(plans, options(check_share=0.5))
    plan: WindowPlan | str = watch.settle(SETTINGS, "tuned", None)
    seen = []
    for _ in range(200):
        assert isinstance(plan, WindowPlan)
        watch.took(plan, report_of(plan))
        if plan.state is SwitchState.WATCH:
            assert plans.settings == SETTINGS
            plan = watch.watched(report_of(plan))
            continue
        seen.append(plans.settings)
        if plans.settings:  # the arm that is judged: told as it should be
            plan = watch.checked(report_of(plan))
        else:  # the default's window says nothing
            plan = watch.checked(report_of(plan, **broken))
            assert isinstance(plan, WindowPlan)
            assert (plan.state, plans.settings, watch.is_checking) == (SwitchState.WATCH, SETTINGS, False)
    assert seen.count(()) > 1
