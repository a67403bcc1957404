"""The client of the wire protocol against a coordinator written from the protocol's text."""

import pytest
from coordinator import Coordinator

SUBMIT_TWO = """
    from emulated import Op, device, times
    gpu = device()
    kernel, event = gpu.describe(b'{"kernel": "k"}'), gpu.describe(b'{"event": "record"}')
    assert gpu.describe(b'{"kernel": "k"}') == kernel != event
    first = gpu.submit_op(Op(2, 3, kernel, -1, 0, 5), 4000)
    second = gpu.submit_op(Op(2, 4, event, 0, first, 0), 1000)
"""


def test_operations_and_waits_reach_the_coordinator_as_the_protocol_says(tmp_path, on_device):
    with Coordinator(tmp_path / "socket") as coordinator:
        done = on_device(
            SUBMIT_TWO
            + """
    import os
    print(os.getpid(), gpu.host_ns(), gpu.query(second), gpu.wait(second), end=" ")
    print(gpu.host_ns(), times(gpu, first), gpu.query(first))
    """,
            LAGOM_EMULATION_SOCKET=str(tmp_path / "socket"),
        )
    assert done.stderr == ""
    pid, *rest = done.stdout.split(maxsplit=1)
    # The operation of 7000 ns ends at 7000; the query at 5000 finds it running and costs the host 1000.
    assert rest == ["5000 1 0 7000 (0, 7000) 0\n"]
    assert coordinator.hello == (1, 2, int(pid), 0)
    assert coordinator.descriptions == {1: {"kernel": "k"}, 2: {"event": "record"}}
    assert coordinator.ops == [(1, 2, 3, 1, -1, 0, 0, 5), (2, 2, 4, 2, 0, 4000, 1, 0)]
    assert coordinator.queries == [(2, 5000, 1, 0)]
    assert [wait[:2] for wait in coordinator.waits] == [(2, 6000)]
    assert coordinator.hosts == [(8000, 1, 0)]  # finished, after the last query's 1000 ns


def test_a_refusal_is_one_line_and_every_later_call_fails(tmp_path, on_device):
    with Coordinator(tmp_path / "socket", refuse_at_op=2) as coordinator:
        done = on_device(
            SUBMIT_TWO + "    print(gpu.wait(second), gpu.submit_op(Op(), 0))",
            LAGOM_EMULATION_SOCKET=str(tmp_path / "socket"),
        )
    assert done.stdout == "-1 0\n"
    assert done.stderr == "lagom emulate: rank 1 died\n"
    assert len(coordinator.ops) == 2


def test_nothing_more_has_ended_for_who_asks_while_the_process_exits(tmp_path, on_device):
    """As PyTorch's watchdogs do, which take an error for the job's and end it by a signal."""
    with Coordinator(tmp_path / "socket"):
        done = on_device(
            """
    import ctypes
    c = ctypes.CDLL(None)
    asked = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: print(gpu.query(third), gpu.query(first), flush=True))
    c.__cxa_atexit(asked, None, None)  # before the device's own, so that it runs after it
    """
            + SUBMIT_TWO
            + "    gpu.wait(second)\n    third = gpu.submit_op(Op(2, 3, kernel, -1, 0, 6), 4000)\n    c.exit(3)",
            LAGOM_EMULATION_SOCKET=str(tmp_path / "socket"),
        )
    assert (done.stdout, done.stderr, done.returncode) == ("1 0\n", "", 3)


def test_operations_of_a_silent_host_are_sent_in_time(tmp_path, on_device):
    with Coordinator(tmp_path / "socket", mark_at_op=2) as coordinator:
        done = on_device(
            SUBMIT_TWO
            + f"""
    import os, pathlib, time
    while not pathlib.Path({str(coordinator.mark)!r}).exists():
        time.sleep(0.005)
    os._exit(0)
    """,
            LAGOM_EMULATION_SOCKET=str(tmp_path / "socket"),
        )
    assert done.returncode == 0
    assert coordinator.hosts == []  # neither a wait nor the end of the process brought them


def test_an_operation_of_a_new_kind_from_a_silent_host_is_sent_in_time(tmp_path, on_device):
    """Its description comes before it into the buffer, whose flushing thread sleeps by then."""
    with Coordinator(tmp_path / "socket", mark_at_op=3) as coordinator:
        done = on_device(
            SUBMIT_TWO
            + f"""
    import os, pathlib, time
    gpu.wait(second)
    time.sleep(0.1)
    gpu.submit_op(Op(2, 3, gpu.describe(b'{{"kernel": "new"}}'), 0, 0, 0), 0)
    while not pathlib.Path({str(coordinator.mark)!r}).exists():
        time.sleep(0.005)
    os._exit(0)
    """,
            LAGOM_EMULATION_SOCKET=str(tmp_path / "socket"),
        )
    assert done.returncode == 0
    assert len(coordinator.ops) == 3


def test_a_thread_that_never_submits_leaves_the_clock_alone(tmp_path, on_device):
    with Coordinator(tmp_path / "socket") as coordinator:
        done = on_device(
            SUBMIT_TWO
            + """
    import threading
    watchdog = threading.Thread(target=lambda: print(gpu.query(first)))
    watchdog.start(); watchdog.join()
    helper = threading.Thread(target=lambda: print(gpu.wait_in_background(first)))
    helper.start(); helper.join()
    print(gpu.host_ns())
    """,
            LAGOM_EMULATION_SOCKET=str(tmp_path / "socket"),
        )
    assert done.stdout.split() == ["1", "0", "5000"]
    assert coordinator.queries == [(1, 5000, 0, 0)]
    assert coordinator.waits == [(1, 5000, 0)]


def test_many_threads_wait_on_one_socket(tmp_path, on_device):
    with Coordinator(tmp_path / "socket") as coordinator:
        done = on_device(
            """
    import threading
    from emulated import Op, device, times
    gpu = device()
    kernel = gpu.describe(b'{"kernel": "k"}')
    def work(stream):
        for i in range(300):
            op = gpu.submit_op(Op(0, stream, kernel, 0, 0, 0), 10)
            assert gpu.query(op) >= 0 and gpu.wait(op) == 0
            start, end = times(gpu, op)
            assert end - start == 7000
    threads = [threading.Thread(target=work, args=(stream,)) for stream in range(6)]
    [t.start() for t in threads]; [t.join() for t in threads]
    print("all")
    """,
            LAGOM_EMULATION_SOCKET=str(tmp_path / "socket"),
        )
    assert (done.stdout, done.stderr) == ("all\n", "")
    assert len(coordinator.ops) == 1800


def test_a_coordinator_that_is_not_there_is_one_line(tmp_path, on_device):
    done = on_device(SUBMIT_TWO + "    print(first, second)", LAGOM_EMULATION_SOCKET=str(tmp_path / "none"))
    assert done.stdout == "0 0\n"
    assert done.stderr.startswith("lagom emulate: cannot reach the coordinator")
    assert done.stderr.count("\n") == 1


def test_alone_operations_take_the_toy_time_and_follow_streams_and_events(on_device):
    done = on_device(
        SUBMIT_TWO
        + """
    third = gpu.submit_op(Op(2, 4, kernel, 0, 0, 0), 0)
    print([times(gpu, i) for i in (first, second, third)], gpu.wait(third), gpu.host_ns())
    """
    )
    assert done.stdout == "[(0, 10000), (10000, 10000), (10000, 20000)] 0 20000\n"


def test_who_does_nothing_but_poll_comes_to_the_end_in_few_queries_and_not_much_later(on_device):
    """A query a microsecond would be half a million round trips to the coordinator: minutes of real time."""
    done = on_device(
        """
    from emulated import Op, device, times
    gpu = device()
    kernel = gpu.describe(b'{"kernel": "k"}')
    for number in (1, 50_000):
        begin = gpu.host_ns()
        for _ in range(number):
            last = gpu.submit_op(Op(0, 1, kernel, 0, 0, 0), 0)
        polls = 0
        while gpu.query(1) or gpu.query(last):  # one has ended, one has not
            polls += 1
        late = gpu.host_ns() - times(gpu, last)[1]
        print(polls, late / (times(gpu, last)[1] - begin))
    """
    )
    (few, share), (many, small_share) = (map(float, line.split()) for line in done.stdout.splitlines())
    assert few <= 10
    assert share < 0.5  # a few microseconds of ten
    assert many < 1000
    assert 0 <= small_share < 4 / 64  # what the last queries spend, of a sixty-fourth each


def test_asking_again_about_what_has_ended_takes_a_query_s_time_each(on_device):
    """An allocator's look through its events, between two launches: it waits for nothing."""
    done = on_device(
        """
    from emulated import Op, device
    gpu = device()
    last = gpu.submit_op(Op(0, 1, gpu.describe(b'{"kernel": "k"}'), 0, 0, 0), 0)
    while gpu.query(last):
        pass
    begin = gpu.host_ns()
    print(sum(gpu.query(last) for _ in range(5000)), gpu.host_ns() - begin)
    """
    )
    assert done.stdout == "0 5000000\n"


def test_a_forked_child_has_no_device(on_device):
    done = on_device(
        SUBMIT_TWO
        + """
    import os
    child = os.fork()
    if not child:
        os._exit(gpu.submit_op(Op(), 0) + 7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), gpu.submit_op(Op(), 0))
    """
    )
    assert done.stdout == "7 3\n"


LATE = """
#include <stdio.h>
#include <stdlib.h>
static int (*call)(void *);
static void *argument;
static void late(void) { printf("late: %d\\n", call(argument)), fflush(stdout); }
void arm(void *function) { call = function, atexit(late); }
void give(void *value) { argument = value; }
"""


@pytest.mark.parametrize(("begin", "is_served"), [("", False), ("cuda_driver.cuInit(0)", True)])
def test_a_library_that_was_first_used_with_cuda_finds_it_when_it_is_unloaded(
    tmp_path, on_device, c_compiler, begin: str, is_served: bool
) -> None:
    """PyTorch's singletons synchronize in their destructors; one from before `cuInit` is told no, without a word."""
    (tmp_path / "late.c").write_text(LATE)
    c_compiler("-shared", "-fPIC", "-fvisibility=default", str(tmp_path / "late.c"), "-o", str(tmp_path / "late.so"))
    with Coordinator(tmp_path / "socket") as coordinator:
        done = on_device(
            f"""
    import ctypes as c
    from emulated import Runtime, kernel
    late, cuda_driver = c.CDLL({str(tmp_path / "late.so")!r}), c.CDLL("libcuda.so.1")
    {begin}
    late.arm(c.cast(cuda_driver.cuStreamSynchronize, c.c_void_p))
    cuda = Runtime(13)
    stream = cuda.stream()
    kernel(stream)
    cuda.StreamSynchronize(stream)
    kernel(stream)
    late.give(stream)
    """,
            LAGOM_EMULATION_SOCKET=str(tmp_path / "socket"),
        )
    assert coordinator.hosts[-1][1] == 1  # it has finished
    assert done.stderr == ""
    assert done.stdout.startswith("late: ")
    assert (done.stdout == "late: 0\n") is is_served
