"""The simulated jobs behind the figures of false adoption: a few of each, through the runtime's own decisions."""

import pytest

pytest.importorskip("torch")

import online_noise
from lagom_overlap.online.ranks import exchange
from online_noise import NOISES, Inline, run

pytestmark = [pytest.mark.torch, pytest.mark.long]

OFTEN = ("white, 2 %", "heavy tails", "autocorrelated", "regime change at adoption")
"""One noise of each kind: `make test` has these."""


@pytest.fixture(autouse=True)
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BoundedCalls", Inline)


@pytest.mark.parametrize(
    "noise", [pytest.param(noise, marks=() if noise in OFTEN else pytest.mark.long) for noise in NOISES]
)
def test_what_helps_nothing_is_not_adopted(noise: str) -> None:
    outcomes = [run("null", noise, seed, 600) for seed in range(2)]
    assert not any(one.num_adopted for one in outcomes)


def test_what_helps_is_adopted_and_what_turned_bad_leaves() -> None:
    helped = run("faster", "white, 2 %", 3, 1500)
    assert helped.num_adopted == 1
    assert helped.lost_steps < -30
    turned = run("turned", "white, 2 %", 0, online_noise.TURNS_AT + 200)
    assert not turned.is_set
    assert online_noise.TURNS_AT < turned.left_at < online_noise.TURNS_AT + 100


def test_bad_saved_settings_cost_few_steps() -> None:
    outcomes = [run("saved", "bimodal", seed, 600) for seed in range(3)]
    assert not any(one.is_set for one in outcomes)
    assert max(one.lost_steps for one in outcomes) < 10
