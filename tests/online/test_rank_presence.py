"""Ranks hear who is killed, who went on and who left, and read who takes part at all."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts import networks
from job_of_threads import FakeStore
from presence_job import Processes, Rank, World, environment, processes, until, worlds

from forked_python import run_ranks
from lagom_overlap.online.ranks import presence as presence_module
from lagom_overlap.online.ranks.presence import absent, say_here, say_off
from lagom_overlap.online.ranks.tree import post_of

__all__ = ["environment", "networks", "processes", "worlds"]


# What is trouble. -----------------------------------------------------------------------------------------------------


def test_a_rank_that_issued_more_than_one_that_waits_is_trouble_for_all(worlds: Callable[..., World]) -> None:
    world = worlds(4)
    for rank in range(4):
        world[rank].issued = {"dp": 7 if rank == 2 else 6}
    world[3].waits(5)
    until(world[3].trouble)
    assert world[3].trouble() == "rank 2 went on beyond the calls that rank 3 stopped at: their steps differ"
    for rank in (0, 1):  # these come there as the other does
        world[rank].waits(5)
        until(world[rank].trouble)
        assert world[rank].trouble() == world[3].trouble()
    assert world[2].trouble() == ""  # it waits nowhere


def test_equal_or_fewer_calls_are_no_trouble_however_often_they_are_compared(worlds: Callable[..., World]) -> None:
    world = worlds(3)
    for rank in range(3):
        world[rank].issued = {"dp": 6 - rank, "tp": 9}
    world[0].waits(5)
    until(lambda: world[1].num_asked >= 3 and world[2].num_asked >= 3)
    assert [world[rank].trouble() for rank in range(3)] == [""] * 3
    world[1].issued, world[2].issued = world[0].issued, {"pp": 100}  # a communicator that the waiting rank is not in
    asked = world[1].num_asked, world[2].num_asked
    until(lambda: world[1].num_asked >= asked[0] + 2 and world[2].num_asked >= asked[1] + 2)
    world[1].waits(5)
    world[1].issued = {"dp": 7}  # by another thread, after it has come there
    assert [world[rank].trouble() for rank in range(3)] == [""] * 3


def test_a_rank_compares_no_longer_once_it_has_come_to_the_boundary(worlds: Callable[..., World]) -> None:
    """It may then go on to the next one while others are still at this one."""
    world = worlds(2)
    world[1].waits(4)
    until(lambda: world[0].num_asked >= 1)
    world[0].waits(4)
    world[0].go_on(4)
    world[0].issued = {"dp": 10}
    world[1].go_on(4)
    world[0].waits(5)  # what is heard of this wait was sent after all that came of the one before
    until(lambda: 5 in world[1]._waits)
    assert (world[0].trouble(), world[1].trouble()) == ("", "")
    assert not world[1]._beyond


def test_the_least_count_of_all_that_wait_is_compared(worlds: Callable[..., World]) -> None:
    world = worlds(3)
    world[1].issued, world[2].issued, world[0].issued = {"dp": 6}, {"dp": 5}, {"dp": 6}
    world[1].waits(1)
    until(lambda: world[0].num_asked >= 2)
    assert world[1].trouble() == ""
    world[2].waits(1)
    for rank in (1, 2):  # the words reach the one before the other
        until(world[rank].trouble)
    assert world[2].trouble() == "rank 0 went on beyond the calls that rank 2 stopped at: their steps differ"


def test_a_rank_in_a_call_that_cannot_be_set_is_trouble_in_the_first_window_and_later(
    worlds: Callable[..., World],
) -> None:
    world = worlds(3)
    for window, grown in enumerate((0, 4, 4)):
        for rank in range(3):
            world[rank].total["dp"] += grown
            world[rank].waits(2 * window)
            world[rank].go_on(2 * window)
        if window != 1:
            world[0].total["dp"] += 3
            world[0].waits(2 * window + 1)
            world[1].total["dp"] += 4  # rank 0's boundary is before the fourth
            until(world[0].trouble)
            assert "rank 1 went on beyond the calls that rank 0 stopped at" in world[0].trouble()
            world[0].go_on(2 * window + 1)
            world[0].total["dp"] -= 3
            world[1].total["dp"] -= 4


@pytest.mark.parametrize(
    ("before", "behind", "ahead"),
    [((2, 3), 3, 9), ((0, 0), 0, 5), ((3, 3), 3, 3)],
    ids=["they send unlike numbers", "no part of the step", "equal"],
)
def test_what_ranks_that_do_the_same_may_count_unlike_is_no_trouble(
    worlds: Callable[..., World], before: tuple[int, int], behind: int, ahead: int
) -> None:
    world = worlds(2)
    for window in range(2):
        for rank in range(2):
            world[rank].waits(2 * window)
            world[rank].go_on(2 * window)
            world[rank].total["pp"] += before[rank]
    for rank in range(2):
        world[rank].waits(4)
        world[rank].go_on(4)
    world[0].total["pp"] += behind
    world[1].total["pp"] += ahead
    world[0].waits(5)
    asked = world[1].num_asked
    until(lambda: world[1].num_asked >= asked + 2)
    assert world[0].trouble() == ""


@pytest.mark.parametrize(
    ("behind", "trouble"),
    [((2, 2), "rank 1 went on"), ((2, 3), "")],
    ids=["alike at the last boundary", "unlike there"],
)
def test_a_rank_that_skipped_a_step_is_compared_by_what_it_issued_since_the_last_call_that_can_be_set(
    worlds: Callable[..., World], behind: tuple[int, int], trouble: str
) -> None:
    """DDP broadcasts buffers before each forward: small calls, in which a rank that is a step behind is stuck."""
    world = worlds(2)
    for rank, steps in enumerate((3, 4)):  # rank 1's window has a step more, since one of them did not count
        world[rank].issued["dp"] = steps
        world[rank].total["dp"] = 10 * steps
        world[rank].marks = {"dp": 10 * steps - behind[rank]}
        world[rank].waits(2)
        world[rank].go_on(2)
    for rank in range(2):
        world[rank].issued["dp"] = 7
        world[rank].marks = {"dp": 70}
    world[0].total["dp"] = 72
    world[1].total["dp"] = 73 if not trouble else 74
    world[0].waits(4)
    asked = world[1].num_asked
    until(world[0].trouble if trouble else lambda: world[1].num_asked >= asked + 2)
    assert world[0].trouble().startswith(trouble)
    assert bool(world[0].trouble()) is bool(trouble)


def test_counts_of_more_communicators_than_fit_into_a_message_all_arrive(worlds: Callable[..., World]) -> None:
    world = worlds(35)  # two levels
    world[0].issued = {f"a communicator with a long name, number {n}": 10**15 for n in range(5000)}
    world[0].waits(3)
    last = post_of(0, 35).children[-1]
    below = max(rank for rank in range(35) if post_of(rank, 35).parent > 0)
    for rank in (last, below):
        until(lambda rank=rank: len(world[rank]._waits.get(3, {})) == 5000)
    world[below].issued = {"a communicator with a long name, number 4999": 10**15 + 1}
    until(world[0].trouble)
    assert f"rank {below} went on" in world[0].trouble()


def test_trouble_at_a_boundary_stays_there_and_is_forgotten_with_it(worlds: Callable[..., World]) -> None:
    world = worlds(2)
    world[0].issued = {"dp": 1}
    world[1].waits(3)
    until(world[1].trouble)
    words = world[1].trouble()
    world[0].waits(3)  # after all, with other counts
    until(world[0].trouble)
    assert world[1].trouble() == words
    for rank in range(2):
        world[rank].go_on(3)
    assert (world[0].trouble(), world[1].trouble()) == ("", "")
    world[1].wait_at(4, {"dp": 1})
    until(lambda: world[0].num_asked >= 1)
    assert world[1].trouble() == ""


def test_boundaries_without_end_are_not_all_kept(worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence_module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(presence_module, "AGAIN_S", 0.0)
    world = worlds(2)
    for boundary in range(20):
        world[0].waits(boundary)
        until(lambda boundary=boundary: boundary in world[1]._waits)
        world[1].waits(boundary)
    assert len(world[1]._waits) == presence_module.MOST_BOUNDARIES == len(world[0]._waits)


def test_a_wait_within_the_patience_is_not_told(worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence_module, "PATIENCE_S", 1e6)
    world = worlds(3)
    world[1].waits(3)
    world[2].vanish()
    until(world[1].trouble)
    assert world[0].num_asked == 0
    assert not world[0]._waits


def test_whoever_left_is_missed_at_the_boundaries_that_it_had_not_reached_alone(worlds: Callable[..., World]) -> None:
    world = worlds(3)
    for rank in (2, 1):  # the first has come further than the second
        world[rank].waits(rank)
        world[rank].go_on(rank)
        world[rank].close()
    until(lambda: world[0]._left is not None and world[0]._left.rank == 1)
    said = []
    for boundary in (1, 2):
        world[0].waits(boundary)
        said.append(world[0].trouble())
        world[0].go_on(boundary)
    assert said == ["", "rank 1 takes no further part"]
    assert world[0].trouble() == ""  # it waits nowhere, and nobody is gone


def test_a_rank_that_lost_the_store_where_it_stands_is_awaited_there_no_longer(worlds: Callable[..., World]) -> None:
    world = worlds(2)
    for rank in (0, 1):
        world[rank].waits(5)
    world[1].leave(is_cut_off=True)
    until(world[0].trouble)
    assert world[0].trouble() == "rank 1 takes no further part"


def test_a_rank_that_leaves_passes_on_what_others_say_until_it_closes(worlds: Callable[..., World]) -> None:
    world = worlds(35)
    middle = next(rank for rank in range(1, 35) if post_of(rank, 35).children)
    world[middle].leave()
    world[post_of(middle, 35).children[0]].vanish()
    until(lambda: all(world[rank].trouble() for rank in range(35) if rank != middle + 1))
    assert world[0].trouble() == f"rank {middle + 1} is gone"


def test_70_ranks_in_two_levels_hear_of_a_loss_in_another_branch(worlds: Callable[..., World]) -> None:
    world = worlds(70)
    lost = max(rank for rank in range(70) if post_of(rank, 70).parent > 0)
    world[lost].vanish()
    others = [rank for rank in range(70) if rank != lost]
    until(lambda: all(world[rank].trouble() for rank in others))
    assert {world[rank].trouble() for rank in others} == {f"rank {lost} is gone"}


def test_where_the_middle_of_the_tree_is_lost_both_parts_hear_of_it(worlds: Callable[..., World]) -> None:
    world = worlds(70)
    lost = next(rank for rank in range(1, 70) if post_of(rank, 70).children)
    world[lost].vanish()
    until(lambda: all(world[rank].trouble() for rank in range(70) if rank != lost))
    assert {world[rank].trouble() for rank in range(70) if rank != lost} == {f"rank {lost} is gone"}


def test_70_ranks_that_all_wait_and_close_at_once_are_told_it_a_few_times_and_none_is_gone(
    worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence_module, "AGAIN_S", 0.0)
    world = worlds(70)
    for rank in range(70):
        world[rank].waits(8)
    until(lambda: all(8 in world[rank]._waits for rank in range(70)))
    ends = [threading.Thread(target=world[rank].close) for rank in range(70)]
    for end in ends:
        end.start()
    for end in ends:
        end.join()
    assert {world[rank].trouble() for rank in range(70)} == {""}
    for rank in range(70):  # that all wait is said once over each connection, or both ways at once; so is that all left
        post = post_of(rank, 70)
        assert world[rank].num_heard <= 4 * (len(post.children) + 1)


@pytest.mark.parametrize("starts", [iter, reversed], ids=["parents first", "children first"])
def test_it_does_not_matter_who_starts_first_and_whoever_comes_late_is_told_what_it_missed(
    starts: Callable[[range], Iterator[int]], worlds: Callable[..., World]
) -> None:
    store, ranks = FakeStore(), {}
    first, *others = starts(range(4))
    try:
        for rank in others:
            ranks[rank] = Rank(store, rank, 4)
            ranks[rank].issued = {"dp": 3}
        if first == 0:  # its children know nobody yet
            ranks[1].waits(7)
            until(lambda: 7 in ranks[1]._waits)
        else:
            until(lambda: ranks[0].num_up == 2)
            ranks[1].waits(7)
            until(lambda: 7 in ranks[0]._waits)
        ranks[first] = Rank(store, first, 4)
        ranks[first].issued = {"dp": 4}
        until(ranks[1].trouble)
        assert ranks[1].trouble() == f"rank {first} went on beyond the calls that rank 1 stopped at: their steps differ"
    finally:
        for rank in ranks.values():
            rank.close()


@pytest.mark.torch
@pytest.mark.gloo
def test_a_process_that_is_killed_is_noticed_by_all_others_wherever_they_are(
    processes: Callable[..., Processes],
) -> None:
    job = processes(4)
    job.ask(1, "wait 5")
    job.ranks[3].kill()
    assert [job.ask(rank, "trouble") for rank in range(3)] == ["rank 3 is gone"] * 3


@pytest.mark.torch
@pytest.mark.gloo
def test_a_process_that_is_stopped_but_alive_is_no_trouble(processes: Callable[..., Processes]) -> None:
    job = processes(4)
    os.kill(job.ranks[2].pid, signal.SIGSTOP)
    try:
        job.ask(1, "wait 5")
        assert job.ask(3, "heard 5") == ""  # what rank 1 said has gone through the tree
        assert [job.ask(rank, "wait 5") for rank in (0, 3)] == ["", ""]
        job.say(2, "issue 1")
    finally:
        os.kill(job.ranks[2].pid, signal.SIGCONT)
    job.hear(2)
    words = job.ask(1, "trouble")  # its connection has held
    assert words == "rank 2 went on beyond the calls that rank 1 stopped at: their steps differ"


@pytest.mark.torch
@pytest.mark.gloo
def test_a_forked_child_says_nothing_and_does_not_keep_its_parent_alive(processes: Callable[..., Processes]) -> None:
    job = processes(3)
    child = int(job.ask(1, "fork"))
    try:
        job.ask(2, "wait 3")
        assert job.ask(0, "heard 3") == ""  # the child has neither left for its parent nor gone beyond
        assert job.ask(1, "heard 3") == ""
        job.ranks[1].kill()
        assert [job.ask(rank, "trouble") for rank in (0, 2)] == ["rank 1 is gone"] * 2
        os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.torch
@pytest.mark.gloo
def test_a_process_ends_without_waiting_for_its_thread(processes: Callable[..., Processes]) -> None:
    job = processes(2)
    job.say(1, "end")
    assert job.ranks[1].wait() == 0
    assert job.ask(0, "trouble") == "rank 1 is gone"


# Who takes part at all. -----------------------------------------------------------------------------------------------


class CountingStore(FakeStore):
    """Counts round trips, and never waits."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0

    def check(self, keys: list[str]) -> bool:
        self.num_asked += 1
        return super().check(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.num_asked += 1
        return [self.values[key] for key in keys]

    def add(self, key: str, amount: int) -> int:
        self.num_asked += 1
        return super().add(key, amount)


def here(num_ranks: int, **odd: str) -> CountingStore:
    """All but those of `odd` (by "rNUMBER") take part; its value: nothing, another mode, or "release mode"."""
    store = CountingStore()
    for rank in range(num_ranks):
        word = odd.get(f"r{rank}", "1.0 online")
        if word:
            release, _, mode = word.partition(" ")
            say_here(store, rank, mode, release)
    store.num_asked = 0
    return store


def test_where_all_ranks_take_part_one_question_says_so() -> None:
    store = here(5000)
    assert absent(store, 5000, "online", "1.0") == ""
    assert store.num_asked == 1


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"r3": ""}, "rank 3 does not run lagom"),
        ({"r0": "1.0 observe"}, "rank 0 runs in mode observe, not online"),
        ({"r4": "0.9 online"}, "rank 4 runs lagom-overlap 0.9, not 1.0"),
        ({"r2": "1.0 off (LAGOM_DISABLE is set)"}, "rank 2 is off (LAGOM_DISABLE is set)"),
        ({"r1": "1.0 two\nlines"}, "rank 1 runs in mode two lines, not online"),
        ({"r1": "", "r4": "1.0 fixed"}, "rank 1 does not run lagom, rank 4 runs in mode fixed, not online"),
    ],
)
def test_those_that_do_not_take_part_are_named_with_the_reason(odd: dict[str, str], words: str) -> None:
    assert absent(here(5, **odd), 5, "online", "1.0") == words


def test_a_rank_whose_session_fails_takes_its_word_back() -> None:
    store = here(3)
    for why in ("no space left on device", "it was closed"):  # the first reason stays
        say_off(store, 1, "online", "1.0", why)
    assert store.add("num_here/1.0/online", 0) == 2
    assert absent(store, 3, "online", "1.0") == "rank 1 is off (no space left on device)"


@pytest.mark.parametrize("missing", [[15_999], [0, 7000, 15_000], range(8, 16), range(0, 16_000, 2)])
def test_of_thousands_of_ranks_a_few_are_named_by_a_hundred_questions_or_so(missing: list[int]) -> None:
    store = here(16_000, **{f"r{rank}": "" for rank in missing})
    named = [f"rank {rank} does not run lagom" for rank in missing[:4]]
    assert absent(store, 16_000, "online", "1.0") == ", ".join([*named, "and more"] if len(missing) > 4 else named)
    assert store.num_asked < 150


@pytest.mark.torch
@pytest.mark.gloo
@pytest.mark.parametrize(
    ("does", "words"),
    [
        (["online", "online", "online"], ""),
        (["online", "bare", "online"], "rank 1 does not run lagom"),
        (["online", "observe", "off"], "rank 1 runs in mode observe, not online, rank 2 is off (LAGOM_DISABLE is set)"),
        (
            ["online", "online", "unknown"],
            "rank 2 is off (LAGOM_RUN_MODE is 'unknown', allowed: fixed, held, planned, observe, online, prove)",
        ),
    ],
    ids=["all", "bare", "another mode and off", "failed"],
)
def test_ranks_of_a_job_say_at_its_start_that_they_are_here(tmp_path: Path, does: list[str], words: str) -> None:
    lines = run_ranks(Path(__file__).parent / "here_rank.py", ["online", *does], 3, cwd=tmp_path)[0].splitlines()
    assert [line for line in lines if "rank" in line or not line] == [words]
