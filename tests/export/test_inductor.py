"""The one line that puts our planner into Inductor: what it sets, and when it refuses."""

from types import SimpleNamespace

import pytest
import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

from lagom_overlap.capturing.fake_world import fake_world
from lagom_overlap.engines.fx.inductor_pass import PlanPass
from lagom_overlap.engines.fx.order_settings import keep_order, undoing
from lagom_overlap.engines.torch_versions import release_of
from lagom_overlap.errors import JobError
from lagom_overlap.export.inductor import plan_compiled_graphs

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _settings_as_they_were():
    settings = {"post_grad_custom_post_pass": None, "reorder_for_peak_memory": True}
    if release_of(torch.__version__) >= (2, 15):
        settings["aten_distributed_optimizations.enable_simple_overlap"] = True
    with config.patch(settings):
        yield


def test_it_takes_the_place_of_the_pass_and_keeps_the_order():
    with fake_world(4):
        made = plan_compiled_graphs(cluster="a40_nvlink")
    assert config.post_grad_custom_post_pass is made
    assert config.reorder_for_peak_memory is False


def test_without_a_process_group_it_refuses():
    with pytest.raises(JobError, match="process group"):
        plan_compiled_graphs()


def test_it_does_not_push_another_pass_out():
    config.post_grad_custom_post_pass = print
    with fake_world(4), pytest.raises(JobError, match="another pass"):
        plan_compiled_graphs()


@pytest.mark.parametrize("on_node", ["3", "0", "two"])
def test_a_launcher_that_contradicts_itself_is_refused(monkeypatch, on_node):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", on_node)
    with fake_world(4), pytest.raises(JobError, match="LOCAL_WORLD_SIZE"):
        plan_compiled_graphs()


def test_what_a_list_of_passes_holds_stays_before_ours():
    """As PyTorch 2.15 keeps them."""
    config.post_grad_custom_post_pass = [print]
    with fake_world(4):
        first = plan_compiled_graphs(cluster="a40_nvlink")
        assert config.post_grad_custom_post_pass == [print, first]
        second = plan_compiled_graphs(cluster="a40_nvlink")
    assert config.post_grad_custom_post_pass == [print, second]


def test_every_setting_that_would_undo_the_order_is_switched_off_where_it_exists():
    newer = SimpleNamespace(
        reorder_for_peak_memory=True, aten_distributed_optimizations=SimpleNamespace(enable_simple_overlap=True)
    )
    assert undoing(newer) == ("reorder_for_peak_memory", "aten_distributed_optimizations.enable_simple_overlap")
    keep_order(newer)
    assert undoing(newer) == ()
    assert newer.aten_distributed_optimizations.enable_simple_overlap is False
    older = SimpleNamespace(reorder_for_peak_memory=True)
    keep_order(older)
    assert vars(older) == {"reorder_for_peak_memory": False}


def test_pytorch_2_15_has_both_settings_and_hooks_that_take_lists():
    """By that release itself: a setting that was renamed would be left on in silence."""
    if release_of(torch.__version__) < (2, 15):
        pytest.skip("PyTorch 2.15 brought the second")
    assert undoing(config) == ("reorder_for_peak_memory", "aten_distributed_optimizations.enable_simple_overlap")
    config.post_grad_custom_post_pass = ran = [Noting(), Noting()]
    torch.compile(lambda x: x + 1)(torch.ones(4))
    assert [each.num_graphs for each in ran] == [1, 1]


@pytest.mark.parametrize("is_on", [False, True])
def test_a_setting_that_undoes_the_order_of_a_planned_graph_is_warned_of(caplog, is_on):
    """The job may have switched it on again after our pass went in."""
    graph = torch.fx.Graph()
    reduced = graph.call_function(
        torch.ops._c10d_functional.all_reduce.default, (graph.placeholder("gradient"), "sum", "0")
    )
    graph.output(graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (reduced,)))
    made = PlanPass(lambda *_: ())
    with config.patch(reorder_for_peak_memory=is_on), pytest.raises(ValueError, match="process group"):
        made(graph)  # which comes no further than here without one
    assert ("reorder_for_peak_memory is on: it undoes the order of the plan" in caplog.text) == is_on


class Noting(CustomGraphPass):
    num_graphs = 0

    def __call__(self, graph):
        self.num_graphs += 1

    def uuid(self):
        return None


def test_compiled_blocks_under_fsdp2_are_said_to_leave_nothing_to_order(caplog):
    """torchtitan compiles each block, then shards it: a block's graph holds no collective."""
    with fake_world(4):
        made = plan_compiled_graphs(cluster="a40_nvlink")
        for _ in range(2):
            made(torch.fx.symbolic_trace(torch.nn.Linear(4, 4)).graph)
    assert sum("without collectives" in record.message for record in caplog.records) == 1
    assert "apply_fsdp2" in caplog.text
