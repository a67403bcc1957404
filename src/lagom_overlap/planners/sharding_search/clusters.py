"""From a program to nodes: trivial calls follow one of their inputs, as Alpa merges them into an operand.

A call that is no matrix product and no attention joins the node that makes one of its inputs if it can take that input
in every layout in which the node makes it: it then works on the same shares and is no decision of its own. Of several
such inputs it follows the one that is made last, which is the deepest.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Final

from lagom_overlap.planners.base import OpTimes
from lagom_overlap.planners.sharding_search.call_strategies import (
    Choice,
    Need,
    ShardingStrategy,
    Views,
    computing,
    needs_of,
    seconds_of,
    strategies_of,
)
from lagom_overlap.planners.sharding_search.conversions import Conversions
from lagom_overlap.planners.sharding_search.mesh_layouts import (
    Held,
    Layout,
    Placement,
    SearchMesh,
    layouts_of,
    local_bytes,
)
from lagom_overlap.planners.sharding_search.sharding_problem import Node, Option, ShardingProblem
from lagom_overlap.workload import MemoryBound
from lagom_overlap.workload.tensor_program import Operand, TensorCall, TensorProgram, ValueKind

_LAYER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(slots=True)
class _Growing:
    """A node while calls join it: per option the strategy of each call."""

    calls: list[TensorCall]
    strategies: list[list[ShardingStrategy]]
    made: dict[str, list[Layout]] = field(default_factory=dict)


def sharding_problem(
    program: TensorProgram, mesh: SearchMesh, conversions: Conversions, times: OpTimes, *, merge: bool = True
) -> ShardingProblem:
    """The nodes of a program in its order, parameters first, what must be delivered last."""
    views = Views(program)
    growing: list[_Growing] = []
    maker: dict[str, tuple[int, _Growing]] = {}
    for call in computing(program.calls):
        node = _joined(call, views, maker, mesh) if merge and _is_trivial(call) else None
        if node is None:
            fed = [strategy for strategy in strategies_of(call, mesh) if _can_be_fed(call, strategy, views)]
            node = _Growing([call], [[strategy] for strategy in fed])
            growing.append(node)
        for output in call.outputs:
            node.made[output.value] = [strategies[-1].layout(output) for strategies in node.strategies]
            maker[output.value] = (len(maker), node)
    nodes = [
        *(_parameter(program, name, mesh) for name, v in program.values.items() if v.kind is ValueKind.PARAMETER),
        *(_node(node, program, views, mesh, times) for node in growing),
    ]
    if program.results:
        needs = tuple(Need(views.chain(name)[0], None, mesh.whole) for name in program.results)
        nodes.append(Node(name="results", kind="results", calls=(), options=(Option(0.0, (), needs),)))
    return ShardingProblem(
        program=program, mesh=mesh, views=views, conversions=conversions, nodes=_numbered_kinds(nodes)
    )


def _can_be_fed(call: TensorCall, strategy: ShardingStrategy, views: Views) -> bool:
    """What the step is given comes whole or cut, never as parts of a sum."""
    kinds = (views.program.values[views.chain(operand.value)[0]].kind for operand in call.inputs)
    return all(
        kind is ValueKind.MADE or Held.PARTIAL not in strategy.layout(operand)
        for kind, operand in zip(kinds, call.inputs, strict=True)
    )


def _is_trivial(call: TensorCall) -> bool:
    return isinstance(call.work, MemoryBound) and call.updates is None


def _joined(
    call: TensorCall, views: Views, maker: dict[str, tuple[int, _Growing]], mesh: SearchMesh
) -> _Growing | None:
    """The node that the call joined, if one makes an input in layouts that all suit it."""
    candidates = [(views.chain(operand.value)[0], operand) for operand in call.inputs]
    made_here = [(root, operand) for root, operand in candidates if root in maker]
    for root, operand in sorted(made_here, key=lambda entry: -maker[entry[0]][0]):
        _, node = maker[root]
        following = [_following(call, operand, layout, views, mesh) for layout in node.made[root]]
        kept = [strategy for strategy in following if strategy is not None]
        if len(kept) == len(following):
            node.calls.append(call)
            for strategies, strategy in zip(node.strategies, kept, strict=True):
                strategies.append(strategy)
            return node
    return None


def _following(
    call: TensorCall, operand: Operand, layout: Layout, views: Views, mesh: SearchMesh
) -> ShardingStrategy | None:
    """The strategy that takes the operand as it is when the tensor behind it is made in `layout`."""
    _, chain = views.chain(operand.value)
    for view, output in chain:
        seen: list[Placement] = []
        for place in layout:
            if isinstance(place, Held):
                seen.append(place)
                continue
            axis = view.inputs[0].axes[place]
            if axis is None or axis not in output.axes:
                return None
            seen.append(output.axes.index(axis))
        layout = tuple(seen)
    choices: list[Choice] = []
    for place in layout:
        if place is Held.PARTIAL and not (call.is_linear and len(call.inputs) == 1):
            return None
        choice: Choice | None = place if isinstance(place, Held) else operand.axes[place]
        if choice is None:
            return None
        choices.append(choice)
    strategy = ShardingStrategy(tuple(choices))
    fits = all(call.sizes[axis] % parts == 0 for axis, parts in strategy.shares(mesh).items())
    return strategy if fits else None


def _parameter(program: TensorProgram, name: str, mesh: SearchMesh) -> Node:
    """At rest; what an update makes of it must end up in the same layout."""
    value = program.values[name]
    fresh = next((call.outputs[0].value for call in program.calls if call.updates == name), None)
    options = tuple(
        Option(0.0, ((name, layout),), () if fresh is None else (Need(fresh, None, layout),))
        for layout in layouts_of(value, mesh)
    )
    return Node(name=name, kind=("parameter", _LAYER.sub("#", name), value.shape), calls=(), options=options)


def _node(growing: _Growing, program: TensorProgram, views: Views, mesh: SearchMesh, times: OpTimes) -> Node:
    calls = tuple(growing.calls)
    options = []
    for strategies in growing.strategies:
        pairs = list(zip(calls, strategies, strict=True))
        options.append(
            Option(
                seconds=sum(seconds_of(call, strategy, mesh, times) for call, strategy in pairs),
                makes=tuple((o.value, strategy.layout(o)) for call, strategy in pairs for o in call.outputs),
                needs=tuple(need for call, strategy in pairs for need in needs_of(call, strategy, views)),
                strategies=tuple(strategies),
                resident_bytes=sum(_state_bytes(call, strategy, program, mesh) for call, strategy in pairs),
            )
        )
    return Node(name=calls[0].name, kind=_kind(calls, program), calls=calls, options=tuple(options))


def _state_bytes(call: TensorCall, strategy: ShardingStrategy, program: TensorProgram, mesh: SearchMesh) -> int:
    if not call.state_bytes:
        return 0
    value, layout = program.values[call.outputs[0].value], strategy.layout(call.outputs[0])
    return call.state_bytes * local_bytes(value, layout, mesh) // value.num_bytes


def _kind(calls: tuple[TensorCall, ...], program: TensorProgram) -> object:
    """What two nodes share that are the same part of two layers."""
    return tuple(
        (
            call.origin.kernel,
            call.origin.phase,
            _LAYER.sub("#", call.origin.module if call.updates is None else call.updates),
            tuple((program.values[o.value].shape, o.axes) for o in (*call.inputs, *call.outputs)),
        )
        for call in calls
    )


def _numbered_kinds(nodes: list[Node]) -> tuple[Node, ...]:
    """Tells equal nodes of one layer apart by their place in it."""
    seen: dict[object, int] = defaultdict(int)
    kinds = []
    for node in nodes:
        layer = (node.calls[0].updates or node.calls[0].origin.layer) if node.calls else node.name
        place = seen[node.kind, layer]
        seen[node.kind, layer] += 1
        kinds.append(replace(node, kind=(node.kind, place)))
    return tuple(kinds)
