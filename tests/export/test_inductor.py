"""The one line that puts our planner into Inductor: what it sets, and when it refuses."""

import pytest
from torch._inductor import config

from lagom_overlap.capturing.fake_world import fake_world
from lagom_overlap.errors import JobError
from lagom_overlap.export.inductor import plan_compiled_graphs

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _settings_as_they_were():
    with config.patch(post_grad_custom_post_pass=None, reorder_for_peak_memory=True):
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
