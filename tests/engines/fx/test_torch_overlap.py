"""PyTorch's own overlap scheduler as an order of ours, on a program whose collectives are awaited on the spot."""

import pytest

pytest.importorskip("torch")

import torch
from torch import distributed as dist

from lagom_overlap.capturing.fake_world import fake_world
from lagom_overlap.engines.fx import torch_overlap
from lagom_overlap.engines.fx.apply import apply_rewrites, name_operators
from lagom_overlap.engines.fx.process_groups import ProcessGroups
from lagom_overlap.engines.fx.program import capture_step
from lagom_overlap.errors import BackendError
from lagom_overlap.workload.rewrite.apply import rewritten

pytestmark = pytest.mark.torch

C10D = torch.ops._c10d_functional


def gathered(shard):
    return C10D.wait_tensor(C10D.all_gather_into_tensor(shard, 2, dist.group.WORLD.group_name))


def step(x, *shards):
    for shard in shards:
        x = torch.relu(x @ gathered(shard))
    return (x,)


@pytest.fixture(scope="module")
def captured():
    with fake_world(2):
        found = capture_step(step, (torch.zeros(64, 32), *(torch.zeros(16, 32) for _ in range(4))), name="layers")
    name_operators(found.graph_module.graph, found.iteration)
    return found


def test_gathers_are_issued_ahead_and_what_waits_for_one_stands_behind_its_wait(captured):
    try:
        torch_overlap.own_scheduler()
    except BackendError as error:  # 2.11 and 2.12 have one with other arguments
        pytest.skip(str(error))
    iteration = captured.iteration
    seconds = {op.name: 1e-3 for op in iteration.ops}
    with fake_world(2):
        order = torch_overlap.own_order(captured.graph_module, iteration, seconds)
        apply_rewrites(captured.graph_module, iteration, (order,), ProcessGroups())
    assert sorted(order.order) == sorted(op.name for op in iteration.ops)
    comms = [op.name for op in iteration.comms]
    first_product = order.order.index("mm")
    assert sum(order.order.index(name) < first_product for name in comms) >= 2  # the program: one
    made = {op.name: op for op in rewritten(iteration, (order,)).ops}
    assert [comms[number] in made[f"mm_{number}" if number else "mm"].deps for number in range(4)] == [True] * 4


def test_a_pytorch_without_it_is_named(captured, monkeypatch):
    monkeypatch.setattr(torch_overlap, "_MODULE", "torch._inductor.fx_passes.no_such_pass")
    with pytest.raises(BackendError, match=r"PyTorch .* has no torch._inductor.fx_passes.no_such_pass"):
        torch_overlap.own_scheduler()
    monkeypatch.setattr(torch_overlap, "_MODULE", "torch._inductor.fx_passes.overlap_scheduling")
    monkeypatch.setattr(torch_overlap, "_SETTINGS", {"overlap_everything": True})
    with pytest.raises(BackendError, match="takes no overlap_everything"):
        torch_overlap.own_scheduler()
