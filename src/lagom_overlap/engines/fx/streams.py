"""Run an ordered graph on one rank: computations on the calling thread, collectives on a thread per comm stream.

As on a device: the calling thread hands a collective to its stream when it comes to its place in the order, goes on,
and stops only where a result is used that has not arrived. A stream runs its collectives one after the other, each
with what prepares its input (copies into one buffer, padding). Streams have process groups of their own, for within
one group the order of calls must be the same on all ranks.

Outputs that a collective makes may be left unfinished and be given to the next run as they are: the next step's
computations start while the last step's gather is still on its way.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event, Lock, Thread
from time import perf_counter
from typing import Any, Final

import torch
from torch import fx

from lagom_overlap.engines.fx.nodes import OP_NAME, ended, is_collective, is_wait, op_name
from lagom_overlap.engines.fx.process_groups import Groups
from lagom_overlap.engines.fx.reorder import STREAM, WAITS
from lagom_overlap.timeline import Span, SpanKind

COMM_STREAM: Final = "comm"
"""The stream of a collective of which nothing else is known."""
COMPUTE_STREAM: Final = "compute"


class Arrival:
    """A result that a stream makes; who needs it waits for it."""

    def __init__(self) -> None:
        self._done = Event()
        self._value: Any = None
        self._error: Exception | None = None

    def arrive(self, value: Any) -> None:
        """The result is there."""
        self._value = value
        self._done.set()

    def fail(self, error: Exception) -> None:
        """There will be no result."""
        self._error = error
        self._done.set()

    @property
    def is_here(self) -> bool:
        """Whether nobody has to wait any more."""
        return self._done.is_set()

    def get(self) -> Any:
        """The result; an error of the stream is raised here."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value


def settled(value: Any) -> Any:
    """A value itself, or what arrives."""
    return value.get() if isinstance(value, Arrival) else value


@dataclass(frozen=True, slots=True)
class _Call:
    """A collective with the nodes that prepare its input."""

    node: fx.Node
    feeders: tuple[fx.Node, ...]
    result: fx.Node


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun:
    """One run: its outputs, who ran when (seconds since its start)."""

    outputs: tuple[Any, ...]
    spans: tuple[Span, ...]
    makespan_s: float


@dataclass(slots=True)
class _Run:
    """The values of one run and what was noted of it."""

    origin: float
    values: dict[fx.Node, Any]
    left: dict[fx.Node, int]
    comms: dict[str, Arrival] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)

    def use(self, nodes: Iterable[fx.Node]) -> None:
        """Counts a use of each; what is not used again is let go."""
        with self._lock:
            for node in nodes:
                self.left[node] -= 1
                if not self.left[node]:
                    del self.values[node]

    def note(self, name: str, kind: SpanKind, stream: str, start: float, end: float) -> None:
        """Who ran when."""
        span = Span(name=name, kind=kind, stream=stream, start_s=start - self.origin, end_s=end - self.origin)
        with self._lock:
            self.spans.append(span)


def groups_of_streams(collectives: Iterable[fx.Node], groups: Groups) -> dict[fx.Node, str]:
    """The process group of each collective: its own on the stream that uses it first, on any other a group of the same.

    Collective: makes those groups in the order of the graph.
    """
    first_stream: dict[str, str] = {}
    group_of: dict[fx.Node, str] = {}
    for node in collectives:
        stream, group = stream_of(node), group_arg(node)
        first = first_stream.setdefault(group, stream)
        group_of[node] = group if stream == first else groups.made_of(groups.ranks(group), stream)
    return group_of


class StreamedStep:
    """An ordered graph made ready to run; one per rank and graph. Close it."""

    def __init__(self, module: fx.GraphModule, groups: Groups, *, as_written: bool = False) -> None:
        """Starts a thread per comm stream; `as_written` stands still at every wait of the graph, as the program does.

        Collective: makes a process group for every group and stream, in the order of the graph.
        """
        self._module = module
        self._as_written = as_written
        self._nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
        self._inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        self._output = next(node for node in module.graph.nodes if node.op == "output")
        self._uses = _uses(module.graph)
        feeders = _feeders(self._nodes)
        self._calls = {node: _call(node, feeders) for node in self._nodes if is_collective(node)}
        self._aside = {used for call in self._calls.values() for used in (*call.feeders, call.result)} - set(
            self._calls
        )
        self._streams = {name: _Stream(name) for name in dict.fromkeys(map(stream_of, self._calls))}
        self._group_of = groups_of_streams(self._calls, groups)

    def run(
        self, inputs: Sequence[Any], *, barrier: Callable[[], object] = lambda: None, defer: bool = False
    ) -> StepRun:
        """Runs the step; `barrier` starts all ranks together.

        With `defer`, outputs that are still on their way are returned as `Arrival`, and count in no time.

        Raises:
            RuntimeError: if a collective fails.
        """
        values: dict[fx.Node, Any] = {
            node: value for node, value in zip(self._inputs, inputs, strict=True) if self._uses[node]
        }
        barrier()
        run = _Run(perf_counter(), values, dict(self._uses))
        start: float | None = None
        for node in self._nodes:
            if node in self._calls:
                self._hand_over(node, run)
                continue
            if node in self._aside:
                if self._as_written and isinstance(arrival := run.values.get(node), Arrival):
                    arrival.get()
                    start = None
                continue
            start = self._compute(node, run, start)
        outputs = fx.map_arg(self._output.args[0], lambda node: run.values[node])
        if not defer:
            outputs = torch.utils._pytree.tree_map(settled, outputs)
        flat = tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)
        makespan_s = perf_counter() - run.origin
        return StepRun(outputs=flat, spans=tuple(run.spans), makespan_s=makespan_s)

    def close(self) -> None:
        """Ends the threads once they have run what they were given."""
        for stream in self._streams.values():
            stream.close()

    def _hand_over(self, node: fx.Node, run: _Run) -> None:
        call = self._calls[node]
        arrival = run.comms[op_name(node)] = Arrival()
        if self._uses[call.result]:
            run.values[call.result] = arrival
        stream = self._streams[stream_of(node)]
        stream.put(lambda: self._communicate(call, run, arrival, stream.name), arrival)

    def _communicate(self, call: _Call, run: _Run, arrival: Arrival, stream: str) -> None:
        """On the stream's thread."""
        for feeder in call.feeders:
            run.values[feeder] = self._evaluate(feeder, run)
            run.use(feeder.all_input_nodes)
        for name in call.node.meta.get(WAITS, ()):
            run.comms[name].get()
        args = list(fx.map_arg(call.node.args, lambda node: settled(run.values[node])))
        args[group_place(call.node)] = self._group_of[call.node]
        start = perf_counter()
        value = call.node.target(*args, **call.node.kwargs)  # type: ignore[operator]  # an operator
        if call.result is not call.node:
            value = torch.ops._c10d_functional.wait_tensor.default(value)
        end = perf_counter()
        run.note(op_name(call.node), SpanKind.COMM, stream, start, end)
        arrival.arrive(value)
        run.use(call.node.all_input_nodes)

    def _compute(self, node: fx.Node, run: _Run, start: float | None) -> float | None:
        """Runs one node; `start` is when the auxiliary nodes before it began, None if there are none."""
        awaited = [run.values[used] for used in node.all_input_nodes if isinstance(run.values[used], Arrival)]
        awaited += [run.comms[name] for name in node.meta.get(WAITS, ()) if name in run.comms]
        if any(not arrival.is_here for arrival in awaited):
            for arrival in awaited:
                arrival.get()
            start = None
        began = perf_counter() if start is None else start
        value = self._evaluate(node, run)
        if self._uses[node]:
            run.values[node] = value
        run.use(node.all_input_nodes)
        if OP_NAME not in node.meta:
            return began
        run.note(op_name(node), SpanKind.COMP, COMPUTE_STREAM, began, perf_counter())
        return None

    def _evaluate(self, node: fx.Node, run: _Run) -> Any:
        if node.op == "get_attr":
            return torch.fx.graph_module._get_attr(self._module, str(node.target))
        if node.op != "call_function":
            raise ValueError(f"a graph of functions was expected, {node.name!r} is a {node.op}")
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: settled(run.values[used]))
        return node.target(*args, **kwargs)  # type: ignore[operator]  # an operator


class _Stream:
    """A thread that runs what it is given, in order; what fails fails all that follows."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._todo: SimpleQueue[tuple[Callable[[], None], Arrival] | None] = SimpleQueue()
        self._thread = Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None], arrival: Arrival) -> None:
        """Queues a collective."""
        self._todo.put((work, arrival))

    def close(self) -> None:
        """Ends the thread."""
        self._todo.put(None)
        self._thread.join()

    def _serve(self) -> None:
        torch.set_grad_enabled(False)
        failed: Exception | None = None
        while (item := self._todo.get()) is not None:
            work, arrival = item
            try:
                if failed is not None:
                    raise failed
                work()
            except Exception as error:  # raised where the result is needed
                failed = error
                arrival.fail(error)


def _uses(graph: fx.Graph) -> dict[fx.Node, int]:
    """How many nodes read each one; a collective and its wait are one, the output's reading never ends."""
    counts = {node: len(node.users) for node in graph.nodes}
    output = next(node for node in graph.nodes if node.op == "output")
    for node in output.all_input_nodes:
        counts[node] += 1
    return counts


def _call(node: fx.Node, feeders: dict[fx.Node, tuple[fx.Node, ...]]) -> _Call:
    return _Call(node, feeders[node], ended(node))


def _feeders(nodes: Sequence[fx.Node]) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """For each collective the auxiliary nodes that its stream alone reads; each with the first that reads it."""
    readers: dict[fx.Node, str] = {}
    for node in reversed(nodes):
        if OP_NAME in node.meta or is_wait(node) or node.op != "call_function":
            continue
        streams = {stream_of(user) if is_collective(user) else readers.get(user) for user in node.users}
        only = streams.pop() if len(streams) == 1 else None
        if only is not None:
            readers[node] = only
    taken: set[fx.Node] = set()
    return {node: tuple(_behind(node, set(readers), taken)) for node in nodes if is_collective(node)}


def _behind(node: fx.Node, among: set[fx.Node], taken: set[fx.Node]) -> list[fx.Node]:
    """The members of `among` that a node needs and nobody took yet, inputs first."""
    nodes: list[fx.Node] = []
    for used in node.all_input_nodes:
        if used in among and used not in taken:
            nodes += _behind(used, among, taken)
            taken.add(used)
            nodes.append(used)
    return nodes


def stream_of(node: fx.Node) -> str:
    """The stream that a plan puts a collective on."""
    return str(node.meta.get(STREAM, COMM_STREAM))


def group_place(node: fx.Node) -> int:
    """Where the group's name is among the arguments: the last text."""
    return max(place for place, arg in enumerate(node.args) if isinstance(arg, str))


def group_arg(node: fx.Node) -> str:
    """The name of the group that a collective runs over."""
    return str(node.args[group_place(node)])
