"""The executor for CUDA's streams on a device that notes what every stream was told, with tensors on the CPU."""

from contextlib import contextmanager

import pytest

pytest.importorskip("torch")

import torch
from torch import distributed as dist

from lagom_overlap.capturing.fake_world import fake_world
from lagom_overlap.engines.fx.apply import apply_rewrites
from lagom_overlap.engines.fx.cuda_streams import CudaStep
from lagom_overlap.engines.fx.nodes import OP_NAME, is_collective
from lagom_overlap.engines.fx.process_groups import ProcessGroups
from lagom_overlap.engines.fx.program import capture_step
from lagom_overlap.engines.fx.reorder import STREAM
from lagom_overlap.engines.fx.streams import stream_of
from lagom_overlap.workload.rewrite.steps import Reorder

pytestmark = pytest.mark.torch
C10D = torch.ops._c10d_functional


class Device:
    """Streams as CUDA has them: an event holds what its stream was told so far, and all that this waits for.

    `behind[operator]` are the operators that must have ended when it starts.
    """

    def __init__(self):
        self.told = {}
        self.main = self.now = self.Stream()
        self.behind = {}

    def Stream(self):  # noqa: N802  torch's name
        device = self

        class Stream:
            def wait_event(self, event):
                device.told[self] |= event.held

        made = Stream()
        self.told[made] = set()
        return made

    def Event(self):  # noqa: N802  torch's name
        device = self

        class Event:
            def record(self, stream):
                self.held = set(device.told[stream])

        return Event()

    def current_stream(self):
        return self.main

    @contextmanager
    def stream(self, stream):
        self.now, before = stream, self.now
        yield
        self.now = before

    def ran(self, name):
        self.behind[name] = set(self.told[self.now])
        self.told[self.now].add(name)


def step(x, first, second):
    """Two sharded layers with dropout and what is gathered written over once it was scattered."""
    size, group = dist.get_world_size(), dist.group.WORLD.group_name

    def gather(shard):
        return C10D.wait_tensor(C10D.all_gather_into_tensor(shard, size, group))

    out = torch.dropout(torch.relu(x @ gather(first)), 0.5, True) @ gather(second)
    sent = out * 2
    got = C10D.wait_tensor(C10D.reduce_scatter_tensor(sent, "sum", size, group))
    later = (out + 1).sum()
    sent.add_(1)
    return got * later, sent.view(-1)


@pytest.fixture
def planned():
    """The step on one rank of one, with both gathers first, on streams of their own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        inputs = [torch.randn(8, 8) for _ in range(3)]
        captured = capture_step(step, inputs, name="step")
        names = [op.name for op in captured.iteration.ops]
        gathers = [name for name in names if "all_gather" in name]
        order = (*gathers, *(name for name in names if name not in gathers))
        module = apply_rewrites(captured.graph_module, captured.iteration, (Reorder(order),), ProcessGroups())
        for node in module.graph.nodes:  # a group of one rank is no collective to the plan
            if is_collective(node):
                node.meta[STREAM] = "gathers" if "all_gather" in node.name else "scatters"
        yield module, inputs
    finally:
        dist.destroy_process_group()


def test_a_collective_runs_on_the_stream_that_the_plan_gives_it():
    def two_gathers(x, y):
        group = dist.group.WORLD.group_name
        first, second = (C10D.wait_tensor(C10D.all_gather_into_tensor(one, 4, group)) for one in (x, y))
        return first.sum(), second.sum()

    with fake_world(4):
        captured = capture_step(two_gathers, [torch.zeros(2, 3), torch.zeros(4, 3)], name="step")
        names = [op.name for op in captured.iteration.ops]
        own, other = (name for name in names if name.startswith("all_gather"))
        step = Reorder(tuple(names), ((other, "inter"),))
        module = apply_rewrites(captured.graph_module, captured.iteration, (step,), ProcessGroups())
    streams = {node.meta[OP_NAME]: stream_of(node) for node in module.graph.nodes if is_collective(node)}
    before = {op.name: op.stream for op in captured.iteration.comms}
    assert before[own] == before[other] != "inter"
    assert streams == {own: before[own], other: "inter"}


class Noted(CudaStep):
    """The executor, telling the device when an operator is issued."""

    def _evaluate(self, node, made):
        if OP_NAME in node.meta:
            self._device.ran(node.meta[OP_NAME])
        return super()._evaluate(node, made)


def needed(graph):
    """(earlier, later) by values, seen through nodes that are no operators."""
    behind, pairs = {}, set()
    for node in graph.nodes:
        carried = {name for used in node.all_input_nodes for name in behind[used]}
        behind[node] = {node.meta[OP_NAME]} if OP_NAME in node.meta else carried
        if OP_NAME in node.meta:
            pairs |= {(earlier, node.meta[OP_NAME]) for earlier in carried}
    return pairs


def test_every_stream_waits_for_what_it_reads_and_for_nothing_else(planned):
    module, inputs = planned
    device = Device()
    Noted(module, ProcessGroups(), device=device).run(inputs)
    for earlier, later in needed(module.graph):
        assert earlier in device.behind[later], (earlier, later)
    gathers = [name for name in device.behind if "all_gather" in name]
    scatter = next(name for name in device.behind if "reduce_scatter" in name)
    assert [device.behind[name] for name in gathers] == [set(), {gathers[0]}]
    assert scatter not in device.behind[next(name for name in device.behind if name.startswith("sum"))]


def test_a_tensor_is_written_over_once_the_collective_that_reads_it_has_ended(planned):
    module, inputs = planned
    device = Device()
    Noted(module, ProcessGroups(), device=device).run(inputs)
    scatter = next(name for name in device.behind if "reduce_scatter" in name)
    assert scatter in device.behind[next(name for name in device.behind if name.startswith("add_"))]


def test_the_current_stream_has_the_outputs_and_they_are_the_programs_bit_for_bit(planned):
    module, inputs = planned
    device = Device()
    for seed in (1, 2):  # the second run of one step finds nothing left over from the first
        torch.manual_seed(seed)
        expected = step(*inputs)
        torch.manual_seed(seed)
        found = Noted(module, ProcessGroups(), device=device).run(inputs).outputs
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
        assert set(device.behind) <= device.told[device.main]


def test_a_graph_has_a_stream_of_its_own_for_each_of_the_plans(planned):
    module, _ = planned
    device = Device()
    CudaStep(module, ProcessGroups(), device=device)
    assert len(device.told) == 1 + len({"gathers", "scatters"})
