"""Times of a trace on a captured step: which traced operator is which, and what the trace does not hold.

Operators of one sort (one kernel of PyTorch, one kind of collective) are matched in order where the trace holds as many
of them as its steps should: the third `aten.mm` of the trace is the third of the capture, if their shapes agree. Else
they are matched by shape: the median of all of that sort with the same sizes, of the same phase where there are such
(matrix products and attention by their dimensions, collectives by bytes and ranks, what moves memory by its bytes,
which for a trace are those of its inputs and of one output like the largest). A step without kernel names (a named
model) is matched by the dimensions of its products and attentions.

What is not matched takes the cost model's time, scaled by how the trace differs from the model on operators of that
sort that were matched; or, where none was, on all computations or collectives.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, TypeVar

from lagom_overlap.planners.base import OpTimes
from lagom_overlap.trace.operators import TracedCollective, TracedOperator, TracedOperators
from lagom_overlap.workload import Attention, CommOp, CompOp, Gemm, Iteration, MemoryBound, Op, Phase

SHAPED: Final = frozenset(
    {"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"}
    | {f"aten._scaled_dot_product_{kind}" for kind in ("flash_attention", "flash_attention_for_cpu")}
    | {f"aten._scaled_dot_product_{kind}_attention" for kind in ("efficient", "cudnn")}
    | {f"aten._scaled_dot_product_{kind}_backward" for kind in ("flash_attention", "flash_attention_for_cpu")}
    | {f"aten._scaled_dot_product_{kind}_attention_backward" for kind in ("efficient", "cudnn")}
)
"""Kernels whose work follows from the shapes of their inputs: what a step without kernel names is matched by."""
_ONE_BYTE: Final = frozenset({f"aten.{name}" for name in ("gt", "ge", "lt", "le", "eq", "ne", "logical_not", "isnan")})

_Traced = TypeVar("_Traced", TracedOperator, TracedCollective)


@dataclass(frozen=True, slots=True)
class TraceMatch:
    """Seconds of the step's operators that the trace holds, and how many were matched in order; the rest by shape."""

    measured_s: Mapping[str, float]
    num_in_order: int


@dataclass(frozen=True, slots=True)
class ScaledTimes:
    """A model's times, scaled per sort of operator: what is measured of some tells how far the model is off."""

    model: OpTimes
    factors: Mapping[str, float]

    @classmethod
    def fitted(cls, model: OpTimes, iteration: Iteration, measured_s: Mapping[str, float]) -> "ScaledTimes":
        """Factors from the operators of an iteration that were measured: seconds measured over seconds modelled."""
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for op in iteration.ops:
            if op.name in measured_s:
                for sort in (sort_of(op), _whole_of(op)):
                    sums[sort][0] += measured_s[op.name]
                    sums[sort][1] += model.seconds(op)
        return cls(model, {sort: measured / modelled for sort, (measured, modelled) in sums.items()})

    def seconds(self, op: Op) -> float:
        """Seconds of one operator alone."""
        factor = self.factors.get(sort_of(op)) or self.factors.get(_whole_of(op), 1.0)
        return self.model.seconds(op) * factor


def sort_of(op: Op) -> str:
    """What an operator is scaled with: its kind of collective, or its kind of work."""
    return str(op.collective.kind) if isinstance(op, CommOp) else type(op.work).__name__


def _whole_of(op: Op) -> str:
    return "collectives" if isinstance(op, CommOp) else "computations"


def kernels_of(iteration: Iteration) -> frozenset[str]:
    """The kernels to ask a trace for: those that the step names, or where it names none, those told by shapes."""
    named = frozenset(op.origin.kernel for op in iteration.computations if op.origin.kernel)
    return named or SHAPED


def match_trace(iteration: Iteration, traced: TracedOperators) -> TraceMatch:
    """Which of the trace's times are of which operators of the step."""
    seconds, in_order = dict[str, float](), 0
    kernels = _grouped(traced.operators, lambda held: held.kernel)
    for kernel, comps in _grouped(iteration.computations, lambda op: op.origin.kernel).items():
        pool = kernels.get(kernel, []) if kernel else list(traced.operators)
        ordered = _in_order(comps, pool, traced.num_steps, _may_be) if kernel else {}
        in_order += len(ordered)
        seconds |= ordered or _by_shape(comps, pool, _comp_keys, _traced_keys)
    kinds = _grouped(traced.collectives, lambda held: held.kind)
    for kind, comms in _grouped(iteration.comms, lambda op: op.collective.kind).items():
        ordered = _in_order(comms, kinds.get(kind, []), traced.num_steps, _may_move)
        in_order += len(ordered)
        seconds |= ordered or _by_shape(comms, kinds.get(kind, []), _comm_keys, _moved_keys)
    return TraceMatch(seconds, in_order)


_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)
_Op = TypeVar("_Op", CompOp, CommOp)


def _grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    groups: dict[_Key, list[_Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def _in_order(
    ops: Sequence[_Op], traced: Sequence[_Traced], num_steps: int, may_be: Callable[[_Op, _Traced], bool]
) -> dict[str, float]:
    """The median over steps of each operator's times; empty where numbers or shapes disagree.

    A trace that marks no steps may hold any whole number of them.
    """
    repeats, rest = divmod(len(traced), len(ops))
    if rest or not repeats or (num_steps and repeats != num_steps):
        return {}
    if not all(may_be(ops[number % len(ops)], each) for number, each in enumerate(traced)):
        return {}
    return {op.name: median(each.seconds for each in traced[place :: len(ops)]) for place, op in enumerate(ops)}


def _by_shape(
    ops: Sequence[_Op],
    traced: Sequence[_Traced],
    keys: Callable[[_Op], Sequence[Hashable]],
    traced_keys: Callable[[_Traced], Sequence[Hashable]],
) -> dict[str, float]:
    """The median of what has an operator's first key that the trace knows."""
    pools: dict[Hashable, list[float]] = defaultdict(list)
    for traced_op in traced:
        for key in traced_keys(traced_op):
            pools[key].append(traced_op.seconds)
    seconds = {}
    for op in ops:
        key = next((key for key in keys(op) if key in pools), None)
        if key is not None:
            seconds[op.name] = median(pools[key])
    return seconds


def _phase_of(phase: Phase | None) -> Phase | None:
    """As a trace tells phases: what is recomputed, and gradients of weights, belong to the backward pass."""
    if phase in (Phase.RECOMPUTE, Phase.WEIGHT_GRAD):
        return Phase.BACKWARD
    return Phase.FORWARD if phase is Phase.LOSS else phase


def _comp_keys(op: CompOp) -> list[Hashable]:
    shape = _shape_of(op)
    return [(shape, _phase_of(op.origin.phase)), shape] if shape is not None else []


def _traced_keys(traced: TracedOperator) -> list[Hashable]:
    shape = traced_shape(traced)
    return [] if shape is None else [shape] if traced.phase is None else [(shape, traced.phase), shape]


def _shape_of(op: CompOp) -> tuple[Hashable, ...] | None:
    """What a computation has to agree in with a traced one of its kernel."""
    match op.work:
        case Gemm(m, n, k):
            return ("gemm", m, n, k)
        case Attention() as work:
            backward = "backward" in op.origin.kernel or (not op.origin.kernel and work.passes > 1)
            return ("attention", work.batch, work.num_heads, work.seq_len, backward)
        case MemoryBound(num_bytes):
            return ("memory", num_bytes) if op.origin.kernel else None
    return None


def traced_shape(traced: TracedOperator) -> tuple[Hashable, ...] | None:
    """The same of a traced operator, from the shapes of its inputs; None where the trace does not say them."""
    shapes, name = traced.shapes, traced.kernel.partition(".")[2]
    if not shapes:
        return None
    if traced.kernel in SHAPED and "scaled_dot_product" not in name:
        left, right = shapes[-2:]
        if len(left) < 2 or len(right) < 2:
            return None
        batch = left[0] if len(left) == 3 else 1
        return ("gemm", batch * left[-2], right[-1], left[-1])
    if "scaled_dot_product" in name:
        backward = "backward" in name
        query = shapes[min(backward, len(shapes) - 1)]
        return ("attention", *query[:3], backward) if len(query) == 4 else None
    sizes = [_product(shape) * size for shape, size in zip(shapes, traced.element_bytes, strict=True) if shape]
    if not sizes:
        return None
    largest = max(range(len(shapes)), key=lambda number: _product(shapes[number]))
    out_bytes = 1 if traced.kernel in _ONE_BYTE else traced.element_bytes[largest]
    return ("memory", sum(sizes) + _product(shapes[largest]) * out_bytes)


def _product(shape: Sequence[int]) -> int:
    elements = 1
    for length in shape:
        elements *= length
    return elements


def _may_be(op: CompOp, traced: TracedOperator) -> bool:
    """Whether nothing speaks against it: memory-bound work of a kernel has no shape that both sides know for sure."""
    if isinstance(op.work, MemoryBound):
        return True
    shape, other = _shape_of(op), traced_shape(traced)
    return shape is None or other is None or other[0] == "memory" or shape == other


def _comm_keys(op: CommOp) -> list[Hashable]:
    return [
        (op.collective.num_bytes, op.collective.num_ranks),
        (op.collective.num_bytes, 0),
    ]


def _moved_keys(traced: TracedCollective) -> list[Hashable]:
    return [(traced.num_bytes, traced.num_ranks)] if traced.num_bytes else []


def _may_move(op: CommOp, traced: TracedCollective) -> bool:
    agrees = traced.num_bytes in (0, op.collective.num_bytes)
    return agrees and traced.num_ranks in (0, op.collective.num_ranks)
