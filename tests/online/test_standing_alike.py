"""Ranks switch only where all stand at one place of their calls, and a call that was never issued counts nowhere."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from job_of_threads import FakeStore, Job
from test_online_loop import options

from lagom_overlap.collective import CollectiveKind, CommConfig, CommunicatorId, ConfigKey, ConfigTable
from lagom_overlap.online.ranks.exchange import CommunicatorPlace, Exchange
from lagom_overlap.online.ranks.messages import SwitchState
from lagom_overlap.online.routes.base import TableCursor

AG = CollectiveKind.ALL_GATHER
ALL = CommunicatorId(description="all", ranks=(0, 1))


def answers(places: list[dict[str, CommunicatorPlace]]) -> list[str]:
    """What each rank has against a switch, as a job would find it: whoever refuses says so to the others."""
    store = FakeStore()

    def stand(rank: int) -> str:
        exchange = Exchange(store, rank=rank, num_ranks=len(places), timeout_s=20.0)
        return exchange.agree(5, refusal=exchange.stand_alike(5, places[rank]))

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(stand, range(len(places))))


def test_ranks_at_one_place_switch() -> None:
    assert answers([{"all": CommunicatorPlace("7 calls", 3)}] * 3) == ["", "", ""]


def test_ranks_at_different_places_do_not() -> None:
    said = answers([{"all": CommunicatorPlace(f"{number} calls", 2)} for number in (7, 8)])
    assert said[0] == said[1]
    assert "7 calls" in said[0]
    assert "8 calls" in said[0]


def test_a_rank_that_does_not_know_of_its_communicator_keeps_the_others_from_switching() -> None:
    said = answers([{"all": CommunicatorPlace("7 calls", 3)}, {"all": CommunicatorPlace("7 calls", 3)}, {}])
    assert said == ["1 of a communicator's ranks do not know of it"] * 3


def test_a_process_counts_for_all_of_its_ranks_and_a_shared_name_is_not_counted() -> None:
    assert answers(
        [{"all": CommunicatorPlace("7 calls", 3, num_here=2)}, {"all": CommunicatorPlace("7 calls", 3)}]
    ) == ["", ""]
    assert answers([{"role": CommunicatorPlace("7 calls")}, {}]) == ["", ""]


def test_a_rank_that_is_interrupted_and_comes_again_has_come_once() -> None:
    """Else the others begin to connect to a rank that has not come, and whoever is missing is not missed."""
    store = FakeStore()
    exchange = Exchange(store, rank=0, num_ranks=3, timeout_s=20.0)

    def interrupted(keys: list[str], timeout_s: float) -> str:
        raise KeyboardInterrupt

    exchange._why_missing = interrupted  # type: ignore[method-assign]
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            exchange.stand_alike(5, {"all": CommunicatorPlace("7 calls", 3)})
    assert [store.add(counter, 0) for counter in ("come/5", "at/5/all#", "owed/5")] == [1, 1, 2]


def test_calls_that_another_thread_makes_while_ranks_agree_keep_all_from_switching() -> None:
    job = Job(options=options())
    route = job.routes[1]
    commit, epochs = route.commit, []

    def commit_beside_a_call(epoch: int) -> None:
        commit(epoch)
        epochs.append(epoch)
        route.num_calls += 1

    route.commit = commit_beside_a_call
    job.run(30)
    route.num_calls -= 1
    assert len(epochs) == 1
    assert [member.plan.state for member in job.members] == [SwitchState.OFF] * 2
    assert all("another thread made calls" in member.plan.reason for member in job.members)


@pytest.mark.parametrize("question", ["_why_stop", "_why_not", "_why_hold", "_why_alone"])
def test_a_question_that_fails_is_a_wish_to_stop(question: str) -> None:
    job = Job(options=options())

    def fails() -> str:
        raise KeyError("never thought of")

    job.start()
    setattr(job.members[1], question, fails)
    job.run(30)
    assert [member.plan.state for member in job.members] == [SwitchState.OFF] * 2
    assert not job.meeting.mismatches


def test_a_call_that_was_never_issued_takes_no_row_and_nothing_of_a_lease() -> None:
    keys = [ConfigKey(communicator=ALL, kind=AG, num_bytes=size << 20, occurrence=0) for size in (1, 2, 3)]
    rows = {key: CommConfig(num_channels=2) for key in keys}
    cursor = TableCursor(ConfigTable(rows, cycles={ALL: tuple(keys)}, lease_steps=1), ALL)
    for key in keys:
        before = cursor.standing
        assert cursor.next_row(AG, key.num_bytes) == (key, rows[key])
        cursor.go_back(before)
        assert cursor.next_row(AG, key.num_bytes) == (key, rows[key])
    assert cursor.is_over
