"""From a chosen sharding to one rank's step: its share of every computation, and the collectives between layouts.

A tensor is converted where it is first needed in that layout; gradients, updated parameters and results as soon as they
are made. Computations keep the axes along which they can be cut further, collectives those that their own step leaves
alone, so that every planner may cut, order and fuse.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import gcd, prod
from typing import Final

from lagom_overlap.planners.sharding_search.call_strategies import Need, ShardingStrategy, local_work
from lagom_overlap.planners.sharding_search.conversions import ConversionStep
from lagom_overlap.planners.sharding_search.integer_program import FoundSharding
from lagom_overlap.planners.sharding_search.mesh_layouts import Held, Layout, SearchMesh, local_bytes
from lagom_overlap.planners.sharding_search.sharding_problem import made_layouts
from lagom_overlap.units import format_memory, format_percent
from lagom_overlap.workload import (
    Buffer,
    Combine,
    CommOp,
    CompOp,
    Gather,
    Iteration,
    Op,
    Origin,
    Phase,
    Reduce,
    ShardSpec,
    TensorUse,
)
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.tensor_program import Operand, TensorCall, Value, ValueKind

_PREFIX: Final = {Phase.FORWARD: "fwd", Phase.LOSS: "loss", Phase.BACKWARD: "bwd", Phase.OPTIMIZER: "opt"}


def emit(sharding: FoundSharding, *, name: str) -> IssuedStep:
    """The sharded step of rank 0, as a capture: data flow, memory, communicators of the mesh."""
    return _Emitter(sharding).emitted(name)


class _Emitter:
    """The operators of one rank while they are written down."""

    def __init__(self, sharding: FoundSharding) -> None:
        problem = sharding.problem
        self._sharding = sharding
        self._program, self._mesh, self._views = problem.program, problem.mesh, problem.views
        self._between = problem.conversions.between
        options = [node.options[number] for node, number in zip(problem.nodes, sharding.choice, strict=True)]
        self._made = made_layouts(options)
        self._strategy: dict[str, ShardingStrategy] = {}
        self._early: dict[str, list[Need]] = defaultdict(list)
        for node, option in zip(problem.nodes, options, strict=True):
            self._strategy.update(zip((call.name for call in node.calls), option.strategies, strict=True))
            if not node.calls or node.calls[0].updates is not None:
                for need in option.needs:
                    self._early[need.value].append(need)
        self._state_bytes = sum(option.resident_bytes for option in options)
        self._ops: list[Op] = []
        self._names: dict[str, int] = {}
        self._source: dict[str, str] = {}
        self._label: dict[str, str] = {}
        self._laid_out: dict[Need, str] = {}
        self._bytes: dict[str, int] = {}
        self._users: dict[str, list[str]] = defaultdict(list)
        self._held: list[tuple[str, str]] = []

    def emitted(self, name: str) -> IssuedStep:
        for call in self._program.calls:
            if call.name in self._strategy:
                self._emit(call, self._strategy[call.name])
        parameters = [v for v in self._program.values.values() if v.kind is ValueKind.PARAMETER]
        resident = self._state_bytes + sum(local_bytes(v, self._made[v.name], self._mesh) for v in parameters)
        used = {op.communicator for op in self._ops if isinstance(op, CommOp)}
        return IssuedStep(
            iteration=Iteration(name, tuple(self._ops), True, self._buffers(), resident),
            num_ranks=self._mesh.num_ranks,
            groups={key: ranks for key, ranks in _groups(self._mesh).items() if key in used},
            notes=self._notes(parameters),
        )

    def _emit(self, call: TensorCall, strategy: ShardingStrategy) -> None:
        reads = [(operand, *self._read(call, operand, strategy)) for operand in call.inputs]
        work = local_work(call, strategy, self._mesh)
        sources = tuple(dict.fromkeys(source for _, _, source in reads if source))
        if work is None:  # nothing runs: what is made is what was read
            for output in call.outputs:
                self._source[output.value] = sources[-1] if sources else ""
            return
        name = self._named(_words(call))
        self._ops.append(
            CompOp(
                name=name,
                work=work,
                deps=sources,
                origin=call.origin,
                shards=self._shards(call, strategy, reads),
            )
        )
        for source in sources:
            self._users[source].append(name)
        for output in call.outputs:
            self._source[output.value], self._label[output.value] = name, name
            value = self._program.values[output.value]
            if value.base is None:
                self._hold(output.value, name, local_bytes(value, self._made[output.value], self._mesh))
            for need in self._early[output.value]:
                self._lay_out(need, call.origin)

    def _read(self, call: TensorCall, operand: Operand, strategy: ShardingStrategy) -> tuple[Need | None, str]:
        need = self._views.need(call, operand, strategy.layout(operand))
        return need, "" if need is None else self._lay_out(need, call.origin)

    def _lay_out(self, need: Need, origin: Origin) -> str:
        """The operator after which a tensor is there in the layout that is needed; "" if it always is."""
        if need in self._laid_out:
            return self._laid_out[need]
        value = self._program.values[need.value]
        conversion = self._between(value, self._made[need.value], need.layout)
        assert conversion is not None, need
        source = self._source.get(need.value, "")
        for step in conversion.steps:
            if step.collective is None:
                continue
            label = self._label.get(need.value, need.value)
            name = self._named(f"{label}.{step.collective.kind}")
            communicator = self._mesh.name_of(step.dims)
            self._ops.append(
                CommOp(
                    name=name,
                    collective=step.collective,
                    stream=communicator,
                    communicator=communicator,
                    deps=(source,) if source else (),
                    origin=replace(origin, kernel=str(step.collective.kind)),
                    shards=self._step_shards(value, step, source),
                )
            )
            if source:
                self._users[source].append(name)
            if value.base is None:
                self._hold(f"{need.value}.{len(self._ops)}", name, local_bytes(value, step.after, self._mesh))
            source = name
        self._laid_out[need] = source
        return source

    # Names, memory, notes.

    def _named(self, stem: str) -> str:
        seen = self._names[stem] = self._names.get(stem, 0) + 1
        return stem if seen == 1 else f"{stem}_{seen}"

    def _hold(self, buffer: str, maker: str, num_bytes: int) -> None:
        self._held.append((buffer, maker))
        self._bytes[buffer] = max(1, num_bytes)

    def _buffers(self) -> tuple[Buffer, ...]:
        """What an operator makes is held until the last that reads one of its results."""
        return tuple(
            Buffer(
                name=f"{maker}:{number}",
                num_bytes=self._bytes[buffer],
                maker=maker,
                users=tuple(dict.fromkeys(self._users[maker])) or (maker,),
            )
            for number, (buffer, maker) in enumerate(self._held)
        )

    def _notes(self, parameters: Sequence[Value]) -> tuple[str, ...]:
        cut = sum(any(isinstance(place, int) for place in self._made[v.name]) for v in parameters)
        shape = "x".join(map(str, self._mesh.shape))
        proof = "not proved cheapest, and how far it may be from it is not known: time ended the search"
        if self._sharding.is_optimal:
            proof = "proved cheapest"
        elif self._sharding.bound_s:
            proof = f"not proved cheapest: another may be {format_percent(self._sharding.gap)} cheaper, no more"
        return (
            f"Sharding found by search over a mesh of {shape} ranks ({proof}): {cut} of {len(parameters)} parameters "
            f"are cut; at most {format_memory(self._sharding.peak_bytes)} held, optimizer state included.",
        )

    # Axes.

    def _shards(
        self, call: TensorCall, strategy: ShardingStrategy, reads: Sequence[tuple[Operand, Need | None, str]]
    ) -> ShardSpec | None:
        """The axes of one rank's share in terms of the tensors behind views; those that a view hides are left out."""
        shares = strategy.shares(self._mesh)
        sizes = {axis: size // shares.get(axis, 1) for axis, size in enumerate(call.sizes)}
        combine = {axis: shards for axis in sizes if (shards := _combine(call, axis)) is not None}
        uses: list[tuple[str, list[int | None]]] = []
        for operand, need, source in reads:
            if need is None or not source:
                uses.append(("", list(operand.axes)))
                continue
            dims = self._dims_behind(operand)
            root = self._program.values[need.value]
            axes: list[int | None] = [None] * len(root.shape)
            for dim, axis in zip(dims, operand.axes, strict=True):
                if axis is None:
                    continue
                if dim is None:
                    combine.pop(axis, None)
                else:
                    axes[dim] = axis
                    sizes[axis] = gcd(sizes[axis], _length(root, need.layout, dim, self._mesh))
            uses.append((source, axes))
        kept = [axis for axis in combine if sizes[axis] > 1]
        if not kept or Held.PARTIAL in strategy.choices:
            return None
        number = {axis: place for place, axis in enumerate(kept)}
        return ShardSpec(
            inputs=tuple(
                TensorUse(source, tuple(None if a is None else number.get(a) for a in axes)) for source, axes in uses
            ),
            combine=tuple(combine[axis] for axis in kept),
            sizes=tuple(sizes[axis] for axis in kept),
        )

    def _dims_behind(self, operand: Operand) -> list[int | None]:
        """For each dimension of an operand the dimension of the tensor behind it that is cut at the same places."""
        _, chain = self._views.chain(operand.value)
        dims: list[int | None] = list(range(len(operand.axes)))
        for call, output in reversed(chain):
            inner = call.inputs[0].axes
            dims = [
                None if dim is None or output.axes[dim] is None or output.axes[dim] not in inner
                else inner.index(output.axes[dim])
                for dim in dims
            ]  # fmt: skip
        return dims

    def _step_shards(self, value: Value, step: ConversionStep, source: str) -> ShardSpec | None:
        """A collective can be cut along the dimensions that it does not itself cut or join."""
        touched = {place for layout in (step.before, step.after) for i in step.dims for place in [layout[i]]}
        lengths = [_length(value, step.before, dim, self._mesh) for dim in range(len(value.shape))]
        dims = [dim for dim, length in enumerate(lengths) if dim not in touched and length > 1]
        if not dims:
            return None
        axes: list[int | None] = [dims.index(dim) if dim in dims else None for dim in range(len(lengths))]
        return ShardSpec(
            inputs=(TensorUse(source, tuple(axes)),),
            combine=tuple(Gather(dim) for dim in dims),
            sizes=tuple(lengths[dim] for dim in dims),
        )


def _combine(call: TensorCall, axis: int) -> Combine | None:
    """How pieces along an axis make the outputs, if they make all of them alike."""
    ways: set[Combine | None] = set()
    for output in call.outputs:
        if axis in output.axes:
            ways.add(Gather(output.axes.index(axis)))
        else:
            ways.add(Reduce() if axis in output.summed else None)
    return ways.pop() if len(ways) == 1 else None


def _length(value: Value, layout: Layout, dim: int, mesh: SearchMesh) -> int:
    """Elements of one rank along a dimension."""
    return value.shape[dim] // prod(n for place, n in zip(layout, mesh.shape, strict=True) if place == dim)


def _words(call: TensorCall) -> str:
    """What an operator is called: phase, module, kernel."""
    if call.updates is not None:
        return f"opt.{call.updates}"
    prefix = _PREFIX.get(call.origin.phase, "op") if call.origin.phase is not None else "op"
    kernel = call.origin.kernel.rpartition(".")[2].strip("_") or call.name
    return ".".join(part for part in (prefix, call.origin.module, kernel) if part)


def _groups(mesh: SearchMesh) -> dict[str, tuple[int, ...]]:
    """The ranks of rank 0's communicators by name."""
    dims: Iterable[tuple[int, ...]] = [tuple(range(len(mesh.shape))), *((dim,) for dim in range(len(mesh.shape)))]
    return {mesh.name_of(each): mesh.ranks_of(each) for each in dims}
