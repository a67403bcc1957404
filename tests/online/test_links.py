"""Connections of ranks: strangers do no harm, and nothing stays or is asked for that cannot be had."""

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from hosts import networks
from job_of_threads import FakeStore
from presence_job import Processes, Rank, World, environment, processes, until, worlds

from lagom_overlap.online.ranks import links as links_module
from lagom_overlap.online.ranks import presence as presence_module

__all__ = ["environment", "networks", "processes", "worlds"]


def frame(text: str) -> bytes:
    return len(text.encode()).to_bytes(4) + text.encode()


STRANGERS = {
    "garbage": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "oversized": (1 << 31).to_bytes(4) + b"x" * 100,
    "one byte too many": (links_module.MOST_BYTES + 1).to_bytes(4),
    "no json": frame("\0\xff"),
    "nested": frame("[" * 60_000),
    "no object": frame("[]"),
    "wrong nonce": frame('{"type":"Greeting","rank":1,"nonce":"' + "0" * 32 + '"}'),
    "nonce without a code": frame('{"type":"Greeting","rank":1,"nonce":"ä"}'),
    "empty nonce": frame('{"type":"Greeting","rank":1,"nonce":""}'),
    "welcome": frame('{"type":"Welcome","nonce":""}'),
    "no hello": frame('{"type":"Gone","rank":1}'),
    "unknown field": frame('{"type":"Greeting","rank":1,"nonce":"","more":1}'),
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
    hello = {"type": "Greeting", "nonce": address(lonely)["hello"]}
    for number in (0, 2, 10**30, -1):
        with dial(lonely) as stranger:
            stranger.sendall(frame(json.dumps(hello | {"rank": number})))
            assert is_ended(stranger)
    with dial(lonely) as stranger:  # the right nonce, in the wrong place
        stranger.sendall(frame(json.dumps(hello | {"type": "Welcome"})))
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
    with monkeypatch.context() as patched:
        patched.setattr(links_module, "HELLO_S", 0.1)
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
                    assert b"Greeting" in connection.recv(1000)
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
    hello = {"type": "Greeting", "nonce": address(lonely)["hello"], "rank": 1}
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
    hello = {"type": "Greeting", "nonce": address(lonely)["hello"], "rank": 1}
    assert lonely._links is not None
    with dial(lonely) as other:
        other.sendall(frame(json.dumps(hello)))
        until(lambda: lonely.num_up == 1)
        (link,) = lonely._links._links
        boundaries = count()

        def wait() -> None:
            boundary = next(boundaries)
            lonely.wait_at(boundary, {f"{n}": n for n in range(2000)})  # 100 KB
            until(lambda: boundary in lonely._waits and not lonely._news)

        while len(link.unsent) < links_module.MOST_UNSENT_BYTES:
            wait()
        for _ in range(3):
            wait()
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
    until(lambda: links._listener is None)


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
