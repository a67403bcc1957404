"""Agreement: one word per decision, whoever is late; thousands of switches under load."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from job_of_threads import FakeStore

from lagom_overlap.online.ranks.exchange import Exchange, ReportMissing, StoreLost
from lagom_overlap.online.ranks.messages import Report, SwitchState, WindowPlan


def exchanges(num_ranks: int, timeout_s: float = 5.0) -> list[Exchange]:
    store = FakeStore()
    return [Exchange(store, rank=rank, num_ranks=num_ranks, timeout_s=timeout_s) for rank in range(num_ranks)]


class Sleepy(FakeStore):
    """As a TCPStore without libuv: a compare-and-set wakes nobody who waits for the key, and `num_overdue` counts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_overdue = 0
        self.is_set = threading.Condition()
        self.awake: set[str] = set()

    def set(self, key: str, value: str) -> None:
        super().set(key, value)
        with self.is_set:
            self.awake.add(key)
            self.is_set.notify_all()

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self.is_set:
            is_there = self.check(keys) or self.is_set.wait_for(lambda: self.awake.issuperset(keys), 2.0)
            self.num_overdue += not is_there


def test_a_store_that_wakes_nobody_after_a_compare_and_set_keeps_no_rank_waiting() -> None:
    store = Sleepy()
    waiting, writing = (Exchange(store, rank=rank, num_ranks=2, timeout_s=30.0) for rank in (1, 0))
    with ThreadPoolExecutor(2) as pool:
        plan = pool.submit(waiting.plan, 0)
        time.sleep(0.05)
        writing.propose(WindowPlan(window=0, state=SwitchState.RECORD, reason="first"))
        assert plan.result().reason == "first"
        answer = pool.submit(waiting.agree, 1)
        time.sleep(0.05)
        assert (writing.agree(1), answer.result()) == ("", "")
    assert store.num_overdue == 0


def test_what_the_job_allows_bounds_each_wait() -> None:
    exchange = Exchange(FakeStore(), rank=1, num_ranks=2, timeout_s=60.0, longest_s=lambda: 0.05)
    plan = exchange.plan(0)
    assert (plan.state, plan.reason) == (
        SwitchState.OFF,
        "rank 1 waited for rank 0's decision on window 0: nothing came within 0.05 s",
    )


def report(rank: int) -> Report:
    return Report(rank=rank, num_steps=1)


def test_hundreds_of_switches_under_load_are_the_same_on_all_ranks() -> None:
    """Four ranks at their own pace during a thread that computes; each switch is a plan and an agreement."""
    ranks, num_switches = exchanges(4, timeout_s=300.0), 400
    is_over = threading.Event()

    def load() -> None:
        while not is_over.is_set():
            sum(range(200))
            time.sleep(0.0001)

    def live(exchange: Exchange) -> list[tuple[int, str]]:
        pace = random.Random(exchange.rank)
        seen = []
        for window in range(num_switches):
            if exchange.rank == 0:
                exchange.propose(
                    WindowPlan(window=window, state=SwitchState.SEARCH, reason=str(window % 7), epoch=window + 1)
                )
            plan = exchange.plan(window)
            refusal = "full disk" if window % 100 == 99 and exchange.rank == window // 100 else ""
            refused = exchange.agree(plan.epoch, refusal=refusal)
            seen.append((plan.epoch, plan.reason, refused))
            if window > 1:
                exchange.forget(window - 2)
            if pace.random() < 0.005:
                time.sleep(0.001)
        return seen

    threading.Thread(target=load, daemon=True).start()
    with ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(live, ranks))
    is_over.set()
    assert all(one == seen[0] for one in seen)
    assert [epoch for epoch, _, _ in seen[0]] == list(range(1, num_switches + 1))
    assert sum(refused == "full disk" for _, _, refused in seen[0]) == 4


def test_a_plan_that_does_not_come_in_time_is_off_for_everybody_also_for_a_late_leader() -> None:
    leader, other, third = exchanges(3, timeout_s=0.05)
    assert other.plan(3).state is SwitchState.OFF
    assert leader.propose(WindowPlan(window=3, state=SwitchState.SEARCH, reason="late")).state is SwitchState.OFF
    assert third.plan(3).state is SwitchState.OFF
    assert third.plan(3).reason == ("rank 1 waited for rank 0's decision on window 3: nothing came within 0.05 s")


def test_a_plan_that_is_out_cannot_be_vetoed() -> None:
    leader, other = exchanges(2)
    leader.propose(WindowPlan(window=0, state=SwitchState.SEARCH, reason="a trial"))
    assert other.veto(0, "too late").state is SwitchState.SEARCH


def test_a_rank_that_never_becomes_ready_keeps_the_others_from_switching() -> None:
    one, two, _ = exchanges(3, timeout_s=0.05)
    with ThreadPoolExecutor(2) as pool:
        refusals = list(pool.map(lambda exchange: exchange.agree(1), (one, two)))
    assert refusals[0] == refusals[1] != ""
    assert "to be ready to switch" in refusals[0]


def test_the_last_rank_that_is_ready_reads_the_refusal_of_one_that_gave_up() -> None:
    one, two = exchanges(2, timeout_s=0.05)
    assert "to be ready" in one.agree(7)
    assert "to be ready" in two.agree(7)


def test_missing_reports_are_named_and_waited_for_no_longer_than_the_timeout() -> None:
    leader, other, _ = exchanges(3, timeout_s=0.1)
    other.report(0, report(1))
    with pytest.raises(ReportMissing, match=r"rank 2 did not report: nothing came within 0\.1 s"):
        leader.reports(0)


@pytest.mark.parametrize("garbage", ["", "{}", '{"window":0,"state":"search"}', "[" * 5000, '{"window":1,'])
def test_a_plan_that_cannot_be_read_is_off(garbage: str) -> None:
    leader, other = exchanges(2)
    leader._store.set("plan/0", garbage)
    assert other.plan(0).state is SwitchState.OFF


def test_the_plan_of_another_window_is_off() -> None:
    leader, other = exchanges(2)
    leader._store.set("plan/0", '{"window":5,"state":"search","reason":""}')
    assert other.plan(0).state is SwitchState.OFF


def test_a_lost_store_is_told_apart_from_a_late_rank() -> None:
    leader, other = exchanges(2)
    leader._store.is_gone = True
    with pytest.raises(StoreLost, match="Connection reset by peer"):
        other.plan(0)


def test_a_timeout_must_be_positive() -> None:
    with pytest.raises(ValueError, match="timeout_s is 0"):
        Exchange(FakeStore(), rank=0, num_ranks=2, timeout_s=0)


def test_a_rank_that_waits_to_be_ready_leaves_with_the_one_that_was_refused() -> None:
    """As gloo's passive side does: its work would never end."""
    refused, waiting = exchanges(2, timeout_s=1e6)
    never = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(waiting.get_ready, 4, never.wait)
        words = refused.get_ready(4, lambda: (_ for _ in ()).throw(OSError("Connection refused")))
        assert words == "rank 0 cannot switch: Connection refused"
        assert refused.agree(4, refusal=words) == words
        assert other.result(30) == words
    assert waiting.agree(4, refusal=words) == words
    never.set()


def test_a_rank_that_is_never_ready_refuses_after_the_timeout() -> None:
    one, _ = exchanges(2, timeout_s=0.05)
    never = threading.Event()
    assert one.get_ready(1, never.wait) == "rank 0 was not ready to switch within 0.05 s"
    never.set()


def test_a_store_that_neither_answers_nor_breaks_is_lost_after_the_timeout() -> None:
    one, _ = exchanges(2, timeout_s=0.05)
    never = threading.Event()
    one._store.compare_set = lambda *_: never.wait()
    with pytest.raises(StoreLost, match=r"no answer within 0\.05 s"):
        one.propose(WindowPlan(window=0, state=SwitchState.RECORD, reason=""))
    never.set()


def test_a_silent_store_is_waited_for_once_however_many_ranks_report() -> None:
    leader, *_ = exchanges(33, timeout_s=0.05)
    never, asked = threading.Event(), []

    def hang(keys: list[str], *_: object) -> bool:
        asked.append(keys)
        return never.wait()

    leader._store.wait = leader._store.check = hang
    with pytest.raises(StoreLost, match=r"no answer within 0\.05 s"):
        leader.reports(0)
    assert len(asked) <= 2
    never.set()


def test_another_release_is_told_by_what_the_first_rank_said() -> None:
    one, two = exchanges(2)
    assert one.greet("1.0") == "1.0"
    assert two.greet("1.1") == "1.0"
