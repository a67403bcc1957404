"""The fuzzer of captured steps: plans keep what its oracle knows, and one that does not is found."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("ortools", reason="needs the extra plan (ortools)")

import fuzz_plans
from lagom_overlap.workload import iteration

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300), pytest.mark.long]


@pytest.mark.parametrize(
    "seed", [0, 4, 8, 11, 3034, pytest.param(5, marks=pytest.mark.long), pytest.param(10, marks=pytest.mark.long)]
)
def test_plans_of_drawn_steps_keep_every_dependence(seed: int) -> None:
    """FSDP2 and DDP, routed tokens, branches, masks, several micro-batches, a wait for the device are among them."""
    num_checked, finds = fuzz_plans.finds_of(seed, num_others=1)
    assert finds == []
    assert num_checked >= 3


def test_a_read_that_nothing_waits_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that leave before their counts have arrived."""
    monkeypatch.setattr(iteration, "_behind_reads", tuple)
    assert any("(read by the host)" in find for find in fuzz_plans.finds_of(8, num_others=0)[1])


def test_a_wait_for_the_device_that_holds_nothing_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_plans.StepRecorder, "synchronize", lambda *_, **__: None)
    assert any("(read by the host)" in find for find in fuzz_plans.finds_of(3034, num_others=0)[1])


@pytest.mark.parametrize(
    "seed", [14, 15, pytest.param(3, marks=pytest.mark.long), pytest.param(6, marks=pytest.mark.long)]
)
def test_the_default_planner_is_behind_no_other(seed: int) -> None:
    """Built steps (odd seeds) and captured ones; every planner has the same work."""
    _, _, found = fuzz_plans.behind(seed)
    assert len(found) >= 10
    assert max(found.values()) <= fuzz_plans.BEHIND, found


def test_the_same_seed_draws_the_same_step() -> None:
    assert fuzz_plans.drawn(7) == fuzz_plans.drawn(7)
    (one, _), (other, _) = fuzz_plans.captured(fuzz_plans.drawn(3)), fuzz_plans.captured(fuzz_plans.drawn(3))
    assert one == other
