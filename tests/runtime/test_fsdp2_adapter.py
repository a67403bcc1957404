"""Reduce-scatters that nobody has waited for: none outlives its backward pass, whatever became of the one before."""

import pytest

torch = pytest.importorskip("torch")

from lagom_overlap.runtime.adapters.fsdp2 import MAX_IN_FLIGHT, _InFlight  # noqa: E402

pytestmark = pytest.mark.torch


class Work:
    def __init__(self):
        self.num_waits = 0

    def wait(self):
        self.num_waits += 1


class Issuing(torch.autograd.Function):
    """In backward it hands over a reduce-scatter, or fails."""

    @staticmethod
    def forward(ctx, x, in_flight, work):
        ctx.what = in_flight, work
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        in_flight, work = ctx.what
        if work is None:
            raise RuntimeError("out of memory")
        in_flight.add(work)
        return grad, None, None


def backward(in_flight, works):
    """The first work is issued last, as the first layer's gradients are."""
    x = torch.ones(1, requires_grad=True)
    for work in works:
        x = Issuing.apply(x, in_flight, work)
    x.sum().backward()


def test_all_are_waited_for_once_when_the_pass_ends():
    in_flight, works = _InFlight(), [Work() for _ in range(MAX_IN_FLIGHT + 3)]
    for passed in range(2):
        backward(in_flight, works)
        assert [work.num_waits for work in works] == [passed + 1] * len(works)


def test_the_passes_after_one_that_raised_wait_for_theirs_and_for_what_it_left():
    in_flight, left, works = _InFlight(), Work(), [Work(), Work()]
    with pytest.raises(RuntimeError, match="out of memory"):
        backward(in_flight, [None, left])
    assert left.num_waits == 0
    backward(in_flight, works)
    assert [work.num_waits for work in (left, *works)] == [1, 1, 1]


def test_a_pass_within_a_pass_leaves_nothing_unwaited():
    """As reentrant checkpointing does."""
    in_flight, inner, outer = _InFlight(), [Work()], [Work(), Work()]

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                backward(in_flight, inner)
            return grad

    x = Issuing.apply(torch.ones(1, requires_grad=True), in_flight, outer[0])
    Issuing.apply(Nested.apply(x), in_flight, outer[1]).sum().backward()
    assert [work.num_waits for work in inner + outer] == [1, 1, 1]
