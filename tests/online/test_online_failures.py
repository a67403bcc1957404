"""Ranks killed, stopped or disabled, disks that are full, files of another job: nobody hangs, nothing is wrong.

How long is allowed: the stated timeout, and what the processes themselves take to start and end on a busy machine.
"""

import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from gloo_job import GlooJob
from test_online_gloo import settings_file

pytestmark = [pytest.mark.torch, pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(240)]

TIMEOUT_S = 3.0
SLACK_S = 400.0
"""For a machine that has other things to do."""


def job(folder: Path, **what: object) -> GlooJob:
    folder.mkdir(exist_ok=True)
    return GlooJob(folder, **{"also_stock": False, **what})


def test_a_rank_that_is_ended_ends_the_others_with_an_error_in_time(tmp_path: Path) -> None:
    number = signal.SIGTERM  # SIGKILL: `fault_matrix`
    running = job(tmp_path, steps=100_000, tuner={"timeout_s": TIMEOUT_S}).start()
    running.wait_for_step(1, 14)
    running.processes[1].send_signal(number)
    codes = running.finish(TIMEOUT_S + SLACK_S)
    assert codes[1] == -number
    assert codes[0] not in (0, None)
    assert "Connection" in running.words() or "connection" in running.words()


def test_a_rank_that_stands_still_for_longer_than_the_timeout_costs_the_tuning_and_nothing_else(tmp_path: Path) -> None:
    """Stopped between two steps or inside one: either nobody noticed, or all ranks are off at the same step."""
    running = job(tmp_path, steps=60, also_stock=True, tuner={"timeout_s": 1.0}).start()
    running.wait_for_step(0, 14)
    running.processes[0].send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    running.processes[0].send_signal(signal.SIGCONT)
    ranks = running.results()
    assert all(rank["losses"] == rank["stock"] for rank in ranks)
    assert ranks[0]["states"] == ranks[1]["states"]


def test_a_rank_whose_environment_says_disable_takes_all_ranks_off_at_one_step(tmp_path: Path) -> None:
    ranks = job(tmp_path, steps=30, disable_at=9, also_stock=True).start().results()
    assert all(rank["losses"] == rank["stock"] for rank in ranks)
    assert ranks[0]["states"] == ranks[1]["states"]
    assert ranks[0]["states"][-1] == "off"
    assert "LAGOM_DISABLE" in ranks[0]["reason"]


def test_a_rank_that_is_disabled_from_the_start_is_not_waited_for(tmp_path: Path) -> None:
    running = job(tmp_path, steps=12, per_rank={1: {"enabled": False}}).start()
    ranks = running.results()
    assert ranks[0]["states"][-1] == "off"
    assert "rank 1" in ranks[0]["reason"]
    assert "disabled" in ranks[0]["reason"]


def test_a_killed_job_goes_on_behind_its_journal(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    first = job(tmp_path / "first", steps=100_000, tuner={"journal": str(journal), "max_steps": 2000}).start()
    first.wait_for_step(0, 24)
    for process in first.processes:
        process.kill()
    first.finish()
    kept = journal.read_text().count("\n")
    assert kept >= 3
    again = job(tmp_path / "again", steps=8, tuner={"journal": str(journal)}).start()
    again.results()
    assert "resuming from the journal" in again.words()


def test_settings_of_another_world_size_or_damaged_ones_are_refused_in_words(tmp_path: Path) -> None:
    settings = settings_file(tmp_path / "lagom.json", world_size=16)
    running = job(tmp_path / "size", steps=5, also_stock=True, tuner={"config": str(settings)}).start()
    ranks = running.results()
    assert all(rank["losses"] == rank["stock"] for rank in ranks)
    assert "were found with 16 ranks, this job has 2; searching as if there were none" in running.words()
    assert ranks[0]["states"][0] == "record"


def test_a_full_disk_costs_the_journal_and_the_saved_file_and_nothing_else(tmp_path: Path) -> None:
    """No file may grow beyond 200 bytes: every write of ours fails, from the first or in its middle."""
    journal, saved = tmp_path / "journal.jsonl", tmp_path / "lagom.json"
    tuner = {"journal": str(journal)}
    running = job(tmp_path / "job", kind="calls", steps=84, tuner=tuner | {"adapters": ["calls"]}, save=str(saved))
    running.file_limit_bytes = 200
    ranks = running.start().results()
    assert ranks[0]["states"][-1] == "watch"
    assert "cannot write" in ranks[0]["saved"]
    assert not saved.exists()
    assert not list(tmp_path.glob(".lagom.json.*"))
    assert running.words().count("without a journal") == 1


def test_the_variable_alone_leaves_a_job_alone(tmp_path: Path) -> None:
    running = job(tmp_path, steps=4, environment={"LAGOM_DISABLE": "1"}).start()
    assert [rank["states"] for rank in running.results()] == [["off"] * 4] * 2
