"""A world made of a recording gives its truth back, and searches of it are the same every time."""

from math import exp, log
from random import Random

import numpy as np
import pytest

import recorded_search
from lagom_overlap.collective import CommConfig
from lagom_overlap.tuners.problem import Measurement
from recorded_world import Pass, World, likeness

CONFIGS = [CommConfig(num_channels=n, chunk_bytes=c) for n in (1, 2, 4, 8) for c in (2**19, 2**21, 2**23)]


def true_s(config: CommConfig) -> tuple[float, float]:
    """Y and x: smooth in both knobs."""
    channels, chunk = log(config.num_channels or 1, 2), log((config.chunk_bytes or 1) / 2**19, 4)
    return 0.10 * exp(0.05 * channels - 0.04 * chunk), 0.08 * exp(-0.2 * channels - 0.1 * chunk)


def recorded(noise: float, passes: int = 6, seed: int = 1) -> Pass:
    rng, arms, runs = Random(seed), [], []
    for _ in range(passes):
        for config in rng.sample(CONFIGS, len(CONFIGS)):
            comp_s, comm_s = (time_s * exp(rng.gauss(0, noise)) for time_s in true_s(config))
            runs.append(Measurement(makespan_s=max(comp_s, comm_s), comp_s=comp_s, comm_s=(comm_s,)))
            arms.append((config,))
    return Pass(arms, range(len(arms)), runs)


def test_the_smoothed_truth_is_nearer_than_the_measurements() -> None:
    world = World(recorded(0.1), scale=0.0)
    errors = [log(world.measure((config,), 0).comp_s / true_s(config)[0]) for config in CONFIGS]
    assert float(np.std(errors)) < 0.1 / 6**0.5  # less than what means of six repeats would leave
    assert world.noise == pytest.approx(0.0, abs=1e-9)


def test_what_a_world_measures_scatters_around_its_truth_as_it_was_recorded() -> None:
    world = World(recorded(0.1))
    assert 0.07 < world.noise < 0.13
    arm = (CONFIGS[0],)
    values = sorted(world.measure(arm, row).makespan_s for row in range(len(world.residuals)))
    assert world.makespans_s[arm] == pytest.approx(float(np.median(values)))


def test_rows_follow_each_other_from_a_random_one_or_are_drawn() -> None:
    world = World(recorded(0.05))
    rows = world.rows(Random(3), in_order=True)
    first = next(rows)
    assert [next(rows) for _ in range(3)] == [(first + step) % len(world.residuals) for step in (1, 2, 3)]
    drawn = world.rows(Random(3), in_order=False)
    assert next(drawn) == first


def test_another_implementation_is_a_thing_by_itself() -> None:
    alike = likeness([CommConfig(), CommConfig(num_channels=1, chunk_bytes=2**19), CONFIGS[0], CONFIGS[3]])
    assert alike[0, 1] == 0
    assert alike[1, 2] == 1
    assert alike[2, 3] == pytest.approx(exp(-0.5))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a.csv", "b.csv", "--tuners", "lagom"], "--tuners is for job files"),
        (["a.csv", "b.csv", "--noise", "1"], "--noise is for job files"),
        (["a.csv", "b.csv", "--surfaces", "x"], "--surfaces is for job files"),
        (["a.csv", "b.csv", "--independent"], "--independent is for job files"),
        (["a.csv"], "1 CSV files; a surface and its raw noise are two"),
        (["a.csv", "b.toml", "--surfaces", "x"], "'a.csv' is a CSV file among job files"),
        (["b.toml"], "--surfaces is needed with job files"),
        (["b.toml", "--surfaces", "x", "--tuners", "lagon"], "unknown tuner 'lagon'"),
        (["b.toml", "--surfaces", "x", "--noise", "1,nan"], "--noise has 'nan', must be numbers from 0 to 100"),
        (["b.toml", "--surfaces", "x", "--noise", "1,"], "--noise has '', must be numbers from 0 to 100"),
        (["b.toml", "--surfaces", "x", "--searches", "0"], "--searches is 0, must be at least 1"),
        (["a.csv", "b.csv", "--workers", "0"], "--workers is 0, must be at least 1"),
    ],
)
def test_a_flag_that_has_no_meaning_is_refused_with_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert recorded_search.main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
