"""The watcher: deaf to noise, patient with what ends by itself, awake to what lasts."""

import re
from math import exp
from random import Random

import pytest

from lagom_overlap.online.watcher import GROWTH, MOST_PATIENCE, SlowPhase, SlowPhases, Watcher

PATIENCE = 60


def steps(num: int, *, sigma: float = 0.02, seed: int = 0, level: float = 1.0) -> list[float]:
    rng = Random(f"{seed}/{level}")
    return [level * exp(rng.gauss(0, sigma)) for _ in range(num)]


def alarm(watcher: Watcher, times: list[float]) -> int | None:
    """Steps after which it alarms, counted from 1; None if it does not."""
    return next((number for number, step_s in enumerate(times, start=1) if watcher.see([step_s])), None)


@pytest.mark.parametrize("sigma", [0.0, 0.01, 0.02, 0.05])
def test_steps_that_do_not_change_raise_no_alarm_and_are_no_slow_phase(sigma: float) -> None:
    phases = SlowPhases()
    assert not Watcher(1.08, PATIENCE, phases).see(steps(20_000, sigma=sigma))
    assert phases.words() == ""


@pytest.mark.parametrize("sigma", [0.0, 0.01, 0.02])
@pytest.mark.parametrize("longer", [1.1, 1.5, 4.0])
@pytest.mark.parametrize("patience", [20, 60, 200])
def test_a_lasting_change_is_found_once_it_has_lasted_as_long_as_was_asked(
    sigma: float, longer: float, patience: int
) -> None:
    for seed in range(5):
        watcher = Watcher(1.08, patience)
        assert not watcher.see(steps(300, sigma=sigma, seed=seed))
        found = alarm(watcher, steps(patience + 10, sigma=sigma, seed=seed, level=longer))
        assert found is not None
        assert patience - 3 <= found <= patience + 3, "a few quiet steps may count as the first, or a slow one may not"


def test_an_alarm_says_what_steps_took_and_take() -> None:
    found = Watcher(1.08, PATIENCE).see([*[1.0] * 300, *[1.25] * 80])
    assert found == "steps became slower: they took 1.00 s and now take 1.25 s"


def test_the_same_times_alarm_at_the_same_step_however_they_are_cut_into_windows() -> None:
    times = [*steps(300), *steps(100, level=1.2)]

    def window_of_alarm(length: int) -> int:
        watcher = Watcher(1.08, PATIENCE)
        return next(end for end in range(length, 401, length) if watcher.see(times[end - length : end]))

    first = window_of_alarm(1)
    assert window_of_alarm(25) == -(-first // 25) * 25


@pytest.mark.parametrize("sigma", [0.0, 0.01, 0.02, 0.03])
def test_slow_phases_that_end_by_themselves_are_told_with_their_number_length_and_ratio(sigma: float) -> None:
    phases = SlowPhases()
    watcher = Watcher(1.08, PATIENCE, phases)
    rng, lengths = Random(3), []
    times = steps(300, sigma=sigma)
    for number in range(60):
        lengths.append(rng.randint(15, 45))
        times += steps(lengths[-1], sigma=sigma, seed=number, level=1.15)
        times += steps(rng.randint(60, 200), sigma=sigma, seed=1000 + number)
    assert not watcher.see([2 * step_s for step_s in times])
    assert phases.num_over == 60
    assert abs(phases.longest_steps - max(lengths[-20:])) <= 2
    words = phases.words()
    assert words.startswith("60 slow phases ended by themselves (")
    assert words.endswith("steps took 1.15 times as long)")
    said = [int(word) for word in re.findall(r"\b\d+\b(?!\.)", words)]
    assert abs(said[1] - sorted(lengths)[30]) <= 2
    assert abs(said[2] - max(lengths)) <= 2


def test_a_handful_of_late_steps_is_no_slow_phase() -> None:
    phases = SlowPhases()
    times = steps(3000)
    for begin in range(200, 3000, 100):
        times[begin : begin + 4] = [1.5 * step_s for step_s in times[begin : begin + 4]]
    assert not Watcher(1.08, PATIENCE, phases).see(times)
    assert phases.num_over == 0


def test_noise_does_not_end_what_lasts() -> None:
    for seed in range(10):
        phases = SlowPhases()
        watcher = Watcher(1.08, 150, phases)
        assert not watcher.see(steps(300, sigma=0.05, seed=seed))
        found = alarm(watcher, steps(180, sigma=0.05, seed=seed, level=1.1))
        assert found is not None
        assert phases.num_over == 0


def test_two_slow_phases_with_a_short_rest_between_them_are_two() -> None:
    phases = SlowPhases()
    watcher = Watcher(1.08, PATIENCE, phases)
    times = [*steps(300), *steps(40, level=1.1), *steps(12, seed=1), *steps(40, level=1.1, seed=1), *steps(100, seed=2)]
    assert not watcher.see(times)
    assert phases.num_over == 2


def test_whoever_has_seen_longer_phases_waits_longer() -> None:
    phases = SlowPhases()
    watcher = Watcher(1.08, PATIENCE, phases)
    assert watcher.patience == PATIENCE
    assert not watcher.see([*steps(300), *steps(50, level=1.2), *steps(200, seed=1)])
    assert watcher.patience == round(GROWTH * phases.longest_steps) > PATIENCE
    assert not watcher.see([*steps(70, level=1.2, seed=5), *steps(200, seed=2)])
    longer = watcher.patience
    assert longer >= 100
    found = alarm(watcher, steps(300, level=1.2, seed=7))
    assert found is not None
    assert longer - 3 <= found <= longer + 3


def test_the_next_watcher_knows_the_alarm_and_has_to_be_surer() -> None:
    phases = SlowPhases()
    assert Watcher(1.08, PATIENCE, phases).see([*steps(300), *steps(80, level=1.2)])
    assert phases.num_over == 0, "it was not over"
    assert phases.words() == ""
    assert Watcher(1.08, PATIENCE, phases).patience == round(GROWTH * PATIENCE)
    for _ in range(3):
        phases.add(SlowPhase(num_steps=5000, ratio=1.1))
    assert Watcher(1.08, PATIENCE, phases).patience == MOST_PATIENCE
    assert Watcher(1.08, 2 * MOST_PATIENCE, phases).patience == 2 * MOST_PATIENCE, "the user's word stands"


def test_what_is_long_ago_makes_nobody_wait() -> None:
    phases = SlowPhases()
    phases.add(SlowPhase(num_steps=300, ratio=1.1))
    for _ in range(20):
        phases.add(SlowPhase(num_steps=10, ratio=1.1))
    assert Watcher(1.08, PATIENCE, phases).patience == PATIENCE
    assert phases.words().startswith("21 slow phases ended by themselves (median 10 steps, longest 300;")


def test_bursts_and_late_steps_are_no_change() -> None:
    watcher = Watcher(1.08, PATIENCE)
    times = steps(4000)
    for begin in range(200, 4000, 200):
        times[begin : begin + 18] = [1.5 * step_s for step_s in times[begin : begin + 18]]
    assert not watcher.see(times)
    watcher = Watcher(1.08, PATIENCE)
    assert not watcher.see([step_s * (3.0 if number % 12 == 0 else 1.0) for number, step_s in enumerate(steps(4000))])


def test_single_fast_steps_do_not_end_what_lasts() -> None:
    watcher = Watcher(1.08, PATIENCE)
    assert not watcher.see(steps(300))
    times = [step_s * (0.8 if number % 10 == 0 else 1.0) for number, step_s in enumerate(steps(80, level=1.2))]
    found = alarm(watcher, times)
    assert found is not None
    assert found <= PATIENCE + 5


def test_less_than_the_ratio_is_followed_in_silence_and_so_are_shorter_steps() -> None:
    watcher = Watcher(1.2, PATIENCE)
    assert not watcher.see([*steps(300), *steps(2000, level=1.05)])
    watcher = Watcher(1.08, PATIENCE)
    assert not watcher.see([*steps(300), *steps(2000, level=0.6)])
    found = watcher.see(steps(100, level=0.7))
    assert found, "judged by the shorter steps, not by the first"
    assert "they took 1" not in found
    assert "they took 9" not in found


@pytest.mark.parametrize("sigma", [0.005, 0.02])
def test_rises_below_the_ratio_add_up_to_a_change(sigma: float) -> None:
    watcher = Watcher(1.08, PATIENCE)
    assert not watcher.see([*steps(300, sigma=sigma), *steps(1500, sigma=sigma, level=1.048)])
    assert watcher.see(steps(1500, sigma=sigma, level=1.048**2)), "1.098 times the first"


def test_a_creep_by_the_whole_ratio_is_a_change() -> None:
    watcher = Watcher(1.08, PATIENCE)
    creep = [step_s * (1 + 0.1 * number / 20_000) for number, step_s in enumerate(steps(20_000))]
    assert not watcher.see(creep[:8000])
    assert watcher.see(creep[8000:])


def test_a_ratio_must_be_above_one_and_patience_positive() -> None:
    with pytest.raises(ValueError, match="ratio is 1"):
        Watcher(1.0, PATIENCE)
    with pytest.raises(ValueError, match="patience is 0"):
        Watcher(1.08, 0)
