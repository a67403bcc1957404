"""The watcher: deaf to noise, awake to what lasts."""

from math import exp
from random import Random

import pytest

from lagom_overlap.runtime.watcher import LEAST_RUN, Watcher


def steps(num: int, *, sigma: float = 0.02, seed: int = 0, level: float = 1.0) -> list[float]:
    rng = Random(f"{seed}/{level}")
    return [level * exp(rng.gauss(0, sigma)) for _ in range(num)]


@pytest.mark.parametrize("sigma", [0.0, 0.01, 0.02, 0.05])
def test_steps_that_do_not_change_raise_no_alarm(sigma: float) -> None:
    watcher = Watcher(1.08)
    assert not watcher.see(steps(20_000, sigma=sigma))


@pytest.mark.parametrize("sigma", [0.0, 0.01, 0.02])
@pytest.mark.parametrize("longer", [1.1, 1.5, 4.0])
def test_a_lasting_change_is_found_within_thirty_steps(sigma: float, longer: float) -> None:
    for seed in range(10):
        watcher = Watcher(1.08)
        assert not watcher.see(steps(300, sigma=sigma, seed=seed))
        assert "when settled" in watcher.see(steps(30, sigma=sigma, seed=seed, level=longer))


def test_the_same_times_alarm_at_the_same_step_however_they_are_cut_into_windows() -> None:
    times = [*steps(300), *steps(60, level=1.2)]

    def alarm(length: int) -> int:
        watcher = Watcher(1.08)
        return next(end for end in range(length, 361, length) if watcher.see(times[end - length : end]))

    first = alarm(1)
    assert 300 + LEAST_RUN <= first <= 330
    assert alarm(25) == -(-first // 25) * 25


def test_a_burst_shorter_than_the_least_run_and_late_steps_are_no_change() -> None:
    watcher = Watcher(1.08)
    times = steps(4000)
    for begin in range(200, 4000, 200):
        times[begin : begin + LEAST_RUN - 2] = [1.5 * step_s for step_s in times[begin : begin + LEAST_RUN - 2]]
    assert not watcher.see(times)
    watcher = Watcher(1.08)
    assert not watcher.see([step_s * (3.0 if number % 12 == 0 else 1.0) for number, step_s in enumerate(steps(4000))])


def test_less_than_the_ratio_is_followed_in_silence_and_so_are_shorter_steps() -> None:
    watcher = Watcher(1.2)
    assert not watcher.see([*steps(300), *steps(2000, level=1.05)])
    watcher = Watcher(1.08)
    assert not watcher.see([*steps(300), *steps(2000, level=0.6)])
    found = watcher.see(steps(60, level=0.7))
    assert found, "judged by the shorter steps, not by the first"
    assert "they took 1" not in found
    assert "they took 9" not in found


def test_a_creep_by_the_whole_ratio_is_a_change() -> None:
    watcher = Watcher(1.08)
    creep = [step_s * (1 + 0.1 * number / 20_000) for number, step_s in enumerate(steps(20_000))]
    assert not watcher.see(creep[:8000])
    assert watcher.see(creep[8000:])


def test_a_ratio_must_be_above_one() -> None:
    with pytest.raises(ValueError, match="ratio is 1"):
        Watcher(1.0)
