"""When DDP is left alone; what it computes otherwise: test_adapters.py."""

import pytest

torch = pytest.importorskip("torch")

from torch import distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from lagom_overlap.online.adapters import ddp  # noqa: E402
from lagom_overlap.online.adapters.base import say_once  # noqa: E402
from lagom_overlap.online.adapters.ddp import DdpAdapter, hook_of  # noqa: E402
from lagom_overlap.online.routes.gloo import GlooRoute  # noqa: E402
from lagom_overlap.online.routes.gloo_clock import ClockMark  # noqa: E402
from lagom_overlap.online.routes.gloo_work import RunWork  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def model():
    """Over a world of one rank; not of gloo, whose threads may stand still freeing a tensor as the group ends."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    say_once.cache_clear()
    yield DistributedDataParallel(torch.nn.Linear(4, 4))
    dist.destroy_process_group()


def check_left_alone(model, caplog, why):
    for _ in range(2):
        DdpAdapter().attach(model, GlooRoute(dist.HashStore()))()
    assert hook_of(model) is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"DDP is left alone: {why} (torch" in line
    assert model(torch.ones(2, 4)).shape == (2, 4)


@pytest.mark.parametrize("name", ddp._NEEDED)
def test_a_name_that_torch_no_longer_has_means_off_in_one_line_when_the_adapter_comes(model, monkeypatch, caplog, name):
    monkeypatch.setattr(ddp, "_NEEDED", (*ddp._NEEDED, f"{name}_of_old"))
    check_left_alone(model, caplog, f"it has no {name}_of_old")


def test_what_torch_no_longer_offers_to_a_hook_means_off_too(model, monkeypatch, caplog):
    with monkeypatch.context() as patched:
        patched.delattr(torch._C, "_current_graph_task_id")
        assert ddp._why_not(model) == "it has no _current_graph_task_id"
    monkeypatch.delattr(dist, "_register_comm_hook")
    check_left_alone(model, caplog, "it has no _register_comm_hook")


def test_gradients_in_views_of_their_buckets_are_left_to_ddp(model, caplog):
    viewed = DistributedDataParallel(torch.nn.Linear(4, 4), gradient_as_bucket_view=True)
    check_left_alone(
        viewed,
        caplog,
        "gradient_as_bucket_view: DDP itself scales each gradient, also in a pass that ends early",
    )


class Done:
    """A handle of what is over."""

    def wait(self) -> None:
        """Returns at once."""


def test_buckets_are_waited_for_at_the_end_of_backward_so_that_their_exposure_is_known(model):
    marks = []

    class Route:
        def call(self, _kind, target, _source, _group, _native):
            marks.append(ClockMark())
            return RunWork(Done(), marks[-1], results=lambda: [target])

    undo = DdpAdapter().attach(model, Route())
    model(torch.ones(2, 4)).sum().backward()
    assert model.module.weight.grad is not None
    assert marks
    assert all(mark.joined_s is not None and mark.joined_s <= mark.resumed_s for mark in marks)
    undo()
