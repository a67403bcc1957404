"""A small step on simulated ranks: a graph whose operators have numbers, and an interpreter of its rewrites.

The interpreter knows operators by name, as `steps` names them, and reads tensors only through ShardSpecs: an operator
that reads what it does not wait for fails. Pieces are index sets: the k-th part of every rank's block where the
collective gathers or scatters that axis, the k-th part of the whole elsewhere; after a group partition the blocks of
the ranks that a step brings.
"""

from dataclasses import dataclass, field
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.workload import (
    CommOp,
    CompOp,
    Gather,
    Gemm,
    Iteration,
    MemoryBound,
    Op,
    Reduce,
    ShardSpec,
    TensorUse,
)
from lagom_overlap.workload.rewrite.steps import TWICE, PartitionGroups, Rewrite, Split

Array = NDArray[np.float64]
Values = list[Array]
"""One tensor, by rank."""

ROWS, HIDDEN, FFN = 24, 12, 24


def _product(sources: tuple[str, str], sizes: tuple[int, int, int]) -> ShardSpec:
    uses = (TensorUse(sources[0], (0, 1)), TensorUse(sources[1], (1, 2)))
    return ShardSpec(uses, (Gather(0), Reduce(), Gather(1)), sizes)


def _rows(*sources: str, size: int) -> ShardSpec:
    return ShardSpec(tuple(TensorUse(s, (0, None)) for s in sources), (Gather(0),), (size,))


def _moved(source: str, rows: int, columns: int) -> ShardSpec:
    return ShardSpec((TensorUse(source, (0, 1)),), (Gather(0), Gather(1)), (rows, columns))


def small_step(num_ranks: int, num_nodes: int | None = None) -> Iteration:
    """norm - all-gather - mm1 - act - mm2 - reduce-scatter - add, a weight's gradient and its all-reduce."""
    rows = num_ranks * ROWS

    def comm(name: str, kind: CollectiveKind, source: str, shards: ShardSpec, num_bytes: int) -> CommOp:
        call = Collective(kind, num_bytes, num_ranks, num_nodes)
        return CommOp(name=name, collective=call, deps=(source,), shards=shards, communicator="tp")

    def comp(name: str, shards: ShardSpec, work: Gemm | MemoryBound) -> CompOp:
        deps = tuple(dict.fromkeys(use.source for use in shards.inputs if use.source))
        return CompOp(name=name, work=work, deps=deps, shards=shards)

    wgrad = ShardSpec(
        (TensorUse("ag", (1, 0)), TensorUse("act", (1, 2))), (Gather(0), Reduce(), Gather(1)), (HIDDEN, rows, FFN)
    )
    elementwise = ShardSpec((TensorUse("mm1", (0, 1)),), (Gather(0), Gather(1)), (rows, FFN))
    ops: list[Op] = [
        comp("norm", _rows("", size=ROWS), MemoryBound(ROWS * HIDDEN * 4)),
        comm("ag", CollectiveKind.ALL_GATHER, "norm", _moved("norm", ROWS, HIDDEN), rows * HIDDEN * 2),
        comp("mm1", _product(("ag", ""), (rows, HIDDEN, FFN)), Gemm(rows, FFN, HIDDEN)),
        comp("act", elementwise, MemoryBound(rows * FFN * 4)),
        comp("mm2", _product(("act", ""), (rows, FFN, HIDDEN)), Gemm(rows, HIDDEN, FFN)),
        comm("rs", CollectiveKind.REDUCE_SCATTER, "mm2", _moved("mm2", ROWS, HIDDEN), rows * HIDDEN * 2),
        comp("add", _rows("rs", "norm", size=ROWS), MemoryBound(ROWS * HIDDEN * 6)),
        comp("wgrad", wgrad, Gemm(HIDDEN, FFN, rows)),
        comm("ar", CollectiveKind.ALL_REDUCE, "wgrad", _moved("wgrad", HIDDEN, FFN), HIDDEN * FFN * 2),
        comp("opt", _rows("ar", size=HIDDEN), MemoryBound(HIDDEN * FFN * 4)),
    ]
    return Iteration("small", tuple(ops), is_dataflow=True)


_FUNCTIONS = {
    "norm": lambda x: x - x.mean(axis=1, keepdims=True),
    "mm1": np.matmul,
    "act": np.tanh,
    "mm2": np.matmul,
    "add": np.add,
    "wgrad": lambda a, b: a.T @ b,
    "opt": lambda g: 0.1 * g,
}


def _base(name: str) -> str:
    for mark in ("#", "/", "."):
        name = name.split(mark, maxsplit=1)[0]
    return name


@dataclass
class Interpreter:
    """Runs a rewritten small step; `rewrites` say what the pieces' indices are."""

    num_ranks: int
    rewrites: tuple[Rewrite, ...]
    seed: int = 0
    values: dict[str, Values] = field(default_factory=dict)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        given = {"norm": (ROWS, HIDDEN), "mm1": (HIDDEN, FFN), "mm2": (FFN, HIDDEN)}
        self.given = {n: [random.standard_normal(shape) for _ in range(self.num_ranks)] for n, shape in given.items()}

    def run(self, iteration: Iteration) -> dict[str, Values]:
        """Every operator's value on every rank."""
        for op in iteration.ops:
            self.values[op.name] = self._value(op)
        return self.values

    def _value(self, op: Op) -> Values:
        if op.name.endswith("#join"):
            return self._joined(op)
        if isinstance(op, CommOp):
            return self._comm(op)
        assert op.shards is not None
        base = _base(op.name)
        inputs = [self._input(op, use, base) for use in op.shards.inputs]
        return [_FUNCTIONS[base](*parts) for parts in zip(*inputs, strict=True)]

    def _input(self, op: Op, use: TensorUse, base: str) -> Values:
        if use.source:
            assert use.source in op.deps, f"{op.name} reads {use.source} without waiting for it"
            whole = self.values[use.source]
        else:
            whole = self.given[base]
        cut = self._cut(op.name)
        if cut is None or "#" in use.source.replace("#join", "") or "/" in use.source:
            return whole
        _, axis, number = cut
        if axis not in use.axes:
            return whole
        dim = use.axes.index(axis)
        return [x.take(self._indices(op.name, number, r, x.shape[dim]), axis=dim) for r, x in enumerate(whole)]

    def _cut(self, name: str) -> tuple[Rewrite, int, int] | None:
        """The rewrite that made a piece, the axis and the piece's number."""
        if "#" not in name or name.endswith("#join"):
            return None
        base, number = name.split("#")
        for step in self.rewrites:
            links = (
                (*step.before, *step.after)
                if isinstance(step, Split)
                else step.chain
                if isinstance(step, PartitionGroups)
                else ()
            )
            if isinstance(step, Split) and step.comm == base:
                return step, step.axis, int(number)
            for link in links:
                if link.op == base:
                    return step, link.axis, int(number)
        raise AssertionError(name)

    def _indices(self, name: str, number: int, rank: int, length: int) -> Array:
        """Which elements of an axis of `length` piece `number` holds."""
        found = self._cut(name)
        assert found is not None
        step = found[0]
        if isinstance(step, PartitionGroups):
            block = length // self.num_ranks
            return np.concatenate([np.arange(r * block, (r + 1) * block) for r in self._brought(step, rank)[number]])
        assert isinstance(step, Split)
        blocks = self.num_ranks if step.comm in ("ag", "rs") and step.axis == 0 and length > ROWS else 1
        part = length // blocks // step.num_chunks
        return np.concatenate(
            [b * (length // blocks) + np.arange(number * part, (number + 1) * part) for b in range(blocks)]
        )

    def _brought(self, step: PartitionGroups, rank: int) -> list[list[int]]:
        """The ranks whose blocks each step of a partitioned gather brings (a scatter takes in, mirrored)."""
        outer, inner = step.mesh
        node, place = divmod(rank, inner)
        own_node = [node * inner + i for i in range(inner)]
        own_place = [n * inner + place for n in range(outer)]
        order = step.order if step.comm == "ag" else step.order[::-1]
        if order == TWICE:
            first, second = own_node, [r for r in own_place if r != rank]
            parts = [first, second, [r for r in range(self.num_ranks) if r not in {*first, *second}]]
        else:
            first = own_node if order[0] == 1 else own_place
            parts = [first, [r for r in range(self.num_ranks) if r not in first]]
        return parts if step.comm == "ag" else parts[::-1]

    def whole(self, name: str) -> Values:
        """An operator's value, put together where it was cut and nothing needed it whole."""
        if name in self.values:
            return self.values[name]
        return self._put_together(name, [piece for piece in self.values if piece.startswith(f"{name}#")])

    def _joined(self, op: Op) -> Values:
        return self._put_together(op.name.removesuffix("#join"), list(op.deps))

    def _put_together(self, base: str, pieces: list[str]) -> Values:
        if all("/" in piece for piece in pieces):
            if base == "ag":
                return _collective(CollectiveKind.ALL_GATHER, self.values["norm"])
            known = self.values.get("mm2")
            return self.values[pieces[-1]] if known is None else _collective(CollectiveKind.REDUCE_SCATTER, known)
        found = self._cut(f"{base}#0")
        assert found is not None
        original = small_step(self.num_ranks)
        shards = next(o.shards for o in original.ops if o.name == base)
        assert shards is not None
        combine = shards.combine[found[1]]
        if isinstance(combine, Reduce):
            return [sum(parts[1:], parts[0]) for parts in zip(*(self.values[piece] for piece in pieces), strict=True)]
        whole = []
        for rank in range(self.num_ranks):
            parts = [self.values[piece][rank] for piece in pieces]
            shape = list(parts[0].shape)
            shape[combine.dim] = sum(part.shape[combine.dim] for part in parts)
            out = np.full(shape, np.nan)
            for number, part in enumerate(parts):
                place: list[object] = [slice(None)] * len(shape)
                place[combine.dim] = self._indices(f"{base}#{number}", number, rank, shape[combine.dim])
                out[tuple(place)] = part
            whole.append(out)
        return whole

    def _comm(self, op: CommOp) -> Values:
        base = _base(op.name)
        if "/" in op.name:
            return self._group_step(op, base)
        source = op.shards.inputs[0] if op.shards else None
        assert source is not None
        return _collective(op.collective.kind, self._input(op, source, base))

    def _group_step(self, op: CommOp, base: str) -> Values:
        """The whole result as far as it is known after the step; NaN elsewhere is never read by a legal graph."""
        step = next(s for s in self.rewrites if isinstance(s, PartitionGroups) and s.comm == base)
        number = [f"{base}/g{a}" for a in step.order].index(op.name) if not op.name.endswith("r") else -1
        if step.order == TWICE:
            names = [f"{base}/g1", f"{base}/g0", f"{base}/g1r"]
            number = (names if base == "ag" else names[::-1]).index(op.name)
        if base == "ag":
            local = self.values["norm"]
            brought = [self._brought(step, rank)[number] for rank in range(self.num_ranks)]
            self._check_steps(op, step, number)
            if step.chain:
                return [np.concatenate([local[r] for r in ranks]) for ranks in brought]
            return _collective(CollectiveKind.ALL_GATHER, local)
        last = number == len(step.order) - 1
        self._check_steps(op, step, number)
        if not last:
            return self.values["norm"]
        if step.chain:
            rows = [np.full((self.num_ranks * ROWS, HIDDEN), np.nan) for _ in range(self.num_ranks)]
            for k, rank in product(range(len(step.order)), range(self.num_ranks)):
                rows[rank][self._indices(f"{step.chain[-1].op}#{k}", k, rank, len(rows[rank]))] = self.values[
                    f"mm2#{k}"
                ][rank]
            return _collective(CollectiveKind.REDUCE_SCATTER, rows)
        return _collective(CollectiveKind.REDUCE_SCATTER, self.values["mm2"])

    def _check_steps(self, op: CommOp, step: PartitionGroups, number: int) -> None:
        """The sub-collective moves at least what the step must bring."""
        size = step.mesh[int(op.name.rstrip("r")[-1])]
        assert op.collective.num_ranks == size
        assert prod(step.mesh) == self.num_ranks


def _collective(kind: CollectiveKind, inputs: Values) -> Values:
    n = len(inputs)
    if kind is CollectiveKind.ALL_GATHER:
        return [np.concatenate(inputs)] * n
    total = sum(inputs[1:], start=inputs[0])
    return [total] * n if kind is CollectiveKind.ALL_REDUCE else list(np.split(total, n))
