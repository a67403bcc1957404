"""What the host waits for by hand, in captures: devices, streams and events, worked by hand."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from lagom_overlap.capturing.fake_tensor import TrainingStep, capture_step
from lagom_overlap.workload import Iteration
from lagom_overlap.workload.ops import is_host_read

pytestmark = pytest.mark.torch


class Parts(nn.Module):
    """Two products that know nothing of each other, one on a stream of its own; a wait; a third product."""

    def __init__(self, wait, is_early: bool = False) -> None:
        super().__init__()
        self.main, self.side, self.last = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.wait, self.is_early = wait, is_early

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stream = torch.cuda.Stream()
        if self.is_early:
            self.wait(stream, torch.cuda.Event())
        with torch.cuda.stream(stream):
            side = self.side(x)
            event = stream.record_event()
        main = self.main(x)
        if not self.is_early:
            self.wait(stream, event)
        last = self.last(x)
        torch.cuda.current_stream().wait_stream(stream)
        return main + side + last


def captured(wait, **how: bool) -> Iteration:
    def build() -> TrainingStep:
        model = Parts(wait, **how)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return TrainingStep(
            model=model, inputs=(torch.randn(4, 8),), loss=lambda y: y.sum(), optimizers=(optimizer,)
        )  # fmt: skip

    return capture_step(build, num_ranks=1).iteration


def ancestors(step: Iteration, name: str) -> set[str]:
    ops, found, left = {op.name: op for op in step.ops}, set(), [name]
    while left:
        for dep in ops[left.pop()].deps:
            if dep not in found:
                found.add(dep)
                left.append(dep)
    return found


def products(step: Iteration) -> dict[str, str]:
    """The forward products, by the module whose they are."""
    return {
        part: next(op.name for op in step.ops if part in (op.origin.module or "") and op.name.startswith("fwd"))
        for part in ("main", "side", "last")
    }


@pytest.mark.parametrize(
    ("wait", "waited"),
    [
        (lambda stream, event: torch.cuda.synchronize(), {"main", "side"}),
        (lambda stream, event: torch.accelerator.synchronize(), {"main", "side"}),
        (lambda stream, event: stream.synchronize(), {"side"}),
        (lambda stream, event: torch.cuda.current_stream().synchronize(), {"main"}),
        (lambda stream, event: event.synchronize(), {"side"}),
    ],
    ids=["device", "accelerator", "side stream", "current stream", "event"],
)
def test_the_host_waits_for_what_was_issued_and_all_behind_waits_for_the_host(wait, waited):
    step = captured(wait)
    (host,) = [op for op in step.ops if is_host_read(op)]
    found = products(step)
    assert {part for part in ("main", "side") if found[part] in ancestors(step, host.name)} == waited
    assert host.name in ancestors(step, found["last"])


@pytest.mark.parametrize(
    "wait", [lambda stream, event: torch.cuda.synchronize(), lambda stream, event: event.synchronize()]
)
def test_a_wait_for_nothing_is_no_operator(wait):
    assert not any(is_host_read(op) for op in captured(wait, is_early=True).ops)


def test_a_second_wait_for_the_same_is_none():
    def twice(*_: object) -> None:
        torch.cuda.synchronize()
        torch.cuda.synchronize()

    assert sum(is_host_read(op) for op in captured(twice).ops) == 1
