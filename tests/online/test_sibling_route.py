"""Calls on sibling communicators: real FSDP2, DDP and all-to-all over gloo, where a sibling is a further group."""

import json
import subprocess
from pathlib import Path

import pytest

from forked_python import ForkedPython
from ports import free_port

torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).with_name("sibling_job.py")


@pytest.fixture(scope="module")
def found():
    port = free_port()
    ranks = [
        ForkedPython(SCRIPT, [str(rank), "2", str(port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(2)
    ]
    outcomes = []
    for rank in ranks:
        with rank.stdout as words:
            outcomes.append(words.read())
    assert [rank.wait() for rank in ranks] == [0, 0], "".join(outcomes)
    first, second = (json.loads(out.splitlines()[-1]) for out in outcomes)
    assert first == second
    return first


pytestmark = [pytest.mark.torch, pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_losses_on_siblings_are_those_of_the_jobs_own_groups_bit_for_bit(found, kind):
    assert found[kind]["equal"]
    assert found[kind]["taken"] == (2 if kind == "fsdp" else 1)  # the root holds no parameters of its own


def test_ddp_that_was_given_another_group_sums_there_and_on_no_sibling_of_the_old_one(found):
    assert found["another group"]


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_every_step_has_the_same_calls_with_occurrences_from_0(found, kind):
    calls = found[kind]["calls"]
    assert all(step == calls[-1] for step in calls[1:])
    assert len(set(calls[-1])) >= 1
    assert any(call.endswith(":0") for call in calls[-1])


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_siblings_are_made_once_each_and_only_those_that_a_table_names(found, kind):
    assert found[kind]["opened"][0] == [2, None]
    assert sorted(found[kind]["opened"]) == sorted(found[kind]["siblings"][0])
    assert {tuple(limits) for limits in found[kind]["opened"]} <= {(2, None), (4, None)}


def test_an_all_to_all_runs_on_its_sibling_with_the_same_result(found):
    assert found["all_to_all"] == {"same": True, "group": "sibling_(2, None)"}


def test_ranks_that_send_unequal_numbers_of_bytes_meet_on_one_communicator(found):
    """Found by the fuzzer: each rank chose by its own bytes, and they waited for each other on different groups."""
    assert found["uneven"]


def test_what_a_communicator_cannot_be_limited_to_is_refused(found):
    assert "chunk_bytes is 1048576" in found["refused"]


def test_a_commit_that_is_taken_back_leaves_calls_on_the_siblings_before(found):
    assert found["taken_back"] == "sibling_(2, None)"


def test_closing_gives_the_jobs_own_groups_back(found):
    assert found["undone"]
