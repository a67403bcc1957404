"""The benchmarks of the protocol and of the watcher: short versions, judged by what must hold."""

import json

import pytest

import protocol_scale
import watcher

pytestmark = pytest.mark.long


def rows(capsys: pytest.CaptureFixture[str]) -> list[dict[str, float]]:
    return json.loads(capsys.readouterr().out)["rows"]


def test_what_a_rank_says_and_hears_does_not_grow_with_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    protocol_scale.main(["--ranks", "64,128", "--windows", "1", "--json"])
    few, many = rows(capsys)
    for role in ("leaf", "root"):
        assert many[f"{role}_calls"] == few[f"{role}_calls"]
        assert many[f"{role}_written_bytes"] < 1.5 * few[f"{role}_written_bytes"]
    assert many["root_calls"] < 64
    assert few["height"] == many["height"] == 2


def test_the_watcher_finds_a_large_change_in_time_and_hears_nothing_in_white_noise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--noise", "gaussian_2", "--hours", "1", "--changes", "4", "--detectors", "watcher,watcher:30", "--json"]
    watcher.main(given)
    usual, hasty = rows(capsys)
    assert usual["false_alarms_per_hour"] == usual["slow_phases_per_hour"] == hasty["false_alarms_per_hour"] == 0
    assert usual["missed_10"] == usual["missed_20"] == hasty["missed_20"] == 0
    assert 30 <= hasty["median_delay_20"] <= 55 < usual["median_delay_20"] <= usual["p95_delay_20"] <= 90


def test_the_neighbour_that_comes_and_goes_is_counted_and_no_alarm(capsys: pytest.CaptureFixture[str]) -> None:
    watcher.main(["--noise", "runs", "--hours", "3", "--changes", "0", "--json"])
    (row,) = rows(capsys)
    assert row["false_alarms_per_hour"] < 0.5, "two runs with three steps between them are one of 60, at most"
    assert row["slow_phases_per_hour"] == pytest.approx(3600 / 222.5, rel=0.3), "one in 200 + 22.5 steps"


@pytest.mark.parametrize("name", list(watcher.FORMS))
def test_every_form_of_noise_is_about_one_second_a_step(name: str) -> None:
    steps = watcher.FORMS[name](watcher.Random(3))
    taken = [next(steps) for _ in range(4000)]
    assert 0.95 < sorted(taken)[len(taken) // 4] < 1.05
    assert min(taken) > 0.5
