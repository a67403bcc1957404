"""A step in which equal layers share their operators: what simulations read, from which the whole step can be written.

An operator of a layer is one object in every layer and micro-batch; its name, the module of its origin and the sources
of its shards are those within the layer. What a framework adds around layers is one object where work, stream and phase
are the same; its own name and origin stand next to it, as layer and micro-batch do. Waits are distances to operators
that were issued before, so that they are equal in equal layers too.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import add
from typing import Final, NamedTuple

from lagom_overlap.hardware import Cluster
from lagom_overlap.workload.issued import IssuedStep, ops_on_nodes
from lagom_overlap.workload.iteration import Buffer, Iteration
from lagom_overlap.workload.ops import BACKWARD_PHASES, CommOp, CompOp, Op, Origin, Phase
from lagom_overlap.workload.rewrite.pieces import output_bytes
from lagom_overlap.workload.sharding import ShardSpec, TensorUse

EARLIER: Final = "@earlier."
"""What the names of a layer's operators in the micro-batch before begin with, within it."""

Distances = tuple[int, ...]
"""From an operator to others, in operators; negative ones were issued before it."""


Own = tuple[str, Origin, ShardSpec | None]
"""An operator's own name, origin and shards."""


class Rows(NamedTuple):
    """Per operator the names of what it reads, what its stream waits for, and what else comes before it.

    That is the operator before it on its stream, and what it is the first of its stream to read from others.
    """

    reads: list[tuple[str, ...]]
    waits: list[Distances]
    order: list[Distances]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Where operators that layers share are used: what their names and modules begin with, layer and micro-batch.

    `earlier` is what names begin with in the micro-batch before; `outside` are the names of what the layer reads from
    elsewhere, by what they are called within it.
    """

    layer: int
    batch: int
    prefix: str
    earlier: str
    module: str
    outside: Mapping[str, str]

    def name_of(self, name: str) -> str:
        """The name in the step of what has this one within the layer; "" is none."""
        if name.startswith(EARLIER):
            return self.earlier + name.removeprefix(EARLIER)
        outside = self.outside.get(name)
        return self.prefix + name if outside is None and name else outside or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledStep:
    """One step of one rank; `scopes` are the ranges of layers' operators, `own` is what all others have for themselves.

    `gathered` make gathered parameters; names of `together` stand for several results. The other fields are those of
    `IssuedStep`.
    """

    name: str
    ops: Sequence[Op]
    rows: Rows
    layers: Sequence[int]
    batches: Sequence[int]
    own: Mapping[int, Own]
    scopes: Sequence[tuple[range, Scope]]
    gathered: frozenset[str]
    together: Mapping[str, tuple[str, ...]]
    num_ranks: int
    groups: Mapping[str, tuple[int, ...]]
    resident_bytes: int

    def placed_on(self, cluster: Cluster) -> "RolledStep":
        """The same step with each collective's number of nodes as its ranks lie on `cluster`, nodes filled in order.

        Raises:
            JobError: if the cluster has fewer GPUs than the step has ranks.
        """
        cluster.num_nodes_of(self.num_ranks)
        return replace(self, ops=ops_on_nodes(self.ops, self.groups, cluster.gpus_per_node))

    def earlier(self) -> tuple["array[int]", "array[int]"]:
        """Of each operator how many it waits for, and how far before it each of them was issued."""
        waits, order = self.rows.waits, self.rows.order
        numbers = map(add, map(len, waits), map(len, order))
        return array("i", numbers), array("i", chain.from_iterable(chain.from_iterable(zip(waits, order, strict=True))))

    def unrolled(self) -> IssuedStep:
        """The step with every operator of every layer."""
        names = [self.own[at][0] if at in self.own else op.name for at, op in enumerate(self.ops)]
        for places, scope in self.scopes:
            for at in places:
                names[at] = scope.prefix + names[at]
        ops = list(self._whole(names))
        waits = {}
        for at, (waited, op) in enumerate(zip(self.rows.waits, ops, strict=True)):
            earlier = [names[place] for place in sorted({at + distance for distance in waited})]
            beyond = [name for name in earlier if name not in op.deps]
            if beyond:
                waits[names[at]] = tuple(beyond)
        return IssuedStep(
            iteration=Iteration(
                self.name,
                tuple(ops),
                is_dataflow=True,
                buffers=_buffers(ops, self.gathered),
                resident_bytes=self.resident_bytes,
            ),
            num_ranks=self.num_ranks,
            groups=self.groups,
            waits=waits,
        )

    def _whole(self, names: Sequence[str]) -> Iterator[Op]:
        scope_of = {at: scope for places, scope in self.scopes for at in places}
        for at, (op, name, reads) in enumerate(zip(self.ops, names, self.rows.reads, strict=True)):
            deps, scope = reads, scope_of.get(at)
            if scope is None:
                _, origin, shards = self.own[at]
            else:
                origin, shards = op.origin, op.shards
                read = [each for each in map(scope.name_of, reads) if each]
                deps = tuple(dict.fromkeys([one for each in read for one in self.together.get(each, (each,))]))
                module = scope.module + origin.module
                origin = Origin(
                    phase=origin.phase,
                    layer=scope.layer,
                    microbatch=scope.batch,
                    module=module,
                    issuer=origin.issuer,
                )
                if shards is not None:
                    uses = tuple([TensorUse(scope.name_of(use.source), use.axes) for use in shards.inputs])
                    shards = ShardSpec(uses, shards.combine, shards.sizes)
            if isinstance(op, CommOp):
                yield CommOp(
                    name=name,
                    collective=op.collective,
                    stream=op.stream,
                    communicator=op.communicator,
                    deps=deps,
                    origin=origin,
                    shards=shards,
                )
            else:
                yield CompOp(name=name, work=op.work, stream=op.stream, deps=deps, origin=origin, shards=shards)


def _buffers(ops: Sequence[Op], gathered: frozenset[str]) -> tuple[Buffer, ...]:
    """Gathered parameters, and what forward leaves for backward."""
    users: defaultdict[str, list[str]] = defaultdict(list)
    late: set[str] = set()
    for op in ops:
        for dep in op.deps:
            users[dep].append(op.name)
        if op.origin.phase in BACKWARD_PHASES:
            late.update(op.deps)
    return tuple(
        Buffer(name=f"{op.name}.kept", num_bytes=output_bytes(op), maker=op.name, users=tuple(users[op.name]))
        for op in ops
        if (op.name in late and op.origin.phase is Phase.FORWARD) or (op.name in gathered and op.name in users)
    )
