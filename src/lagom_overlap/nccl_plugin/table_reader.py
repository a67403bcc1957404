"""Reads a plug-in table back: to compare it with what was meant, and to show it. Refuses what the plug-in refuses."""

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from lagom_overlap.collective import CollectiveKind, CommConfig
from lagom_overlap.collective.size_class import LEAST_BYTES
from lagom_overlap.errors import TableError
from lagom_overlap.nccl_plugin import table_layout as layout
from lagom_overlap.nccl_plugin.table_writer import table_checksum
from lagom_overlap.record import read_regular


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCommunicator:
    """A communicator as the plug-in knows it; `num_nodes` None: any; `max_channels` None: not known.

    `lease_calls` None: the table counts for good.
    """

    description: str
    num_ranks: int
    num_nodes: int | None
    creation_order: int
    max_channels: int | None
    lease_calls: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDecision:
    """One row for calls of `first_bytes` to `last_bytes`.

    `occurrence` None: every call that has no row of its own.
    """

    communicator: TableCommunicator
    kind: CollectiveKind
    first_bytes: int
    last_bytes: int
    occurrence: int | None
    config: CommConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCall:
    """One call of a step on a communicator."""

    communicator: TableCommunicator
    kind: CollectiveKind
    num_bytes: int


@dataclass(frozen=True, slots=True)
class DecodedTable:
    """What a plug-in table says; `calls` are the communicators' cycles, one after the other."""

    generation: int
    communicators: tuple[TableCommunicator, ...]
    decisions: tuple[TableDecision, ...]
    calls: tuple[TableCall, ...]


MAX_TABLE_BYTES: Final = (
    layout.HEADER.itemsize
    + layout.MAX_COMMUNICATORS * layout.COMMUNICATOR.itemsize
    + layout.MAX_DECISIONS * layout.DECISION.itemsize
)
"""The bytes of the largest table that the plug-in reads."""


def read_table(path: Path) -> DecodedTable:
    """The table in a file.

    Raises:
        TableError: if it cannot be read or is not a sound table.
    """
    try:
        data = read_regular(path, MAX_TABLE_BYTES)
    except OSError as error:
        raise TableError(f"cannot read the plug-in table {path}: {error.strerror}") from error
    try:
        return decode_table(data)
    except TableError as error:
        raise TableError(f"{path}: {error}") from error


def decode_table(data: bytes) -> DecodedTable:
    """The table in these bytes.

    Raises:
        TableError: if they are not a sound table.
    """
    header = _header(data)
    start = layout.HEADER.itemsize
    num_communicators, num_decisions, num_calls = (
        int(header[field]) for field in ("num_communicators", "num_decisions", "num_calls")
    )
    names = np.frombuffer(data, layout.COMMUNICATOR, num_communicators, start)
    rows = np.frombuffer(data, layout.DECISION, num_decisions, start + names.nbytes)
    steps = np.frombuffer(data, layout.CYCLE_CALL, num_calls, start + names.nbytes + rows.nbytes)
    communicators = tuple(_communicator(name) for name in names)
    places = [(each.num_ranks, each.num_nodes, each.creation_order) for each in communicators]
    if len(set(places)) != len(places):
        raise TableError("a communicator is named twice")
    decisions = tuple(_decision(row, communicators) for row in rows)
    calls = tuple(_call(call, communicators) for call in steps)
    if (np.diff(steps["communicator"].astype(np.int64)) < 0).any():
        raise TableError("its cycles are not in the order of the communicators")
    _check_sites(decisions, calls)
    return DecodedTable(int(header["generation"]), communicators, decisions, calls)


def _check_sites(decisions: tuple[TableDecision, ...], calls: tuple[TableCall, ...]) -> None:
    """Refuses a call that is named twice, by two equal rows or two ranges that overlap, or in a cycle and by no row."""
    if len({(d.communicator, d.kind, d.first_bytes, d.occurrence) for d in decisions}) != len(decisions):
        raise TableError("a call is named twice")
    named: dict[tuple[TableCommunicator, CollectiveKind], set[tuple[int, int]]] = defaultdict(set)
    for d in decisions:
        named[d.communicator, d.kind].add((d.first_bytes, d.last_bytes))
    ranges = {pair: sorted(site_ranges) for pair, site_ranges in named.items()}
    for site_ranges in ranges.values():
        for (_, last), (first, _) in pairwise(site_ranges):
            if last >= first:
                raise TableError(f"calls of {first} bytes are named by two ranges")
    for call in set(calls):
        site_ranges = ranges.get((call.communicator, call.kind), [])
        at = bisect_right(site_ranges, (call.num_bytes, layout.MAX_BYTES)) - 1
        if at < 0 or call.num_bytes > site_ranges[at][1]:
            raise TableError(f"a step calls {call.kind} of {call.num_bytes} bytes, for which there is no row")


def _header(data: bytes) -> np.void:
    if len(data) < layout.HEADER.itemsize:
        raise TableError(f"{len(data)} bytes are too few for a plug-in table")
    header = np.frombuffer(data, layout.HEADER, 1)[0]
    if header["magic"] != layout.TABLE_MAGIC:
        raise TableError("not a lagom plug-in table")
    if header["version"] != layout.TABLE_VERSION:
        raise TableError(f"plug-in table of version {header['version']}, this program reads {layout.TABLE_VERSION}")
    sizes = tuple(
        int(header[field]) for field in ("header_bytes", "communicator_bytes", "decision_bytes", "call_bytes")
    )
    expected_bytes = (
        layout.HEADER.itemsize
        + int(header["num_communicators"]) * layout.COMMUNICATOR.itemsize
        + int(header["num_decisions"]) * layout.DECISION.itemsize
        + int(header["num_calls"]) * layout.CYCLE_CALL.itemsize
    )
    own = (layout.HEADER, layout.COMMUNICATOR, layout.DECISION, layout.CYCLE_CALL)
    if sizes != tuple(each.itemsize for each in own):
        raise TableError(f"records of {sizes} bytes, which no version had")
    if header["flags"] or not header["generation"]:
        raise TableError("an impossible header")
    if (
        header["num_communicators"] > layout.MAX_COMMUNICATORS
        or header["num_decisions"] > layout.MAX_DECISIONS
        or header["num_calls"] > layout.MAX_CALLS
    ):
        raise TableError("more communicators, rows or calls than a table may have")
    if len(data) != header["file_bytes"] or len(data) != expected_bytes:
        raise TableError(f"{len(data)} bytes, but the header says {header['file_bytes']}")
    if table_checksum(data) != header["checksum"]:
        raise TableError("damaged: the checksum differs")
    return header  # type: ignore[no-any-return]  # numpy types a structured scalar as Any


def _communicator(name: np.void) -> TableCommunicator:
    text = name.tobytes()[: layout.MAX_DESCRIPTION_BYTES + 1].rstrip(b"\0")
    num_ranks, num_nodes, order, most = (
        int(name[field]) for field in ("num_ranks", "num_nodes", "creation_order", "max_channels")
    )
    is_text = len(text) <= layout.MAX_DESCRIPTION_BYTES and all(byte >= 0x20 and byte != 0x7F for byte in text)
    is_placed = 1 <= num_ranks <= layout.MAX_RANKS and num_nodes <= num_ranks and order < layout.MAX_RANKS
    if not (is_text and is_placed and most <= layout.MAX_CHANNELS):
        raise TableError(f"not a sound plug-in table: communicator {text!r} of {num_ranks} ranks")
    return TableCommunicator(
        description=text.decode(errors="backslashreplace"),
        num_ranks=num_ranks,
        num_nodes=num_nodes or None,
        creation_order=order,
        max_channels=most or None,
        lease_calls=int(name["lease_calls"]) or None,
    )


def _call(call: np.void, communicators: tuple[TableCommunicator, ...]) -> TableCall:
    communicator, kind, num_bytes = (int(call[field]) for field in ("communicator", "kind", "num_bytes"))
    is_named = communicator < len(communicators) and kind < len(layout.KINDS)
    if not (is_named and LEAST_BYTES <= num_bytes <= layout.MAX_BYTES):
        raise TableError(f"not a sound plug-in table: a call of {num_bytes} bytes that no step may have")
    return TableCall(communicator=communicators[communicator], kind=layout.KINDS[kind], num_bytes=num_bytes)


def _decision(row: np.void, communicators: tuple[TableCommunicator, ...]) -> TableDecision:
    communicator, kind, occurrence, algorithm, protocol, channels, chunk, first, last = (
        int(row[field])
        for field in (
            *("communicator", "kind", "occurrence", "algorithm", "protocol"),
            *("num_channels", "chunk_bytes", "first_bytes", "last_bytes"),
        )
    )
    is_named = (
        communicator < len(communicators)
        and kind < len(layout.KINDS)
        and -1 <= algorithm < len(layout.ALGORITHMS)
        and -1 <= protocol < len(layout.PROTOCOLS)
    )
    grain = (
        min(layout.GRAIN_BYTES.values())
        if protocol < 0 or not is_named
        else layout.GRAIN_BYTES[layout.PROTOCOLS[protocol]]
    )
    is_sized = (
        1 <= first <= last <= layout.MAX_BYTES
        and channels <= layout.MAX_CHANNELS
        and (not chunk or grain <= chunk <= layout.MAX_CHUNK_BYTES)
        and (occurrence == layout.ANY_OCCURRENCE or occurrence < layout.MAX_CALLS)
    )
    if not (is_named and is_sized):
        raise TableError(f"not a sound plug-in table: a row for calls of {first} to {last} bytes says what none may")
    return TableDecision(
        communicator=communicators[communicator],
        kind=layout.KINDS[kind],
        first_bytes=first,
        last_bytes=last,
        occurrence=None if occurrence == layout.ANY_OCCURRENCE else occurrence,
        config=CommConfig(
            algorithm=None if algorithm == -1 else layout.ALGORITHMS[algorithm],
            protocol=None if protocol == -1 else layout.PROTOCOLS[protocol],
            num_channels=channels or None,
            chunk_bytes=chunk or None,
        ),
    )
