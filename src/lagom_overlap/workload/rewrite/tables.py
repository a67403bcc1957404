"""Rewrites as tables: what plan files hold, and what a controller sends to its ranks. Unknown keys are refused."""

from collections.abc import Iterable

import msgspec

from lagom_overlap.workload.rewrite.steps import (
    ChainLink,
    Fuse,
    PartitionGroups,
    Reorder,
    Rewrite,
    Slide,
    Split,
    Substitute,
    Substitution,
)

Link = tuple[str, int]
"""An operator of a chain and its shard axis."""


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="rewrite"):
    pass


class SubstituteTable(_Table, frozen=True, tag="substitute"):
    """A `Substitute`."""

    comm: str
    into: Substitution


class PartitionTable(_Table, frozen=True, tag="partition_groups"):
    """A `PartitionGroups`."""

    comm: str
    mesh: tuple[int, ...]
    order: tuple[int, ...]
    axis: int = 0
    chain: tuple[Link, ...] = ()


class SplitTable(_Table, frozen=True, tag="split"):
    """A `Split`."""

    comm: str
    axis: int
    num_chunks: int
    before: tuple[Link, ...] = ()
    after: tuple[Link, ...] = ()


class SlideTable(_Table, frozen=True, tag="slide"):
    """A `Slide`."""

    comms: tuple[str, ...]
    ops: tuple[Link, ...]


class FuseTable(_Table, frozen=True, tag="fuse"):
    """A `Fuse`."""

    comms: tuple[str, ...]


class ReorderTable(_Table, frozen=True, tag="reorder"):
    """A `Reorder`; streams are pairs (operator, stream), waits pairs (operator, earlier operator)."""

    order: tuple[str, ...]
    streams: tuple[tuple[str, str], ...] = ()
    waits: tuple[tuple[str, str], ...] = ()


RewriteTable = SubstituteTable | PartitionTable | SplitTable | SlideTable | FuseTable | ReorderTable
"""One rewrite as a table; `rewrite` names its kind."""


def _links(chain: Iterable[Link]) -> tuple[ChainLink, ...]:
    return tuple(ChainLink(op, axis) for op, axis in chain)


def _pairs(chain: Iterable[ChainLink]) -> tuple[Link, ...]:
    return tuple((link.op, link.axis) for link in chain)


def table_of(rewrite: Rewrite) -> RewriteTable:
    """The table of a rewrite."""
    match rewrite:
        case Substitute(comm, into):
            return SubstituteTable(comm, into)
        case PartitionGroups(comm, mesh, order, axis, chain):
            return PartitionTable(comm, mesh, order, axis, _pairs(chain))
        case Split(comm, axis, num_chunks, before, after):
            return SplitTable(comm, axis, num_chunks, _pairs(before), _pairs(after))
        case Slide(comms, ops):
            return SlideTable(comms, _pairs(ops))
        case Fuse(comms):
            return FuseTable(comms)
        case Reorder(order, streams, waits):
            return ReorderTable(order, streams, waits)


def rewrite_of(table: RewriteTable) -> Rewrite:
    """The rewrite of a table.

    Raises:
        JobError: if it holds what no rewrite may.
    """
    match table:
        case SubstituteTable():
            return Substitute(table.comm, table.into)
        case PartitionTable():
            return PartitionGroups(table.comm, table.mesh, table.order, table.axis, _links(table.chain))
        case SplitTable():
            return Split(table.comm, table.axis, table.num_chunks, _links(table.before), _links(table.after))
        case SlideTable():
            return Slide(table.comms, _links(table.ops))
        case FuseTable():
            return Fuse(table.comms)
        case ReorderTable():
            return Reorder(table.order, table.streams, table.waits)
