"""The rewrites a plan is made of, as data: read and written by planners, plan files and the engines that execute them.

A plan is a sequence of rewrites, each of which keeps what the step computes, closed by one `Reorder`. The names of the
operators that a rewrite makes follow from it alone, so that an engine that rewrites a program (an FX graph) and
`apply.rewritten`, which rewrites an `Iteration`, agree without exchanging anything:

    Substitute(c, REDUCE_SCATTER_ALL_GATHER)   c.rs, c.ag
    Substitute(c, REDUCES | BROADCASTS)        c.0 ... c.P-1
    PartitionGroups(c, mesh, order, chain)     c/g0 ... c/gd-1, gk over axis k of the mesh, executed in `order`;
                                               c/gkr where axis k comes twice: what the other axis brought or leaves;
                                               o#0 ... for every operator of the chain, as by Split; c#join
                                               where what follows needs the whole of what several steps bring
    Split(c, ...)                              o#0 ... o#N-1 for the collective and every operator of the chains;
                                               o#join where what follows needs the whole of o, which lies in
                                               pieces, or is their sum
    Slide((c, ...), (o, ...))                  c.rs for every all-reduce, o/part for every operator; c.ag where what
                                               follows needs all of c, c.ag.o (of the first c) where all of o
    Fuse((c, d, e))                            c+2
    Reorder(names)                             no new name
"""

from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import Final

from lagom_overlap.errors import JobError


class Substitution(StrEnum):
    """What one collective can be replaced by (Centauri, tree level 1; spec, planners section 2.1)."""

    REDUCE_SCATTER_ALL_GATHER = "reduce_scatter_all_gather"
    REDUCES = "reduces"
    BROADCASTS = "broadcasts"


@dataclass(frozen=True, slots=True)
class Substitute:
    """Replaces a collective by others that together do the same."""

    comm: str
    into: Substitution


@dataclass(frozen=True, slots=True)
class ChainLink:
    """An operator that is cut along with a collective, and its shard axis."""

    op: str
    axis: int


TWICE = (1, 0, 1)
"""The order of a mesh of two axes in three steps: the inner axis, the outer one, the inner one for the rest."""


@dataclass(frozen=True, slots=True)
class PartitionGroups:
    """Runs a collective over the axes of a mesh laid over its group, one axis after the other.

    `mesh` has the sizes [N1 .. Nd], their product is the group's size; index k of the group's r-th rank is
    `(r // prod(mesh[k+1:])) % mesh[k]`. `order` lists the axes as they are executed: each once, or `TWICE`.

    `chain` is cut with an all-gather (operators after it: piece k works on what step k brings) or a reduce-scatter
    (operators before it: piece k is what step k takes in), along the collective's shard axis `axis`. The pieces are
    unequal: Centauri's granularity (Algorithm 1).
    """

    comm: str
    mesh: tuple[int, ...]
    order: tuple[int, ...]
    axis: int = 0
    chain: tuple[ChainLink, ...] = ()

    def __post_init__(self) -> None:
        if len(self.mesh) < 2 or min(self.mesh) < 2:
            raise JobError(f"{self.comm}: mesh is {list(self.mesh)}, must be at least two axes of at least 2")
        once = sorted(self.order) == list(range(len(self.mesh)))
        if not once and not (self.order == TWICE and len(self.mesh) == 2):
            raise JobError(f"{self.comm}: order is {list(self.order)}, must name each axis of {list(self.mesh)} once")

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return prod(self.mesh)


MAX_CHUNKS: Final = 4096
"""Far more pieces than pay; a plan file that asks for a billion must not fill the memory."""


@dataclass(frozen=True, slots=True)
class Split:
    """Cuts a collective, the chain before it and the chain after it into `num_chunks` equal pieces.

    `axis` is the collective's own shard axis. Piece k of the collective waits for piece k of `before` and is waited for
    by piece k of `after`. An empty chain waits for, or is waited for by, all pieces.

    With both chains empty `comm` may name a computation: cut alone, it fills gaps that it is too long for as a whole.
    """

    comm: str
    axis: int
    num_chunks: int
    before: tuple[ChainLink, ...] = ()
    after: tuple[ChainLink, ...] = ()

    def __post_init__(self) -> None:
        if not 2 <= self.num_chunks <= MAX_CHUNKS:
            raise JobError(f"{self.comm}: num_chunks is {self.num_chunks}, must be from 2 to {MAX_CHUNKS}")


@dataclass(frozen=True, slots=True)
class Slide:
    """Turns all-reduces into reduce-scatters, behind which operators work on this rank's part of the first dimension.

    The all-gathers slide behind those operators (Centauri, section 3.1.1): tensor parallelism becomes sequence
    parallelism where they are what follows a row-parallel product, data parallelism becomes ZeRO-1 and 2 where they are
    the optimizer. Only results that something else reads are gathered. Each link's axis runs over the dimension along
    which its inputs lie in parts; an operator that draws random numbers would draw others and is refused.
    """

    comms: tuple[str, ...]
    ops: tuple[ChainLink, ...]

    def __post_init__(self) -> None:
        names = (*self.comms, *(link.op for link in self.ops))
        if not self.comms or not self.ops or len(set(names)) != len(names):
            raise JobError(f"slide {list(names)}: must name at least one all-reduce and one operator, each once")


@dataclass(frozen=True, slots=True)
class Fuse:
    """Runs collectives of one kind, group and element type as one."""

    comms: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.comms) < 2 or len(set(self.comms)) != len(self.comms):
            raise JobError(f"fuse {list(self.comms)}: must be at least two different collectives")


@dataclass(frozen=True, slots=True)
class Reorder:
    """Issues all operators in this order: a topological order of the data flow, the same on every rank.

    `streams` moves operators to another stream, by name; collectives of one stream run in the order given. `waits` are
    pairs (operator, earlier operator): the first one also waits for the second, which no data forces it to. That is how
    a plan limits a prefetch, or keeps memory low.
    """

    order: tuple[str, ...]
    streams: tuple[tuple[str, str], ...] = ()
    waits: tuple[tuple[str, str], ...] = ()


Rewrite = Substitute | PartitionGroups | Split | Slide | Fuse | Reorder
"""One step of a plan."""
