"""What is said of a job that is only watched."""

import itertools
from dataclasses import dataclass, field

import pytest

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.nccl_plugin.support import Knob
from lagom_overlap.online.observe import (
    FIRST_SAMPLED,
    NUM_SAMPLED,
    SAMPLED_APART,
    Sampler,
    SeenCall,
    Shares,
    conclusion,
    knobs_of,
    report_lines,
)
from lagom_overlap.units import MIB

AG, AR, A2A, SEND = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_TO_ALL,
    CollectiveKind.SEND_RECV,
)


def test_shares_are_of_the_whole_communication_time():
    shares = Shares((2, 30, 7))
    shares.add_step([SeenCall(AG, 3.0), SeenCall(A2A, 4.0), SeenCall(AR, 1.0, is_reachable=False), SeenCall(None, 2.0)])
    shares.add_step([SeenCall(AG, 10.0)])
    ratios = shares.ratios()
    assert shares.total_s == 20.0
    assert ratios[Knob.CHANNELS] == ratios[Knob.ALGORITHM] == ratios[Knob.CHUNK] == 13 / 20
    assert ratios[Knob.ALL_TO_ALL_CHANNELS] == 4 / 20
    assert dict(shares.by_kind_s) == {"all_gather": 13.0, "all_to_all": 4.0, "all_reduce": 1.0, "other": 2.0}


@pytest.mark.parametrize(
    ("nccl", "kind", "knobs"),
    [
        ((2, 30, 7), AG, {Knob.ALGORITHM, Knob.PROTOCOL, Knob.CHANNELS, Knob.CHUNK, Knob.THREADS}),
        ((2, 29, 7), AG, {Knob.ALGORITHM, Knob.PROTOCOL, Knob.CHANNELS}),
        ((2, 19, 0), AG, {Knob.CHANNELS}),
        ((2, 16, 0), AG, set()),
        ((2, 30, 7), A2A, {Knob.ALL_TO_ALL_CHANNELS}),
        ((2, 30, 7), SEND, set()),
        (None, A2A, {Knob.CHANNELS, Knob.CHUNK}),
        (None, SEND, set()),
    ],
)
def test_what_reaches_a_call_depends_on_its_kind_and_the_release(nccl, kind, knobs):
    assert set(knobs_of(kind, nccl)) == knobs


def test_the_report_names_kinds_shares_and_ways():
    shares = Shares((2, 31, 2))
    shares.add_step([SeenCall(AG, 0.003), SeenCall(A2A, 0.001)])
    text = "\n".join(report_lines(shares))
    assert "NCCL 2.31.2: 4.00 ms of collectives per step (1 steps sampled): all_gather 75 %, all_to_all 25 %" in text
    assert "75.0 %  by the plugin route, lower only (below NCCL's own choice" in text
    assert "nothing can be said" in report_lines(Shares(None))[0]


def test_what_is_only_said_to_be_reached_is_not_recommended():
    """Online tuning leaves calls below 1 MiB alone, so a job that makes no others is not sent there."""
    shares = Shares(None)
    shares.add_step([SeenCall(AG, 0.003, num_bytes=MIB - 1), SeenCall(AR, 0.001, num_bytes=4)])
    assert set(shares.ratios().values()) == {0.0}
    assert "100 % of the time is of calls below 1 MiB, which are left alone" in report_lines(shares)[-1]
    told = conclusion(shares, "", "torchrun train.py", trace="seen/traces")
    assert told.found.endswith("nothing of it can be set")
    assert told.why == "calls below 1 MiB are left alone, and 100 % of the time is of such"
    assert told.next_line == "lagom analyze seen/traces"
    shares.add_step([SeenCall(AG, 0.004, num_bytes=MIB)])
    assert conclusion(shares, "", "torchrun train.py").next_line == "lagom run --online -- torchrun train.py"


@dataclass
class Job:
    log: list[str] = field(default_factory=list)
    busy: str = ""
    calls: list[SeenCall] | None = field(default_factory=lambda: [SeenCall(AG, 1.0)])

    def sampler(self):
        return Sampler(
            Shares(None),
            lambda: self.log.append("begin"),
            lambda: self.log.append("end") or self.calls,
            lambda: self.busy,
        )


def test_a_few_steps_after_the_warm_up_are_sampled_and_no_more():
    job = Job()
    sampler = job.sampler()
    told = [sampler.next_step() for _ in range(20)]
    assert told.index(True) == FIRST_SAMPLED + SAMPLED_APART * (NUM_SAMPLED - 1)
    assert told.count(True) == 1
    assert job.log == ["begin", "end"] * NUM_SAMPLED
    assert sampler.shares.num_steps == NUM_SAMPLED
    assert not sampler.close()


def test_no_two_steps_in_a_row_are_sampled_whatever_is_in_the_way():
    """Kineto writes into freed events if a scope that one profiler saw opened closes under the next."""
    job = Job()
    sampler, sampled = job.sampler(), []
    for step in range(1, 40):
        job.busy = "busy" if step in (3, 4, 8, 9, 10) else ""
        job.calls = None if step < 14 else [SeenCall(AG, 1.0)]
        before = job.log.count("begin")
        sampler.next_step()
        sampled += [step] * (job.log.count("begin") - before)
    assert sampler.shares.num_steps == NUM_SAMPLED
    assert all(later - step > 1 for step, later in itertools.pairwise(sampled)), sampled


def test_it_steps_aside_while_the_jobs_own_profiler_runs():
    job = Job(busy="another profiler runs")
    sampler = job.sampler()
    for _ in range(10):
        sampler.next_step()
    assert job.log == []
    assert "(another profiler runs): nothing can be said" in report_lines(sampler.shares, sampler.reason)[0]
    job.busy = ""
    sampler.next_step()
    assert job.log == ["begin"]


def test_a_sample_that_was_taken_away_does_not_count():
    job = Job(calls=None)
    sampler = job.sampler()
    assert not any(sampler.next_step() for _ in range(10))
    assert sampler.shares.num_steps == 0
