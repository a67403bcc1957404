"""Training jobs on two and three machines: tuned to the verdict, cut off, refused; never stuck, never wrong."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from gloo_job import GlooJob
from hosts import DEVICE, Network, ipv4, ipv6, networks
from test_online_gloo import settings_file

__all__ = ["networks"]
pytestmark = [pytest.mark.torch, pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(600)]
LIMIT_S = 500.0
NAMED = {"GLOO_SOCKET_IFNAME": DEVICE}
OFF = "online tuning is off, everything runs untouched"


def job(folder: Path, network: Network, **what: Any) -> GlooJob:
    (folder / "job").mkdir()
    what = {"limit_s": LIMIT_S, "num_ranks": 2 * len(network.machines)} | what
    return GlooJob(folder / "job", network=network, **what).start()


def check_equal(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        assert rank["losses"] == rank["stock"], f"rank {number}"
        assert rank["states"] == ranks[0]["states"], f"rank {number}"


def lost_more_than(network: Network, num_resent: int) -> bool:
    return network.num_resent(0) > num_resent


def test_a_search_over_two_machines_whose_names_do_not_resolve_comes_to_its_verdict(
    tmp_path: Path, networks: Any
) -> None:
    """Fails where our groups bind anything but what the job's own group binds: the ranks then never meet."""
    ranks = job(tmp_path, networks(2, resolves=False), steps=76, environment=NAMED).results()
    check_equal(ranks)
    assert "tuning took" in ranks[0]["reason"]
    assert ranks[0]["states"][-1] == "watch"


def test_three_machines_of_which_one_sends_slowly(tmp_path: Path, networks: Any) -> None:
    network = networks(3)
    network.slow_down(2, mbit_per_s=400)
    ranks = job(tmp_path, network, steps=14).results()
    check_equal(ranks)
    assert ranks[0]["states"][-1] == "search"
    assert any(rank["settings"] for rank in ranks)


def test_machines_that_speak_ipv6_alone(tmp_path: Path, networks: Any) -> None:
    ranks = job(tmp_path, networks(2, has_ipv4=False), steps=14, master=ipv6(0)).results()
    check_equal(ranks)
    assert ranks[0]["states"][-1] == "search"
    assert ranks[3]["settings"]


def test_saved_settings_are_in_force_on_two_machines(tmp_path: Path, networks: Any) -> None:
    saved = settings_file(tmp_path / "lagom.json", world_size=4, num_ranks=4)
    ranks = job(tmp_path, networks(2), steps=10, tuner={"config": str(saved)}).results()
    check_equal(ranks)
    assert ranks[3]["states"] == ["record"] * 4 + ["watch"] * 6
    assert [rank["settings"] for rank in ranks] == [2] * 4


def test_ranks_that_cannot_reach_each_other_are_all_off_at_once_and_train_on(tmp_path: Path, networks: Any) -> None:
    """Gloo's passive side waits without a limit for one that was refused; it has to hear of that from the store."""
    running = job(tmp_path, networks(2), steps=14, loopback_channels=True)
    ranks = running.results()
    check_equal(ranks)
    assert ranks[0]["states"][-1] == "off"
    assert "cannot switch" in ranks[0]["reason"]
    said = [log.read_text().count(f"WARNING lagom_overlap.online.ranks.member: {OFF}") for log in running.logs]
    assert said == [1, 0, 0, 0]


def test_a_machine_with_another_release_takes_all_ranks_off(tmp_path: Path, networks: Any) -> None:
    running = job(tmp_path, networks(2), steps=8, release_of={2: "9.9", 3: "9.9"})
    ranks = running.results()
    check_equal(ranks[:2])
    assert all(rank["losses"] == rank["stock"] for rank in ranks)
    assert [rank["states"][-1] for rank in ranks] == ["off"] * 4
    words = running.logs[0].read_text()
    assert words.count(OFF) == 1
    assert "9.9" in words


@pytest.mark.parametrize(
    ("pauses", "steps", "states"),
    [
        ((1, 9), 14, {"record", "search"}),
        pytest.param((1, 9, 46, 84), 88, {"record", "search", "verdict", "watch"}, marks=pytest.mark.long),
    ],
)
def test_a_cable_that_is_pulled_and_put_back_in_any_state_changes_nothing(
    tmp_path: Path, networks: Any, pauses: tuple[int, ...], steps: int, states: set[str]
) -> None:
    network = networks(2)
    running = job(tmp_path, network, steps=steps, pauses=pauses)
    for step in pauses:
        running.wait_for_pause(step)
        resent = network.num_resent(0)
        network.unplug(1)
        running.release(step)
        running.wait_for(partial(lost_more_than, network, resent))
        network.plug_in(1)
    ranks = running.results()
    check_equal(ranks)
    assert states == {ranks[0]["states"][step] for step in pauses}


def test_a_store_that_neither_answers_nor_breaks_takes_all_ranks_off_at_the_same_step(
    tmp_path: Path, networks: Any
) -> None:
    """The store is on a third machine, whose cable is pulled in the middle of a trial and never put back."""
    network = networks(3)
    running = GlooJob(tmp_path, network=network, num_ranks=4, steps=20, master=ipv4(2), pauses=(9,), limit_s=LIMIT_S)
    running.tuner = {"timeout_s": 3.0}
    running.environment = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    serve = f"TCPStore('0.0.0.0', {running.port}, is_master=True, wait_for_workers=False)"
    script = f"from torch.distributed import TCPStore; store = {serve}; input()"
    network.start(2, [sys.executable, "-c", script], stdin=subprocess.PIPE)
    running.start()
    running.wait_for_pause(9)
    network.unplug(2)
    running.release(9)
    ranks = running.results()
    check_equal(ranks)
    assert ranks[0]["states"][9] == "search"
    assert ranks[0]["states"][-1] == "off"
    assert "does not answer" in ranks[0]["reason"]


@pytest.mark.parametrize("is_unplugged", [False, True])
def test_a_machine_that_dies_ends_the_job_as_without_us(tmp_path: Path, networks: Any, *, is_unplugged: bool) -> None:
    """Its processes are killed; or it vanishes without a word, and the job's own limit ends the job."""
    network = networks(2)
    running = job(tmp_path, network, steps=30, pauses=(9,), timeout_s=10.0, also_stock=False)
    running.wait_for_pause(9)
    if is_unplugged:
        network.unplug(1)
    network.machines[1].kill_all()
    running.release(9)
    assert running.finish() == [1, 1, -9, -9]
