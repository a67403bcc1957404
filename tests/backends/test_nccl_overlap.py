"""A run on several devices: they begin together, after every host has queued all of it."""

import contextlib

import pytest

torch = pytest.importorskip("torch")

from lagom_overlap.backends.nccl.overlap import MAX_HEAD_START, HeadStart, make_ready, run_overlap  # noqa: E402
from lagom_overlap.collective import Collective, CollectiveKind  # noqa: E402
from lagom_overlap.errors import BackendError  # noqa: E402
from lagom_overlap.workload import CommOp, CompOp, Gemm, OverlapGroup  # noqa: E402

pytestmark = pytest.mark.torch
GROUP = OverlapGroup(
    name="g",
    computations=(CompOp(name="mm", work=Gemm(8, 8, 8)),),
    comms=(CommOp(name="ar", collective=Collective(CollectiveKind.ALL_REDUCE, 4096, 2), communicator="dp"),),
)


class Scripted:
    """A device that needs a head start of `needed` before its host has queued a run, and the ranks around it."""

    torch_device = torch.device("cpu")

    def __init__(self, needed, *, slow_first=0, others_early=0):
        self.needed, self.slow_first, self.others_early = needed, slow_first, others_early
        self.log, self.factors, self.num_marks = [], [], 0

    # The device.

    def new_stream(self):
        return object()

    def use(self, stream):
        return contextlib.nullcontext()

    def mark(self, stream):
        self.log.append("mark")
        self.num_marks += 1
        return float(self.num_marks)

    def wait(self, stream, mark):
        self.log.append("wait")

    def head_start(self, factor):
        self.log.append("sleep")
        self.factors.append(factor)

    def is_passed(self, mark):
        return self.factors[-1] < self.needed or len(self.factors) <= self.slow_first

    def finish(self):
        self.log.append("finish")

    def seconds(self, marks):
        return [mark - marks[0] for mark in marks]

    # The ranks.

    def barrier(self):
        self.log.append("barrier")

    def gather(self, value):
        self.others_early -= 1
        return (value, int(self.others_early >= 0))

    def run(self, head_start):
        return run_overlap(
            make_ready(GROUP, self),
            self,
            lambda place: self.log.append("issue"),
            ranks=self,
            meet=lambda: self.log.append("meet"),
            head_start=head_start,
        )


def test_devices_meet_behind_the_head_start_and_before_the_clock_starts():
    """Hosts leave a barrier up to a millisecond apart; the devices do not."""
    device = Scripted(needed=1)
    times = device.run(HeadStart())
    assert device.log[:4] == ["barrier", "sleep", "meet", "mark"]
    assert device.log.index("issue") > 4
    assert times.makespan_s > 0


def test_a_run_that_a_device_began_before_all_was_queued_is_made_again_with_a_longer_head_start():
    device, head_start = Scripted(needed=8), HeadStart()
    device.run(head_start)
    assert device.factors == [1, 1, 2, 4, 8]
    device.run(head_start)
    assert device.factors[-1] == 8
    assert len(device.factors) == 6  # what was learnt stays


def test_a_host_that_is_slow_once_does_not_lengthen_the_head_start():
    device, head_start = Scripted(needed=1, slow_first=1), HeadStart()
    device.run(head_start)
    assert device.factors == [1, 1]
    assert head_start.factor == 1


def test_all_ranks_run_again_when_one_began_early():
    device = Scripted(needed=1, others_early=1)
    device.run(HeadStart())
    assert len(device.factors) == 2


def test_a_host_that_never_keeps_up_is_an_error():
    with pytest.raises(BackendError, match="cannot queue this group"):
        Scripted(needed=MAX_HEAD_START + 1).run(HeadStart())
