"""A training step on one device as calls on whole tensors, with the axes along which each call can be shared out.

What a search for a sharding starts from: unlike an `Iteration`, it says which tensors a call reads and writes, views
included, so that every tensor can be given a layout. An axis names dimensions of a call's tensors that are cut together
(a matrix product has m, k and n); an output that an axis is summed over holds a part of each number on every rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import prod

from lagom_overlap.errors import JobError
from lagom_overlap.workload.ops import NO_ORIGIN, MemoryBound, Origin, Phase, Work

UPDATE_STATE_BYTES = 12
"""Optimizer state of one parameter: two moments and a master copy of 4 bytes each (Adam in mixed precision)."""


class ValueKind(StrEnum):
    """Where a tensor comes from."""

    PARAMETER = "parameter"
    INPUT = "input"
    MADE = "made"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor of the step; `base` is the tensor whose memory a view shares."""

    name: str
    shape: tuple[int, ...]
    element_bytes: int
    kind: ValueKind = ValueKind.MADE
    base: str | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.element_bytes


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a call reads or writes: the axis of each dimension, None where it stays whole.

    `summed` (of outputs) are the axes whose parts are added up to make it.
    """

    value: str
    axes: tuple[int | None, ...]
    summed: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCall:
    """One operator on whole tensors; `work` is None where nothing runs (views).

    `sizes[axis]` is what the number of ranks along an axis must divide. `is_linear`: of inputs that are parts of a sum
    the outputs are parts of theirs. `updates` is the parameter that output 0 replaces, `state_bytes` what an optimizer
    keeps for it, laid out as that output.
    """

    name: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    sizes: tuple[int, ...] = ()
    is_linear: bool = False
    work: Work | None = None
    origin: Origin = NO_ORIGIN
    updates: str | None = None
    state_bytes: int = 0

    def __post_init__(self) -> None:
        for operand in (*self.inputs, *self.outputs):
            unknown = [axis for axis in (*operand.axes, *operand.summed) if axis is not None and not self._has(axis)]
            if unknown:
                raise JobError(f"call {self.name!r}: axis {unknown[0]} of {operand.value!r}, there are {self.sizes}")

    def _has(self, axis: int) -> bool:
        return 0 <= axis < len(self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorProgram:
    """Calls in the order in which the program makes them; every value is made by one call, or there before.

    `results` must be whole at the end. `gradients` pairs parameters with what is their gradient.
    """

    name: str
    values: Mapping[str, Value]
    calls: tuple[TensorCall, ...]
    results: tuple[str, ...] = ()
    gradients: tuple[tuple[str, str], ...] = field(default=())

    def __post_init__(self) -> None:
        known = {name for name, value in self.values.items() if value.kind is not ValueKind.MADE}
        for call in self.calls:
            for operand in call.inputs:
                self._check(call, operand)
                if operand.value not in known:
                    raise JobError(f"program {self.name!r}: {call.name!r} reads {operand.value!r} before it is made")
            for operand in call.outputs:
                self._check(call, operand)
                if operand.value in known:
                    raise JobError(f"program {self.name!r}: {operand.value!r} is made twice, again by {call.name!r}")
                known.add(operand.value)

    def _check(self, call: TensorCall, operand: Operand) -> None:
        value = self.values.get(operand.value)
        if value is None or len(value.shape) != len(operand.axes):
            raise JobError(f"program {self.name!r}: {call.name!r} names {operand.value!r}, no tensor of that rank")

    def with_updates(self, state_bytes_per_element: int = UPDATE_STATE_BYTES) -> "TensorProgram":
        """The program with an optimizer's call for every gradient: element by element, reading and writing its state.

        Raises:
            JobError: if there is no gradient.
        """
        if not self.gradients:
            raise JobError(f"program {self.name!r} has no gradients to update parameters with")
        values, calls = dict(self.values), list(self.calls)
        for parameter, gradient in self.gradients:
            old = self.values[parameter]
            fresh = replace(old, name=f"{parameter}.new", kind=ValueKind.MADE, base=parameter)
            state_bytes = prod(old.shape) * state_bytes_per_element
            values[fresh.name] = fresh
            axes = tuple(dim if size > 1 else None for dim, size in enumerate(old.shape))
            moved = 2 * state_bytes + 2 * old.num_bytes + self.values[gradient].num_bytes
            calls.append(
                TensorCall(
                    name=f"update.{parameter}",
                    inputs=(Operand(parameter, axes), Operand(gradient, axes)),
                    outputs=(Operand(fresh.name, axes),),
                    sizes=old.shape,
                    work=MemoryBound(moved),
                    origin=Origin(phase=Phase.OPTIMIZER, kernel="update"),
                    updates=parameter,
                    state_bytes=state_bytes,
                )
            )
        return replace(self, values=values, calls=tuple(calls), gradients=())
