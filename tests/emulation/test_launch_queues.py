"""Launch queues (CUDA_DEVICE_MAX_CONNECTIONS) by cases worked by hand: every kernel takes 10 ns."""

import os
import subprocess
import sys

import pytest

from lagom_emulate.clock import INSTANT, Clock, Operation, Work
from lagom_emulate.coordinator import Coordinator
from lagom_emulate.processes import launch_queues_of
from lagom_emulate.protocol import Host, Op

KERNEL = Work(kind=-1)


def starts(streams: str, num_queues: int, waits: dict[int, int] | None = None) -> list[float]:
    """When operations start that are launched at once, in this order, on streams named by letters.

    `waits` says which of them are waits, and for which operation's end.
    """
    clock = Clock(lambda kinds: [10.0] * len(kinds))
    names = {name: number for number, name in enumerate(dict.fromkeys(streams))}
    operations: list[Operation] = []
    for place, name in enumerate(streams):
        waited = (waits or {}).get(place)
        work = KERNEL if waited is None else INSTANT
        operation = Operation(0, place + 1, 0, work, 0.0, stream=names[name])
        queue = names[name] % num_queues if num_queues else None
        clock.submit(operation, after=None if waited is None else operations[waited], queue=queue)
        operations.append(operation)
    while clock.next_ns() < float("inf"):
        clock.step()
    return [operation.start_ns for operation in operations]


def test_without_queues_streams_are_independent():
    assert starts("aab", 0) == [0, 10, 0]


def test_one_queue_starts_kernels_in_the_order_of_launch():
    """The third has no dependency, but is launched behind the second, which waits for its stream."""
    assert starts("aab", 1) == [0, 10, 10]


def test_what_has_started_lets_the_next_one_by():
    """Megatron's reason: the communication is launched first and overlaps the products behind it."""
    assert starts("baa", 1) == [0, 0, 10]


def test_a_wait_at_the_head_of_a_queue_holds_up_what_does_not_need_it():
    """Stream b waits for the first kernel; stream c does not, and runs at once where it has a queue of its own."""
    assert starts("abbc", 1, {1: 0}) == [0, 10, 10, 10]
    assert starts("abbc", 3, {1: 0}) == [0, 10, 10, 0]


def test_streams_share_queues_in_turn():
    """Streams a and c have the first of two queues, so that c starts behind the second kernel of a."""
    assert starts("abac", 2) == [0, 0, 10, 10]


class _Prices:
    set_times = staticmethod(lambda kinds: [10.0] * len(kinds))

    def work(self, text: bytes) -> Work:
        return KERNEL

    def communicator(self, text: bytes) -> str:
        return ""


@pytest.mark.parametrize(("num_queues", "expected"), [(0, [0, 10, 0]), (1, [0, 10, 10]), (8, [0, 10, 0])])
def test_the_coordinator_gives_streams_their_queues_and_records_of_events_none(num_queues, expected):
    """A record behind the first kernel ends with it, and holds up nobody."""
    ended: dict[int, Operation] = {}
    coordinator = Coordinator(_Prices(), lambda operation: ended.__setitem__(operation.op_id, operation))
    coordinator.hello(0, 0, num_queues)
    coordinator.describe(0, 1, b"{}")
    for op_id, stream, desc_id in ((1, 7, 1), (2, 7, 0), (3, 7, 1), (4, 9, 1)):
        coordinator.submit(0, Op(op_id, 0, stream, desc_id, 0, 0, 0, 0))
    coordinator.host(0, Host(0, 1, 0))
    coordinator.advance()
    assert [ended[op_id].start_ns for op_id in (1, 3, 4)] == expected


@pytest.mark.parametrize(("value", "found"), [("1", 1), ("32", 32), ("33", 0), ("many", 0), (None, 0)])
def test_the_variable_is_read_of_the_process(value, found):
    environment = {name: text for name, text in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
    if value is not None:
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = value
    program = [sys.executable, "-S", "-c", "print(flush=True); input()"]
    with subprocess.Popen(program, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert launch_queues_of(process.pid) == found
        process.communicate(b"\n")
