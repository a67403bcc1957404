"""One training iteration as a graph: operators in issue order on streams, waits between streams."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from lagom_overlap.errors import JobError
from lagom_overlap.workload.ops import CommOp, CompOp, Op, is_host_read


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Device memory that lives from the start of `maker` to the end of the last of `users` (for ever if there is none).

    Names are operators of the iteration. Gathered parameters, activations kept for the backward, unreduced gradients.
    """

    name: str
    num_bytes: int
    maker: str
    users: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.num_bytes < 1:
            raise JobError(f"buffer {self.name!r}: bytes is {self.num_bytes}, must be at least 1")


@dataclass(frozen=True, slots=True)
class Iteration:
    """Operators of one rank in the order in which the host issues them.

    Operators of one stream run in that order; `deps` are waits for operators issued earlier (on any stream).
    `is_dataflow` promises that `deps` hold every data dependence, on the same stream too: only then may a planner
    change the order. `buffers` are what comes and goes in memory, `resident_bytes` what stays (parameters, optimizer
    state).

    Behind a read of the host (`CompOp.is_host_read`) nothing is issued until it has ended, and what is issued then may
    depend on what was read (split sizes, a branch). So every operator behind a read waits for it: where `deps` do not
    imply that, it is added here. Moved behind a read by a plan, an operator waits for it as well.
    """

    name: str
    ops: tuple[Op, ...]
    is_dataflow: bool = False
    buffers: tuple[Buffer, ...] = ()
    resident_bytes: int = 0

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for op in self.ops:
            if op.name in seen:
                raise JobError(f"iteration {self.name!r}: operator {op.name!r} occurs twice")
            if not seen.issuperset(op.deps):
                missing = next(dep for dep in op.deps if dep not in seen)
                raise JobError(f"iteration {self.name!r}: {self._why_not(op.name, missing)}")
            seen.add(op.name)
        if any(map(is_host_read, self.ops)):
            object.__setattr__(self, "ops", _behind_reads(self.ops))
        for buffer in self.buffers:
            if not seen.issuperset((buffer.maker, *buffer.users)):
                unknown = next(name for name in (buffer.maker, *buffer.users) if name not in seen)
                raise JobError(f"iteration {self.name!r}: buffer {buffer.name!r} names {unknown!r}, no operator of it")

    def _why_not(self, name: str, dep: str) -> str:
        """Why an operator cannot wait for another one that is not issued before it."""
        if all(op.name != dep for op in self.ops):
            return f"{name!r} waits for {dep!r}, no operator of it"
        return f"{name!r} waits for {dep!r}, not issued before it: a cycle, or operators out of order"

    @property
    def layers(self) -> tuple[int, ...]:
        """The layer of every operator, -1 where there is none."""
        return tuple([-1 if op.origin.layer is None else op.origin.layer for op in self.ops])

    @property
    def batches(self) -> tuple[int, ...]:
        """The micro-batch of every operator."""
        return tuple([op.origin.microbatch for op in self.ops])

    @property
    def computations(self) -> tuple[CompOp, ...]:
        """The computations in issue order."""
        return tuple(op for op in self.ops if isinstance(op, CompOp))

    @property
    def comms(self) -> tuple[CommOp, ...]:
        """The collectives in issue order."""
        return tuple(op for op in self.ops if isinstance(op, CommOp))


def _behind_reads(ops: Sequence[Op]) -> tuple[Op, ...]:
    """The operators, each waiting for the last read of the host before it, if only by way of another behind that."""
    read: tuple[str, ...] = ()  # the last one, if there is any yet
    waiting: set[str] = set()  # the read, and all behind it
    ordered: list[Op] = []
    for op in ops:
        ordered.append(replace(op, deps=(*op.deps, *read)) if waiting.isdisjoint(op.deps) and read else op)
        waiting.add(op.name)
        if is_host_read(op):
            read, waiting = (op.name,), {op.name}
    return tuple(ordered)


_SAY_NOTHING: Final = (
    ", packed=1", ", block_scaled=False", ", backward=False", ", backward=True", ", reach=0.0", ", window=0",
    ", narrow=False",
)  # fmt: skip
"""What digests of before do not have, so that plans of before fit their graphs.

Elements of whole bytes, one scale per tensor; attention's pass, which its `passes` tell, all keys, two bytes.
"""


def graph_digest(iteration: Iteration) -> str:
    """Sixteen hex digits that are equal for equal graphs: operators, what they move and compute, their data flow.

    On how many nodes a collective's ranks lie does not count: a graph is the same before and after it is placed.
    """

    def line(op: Op) -> tuple[object, ...]:
        what = op.collective.unplaced if isinstance(op, CommOp) else op.work
        words = repr(what)
        for nothing in _SAY_NOTHING:
            words = words.replace(nothing, "")
        return (op.name, words, sorted(op.deps))

    return hashlib.sha256(msgspec.json.encode([line(op) for op in iteration.ops])).hexdigest()[:16]
