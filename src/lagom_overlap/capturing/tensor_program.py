"""A training step on one device, traced into calls on whole tensors with the axes along which they can be shared out.

The module runs once under FakeTensorMode without any parallelism; `make_fx` traces forward and backward into one graph
without side effects, whose nodes become the calls of a `TensorProgram`. A step's optimizer is not traced: the program
says which value is the gradient of which parameter (`TensorProgram.with_updates`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, Final

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lagom_overlap.capturing.call_axes import Axes, call_axes
from lagom_overlap.capturing.collectives import tensors_in
from lagom_overlap.capturing.fake_tensor import TrainingStep
from lagom_overlap.capturing.fake_world import fake_world
from lagom_overlap.capturing.fx import ORIGIN, NoteOrigins
from lagom_overlap.capturing.whereabouts import Whereabouts
from lagom_overlap.capturing.work import work_of
from lagom_overlap.errors import JobError
from lagom_overlap.workload.ops import NO_ORIGIN
from lagom_overlap.workload.tensor_program import Operand, TensorCall, TensorProgram, Value, ValueKind

_VIEWS: Final = frozenset({"_unsafe_view", "detach", "alias", "lift_fresh_copy"})
"""Hand their input on, besides what PyTorch itself calls a view."""


@dataclass(frozen=True, slots=True)
class TracedProgram:
    """A program and the graph that it was read from; nodes and values have the same names.

    Output i of a node with several is `node:i`.
    """

    graph_module: fx.GraphModule
    program: TensorProgram


def capture_program(build: Callable[[], TrainingStep], *, name: str = "step") -> TracedProgram:
    """Traces forward and backward of the step that `build` makes, on a single rank and with fake tensors.

    Raises:
        JobError: if the step has several micro-batches, which are one after the other on any mesh.
    """
    with fake_world(1, 0), FakeTensorMode():
        step = build()
        if step.num_micro_batches != 1:
            raise JobError(
                f"micro-batches of the step are {step.num_micro_batches}: a sharding is searched for one micro-batch"
            )
        with step.context():
            return trace_program(step, name=name)


def trace_program(step: TrainingStep, *, name: str = "step") -> TracedProgram:
    """Traces a step under the mode that is on; real tensors are computed with while they are traced."""
    parameters = dict(step.model.named_parameters())
    names, weights = list(parameters), list(parameters.values())
    whereabouts = Whereabouts(step.model)

    def function(weights: list[torch.Tensor], inputs: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        with NoteOrigins(whereabouts):
            arguments = dict(zip(names, weights, strict=True))
            result = torch.func.functional_call(step.model, arguments, tuple(inputs), dict(keywords))
            loss = step.loss(result)
            return loss, torch.autograd.grad(loss, weights)

    with whereabouts:
        graph_module = make_fx(function)(weights, list(step.inputs), dict(step.keyword_inputs))
    return TracedProgram(graph_module, _program(graph_module, names, name))


def _program(graph_module: fx.GraphModule, parameters: Sequence[str], name: str) -> TensorProgram:
    reader = _Reader(parameters)
    for node in graph_module.graph.nodes:
        reader.read(node)
    outputs: Any = graph_module.graph.output_node().args[0]
    loss, *gradients = outputs
    return TensorProgram(
        name=name,
        values=reader.values,
        calls=tuple(reader.calls),
        results=(reader.value_of(loss),),
        gradients=tuple(
            (parameter, reader.value_of(node)) for parameter, node in zip(parameters, gradients, strict=True)
        ),
    )


class _Reader:
    """Nodes of a graph, one after the other, into values and calls."""

    def __init__(self, parameters: Sequence[str]) -> None:
        self._parameters = list(parameters)
        self._num_placeholders = 0
        self._named: dict[tuple[fx.Node, int], str] = {}
        self.values: dict[str, Value] = {}
        self.calls: list[TensorCall] = []

    def value_of(self, node: Any) -> str:
        """The value that a node stands for."""
        assert isinstance(node, fx.Node), node
        if node.target is getitem:
            return self._named[node.args[0], int(node.args[1])]  # type: ignore[index,arg-type]  # fx.Argument
        return self._named[node, 0]

    def read(self, node: fx.Node) -> None:
        """Takes one node."""
        if node.op in ("placeholder", "get_attr"):
            self._given(node)
        elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            self._call(node, node.target)

    def _given(self, node: fx.Node) -> None:
        number = self._num_placeholders if node.op == "placeholder" else len(self._parameters)
        self._num_placeholders += node.op == "placeholder"
        tensor = node.meta.get("val")
        if not isinstance(tensor, torch.Tensor):
            tensor = getattr(node.graph.owning_module, str(node.target), None)
        if isinstance(tensor, torch.Tensor):
            is_parameter = number < len(self._parameters)
            name = self._parameters[number] if is_parameter else node.name
            self._add(node, 0, name, tensor, ValueKind.PARAMETER if is_parameter else ValueKind.INPUT)

    def _add(self, node: fx.Node, number: int, name: str, tensor: torch.Tensor, kind: ValueKind) -> None:
        self._named[node, number] = name
        self.values[name] = Value(
            name=name,
            shape=tuple(int(n) for n in tensor.shape),
            element_bytes=tensor.element_size(),
            kind=kind,
        )

    def _call(self, node: fx.Node, func: torch._ops.OpOverload) -> None:
        schema_names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(schema_names, node.args, strict=False)), **node.kwargs}
        arguments = {key: fx.map_arg(value, _tensor) for key, value in given.items()}
        outputs = tensors_in(node.meta.get("val"))
        if not outputs:
            return
        axes_of_call = call_axes(func, arguments, outputs)
        source = {id(_tensor(other)): self.value_of(other) for other in node.all_input_nodes}
        inputs = tuple(Operand(source[id(tensor)], axes) for tensor, axes in axes_of_call.inputs)
        read = {operand.value for operand in inputs}
        unread = [(tensor, self.value_of(other)) for other in node.all_input_nodes for tensor in [_tensor(other)]]
        inputs += tuple(
            Operand(value, (None,) * tensor.dim()) for tensor, value in unread if value not in read and tensor.numel()
        )
        is_view = func.is_view or func._schema.name.rpartition("::")[2] in _VIEWS
        values = self._outputs(node, outputs, axes_of_call.outputs, axes_of_call.summed)
        if is_view:
            for operand in values:
                old = self.values[operand.value]
                self.values[operand.value] = Value(
                    name=old.name, shape=old.shape, element_bytes=old.element_bytes, base=inputs[0].value
                )
        short = func._schema.name.rpartition("::")[2].rstrip("_")
        tensors = tensors_in(list(arguments.values()))
        self.calls.append(
            TensorCall(
                name=node.name,
                inputs=inputs,
                outputs=values,
                sizes=axes_of_call.sizes,
                is_linear=axes_of_call.is_linear,
                work=None if is_view else work_of(short, arguments, tensors, outputs),
                origin=node.meta.get(ORIGIN, NO_ORIGIN),
            )
        )

    def _outputs(
        self,
        node: fx.Node,
        tensors: Sequence[torch.Tensor],
        axes: Sequence[Axes],
        summed: Sequence[frozenset[int]],
    ) -> tuple[Operand, ...]:
        value = node.meta["val"]
        places = [0] if isinstance(value, torch.Tensor) else [i for i, v in enumerate(value) if tensors_in(v)]
        values = []
        for place, tensor, dims, parts in zip(places, tensors, axes, summed, strict=True):
            name = node.name if isinstance(value, torch.Tensor) else f"{node.name}:{place}"
            self._add(node, place, name, tensor, ValueKind.MADE)
            values.append(Operand(name, dims, parts))
        return tuple(values)


def _tensor(node: fx.Node) -> Any:
    """The fake tensor of a node."""
    value = node.meta.get("val")
    if node.op == "get_attr" and value is None:
        return getattr(node.graph.owning_module, str(node.target))
    return value
