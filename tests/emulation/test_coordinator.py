"""The same messages give the same virtual times in whatever order they come; nobody is passed."""

import json
import subprocess
import sys
import time
from random import Random

import pytest
from scripted import LAUNCH_NS, Rank, ToyPrices, all_times, deliver

from lagom_emulate.clock import Operation
from lagom_emulate.coordinator import Coordinator
from lagom_emulate.processes import Activity
from lagom_emulate.protocol import Host, Op, ProtocolError, Query, Wait
from lagom_emulate.settings import EmulationSettings

SHORT, LONG = '{"ns": 100}', '{"ns": 400}'


def collective(num_members: int, ns: int = 200) -> str:
    return json.dumps({"comm": f"c{num_members}", "members": num_members, "ns": ns})


def training(coordinator: Coordinator, rank: Rank, num_ranks: int, seed: int):
    """Steps of kernels, collectives on a second stream, events, questions and waits; each yield is one record."""
    random = Random(f"{seed}/{rank.number}")
    for step in range(3):
        last = 0
        for layer in range(4):
            last = rank.op(coordinator, 0, random.choice((SHORT, LONG)))
            yield
            comm = rank.op(coordinator, 1, collective(num_ranks), after=last, instance=4 * step + layer)
            yield
            if random.random() < 0.5:
                rank.op(coordinator, 0, "", after=comm)
                yield
            if random.random() < 0.5:
                rank.query(coordinator, last)
                yield
        rank.wait(coordinator, last)
        yield
        rank.wait(coordinator, comm)
        yield


def run(num_ranks: int, seed: int, order_seed: int, settings: EmulationSettings | None = None):
    ended: list[Operation] = []
    coordinator = Coordinator(ToyPrices(), ended.append, settings)
    ranks = [Rank(number) for number in range(num_ranks)]
    for rank in ranks:
        coordinator.hello(rank.number, 0)
    scripts = {rank.number: training(coordinator, rank, num_ranks, seed) for rank in ranks}
    deliver(coordinator, ranks, scripts, Random(order_seed).choice)
    assert coordinator.num_late == 0
    return all_times(ended), [rank.answers for rank in ranks], [rank.host_ns for rank in ranks]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("settings", [None, EmulationSettings(noise=0.1, seed=3, stragglers={1: 1.5})])
def test_virtual_times_do_not_depend_on_the_order_of_arrival(seed: int, settings: EmulationSettings | None) -> None:
    first = run(3, seed, 0, settings)
    for order_seed in range(1, 12):
        assert run(3, seed, order_seed, settings) == first


def one_rank() -> tuple[Coordinator, Rank, list[Operation]]:
    ended: list[Operation] = []
    coordinator = Coordinator(ToyPrices(), ended.append)
    coordinator.hello(0, 0)
    return coordinator, Rank(0), ended


def test_a_host_that_waits_goes_on_at_the_end_of_what_it_waited_for() -> None:
    coordinator, rank, _ = one_rank()
    rank.op(coordinator, 0, LONG)
    second = rank.op(coordinator, 0, SHORT)
    rank.wait(coordinator, second)
    (reply,) = coordinator.advance()
    assert (reply.is_done, reply.now_ns) == (True, 500)
    assert [(one.start_ns, one.end_ns) for one in reply.ended] == [(0, 400), (400, 500)]


def test_a_question_is_answered_for_its_own_moment() -> None:
    coordinator, rank, _ = one_rank()
    first = rank.op(coordinator, 0, SHORT)
    coordinator.query(0, Query(first, 99, 1, 0))
    assert [reply.is_done for reply in coordinator.advance()] == [False]
    coordinator.query(0, Query(first, 100, 1, 0))
    assert [reply.is_done for reply in coordinator.advance()] == [True]


def test_the_questions_of_two_threads_are_both_answered() -> None:
    coordinator, rank, _ = one_rank()
    first, second = rank.op(coordinator, 0, SHORT), rank.op(coordinator, 0, LONG)
    for op_id in (second, first):
        coordinator.query(0, Query(op_id, 200, 1, 0))
    assert {reply.op_id: reply.is_done for reply in coordinator.advance()} == {first: True, second: False}


def test_nobody_passes_a_host_that_may_still_issue() -> None:
    ended: list[Operation] = []
    coordinator = Coordinator(ToyPrices(), ended.append)
    ranks = [Rank(0), Rank(1)]
    for rank in ranks:
        coordinator.hello(rank.number, 0)
    ranks[0].wait(coordinator, ranks[0].op(coordinator, 0, LONG))
    assert coordinator.advance() == []  # rank 1 is at 0
    coordinator.host(1, Host(399, 0, 0))
    assert coordinator.advance() == []
    coordinator.host(1, Host(400, 0, 0))
    assert [reply.now_ns for reply in coordinator.advance()] == [400]


def test_a_sleeping_host_holds_nobody_and_catches_up() -> None:
    ended: list[Operation] = []
    coordinator = Coordinator(ToyPrices(), ended.append)
    ranks = [Rank(0), Rank(1)]
    for rank in ranks:
        coordinator.hello(rank.number, 0)
    ranks[0].wait(coordinator, ranks[0].op(coordinator, 0, LONG))
    assert coordinator.advance() == []
    assert coordinator.silent() == [1]
    coordinator.sleep(1)
    assert [reply.process for reply in coordinator.advance()] == [0]
    woken = ranks[1].op(coordinator, 0, SHORT)  # by its own clock at 0, in everybody's time at 400
    ranks[1].wait(coordinator, woken)
    ranks[0].wait(coordinator, ranks[0].last_op)
    coordinator.host(0, Host(10_000, 0, 0))
    replies = {reply.process: reply for reply in coordinator.advance()}
    assert replies[1].now_ns == 500
    assert coordinator.num_idle == 1


def test_time_goes_on_for_a_watchdog_once_its_host_is_silent() -> None:
    """A job that ends without a synchronization waits for its watchdog alone, which asks again and again."""
    coordinator, rank, ended = one_rank()
    last = rank.op(coordinator, 0, LONG)
    assert coordinator.silent() == []  # nobody cares
    coordinator.query(0, Query(last, rank.host_ns, 0, 0))
    assert [reply.is_done for reply in coordinator.advance()] == [False]
    assert coordinator.silent() == [0]  # though the question has been answered
    coordinator.sleep(0)
    coordinator.advance()
    assert [one.end_ns for one in ended] == [400]
    coordinator.query(0, Query(last, rank.host_ns, 0, 0))
    assert [reply.is_done for reply in coordinator.advance()] == [True]
    assert coordinator.silent() == []


def test_a_watchdog_is_not_the_jobs_work() -> None:
    """A thread of PyTorch's that only looks after the job, which would never let it be silent."""
    script = """
import ctypes, threading, time
def watch():
    ctypes.CDLL(None).prctl(15, b"pt_nccl_watchdg", 0, 0, 0)
    print("on", flush=True)
    while True: sum(range(1000))
threading.Thread(target=watch, daemon=True).start()
threading.Event().wait()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        activity, number = Activity(process.pid), 0
        while not activity.has_slept(float(number), 1.0):  # ends by pytest's timeout where it works
            number += 1
            time.sleep(0.05)
        process.kill()


def test_a_helpers_wait_does_not_hold_the_host() -> None:
    coordinator, rank, _ = one_rank()
    first = rank.op(coordinator, 0, LONG)
    coordinator.wait(0, Wait(first, rank.host_ns, 0))
    assert coordinator.advance() == []  # the host is at LAUNCH_NS and may issue
    coordinator.host(0, Host(1000, 0, 0))
    (reply,) = coordinator.advance()
    assert (reply.op_id, reply.now_ns) == (first, 1000)
    assert rank.host_ns == LAUNCH_NS


def test_a_collective_that_lacks_members_is_named() -> None:
    ended: list[Operation] = []
    coordinator = Coordinator(ToyPrices(), ended.append)
    ranks = [Rank(0), Rank(1)]
    for rank in ranks:
        coordinator.hello(rank.number, 0)
    ranks[0].wait(coordinator, ranks[0].op(coordinator, 1, collective(2)))
    ranks[1].wait(coordinator, ranks[1].op(coordinator, 1, collective(2), instance=7))
    assert coordinator.advance() == []
    text = coordinator.describe_waits()
    assert "rank 0 waits for operation 1" in text
    assert "rank 1 waits for operation 1" in text
    assert "lacks 1 of 2 members" in text


def test_a_rank_that_dies_takes_no_part_any_more() -> None:
    ended: list[Operation] = []
    coordinator = Coordinator(ToyPrices(), ended.append)
    ranks = [Rank(0), Rank(1)]
    for rank in ranks:
        coordinator.hello(rank.number, 0)
    ranks[0].wait(coordinator, ranks[0].op(coordinator, 0, SHORT))
    ranks[1].op(coordinator, 0, LONG)
    assert coordinator.leave(1)
    assert [reply.process for reply in coordinator.advance()] == [0]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (Op(2, 0, 0, 0, 0, 0, 0, 0), "operation 2 follows operation 0"),
        (Op(1, 0, 0, 5, 0, 0, 0, 0), "description 5, which is not there"),
        (Op(1, 0, 0, 0, 0, 0, 1, 0), "which is not before it"),
        (Op(1, 9999, 0, 0, 0, 0, 0, 0), "device 9999"),
        (Wait(3, 0, 1), "asked for operation 3"),
        (Query(3, 0, 1, 0), "asked for operation 3"),
    ],
)
def test_what_cannot_be_is_refused(record, words: str) -> None:
    coordinator, _, _ = one_rank()
    take = {Op: coordinator.submit, Wait: coordinator.wait, Query: coordinator.query}[type(record)]
    with pytest.raises(ProtocolError, match=words):
        take(0, record)


def test_a_host_that_asks_nothing_gets_nothing_and_time_stands() -> None:
    coordinator, rank, ended = one_rank()
    rank.op(coordinator, 0, SHORT)
    coordinator.host(0, Host(10_000, 0, 0))
    assert coordinator.advance() == []
    assert not ended
    coordinator.host(0, Host(10_000, 1, 0))
    coordinator.advance()
    assert [(one.start_ns, one.end_ns) for one in ended] == [(0, 100)]


def test_noise_is_drawn_by_the_seed_and_once_per_collective() -> None:
    settings = EmulationSettings(noise=0.2, seed=5, slow_links={2: 3.0}, skew_s={1: 2e-6})
    prices = ToyPrices()
    kernel, both = prices.work(SHORT.encode()), prices.work(collective(2).encode())
    assert settings.factor(0, 7, 0, kernel) == settings.factor(0, 7, 0, kernel) != settings.factor(0, 8, 0, kernel)
    assert settings.factor(0, 7, 4, both) == settings.factor(1, 9, 4, both) != settings.factor(0, 7, 5, both)
    assert settings.factor(2, 7, 4, both) == 3.0 * settings.factor(0, 7, 4, both)
    assert settings.skew_ns(1) == 2000
    values = [settings.factor(0, number, 0, kernel) for number in range(4000)]
    from math import log
    from statistics import fmean, pstdev

    assert fmean(map(log, values)) == pytest.approx(0.0, abs=0.02)
    assert pstdev(map(log, values)) == pytest.approx(0.2, abs=0.02)
