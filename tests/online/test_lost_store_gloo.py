"""One rank of a real job loses the store: all ranks run on under the same settings, and compute the same bits."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from gloo_job import GlooJob
from test_online_gloo import settings_file

WINDOW = 4
"""Steps of a window of these jobs."""
COMPARED = {"adapters": ["calls"], "compare": ["fixed_min"]}
"""Tuning that lasts: a search that ends with the default is over, but for what it is compared with."""
pytestmark = [pytest.mark.torch, pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.mark.parametrize(("rank", "step"), [(0, 13), (1, 18)])
def test_a_rank_that_loses_the_store_while_tuning_is_untouched_as_the_others_are(
    tmp_path: Path, rank: int, step: int
) -> None:
    running = GlooJob(tmp_path, kind="calls", steps=34, loses_store=(rank, step))
    running.tuner = COMPARED | {"timeout_s": 2.0}
    ranks = running.start().results()
    assert all(one["losses"] == one["stock"] for one in ranks)
    states = [one["states"] for one in ranks]
    off = [each.index("off") for each in states]
    # Where a window's report had left before the store was lost, the other rank hears of it a window later; until then
    # nothing can be switched, as that takes both.
    assert abs(off[0] - off[1]) <= WINDOW
    assert states[0][: min(off)] == states[1][: min(off)]
    assert all(each[at:] == ["off"] * (34 - at) for each, at in zip(states, off, strict=True))
    assert states[0][step] in ("search", "verdict")
    assert "the job's store does not answer" in ranks[rank]["reason"]


def test_a_rank_that_loses_the_store_ends_no_job_whose_own_calls_may_take_less_time_than_ours(tmp_path: Path) -> None:
    running = GlooJob(tmp_path, kind="calls", steps=34, loses_store=(1, 18), timeout_s=20.0)
    running.tuner = COMPARED | {"timeout_s": 60.0}
    ranks = running.start().results()
    assert all(one["losses"] == one["stock"] and one["states"][-1] == "off" for one in ranks)
    assert "rank 1 takes no further part" in ranks[0]["reason"]


def test_settled_settings_stay_where_one_rank_loses_the_store_and_another_one_wants_to_stop(tmp_path: Path) -> None:
    running = GlooJob(tmp_path, steps=90, loses_store=(0, 11), disable_at=11)
    running.tuner = {"config": str(settings_file(tmp_path / "lagom.json")), "timeout_s": 2.0}
    ranks = running.start().results()
    assert all(one["losses"] == one["stock"] for one in ranks)
    assert ranks[0]["states"] == ranks[1]["states"]
    assert ranks[0]["states"][-1] == "done"
    assert [one["settings"] for one in ranks] == [2, 2]
    assert all("what is set stays for good" in one["reason"] for one in ranks)
