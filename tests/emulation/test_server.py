"""When a process counts as silent, by sockets and a real process that sleeps."""

import fcntl
import resource
import socket
import subprocess
from collections.abc import Iterator

import pytest

from lagom_emulate.processes import Activity
from lagom_emulate.server import EmulationServer, _Connection


@pytest.fixture
def sleeper() -> Iterator[Activity]:
    """A process of which every look but the first says that it has slept; time is counted by the test."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        activity = Activity(process.pid)
        number = 0
        while not activity.has_slept(float(number), 1.0):  # until it has started
            number += 1
        yield activity
        process.kill()


def test_a_process_that_asks_again_and_again_is_not_silent_though_it_sleeps_whenever_one_looks(
    sleeper: Activity,
) -> None:
    """Before: ranks that asked for events waited for a coordinator that others kept from the processor."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = _Connection(ours, sleeper.pid, activity=sleeper, heard_s=1e6)
        assert not EmulationServer._is_silent(connection, 1e6 + 0.04, 0.05)
        assert EmulationServer._is_silent(connection, 1e6 + 0.06, 0.05)
        theirs.send(b"x")
        assert not EmulationServer._is_silent(connection, 1e6 + 0.06, 0.05)
        ours.recv(1)
        assert EmulationServer._is_silent(connection, 1e6 + 0.06, 0.05)


def test_what_has_come_is_seen_however_high_the_descriptor() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] <= 1024:
        pytest.skip("needs a hard limit of more than 1024 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 1100), limits[1]))
    ours, theirs = socket.socketpair()
    try:
        with ours, theirs, socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD, 1024)) as high:
            assert not _Connection(high, 1).has_unread
            theirs.send(b"x")
            assert _Connection(high, 1).has_unread
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
