"""Run an ordered graph on one GPU: computations on the current stream, collectives on a stream for each of the plan's.

The host issues everything in the plan's order and waits for nothing. A stream that reads what another one made waits
for the maker's event, and the allocator is told of the tensor's second stream, so that its memory is not given away
before. NCCL's own stream begins behind the stream that calls a collective and is waited for on that stream alone.
Collectives on two streams use two communicators, for within one their order must be the same on all ranks.

The streams are those of `torch.cuda`, or of whatever says the same (`StreamDevice`).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from operator import getitem
from typing import Any, Final, Protocol, cast

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from lagom_overlap.engines.fx.nodes import ended, is_collective, is_wait, op_name
from lagom_overlap.engines.fx.process_groups import Groups
from lagom_overlap.engines.fx.reorder import WAITS
from lagom_overlap.engines.fx.streams import COMPUTE_STREAM, group_place, groups_of_streams, stream_of

_MAIN: Final = COMPUTE_STREAM


class StreamDevice(Protocol):
    """Streams of a device: what this module uses of `torch.cuda`."""

    def Stream(self) -> Any:  # noqa: N802  torch's name
        """A new stream: `wait_event`."""

    def Event(self) -> Any:  # noqa: N802  torch's name
        """A new event: `record(stream)`."""

    def current_stream(self) -> Any:
        """The stream that operators go to."""

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Operators go to `stream` for a while."""


@dataclass(slots=True)
class _Made:
    """A value, the stream that makes it and the event behind it; `seen` are streams that have waited for it."""

    value: Any
    stream: str
    event: Any = None
    seen: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class CudaRun:
    """What a step returned; the device may still be at it, and the current stream waits for it."""

    outputs: tuple[Any, ...]


class CudaStep:
    """An ordered graph made ready to run on the streams of a device; one per rank and graph."""

    def __init__(self, module: fx.GraphModule, groups: Groups, *, device: StreamDevice | None = None) -> None:
        """Makes the plan's streams, and a process group for every group and stream, in the order of the graph."""
        self._module = module
        self._device = cast("StreamDevice", torch.cuda) if device is None else device
        self._nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
        self._inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        self._output = next(node for node in module.graph.nodes if node.op == "output")
        self._left = {node: len(node.users) for node in module.graph.nodes}
        self._read_aside = _read_aside(module.graph)
        collectives = [node for node in self._nodes if is_collective(node)]
        self._streams = {name: self._device.Stream() for name in dict.fromkeys(map(stream_of, collectives))}
        self._group_of = groups_of_streams(collectives, groups)

    def run(self, inputs: Sequence[Any]) -> CudaRun:
        """Issues the step; its outputs, for which the current stream waits. The host waits for nothing."""
        streams = {_MAIN: self._device.current_stream(), **self._streams}
        begin = self._recorded(streams[_MAIN])
        values = {node: _Made(value, _MAIN, begin) for node, value in zip(self._inputs, inputs, strict=True)}
        left = dict(self._left)
        comms: dict[str, _Made] = {}
        reading: dict[int, _Made] = {}
        for stream in self._streams.values():
            stream.wait_event(begin)
        for node in self._nodes:
            if is_wait(node):  # the reader waits, not the place in the graph
                values[node] = values[node.all_input_nodes[0]]
                continue
            if _is_view(node):  # nothing runs: it is where its tensor is
                whole = values[node.all_input_nodes[0]]
                values[node] = _Made(self._evaluate(node, values), whole.stream, whole.event, whole.seen)
            else:
                where = stream_of(node) if is_collective(node) else _MAIN
                read = [values[used] for used in node.all_input_nodes]
                read += [comms[name] for name in node.meta.get(WAITS, ()) if name in comms]
                read += [reading[place] for place in self._overwritten(node, values) if place in reading]
                with self._device.stream(streams[where]):
                    for one in read:
                        self._await(one, where, streams)
                    value_made = values[node] = _Made(self._evaluate(node, values), where)
                if is_collective(node) or node in self._read_aside:
                    value_made.event = self._recorded(streams[where])
                if is_collective(node):
                    comms[op_name(node)] = value_made
                    reading |= dict.fromkeys((place for one in read for place in _storages(one.value)), value_made)
            for used in node.all_input_nodes:
                left[used] -= 1
                if not left[used]:
                    del values[used]
        for node in self._output.all_input_nodes:
            self._await(values[node], _MAIN, streams)
        outputs = fx.map_arg(self._output.args[0], lambda node: values[node].value)
        return CudaRun(tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,))

    def close(self) -> None:
        """Nothing is held: streams belong to the process."""

    def _recorded(self, stream: Any) -> Any:
        event = self._device.Event()
        event.record(stream)
        return event

    def _await(self, one: _Made, where: str, streams: dict[str, Any]) -> None:
        """The stream `where` waits for a value of another stream, once."""
        if one.stream == where or where in one.seen:
            return
        assert one.event is not None, "recorded where another stream reads it"
        streams[where].wait_event(one.event)
        one.seen.add(where)
        tree_map(lambda leaf: _keep(leaf, streams[where]), one.value)

    def _overwritten(self, node: fx.Node, values: dict[fx.Node, _Made]) -> list[int]:
        """The storages that a node writes into: a collective may still be reading them."""
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            return []
        written = [
            values[given].value
            for declared, given in zip(schema.arguments, node.args, strict=False)
            if isinstance(given, fx.Node) and declared.alias_info is not None and declared.alias_info.is_write
        ]
        return [place for value in written for place in _storages(value)]

    def _evaluate(self, node: fx.Node, values: dict[fx.Node, _Made]) -> Any:
        if node.op == "get_attr":
            return torch.fx.graph_module._get_attr(self._module, str(node.target))
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: values[used].value)
        if not is_collective(node):
            return node.target(*args, **kwargs)  # type: ignore[operator]  # an operator
        listed = list(args)
        listed[group_place(node)] = self._group_of[node]
        value = node.target(*listed, **kwargs)  # type: ignore[operator]  # an operator
        return torch.ops._c10d_functional.wait_tensor.default(value) if ended(node) is not node else value


def _is_view(node: fx.Node) -> bool:
    """Whether a node launches nothing: a view of one tensor, or an element of a result of several."""
    return node.op == "call_function" and (node.target is getitem or bool(getattr(node.target, "is_view", False)))


def _read_aside(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that a collective reads, also through views."""
    readers: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if any(is_collective(user) or (_is_view(user) and user in readers) for user in node.users):
            readers.add(node)
    return readers


def _storages(value: Any) -> list[int]:
    return [leaf.untyped_storage().data_ptr() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _keep(leaf: Any, stream: Any) -> Any:
    """Tells the allocator that another stream uses a tensor."""
    if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
        leaf.record_stream(stream)
    return leaf
