"""The operators of a layer, recorded once for all layers and micro-batches in which they are the same.

A layer is recorded as it is issued anywhere else (`LayerOps`), by a graph in which nothing was issued before: what its
operators read or wait for from outside has names that begin with `@`, and numbers below 0. Whoever issues the layer
says what they are there.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from lagom_overlap.workload.clock import ClockState, StreamClock
from lagom_overlap.workload.layer_kinds import LayerKind, Mixer
from lagom_overlap.workload.ops import Op, Origin, Phase, Work
from lagom_overlap.workload.parallel.layout import Recompute
from lagom_overlap.workload.sharding import ShardSpec
from lagom_overlap.workload.step.graph import Places, Segment, StepGraph
from lagom_overlap.workload.step.latent import LatentOps
from lagom_overlap.workload.step.layer import LayerOps
from lagom_overlap.workload.step.mamba import MambaOps
from lagom_overlap.workload.step.operators import StepShape
from lagom_overlap.workload.step.parameter_units import ParamUnit, Weight
from lagom_overlap.workload.step.rank_groups import CONTEXT, EXPERTS, TENSOR
from lagom_overlap.workload.step.rolled import EARLIER, Distances, Rows
from lagom_overlap.workload.streams import COMPUTE

_OPS: Final[dict[Mixer, type[LayerOps]]] = {Mixer.LATENT: LatentOps, Mixer.MAMBA: MambaOps}
"""Of mixers other than attention."""
_STREAMS: Final = (COMPUTE, TENSOR, CONTEXT, EXPERTS)
"""Those of a layer's own operators; collectives run on the stream of their communicator."""
INPUT: Final = "@x"
GRADIENT: Final = "@gradient"
"""Within a layer, its input and the gradient of its output."""


@dataclass(frozen=True, slots=True)
class Part:
    """Operators that follow each other, and the matrices whose gradients are ready after them: what made each."""

    segment: Segment
    gradients: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class LayerTape:
    """A layer's forward, recomputation and backward in parts; the names of its output and of its input's gradient.

    `partial` are gradients that others are added to before they are announced, by matrix.
    """

    forward: Sequence[Part]
    recompute: Sequence[Part]
    backward: Sequence[Part]
    output: str
    input_gradient: str
    partial: Mapping[str, str]


def layer_ops(kind: LayerKind) -> type[LayerOps]:
    """Whose operators a layer of that kind has."""
    return _OPS.get(kind.mixer, LayerOps)


class _Names(Places):
    """Places by name; a name that nothing of the segment has gets a place outside of it."""

    def __init__(self, outside: list[tuple[str, str]]) -> None:
        super().__init__()
        self._outside = outside

    def __missing__(self, name: str) -> int:
        self[name] = _outside(self._outside, "name", name)
        return self[name]


def _outside(known: list[tuple[str, str]], kind: str, name: str) -> int:
    known.append((kind, name))
    return -len(known)


class _Recorder(StepGraph):
    """A graph that is cut into segments."""

    def __init__(self, works: dict[Work, Work], *, cuts: bool) -> None:
        super().__init__(works)
        self._cuts = cuts
        self._parts: list[Part] = []
        self._gradients: list[tuple[str, str]] = []
        self._streams: dict[str, str] = {}  # of what was recorded, and of gradients before
        self._begin()

    def _begin(self) -> None:
        self.ops, self._rows = [], Rows([], [], [])
        self._known: list[tuple[str, str]] = []
        self._place = _Names(self._known)
        self._begun = ClockState(
            {stream: _outside(self._known, "last", stream) for stream in _STREAMS},
            {stream: frozenset([_outside(self._known, "pending", stream)]) for stream in _STREAMS},
            {stream: _outside(self._known, "communicator", stream) for stream in _STREAMS},
        )
        self.clock = StreamClock(self._begun)
        self._ordered.clear()

    def _alike(self, key: tuple[object, ...], origin: Origin, shards: ShardSpec | None) -> None:
        """A segment has operators of its own."""

    def _add(self, name: str, op: Op, deps: Sequence[str], waits: set[int], last: int | None) -> str:
        self._streams[name] = op.stream
        return super()._add(name, op, deps, waits, last)

    def _stream_of(self, name: str) -> str:
        return self._streams.get(name, "")

    def knows(self, names: Iterable[str]) -> None:
        """Outside, these are computations."""
        self._streams |= dict.fromkeys(names, COMPUTE)

    def gradient(self, weight: Weight, gradient: str) -> None:
        """A matrix's gradient is ready: whoever listens may issue something here."""
        self._gradients.append((weight.name, gradient))
        if self._cuts:
            self._cut()

    def _cut(self) -> None:
        numbers: dict[int, int] = {}  # of what is used from outside

        def of(place: int) -> int:
            return place if place >= 0 else -1 - numbers.setdefault(place, len(numbers))

        def opened(rows: list[Distances]) -> list[tuple[int, Distances, Sequence[int]]]:
            return [
                (
                    at,
                    tuple([distance for distance in row if at + distance >= 0]),
                    [-1 - of(at + distance) for distance in row if at + distance < 0],
                )
                for at, row in enumerate(rows)
                if any(at + distance < 0 for distance in row)
            ]

        open_waits, open_order = opened(self._rows.waits), opened(self._rows.order)
        changed = self.clock.state().since(self._begun)
        assert {*changed.last, *changed.pending, *changed.communicators} <= {*_STREAMS}
        changed = replace(changed, pending={name: frozenset(map(of, waits)) for name, waits in changed.pending.items()})
        segment = Segment(
            ops=self.ops,
            numbers={op.name: number for number, op in enumerate(self.ops)},
            rows=self._rows,
            open_waits=open_waits,
            open_order=open_order,
            outside=[self._known[-1 - place] for place in numbers],
            clock=changed,
            together={name: each for name, each in self._together.items() if self._place.get(name, -1) >= 0},
        )
        self._parts.append(Part(segment, tuple(self._gradients)))
        self._gradients.clear()
        self._begin()

    def parts(self) -> Sequence[Part]:
        """What was recorded since the last call."""
        if self.ops or self._gradients or self.clock.state() != self._begun:
            self._cut()
        parts, self._parts = self._parts, []
        return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerUse:
    """A layer in a micro-batch; with `cuts` something may be issued where a gradient is ready."""

    kind: LayerKind
    layer: int
    batch: int
    weights: Mapping[str, Weight]
    units: Sequence[ParamUnit]
    silent: frozenset[str]
    cuts: bool


class LayerTapes:
    """The tapes of a step's layers, each recorded when a layer first asks for it.

    `works` are the objects of equal works, for the whole step.
    """

    def __init__(self, shape: StepShape) -> None:
        self.works: dict[Work, Work] = {}
        self._shape = shape
        self._found: dict[tuple[object, ...], LayerTape] = {}

    def of(self, use: LayerUse) -> LayerTape:
        """The tape of a layer in a micro-batch.

        A layer's operators follow from its kind, the step's shape and what the key has.
        """
        layout, shape = self._shape.layout, self._shape
        every_second = layout.recompute is Recompute.LAYERS and use.layer % 2
        # Matrices are cast in the first micro-batch; from the second on all-to-alls wait for those of the one before.
        is_later = use.batch > 0 and (shape.casts.keeps_weights or layout.overlap_experts)
        partial = tuple([len(weight.partial) for weight in use.weights.values()])
        is_wide = shape.precision.is_wide(use.layer, shape.model.num_layers)
        key = use.kind, every_second, is_later, use.silent, use.cuts, partial, is_wide
        tape = self._found.get(key)
        if tape is None:
            tape = self._found[key] = self._record(use)
        return tape

    def _record(self, use: LayerUse) -> LayerTape:
        recorder = _Recorder(self.works, cuts=use.cuts)
        inside = {}
        for unit in use.units:
            phases = (Phase.FORWARD, use.batch), (Phase.BACKWARD, use.batch)
            gathered = dict(zip(phases, _gathered_names(unit), strict=True))
            for weight in unit.weights:
                before = [_before(weight.name)]
                partial = [f"@{weight.name}.partial{number}" for number in range(len(weight.partial))]
                recorder.knows([*before, *partial])
                inside[weight.name] = replace(weight, gathered=gathered.copy(), gradients=before, partial=partial)
        inside = {name: inside[name] for name in use.weights}  # in the order of the layer
        ops = layer_ops(use.kind)(
            recorder, self._shape, layer=use.layer, batch=use.batch, weights=inside, kind=use.kind
        )
        ops.name_within("", EARLIER, "")
        ops.silent, ops.on_gradient = use.silent, recorder.gradient
        output = ops.forward(INPUT)
        forward = recorder.parts()
        ops.recompute()
        recompute = recorder.parts()
        input_gradient = ops.backward(GRADIENT)
        backward = recorder.parts()
        return LayerTape(
            forward=forward,
            recompute=recompute,
            backward=backward,
            output=output,
            input_gradient=input_gradient,
            partial={name: inside[name].partial[-1] for name in sorted(use.silent)},
        )


def _gathered_names(unit: ParamUnit) -> tuple[str, str]:
    """What brings a unit's parameters in forward and in backward."""
    first = unit.weights[0].name
    return f"@{first}.forward", f"@{first}.backward"


@cache
def _before(name: str) -> str:
    """A matrix's gradient so far."""
    return f"@{name}.before"


def outside_of(units: Sequence[ParamUnit], batch: int) -> dict[str, str]:
    """What the matrices of a layer in their present state are called within it; "" where there is nothing."""
    outside = {}
    for unit in units:
        gathered = unit.weights[0].gathered  # that of all matrices of a unit
        forward, backward = _gathered_names(unit)
        outside[forward] = gathered.get((Phase.FORWARD, batch), "")
        outside[backward] = gathered.get((Phase.BACKWARD, batch), "")
        for weight in unit.weights:
            outside[_before(weight.name)] = weight.gradients[-1] if weight.gradients else ""
            for number, partial in enumerate(weight.partial):
                outside[f"@{weight.name}.partial{number}"] = partial
    return outside
