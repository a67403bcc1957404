"""Reduce-scatters that nobody has waited for: none outlives its backward pass, whatever became of the one before."""

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch import distributed as dist  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from lagom_overlap.online.adapters import fsdp2  # noqa: E402
from lagom_overlap.online.adapters.base import say_once  # noqa: E402
from lagom_overlap.online.adapters.fsdp2 import MAX_IN_FLIGHT, Fsdp2Adapter, InFlight  # noqa: E402
from lagom_overlap.online.routes.gloo import GlooRoute  # noqa: E402

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
        assert in_flight.is_open()
        in_flight.add(work)
        return grad, None, None


def backward(in_flight, works):
    """The first work is issued last, as the first layer's gradients are."""
    x = torch.ones(1, requires_grad=True)
    for work in works:
        x = Issuing.apply(x, in_flight, work)
    x.sum().backward()


def test_all_are_waited_for_once_when_the_pass_ends():
    in_flight, works = InFlight(lambda: True), [Work() for _ in range(MAX_IN_FLIGHT + 3)]
    for passed in range(2):
        backward(in_flight, works)
        assert [work.num_waits for work in works] == [passed + 1] * len(works)


def test_a_pass_that_raises_waits_for_what_it_left_and_the_next_one_for_its_own():
    in_flight, left, works = InFlight(lambda: True), Work(), [Work(), Work()]
    with pytest.raises(RuntimeError, match="out of memory"):
        backward(in_flight, [None, left])
    assert left.num_waits == 1, "the job may use the gradients that it has"
    backward(in_flight, works)
    assert [work.num_waits for work in (left, *works)] == [1, 1, 1]


def test_a_pass_within_a_pass_leaves_nothing_unwaited():
    """As reentrant checkpointing does."""
    in_flight, inner, outer = InFlight(lambda: True), [Work()], [Work(), Work()]

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


def test_outside_a_pass_and_where_somebody_may_read_nothing_is_left_for_later():
    assert not InFlight(lambda: True).is_open()
    asked = []

    def refuse():
        asked.append(1)
        return False

    in_flight = InFlight(refuse)

    class Asking(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            assert not in_flight.is_open()
            return grad

    Asking.apply(Asking.apply(torch.ones(1, requires_grad=True))).sum().backward()
    assert len(asked) == 1, "once in a pass"


@pytest.fixture
def model():
    """Sharded over a world of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = fully_shard(torch.nn.Linear(4, 4))
    say_once.cache_clear()
    yield model
    dist.destroy_process_group()


def step_of(model):
    model(torch.ones(2, 4)).sum().backward()
    return [parameter.grad.to_local().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("owner", "name"),
    [*(("_OF_GROUP", name) for name in fsdp2._OF_GROUP), *(("_OF_PARAM", name) for name in fsdp2._OF_PARAM)],
)
def test_a_name_that_torch_no_longer_has_means_off_in_one_line_when_the_adapter_comes(
    model, monkeypatch, caplog, owner, name
):
    monkeypatch.setattr(fsdp2, owner, (*getattr(fsdp2, owner), f"{name}_of_old"))
    route = GlooRoute(dist.HashStore())
    for _ in range(2):
        Fsdp2Adapter().attach(model, route)()
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"FSDP2 is left alone: its parameter groups have no {name}_of_old (torch" in line
    step_of(model)


def param_group(module):
    """A module's only parameter group, by the name of this release."""
    state = module._get_fsdp_state()
    return state._fsdp_param_groups[0] if hasattr(state, "_fsdp_param_groups") else state._fsdp_param_group


def test_a_release_of_torch_that_was_not_tested_waits_where_it_issues_and_says_so(model, monkeypatch, caplog):
    monkeypatch.setattr(torch, "__version__", "9.1.0a0+cpu")
    Fsdp2Adapter().attach(model, GlooRoute(dist.HashStore()))
    assert param_group(model)._reduce_scatter_comm._in_flight is None
    assert [record.getMessage() for record in caplog.records] == [
        "FSDP2: reduce-scatters are waited for where they are issued, tested up to torch 2.15 (torch 9.1.0a0+cpu)"
    ]
    step_of(model)


def test_undoing_gives_fsdp2_its_own_calls_back_but_not_those_that_the_user_replaced(model):
    group = param_group(model)
    before = group._all_gather_comm, group._reduce_scatter_comm, group.unshard_async_op
    undo = Fsdp2Adapter().attach(model, GlooRoute(dist.HashStore()))
    assert isinstance(group._all_gather_comm, type(before[0])), "FSDP2 looks at the class of its calls"
    undo()
    assert (group._all_gather_comm, group._reduce_scatter_comm, group.unshard_async_op) == before
    undo = Fsdp2Adapter().attach(model, GlooRoute(dist.HashStore()))
    custom = type(before[0])()
    model.set_custom_all_gather(custom)
    undo()
    assert group._all_gather_comm is custom


@pytest.mark.usefixtures("model")
def test_a_model_that_the_job_drops_is_gone_while_the_adapter_is_attached():
    dropped = fully_shard(torch.nn.Linear(4, 4))
    undo = Fsdp2Adapter().attach(dropped, GlooRoute(dist.HashStore()))
    step_of(dropped)
    living = weakref.ref(dropped), weakref.ref(param_group(dropped))
    del dropped
    gc.collect()
    assert [each() for each in living] == [None, None]
    undo()
