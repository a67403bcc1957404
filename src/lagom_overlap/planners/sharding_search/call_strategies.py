"""The strategies of one call: which of its axes each mesh dimension shares out, and what that asks of its tensors.

Three choices per mesh dimension: an axis that its ranks divide, `WHOLE` (every rank does the same), or `PARTIAL` (a
linear call works on parts of a sum). The layouts of inputs and outputs follow. Views are no decisions: a layout that is
asked of a view is asked of the tensor behind it, whole where the view's dimension is none of that tensor's (to cut it
afterwards costs nothing).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from lagom_overlap.planners.base import OpTimes
from lagom_overlap.planners.sharding_search.mesh_layouts import Held, Layout, Placement, SearchMesh
from lagom_overlap.workload import Attention, CompOp, Gemm, MemoryBound, Phase, Work
from lagom_overlap.workload.tensor_program import Operand, TensorCall, TensorProgram, ValueKind

Choice = int | Held
"""Of one mesh dimension: an axis of the call, or what is done where none is shared out."""


@dataclass(frozen=True, slots=True)
class ShardingStrategy:
    """One choice per mesh dimension."""

    choices: tuple[Choice, ...]

    def layout(self, operand: Operand) -> Layout:
        """Of an input as it is needed, of an output as it is made."""
        return tuple(_placement(choice, operand) for choice in self.choices)

    def shares(self, mesh: SearchMesh) -> dict[int, int]:
        """Into how many parts each axis is shared out."""
        parts: dict[int, int] = {}
        for choice, size in zip(self.choices, mesh.shape, strict=True):
            if not isinstance(choice, Held):
                parts[choice] = parts.get(choice, 1) * size
        return parts


def _placement(choice: Choice, operand: Operand) -> Placement:
    if isinstance(choice, Held):
        return choice
    if choice in operand.axes:
        return operand.axes.index(choice)
    return Held.PARTIAL if choice in operand.summed else Held.WHOLE


def strategies_of(call: TensorCall, mesh: SearchMesh) -> tuple[ShardingStrategy, ...]:
    """Every strategy; the first one is that every rank does all of it."""
    options: list[list[Choice]] = [
        [
            Held.WHOLE,
            *(axis for axis, size in enumerate(call.sizes) if size % n == 0),
            *([Held.PARTIAL] if call.is_linear else []),
        ]
        for n in mesh.shape
    ]
    candidates = (ShardingStrategy(choices) for choices in product(*options))
    return tuple(s for s in candidates if all(call.sizes[axis] % n == 0 for axis, n in s.shares(mesh).items()))


def local_work(call: TensorCall, strategy: ShardingStrategy, mesh: SearchMesh) -> Work | None:
    """What one rank computes."""
    shares = strategy.shares(mesh)
    match call.work:
        case Gemm() as gemm:
            for axis, parts in shares.items():
                name = gemm_dim(call, axis)
                gemm = replace(gemm, **{name: max(1, getattr(gemm, name) // parts)})
            return gemm
        case Attention() as attention:
            for axis, parts in shares.items():
                name = "batch" if call.inputs[0].axes[0] == axis else "num_heads"
                if getattr(attention, name) % parts:  # queries, which it has no field for
                    attention = replace(attention, passes=attention.passes / parts)
                else:
                    attention = replace(attention, **{name: getattr(attention, name) // parts})
            return attention
        case MemoryBound(num_bytes):
            return MemoryBound(max(1, num_bytes // prod(shares.values())))
        case _:
            return call.work


def gemm_dim(call: TensorCall, axis: int) -> str:
    """Which of m, n, k of its product an axis of a call is."""
    if axis in call.outputs[0].summed:
        return "k"
    return "m" if axis in call.inputs[0].axes else "n"


def seconds_of(call: TensorCall, strategy: ShardingStrategy, mesh: SearchMesh, times: OpTimes) -> float:
    """How long one rank computes."""
    work = local_work(call, strategy, mesh)
    return 0.0 if work is None else times.seconds(CompOp(name=call.name, work=work))


def is_view(call: TensorCall) -> bool:
    """Whether nothing runs, and one tensor is seen in another way."""
    return call.work is None and len(call.inputs) == 1


@dataclass(frozen=True, slots=True)
class Need:
    """A tensor (no view) in a layout, for a part of the step.

    Parameters are laid out for forward and backward apart, so that what was gathered need not be kept between; other
    tensors are laid out once (`part` is None).
    """

    value: str
    part: Phase | None
    layout: Layout


class Views:
    """The views of a program, seen through."""

    def __init__(self, program: TensorProgram) -> None:
        self.program = program
        self._maker = {
            operand.value: (call, operand) for call in program.calls if is_view(call) for operand in call.outputs
        }

    def chain(self, value: str) -> tuple[str, tuple[tuple[TensorCall, Operand], ...]]:
        """The tensor behind a value, and the views from it to the value, each with the output that is meant."""
        views: list[tuple[TensorCall, Operand]] = []
        while value in self._maker:
            call, output = self._maker[value]
            views.append((call, output))
            value = call.inputs[0].value
        return value, tuple(reversed(views))

    def behind(self, value: str, layout: Layout) -> tuple[str, Layout]:
        """The tensor behind a value, and the layout of it that shows the value in `layout` (cut finer at most)."""
        root, views = self.chain(value)
        for call, output in reversed(views):
            layout = tuple(_seen_through(place, call, output) for place in layout)
        return root, layout

    def need(self, call: TensorCall, operand: Operand, layout: Layout) -> Need | None:
        """What a call's input asks for; None of the step's inputs, which come in any layout."""
        root, wanted = self.behind(operand.value, layout)
        kind = self.program.values[root].kind
        if kind is ValueKind.INPUT:
            return None
        part = call.origin.phase if kind is ValueKind.PARAMETER else None
        return Need(root, _part(part) if part is not None else None, wanted)


def _part(phase: Phase) -> Phase:
    return phase if phase in (Phase.FORWARD, Phase.OPTIMIZER) else Phase.BACKWARD


def _seen_through(place: Placement, call: TensorCall, output: Operand) -> Placement:
    if isinstance(place, Held):
        return place
    axis = output.axes[place]
    axes = call.inputs[0].axes
    return axes.index(axis) if axis is not None and axis in axes else Held.WHOLE


def needs_of(call: TensorCall, strategy: ShardingStrategy, views: Views) -> tuple[Need, ...]:
    """What all inputs of a call ask for."""
    needs = (views.need(call, operand, strategy.layout(operand)) for operand in call.inputs)
    return tuple(need for need in needs if need is not None)


def computing(calls: Sequence[TensorCall]) -> Iterator[TensorCall]:
    """The calls that are decisions: all but views."""
    return (call for call in calls if not is_view(call))
