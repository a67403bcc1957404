"""FX graphs with functional collectives: the iteration's operators are nodes, and its data flow is all that counts."""

import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as funcol  # noqa: E402
from torch import fx  # noqa: E402

from lagom_overlap.capturing.fake_world import fake_world  # noqa: E402
from lagom_overlap.capturing.fx import FxCapture, capture_fx  # noqa: E402
from lagom_overlap.collective import CollectiveKind  # noqa: E402
from lagom_overlap.workload import Gemm, Phase  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]  # a shared machine may be slow

gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor


def sharded_step(x: "torch.Tensor", shard: "torch.Tensor", head: "torch.Tensor") -> tuple:
    """A gathered weight, a summed activation, gradients scattered back."""
    group = dist.group.WORLD
    weight = gather(shard, 0, group)
    hidden = torch.relu(funcol.all_reduce(x.flatten(0, 1) @ weight, "sum", group))
    loss = (hidden @ head).sum()
    weight_gradient, head_gradient = torch.autograd.grad(loss, (weight, head))
    return scatter(weight_gradient, "sum", 0, group), head_gradient


def inputs() -> tuple:
    torch.manual_seed(3)
    return torch.randn(2, 4, 8), torch.randn(4, 6, requires_grad=True), torch.randn(6, 4, requires_grad=True)


@pytest.fixture(scope="module")
def captured() -> FxCapture:
    with fake_world(2):
        return capture_fx(sharded_step, inputs(), is_fake=True, name="sharded")


def test_operators_are_nodes_by_name(captured: FxCapture) -> None:
    nodes = {node.name: node for node in captured.graph_module.graph.nodes}
    for op in captured.iteration.ops:
        assert str(nodes[op.name].target).startswith(op.origin.kernel)
    assert captured.groups == {"world": (0, 1)}
    assert captured.iteration.is_dataflow


def test_collectives_products_and_phases(captured: FxCapture) -> None:
    ops = captured.iteration.ops
    assert [comm.collective.kind for comm in captured.iteration.comms] == [
        CollectiveKind.ALL_GATHER,
        CollectiveKind.ALL_REDUCE,
        CollectiveKind.ALL_REDUCE,
        CollectiveKind.REDUCE_SCATTER,
    ]
    phases = [op.origin.phase for op in ops if isinstance(getattr(op, "work", None), Gemm)]
    assert phases[:2] == [Phase.FORWARD, Phase.FORWARD]
    assert sorted(phases[2:]) == [Phase.BACKWARD, Phase.WEIGHT_GRAD, Phase.WEIGHT_GRAD]


def test_waits_and_views_are_no_operators_but_hand_the_data_on(captured: FxCapture) -> None:
    ops = {op.name: op for op in captured.iteration.ops}
    assert not [name for name in ops if name.startswith(("wait_tensor", "view", "detach"))]
    assert ops["mm"].deps == ("all_gather_into_tensor",)
    assert ops["relu"].deps == ("all_reduce",)


def test_a_stream_that_waited_holds_back_what_needs_nothing_of_it() -> None:
    """The framework's wait is among the waits of the next operator, not among its data dependences."""

    def step(x: "torch.Tensor", other: "torch.Tensor") -> tuple:
        total = funcol.wait_tensor(funcol.all_reduce(x, "sum", dist.group.WORLD))
        return total, other * 2

    with fake_world(2):
        capture = capture_fx(step, (torch.zeros(4), torch.zeros(4)), is_fake=True).capture
    assert capture.iteration.ops[1].deps == ()
    assert capture.waits == {"mul": ("all_reduce",)}


def test_what_is_returned_is_kept(captured: FxCapture) -> None:
    kept = {buffer.maker for buffer in captured.iteration.buffers if not buffer.users}
    returned = {node.name for node in captured.graph_module.graph.output_node().all_input_nodes}
    assert "reduce_scatter_tensor" in kept
    assert kept - {"reduce_scatter_tensor"} <= returned


def in_place_step(x: "torch.Tensor", weight: "torch.Tensor") -> tuple:
    """Reads, overwrites and reads again, through views."""
    state = x * 2
    first = state.sum(0)
    state[1:].mul_(3)
    second = state @ weight
    state.t().add_(first.mean())
    third = state.t() @ second
    first.add_(1)
    return first, second, third, state.clone()


def _run(graph: fx.Graph, order: list[fx.Node], args: tuple) -> Any:
    """Executes operators in `order`, views and the rest when they are first needed."""
    values: dict[fx.Node, Any] = {}
    given = iter(args)
    placeholders = {node: next(given) for node in graph.nodes if node.op == "placeholder"}
    is_operator = set(order)

    def value(node: fx.Node) -> Any:
        if node in placeholders:
            return placeholders[node]
        if node not in values:
            assert node not in is_operator, f"{node} is read before it ran"
            compute(node)
        return values[node]

    def compute(node: fx.Node) -> None:
        node_args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        values[node] = node.target(*node_args, **kwargs)

    for node in order:
        compute(node)
    return fx.map_arg(graph.output_node().args[0], value)


def _topological(captured: FxCapture, chance: random.Random) -> list[str]:
    ops = {op.name: set(op.deps) for op in captured.iteration.ops}
    order: list[str] = []
    while ops:
        name = chance.choice([name for name, deps in ops.items() if not deps & ops.keys()])
        order.append(name)
        del ops[name]
    return order


@pytest.mark.parametrize("step", [in_place_step])
def test_every_order_of_the_data_flow_computes_the_same(step: Callable[..., Any]) -> None:
    """Executed with real numbers in random topological orders: a dependence that is missing shows."""
    chance = random.Random(5)
    torch.manual_seed(1)
    args = (torch.randn(4, 4), torch.randn(4, 4))
    with fake_world(2):
        captured = capture_fx(step, tuple(arg.clone() for arg in args))
    nodes = {node.name: node for node in captured.graph_module.graph.nodes}
    expected = step(*(arg.clone() for arg in args))
    orders = [_topological(captured, chance) for _ in range(60)]
    assert len({tuple(order) for order in orders}) > 5
    for order in orders:
        found = _run(captured.graph_module.graph, [nodes[name] for name in order], tuple(a.clone() for a in args))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


def test_modules_name_layers_where_a_model_is_given() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

    def step(x: "torch.Tensor") -> Any:
        loss = model(x).sum()
        return torch.autograd.grad(loss, list(model.parameters()))

    with fake_world(2):
        captured = capture_fx(step, (torch.randn(2, 4),), model=model)
    layers = [op.origin.layer for op in captured.iteration.ops if isinstance(getattr(op, "work", None), Gemm)]
    assert layers == [0, 1, 1, 1, 0]
