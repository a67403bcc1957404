"""Ranks hear of each other over connections: who is killed, who went on, who left; and strangers do no harm."""

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts import networks
from job_of_threads import FakeStore

from forked_python import ForkedPython
from lagom_overlap.online.ranks import links as links_module
from lagom_overlap.online.ranks import presence as presence_module
from lagom_overlap.online.ranks.presence import Presence
from lagom_overlap.online.ranks.tree import post_of
from ports import free_port

__all__ = ["networks"]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def until(holds: Callable[[], object]) -> None:
    """Returns once it does; a test's timeout is the limit."""
    while not holds():
        time.sleep(0.005)


class Rank(Presence):
    """One whose counts the test sets, and which notes how often it was asked for them."""

    def __init__(self, store: FakeStore, rank: int, num_ranks: int) -> None:
        self.issued = {"dp": 0}
        self.num_asked = 0
        super().__init__(store, rank=rank, num_ranks=num_ranks, counts=self._issued)
        self.start()

    def _issued(self) -> dict[str, int]:
        self.num_asked += 1
        return self.issued

    def waits(self, boundary: int) -> None:
        self.wait_at(boundary, dict(self.issued))

    @property
    def num_up(self) -> int:
        assert self._links is not None
        return sum(link.is_up for link in self._links._links)

    def vanish(self) -> None:
        """Its connections end without a goodbye."""
        self._has_left = True
        self.close()


class World:
    """Ranks of this process, which have met."""

    def __init__(self, num_ranks: int, *, starts: Callable[[range], Iterator[int]] = iter) -> None:
        self.store = FakeStore()
        self.ranks = {rank: Rank(self.store, rank, num_ranks) for rank in starts(range(num_ranks))}
        for rank in self.ranks.values():
            post = post_of(rank._rank, num_ranks)
            until(lambda rank=rank, post=post: rank.num_up == len(post.children) + (post.parent >= 0))

    def __getitem__(self, rank: int) -> Rank:
        return self.ranks[rank]

    def close(self) -> None:
        for rank in self.ranks.values():
            rank.close()


@pytest.fixture
def worlds() -> Iterator[Callable[..., World]]:
    with contextlib.ExitStack() as stack:

        def make(num_ranks: int, **how: Callable[[range], Iterator[int]]) -> World:
            world = World(num_ranks, **how)
            stack.callback(world.close)
            return world

        yield make


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
    until(world[1].trouble)
    assert world[2].trouble() == "rank 0 went on beyond the calls that rank 2 stopped at: their steps differ"


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


def test_70_ranks_that_all_close_at_once_leave_nobody_to_be_gone(worlds: Callable[..., World]) -> None:
    world = worlds(70)
    for rank in range(70):
        world[rank].waits(8)
    ends = [threading.Thread(target=world[rank].close) for rank in range(70)]
    for end in ends:
        end.start()
    for end in ends:
        end.join()
    assert {world[rank].trouble() for rank in range(70)} == {""}


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


# Processes. -----------------------------------------------------------------------------------------------------------


class Processes:
    """Ranks as processes, which have met; `ask` says a line to one and returns its answer."""

    def __init__(self, num_ranks: int, host: str = "127.0.0.1", machines: dict[int, int] | None = None) -> None:
        port, script = free_port(), Path(__file__).parent / "presence_rank.py"
        self.num_ranks = num_ranks
        local = num_ranks if machines is None else 1
        self.ranks = [
            ForkedPython(
                script,
                [str(rank), str(num_ranks), str(port), host, "serves"],
                env=os.environ | {"LOCAL_WORLD_SIZE": str(local)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                machine=(machines or {}).get(rank),
            )
            for rank in range(num_ranks)
        ]
        for rank in range(num_ranks):
            self.ask(rank, f"meet {num_ranks - 1 if rank == 0 else 1}")

    def say(self, rank: int, line: str) -> None:
        stdin = self.ranks[rank].stdin
        assert stdin is not None
        stdin.write(f"{line}\n")
        stdin.flush()

    def hear(self, rank: int) -> str:
        stdout = self.ranks[rank].stdout
        assert stdout is not None
        line: str = stdout.readline()
        assert line, f"rank {rank} has ended"
        return line.rstrip("\n")

    def ask(self, rank: int, line: str) -> str:
        self.say(rank, line)
        return self.hear(rank)

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()
            for pipe in (rank.stdin, rank.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()


@pytest.fixture
def processes() -> Iterator[Callable[..., Processes]]:
    with contextlib.ExitStack() as stack:

        def make(*arguments: object, **how: object) -> Processes:
            made = Processes(*arguments, **how)  # type: ignore[arg-type]  # its own
            stack.callback(made.close)
            return made

        yield make


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


@pytest.mark.torch
@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("has_ipv4", [True, False])
def test_two_machines_meet_where_one_knows_itself_as_loopback_and_miss_one_whose_cable_is_pulled(
    processes: Callable[..., Processes], networks: Callable[..., object], has_ipv4: bool
) -> None:
    network = networks(3, own_is_loopback=has_ipv4, has_ipv4=has_ipv4)
    machines = {number: machine.holder.pid for number, machine in enumerate(network.machines)}  # type: ignore[attr-defined]
    job = processes(3, "node0", machines)
    network.unplug(2)  # type: ignore[attr-defined]
    assert [job.ask(rank, "trouble") for rank in (0, 1)] == ["rank 2 is gone"] * 2


# Strangers, and what cannot be had. -----------------------------------------------------------------------------------


def frame(text: str) -> bytes:
    return len(text.encode()).to_bytes(4) + text.encode()


STRANGERS = {
    "garbage": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "oversized": (1 << 31).to_bytes(4) + b"x" * 100,
    "one byte too many": (links_module.MOST_BYTES + 1).to_bytes(4),
    "no json": frame("\0\xff"),
    "nested": frame("[" * 60_000),
    "no object": frame("[]"),
    "wrong nonce": frame('{"type":"Hello","rank":1,"nonce":"' + "0" * 32 + '"}'),
    "nonce without a code": frame('{"type":"Hello","rank":1,"nonce":"ä"}'),
    "empty nonce": frame('{"type":"Hello","rank":1,"nonce":""}'),
    "welcome": frame('{"type":"Welcome","nonce":""}'),
    "no hello": frame('{"type":"Gone","rank":1}'),
    "unknown field": frame('{"type":"Hello","rank":1,"nonce":"","more":1}'),
}


@pytest.fixture
def lonely() -> Iterator[Rank]:
    """Rank 0 of two, which listens."""
    rank = Rank(FakeStore(), 0, 2)
    until(lambda: "presence/1" in rank._store.values)  # type: ignore[attr-defined]
    yield rank
    rank.close()


def address(rank: Rank) -> dict[str, str | int]:
    found: dict[str, str | int] = json.loads(rank._store.values["presence/1"])  # type: ignore[attr-defined]
    return found


def dial(rank: Rank) -> socket.socket:
    return socket.create_connection(("localhost", int(address(rank)["port"])))


def is_ended(connection: socket.socket) -> bool:
    """Waits for the other end to close it."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("what", STRANGERS)
def test_a_stranger_is_cut_off_and_does_no_harm(lonely: Rank, what: str) -> None:
    with dial(lonely) as stranger:
        stranger.sendall(STRANGERS[what])
        assert is_ended(stranger)
    check_works(lonely)


def check_works(rank: Rank) -> None:
    """The rank that is expected still comes, and is the only one that counts."""
    assert rank.trouble() == ""
    other = Rank(rank._store, 1, 2)  # type: ignore[arg-type]
    until(lambda: rank.num_up == other.num_up == 1)
    assert rank.trouble() == ""
    other.vanish()
    until(rank.trouble)


def test_a_nonce_of_the_rank_is_no_pass_for_another_rank_or_a_second_time(lonely: Rank) -> None:
    hello = {"type": "Hello", "nonce": address(lonely)["hello"]}
    for number in (0, 2, 10**30, -1):
        with dial(lonely) as stranger:
            stranger.sendall(frame(json.dumps(hello | {"rank": number})))
            assert is_ended(stranger)
    early = dial(lonely)  # accepted while the rank listens
    until(lambda: lonely._links is not None and lonely._links._links)
    other = Rank(lonely._store, 1, 2)  # type: ignore[arg-type]
    until(lambda: lonely.num_up == 1)
    early.sendall(frame(json.dumps(hello | {"rank": 1})))
    assert is_ended(early)
    early.close()
    with pytest.raises(ConnectionRefusedError):  # all are here: nobody listens
        dial(lonely)
    assert lonely.trouble() == other.trouble() == ""
    other.close()


def test_a_stranger_that_hangs_up_in_the_middle_or_says_nothing_is_no_trouble(
    lonely: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dial(lonely) as stranger:
        stranger.sendall(b"\0\0")
    monkeypatch.setattr(links_module, "HELLO_S", 0.1)
    with dial(lonely) as silent:
        assert is_ended(silent)
    check_works(lonely)


def test_strangers_beyond_a_number_are_turned_away(lonely: Rank) -> None:
    with contextlib.ExitStack() as stack:
        kept = [stack.enter_context(dial(lonely)) for _ in range(links_module.MOST_STRANGERS)]
        until(lambda: lonely._links is not None and len(lonely._links._links) == len(kept))
        assert is_ended(stack.enter_context(dial(lonely)))
    until(lambda: lonely._links is not None and not lonely._links._links)
    check_works(lonely)


@pytest.mark.parametrize("answer", [None, b"", frame('{"type":"Welcome","nonce":"wrong"}'), frame("{}")])
def test_an_address_where_a_stranger_listens_or_nobody_is_no_trouble(answer: bytes | None) -> None:
    with socket.create_server(("localhost", 0)) as server:
        store = FakeStore()
        where = {"host": "", "port": server.getsockname()[1], "hello": "a", "welcome": "b"}
        store.set("presence/1", json.dumps(where))
        if answer is None:
            server.close()
        rank = Rank(store, 1, 2)
        if answer is not None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(answer)
                if answer:
                    assert b"Hello" in connection.recv(1000)
                    assert is_ended(connection)
        until(lambda: rank._links is not None and not rank._links._expected and not rank._links._links)
        assert rank.trouble() == ""
        rank.close()


@pytest.mark.parametrize("text", ["", "{}", '{"host":"","port":0,"hello":"","welcome":""}', "no json"])
def test_an_address_that_cannot_be_read_is_no_trouble(text: str) -> None:
    store = FakeStore()
    store.values["presence/2"] = text.encode() or b"\xff"
    ranks = [Rank(store, rank, 3) for rank in range(3)]
    until(lambda: ranks[0].num_up == ranks[1].num_up == 1)
    ranks[1].waits(1)
    assert [rank.trouble() for rank in ranks] == [""] * 3
    for rank in ranks:
        rank.close()


def test_a_neighbour_that_says_what_no_rank_says_counts_as_gone(lonely: Rank) -> None:
    hello = {"type": "Hello", "nonce": address(lonely)["hello"], "rank": 1}
    with dial(lonely) as other:
        other.sendall(frame(json.dumps(hello)))
        until(lambda: lonely.num_up == 1)
        other.sendall(frame("[]"))
        until(lonely.trouble)
    assert lonely.trouble() == "rank 1 is gone"


def test_a_neighbour_that_reads_nothing_costs_no_more_than_a_bound(
    lonely: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence_module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(presence_module, "AGAIN_S", 0.0)
    hello = {"type": "Hello", "nonce": address(lonely)["hello"], "rank": 1}
    assert lonely._links is not None
    with dial(lonely) as other:
        other.sendall(frame(json.dumps(hello)))
        until(lambda: lonely.num_up == 1)
        (link,) = lonely._links._links
        for boundary in range(1000):
            lonely.wait_at(boundary, {f"{n}": n for n in range(2000)})
            until(lambda boundary=boundary: boundary in lonely._waits and not lonely._news)
            if len(link.unsent) >= links_module.MOST_UNSENT_BYTES:
                break
        lonely.wait_at(5000, {"last": 1})
        until(lambda: 5000 in lonely._waits and not lonely._news)
        assert len(link.unsent) < links_module.MOST_UNSENT_BYTES + links_module.MOST_BYTES
        assert lonely.trouble() == ""


@pytest.mark.parametrize("what", ["socketpair", "create_server", "getaddrinfo", "store", "thread"])
def test_where_sockets_cannot_be_had_there_is_no_trouble_and_one_debug_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    caplog.set_level(logging.DEBUG, presence_module.__name__)
    store = FakeStore()
    before = descriptors()

    def refuse(*_: object, **__: object) -> None:
        raise (RuntimeError if what == "thread" else PermissionError)("not permitted")

    if what == "store":
        store.is_gone = True
    elif what == "thread":
        monkeypatch.setattr(presence_module.Thread, "start", refuse)
    else:
        monkeypatch.setattr(socket, what, refuse)
    rank = Rank(store, 0, 2)
    until(lambda: caplog.records)
    until(lambda: descriptors() == before)
    rank.waits(1)
    assert rank.trouble() == ""
    rank.go_on(1)
    rank.leave()
    rank.close()
    rank.close()
    assert len(caplog.records) == 1
    assert descriptors() == before


def test_a_system_without_a_free_descriptor_listens_no_longer_and_does_not_spin(
    lonely: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = lonely._links
    assert links is not None
    assert links._listener is not None

    class Full:
        def __init__(self, listener: socket.socket) -> None:
            self.close, self.fileno = listener.close, listener.fileno

        def accept(self) -> None:
            raise OSError(24, "Too many open files")

    links._listener = Full(links._listener)  # type: ignore[assignment]
    with dial(lonely) as stranger:
        assert is_ended(stranger)
    assert links._listener is None


def descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def test_nothing_stays_after_close(worlds: Callable[..., World]) -> None:
    before = len(descriptors())
    world = worlds(40)
    assert len(descriptors()) > before + 40
    world.close()
    assert [thread.name for thread in threading.enumerate() if "presence" in thread.name] == []
    assert len(descriptors()) == before
    world[0].waits(4)  # nor does it come again
    world[0].leave()
    assert len(descriptors()) == before


def test_a_job_of_one_rank_opens_nothing() -> None:
    before = descriptors()
    rank = Rank(FakeStore(), 0, 1)
    assert descriptors() == before
    rank.waits(0)
    assert rank.trouble() == ""
    rank.close()


@pytest.mark.parametrize("host", ["::1", "127.0.0.1", "localhost"])
def test_ranks_meet_over_both_protocols_at_the_address_of_the_store(host: str) -> None:
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        pytest.skip(f"no {host} here: {error}")
    store = FakeStore()
    store.host = host  # type: ignore[attr-defined]
    ranks = [Rank(store, rank, 2) for rank in range(2)]
    until(lambda: ranks[0].num_up == ranks[1].num_up == 1)
    for rank in ranks:
        rank.close()
