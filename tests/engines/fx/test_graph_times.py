"""Times of a graph's operators: every one that runs has one, equal calls are timed once, open sizes are seen."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from lagom_overlap.capturing.fake_world import fake_world
from lagom_overlap.capturing.fx import capture_fx
from lagom_overlap.engines.fx import graph_times
from lagom_overlap.engines.fx.program import one_tensor_each
from lagom_overlap.errors import JobError

pytestmark = pytest.mark.torch
FC = torch.ops._c10d_functional


def test_every_operator_has_a_time_and_equal_calls_share_one(monkeypatch):
    def step(x, w, places):
        return (torch.relu(x @ w) @ w, w[places])

    timed = []
    real = graph_times._seconds
    monkeypatch.setattr(graph_times, "_seconds", lambda node, repeats: timed.append(node.name) or real(node, repeats))
    with fake_world(2):
        captured = capture_fx(step, [torch.ones(4, 4), torch.ones(4, 4), torch.tensor([3])], is_fake=True)
        times = graph_times.times_alone(captured.graph_module.graph, captured.iteration, repeats=1)
    assert set(times) == {op.name for op in captured.iteration.ops}
    assert min(times.values()) > 0
    assert timed.count("mm") + timed.count("mm_1") == 1


def test_an_operator_that_cannot_run_alone_has_no_time(monkeypatch):
    def step(x):
        return torch.relu(x) @ x

    with fake_world(2):
        captured = capture_fx(step, [torch.ones(4, 4)], is_fake=True)
        real = graph_times._example
        monkeypatch.setattr(graph_times, "_example", lambda value: real(value)[:1] if value.dim() == 2 else None)
        times = graph_times.times_alone(captured.graph_module.graph, captured.iteration, repeats=1)
    assert set(times) == {"relu"}


def test_open_sizes_are_seen():
    def step(x):
        return x + 1

    fixed = make_fx(step, tracing_mode="fake")(torch.ones(3, 5))
    opened = make_fx(step, tracing_mode="symbolic")(torch.ones(3, 5))
    assert graph_times.has_fixed_shapes(fixed.graph)
    assert not graph_times.has_fixed_shapes(opened.graph)


def test_a_call_with_several_element_types_is_refused():
    def step(x, y):
        return tuple(map(FC.wait_tensor, FC.all_gather_into_tensor_coalesced([x, y.half()], 2, "0")))

    with fake_world(2):
        captured = capture_fx(step, [torch.ones(4), torch.ones(4)], is_fake=True)
        with pytest.raises(JobError, match="several element types"):
            one_tensor_each(captured.graph_module.graph)
