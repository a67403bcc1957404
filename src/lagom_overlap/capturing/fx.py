"""A function with functional collectives becomes an FX graph and an iteration whose operators are its nodes, by name.

`torch.distributed._functional_collectives` are what torch.compile leaves in its graphs; `make_fx` traces forward and
backward into one graph if the function calls `torch.autograd.grad`. An engine rewrites and runs that graph; the
iteration is what planners see of it. Views, `getitem` and `wait_tensor` are nodes but no operators.

The function is traced once with the given inputs: Python control flow and shapes are fixed by them.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from operator import getitem
from typing import Any, Final

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from lagom_overlap.capturing.collectives import tensors_in
from lagom_overlap.capturing.recorder import StepRecorder
from lagom_overlap.capturing.whereabouts import Whereabouts
from lagom_overlap.workload import Iteration, Origin, Phase
from lagom_overlap.workload.issued import IssuedStep

ORIGIN = "lagom_origin"
_FORWARD_NODE = "lagom_forward_node"
_READ: Final = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
"""What a graph calls operators whose values, or sizes of results, the host needs."""


@dataclass(frozen=True, slots=True)
class FxCapture:
    """A traced function: its graph, and the capture whose operators are nodes of the graph, by the same names.

    A node's tensors are fake ones in `node.meta["val"]`.
    """

    graph_module: fx.GraphModule
    capture: IssuedStep

    @property
    def iteration(self) -> Iteration:
        """The data flow that a planner may reorder."""
        return self.capture.iteration

    @property
    def groups(self) -> Mapping[str, tuple[int, ...]]:
        """Global ranks of each communicator."""
        return self.capture.groups


class NoteOrigins(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """While make_fx traces: writes on each new node where it comes from."""

    def __init__(self, whereabouts: Whereabouts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._whereabouts = whereabouts
        self._noted = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        where = self._whereabouts
        where.note_forward()
        origin, node = where.origin(func._schema.name.replace("::", ".")), where.forward_node
        result = func(*args, **(kwargs or {}))
        mode = get_proxy_mode()
        if mode is not None:
            for fresh in _newest(mode.tracer.graph, self._noted):
                fresh.meta[ORIGIN], fresh.meta[_FORWARD_NODE] = origin, node
            self._noted = len(mode.tracer.graph.nodes)
        return result


def _newest(graph: fx.Graph, num_known: int) -> list[fx.Node]:
    """The nodes that were added since the graph had `num_known`."""
    newest, node = [], graph._root.prev
    for _ in range(len(graph.nodes) - num_known):
        newest.append(node)
        node = node.prev
    return newest


def capture_fx(
    function: Callable[..., Any],
    example_inputs: Sequence[Any],
    *,
    model: torch.nn.Module | None = None,
    name: str = "fx",
    is_fake: bool = False,
) -> FxCapture:
    """Traces `function(*example_inputs)`, forward and, where it calls `torch.autograd.grad`, backward.

    Inputs that require a gradient count as parameters. With `is_fake` nothing is computed and inputs may be of any
    size; without, the function runs once on the inputs as they are, collectives included. `model` names modules and
    layers. A default process group must exist.
    """
    whereabouts = Whereabouts(model)

    def noted(*inputs: Any) -> Any:
        with NoteOrigins(whereabouts):
            return function(*inputs)

    mode = FakeTensorMode(allow_non_fake_inputs=True) if is_fake else nullcontext()
    with whereabouts, mode:
        graph_module = make_fx(noted)(*example_inputs)
    parameters = [isinstance(value, torch.Tensor) and value.requires_grad for value in example_inputs]
    return FxCapture(
        graph_module,
        capture_graph(graph_module, num_ranks=torch.distributed.get_world_size(), name=name, parameters=parameters),
    )


def capture_graph(
    graph_module: fx.GraphModule, *, num_ranks: int, name: str = "fx", parameters: Sequence[bool] = ()
) -> IssuedStep:
    """The capture of a graph whose nodes carry fake tensors (`node.meta["val"]`), such as torch.compile's.

    `parameters` says of each placeholder whether it is one. Nodes without a value or that are no ATen or collective
    operators are handed on.
    """
    recorder = StepRecorder(is_graph=True)
    placeholders = 0
    for node in graph_module.graph.nodes:
        value = node.meta.get("val")
        if node.op in ("placeholder", "get_attr") and isinstance(value, torch.Tensor):
            entry = recorder.storages.external(value)
            entry.is_parameter = node.op == "get_attr" or (placeholders < len(parameters) and parameters[placeholders])
        placeholders += node.op == "placeholder"
        if node.target is getitem and isinstance(value, torch.Tensor):  # Inductor gives it a tensor of its own
            whole = node.args[0].meta["val"][node.args[1]]
            recorder.storages.alias(value, recorder.storages.external(whole))
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), _value)
        recorder.record(
            node.target,
            args,
            kwargs,
            value,
            origin=node.meta.get(ORIGIN, _plain_origin(node)),
            name=node.name,
            forward_node=node.meta.get(_FORWARD_NODE),
            is_host_read=not _READ.isdisjoint(node.target.tags),
        )
        if "out" in kwargs and isinstance(value, torch.Tensor):  # so does it with what is written into `out`
            recorder.storages.alias(value, recorder.storages.external(kwargs["out"]))
    for node in graph_module.graph.output_node().all_input_nodes:
        for tensor in tensors_in(node.meta.get("val")):
            recorder.keep(tensor)
    return recorder.finish(name, num_ranks)


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _plain_origin(node: fx.Node) -> Origin:
    return Origin(phase=Phase.FORWARD, kernel=str(node.target).rpartition(".")[0])
