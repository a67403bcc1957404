"""Reads the ring that the plug-in records (`LAGOM_RECORD`): what NCCL offered at each decision and what was chosen.

The offered cost table is NCCL's own prediction for every algorithm and protocol, so the recorded calls of one step give
the true call sites of a job and the implementations that may be chosen for each.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lagom_overlap.collective import Algorithm, CollectiveKind, Protocol
from lagom_overlap.nccl_plugin import table_layout as layout
from lagom_overlap.nccl_plugin.ring_file import RingFile, RingFormat, read_ring
from lagom_overlap.units import US

Implementation: TypeAlias = tuple[Algorithm, Protocol]


class RecordEvent(IntEnum):
    """What an entry of the ring is about."""

    INIT = 1
    DECISION = 2
    CHUNK = 3


class Flag(IntFlag):
    """What the plug-in did at a decision."""

    MATCHED = 1
    APPLIED = 2
    CHAINED = 4
    NOT_COUNTED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCommunicator:
    """A communicator as NCCL announced it; `comm_id` is this run's."""

    comm_id: int
    num_ranks: int
    num_nodes: int
    creation_order: int
    abi_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedDecision:
    """One getCollInfo call.

    `offered_s` is NCCL's predicted time per available implementation (empty under NCCL 2.21, which tells none),
    `algorithm`, `protocol` and `chunk_bytes` what the table asked for, `num_channels` what was answered; None: left to
    NCCL. `occurrence` is the call's in its communicator's cycle, None where that did not decide.
    """

    comm_id: int
    step: int
    kind: CollectiveKind
    num_bytes: int
    occurrence: int | None
    num_pipe_ops: int
    flags: Flag
    generation: int
    offered_s: Mapping[Implementation, float]
    algorithm: Algorithm | None
    protocol: Protocol | None
    num_channels: int | None
    chunk_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedChunk:
    """One getChunkSize call: `num_bytes` are those of one channel."""

    comm_id: int
    step: int
    kind: CollectiveKind
    num_bytes: int
    algorithm: Algorithm
    protocol: Protocol
    offered_bytes: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class RecordLog:
    """A recorded ring, oldest first; `num_lost` older entries were overwritten."""

    communicators: tuple[RecordedCommunicator, ...]
    decisions: tuple[RecordedDecision, ...]
    chunks: tuple[RecordedChunk, ...]
    num_lost: int

    def offered(self, comm_id: int, kind: CollectiveKind, num_bytes: int) -> frozenset[Implementation]:
        """The implementations that NCCL offered at every recorded call of this kind and size."""
        tables = [
            frozenset(d.offered_s)
            for d in self.decisions
            if (d.comm_id, d.kind, d.num_bytes) == (comm_id, kind, num_bytes) and Flag.NOT_COUNTED not in d.flags
        ]
        return frozenset.intersection(*tables) if tables else frozenset()


def read_record(path: Path) -> RecordLog:
    """The ring in a file, also while a process still writes it: entries under way are left out.

    Raises:
        TableError: if the file is not a record of this version.
    """
    return read_ring(path, _FORMAT)


def _log_of(entries: NDArray[np.void], num_lost: int) -> RecordLog:
    communicators, decisions, chunks = [], [], []
    for entry in entries[entries["kind"] < len(layout.KINDS)]:
        match RecordEvent(int(entry["event"])):
            case RecordEvent.INIT:
                communicators.append(_communicator(entry))
            case RecordEvent.DECISION:
                decisions.append(_decision(entry))
            case RecordEvent.CHUNK:
                chunks.append(_chunk(entry))
    return RecordLog(tuple(communicators), tuple(decisions), tuple(chunks), num_lost)


def _communicator(entry: np.void) -> RecordedCommunicator:
    return RecordedCommunicator(
        comm_id=int(entry["comm_id"]),
        num_ranks=int(entry["num_bytes"]),
        num_nodes=int(entry["num_pipe_ops"]),
        creation_order=int(entry["occurrence"]),
        abi_version=int(entry["abi_version"]),
    )


def _decision(entry: np.void) -> RecordedDecision:
    algorithm, protocol, occurrence = int(entry["algorithm"]), int(entry["protocol"]), int(entry["occurrence"])
    costs_us = entry["cost_us"].reshape(len(layout.ALGORITHMS), len(layout.PROTOCOLS))
    return RecordedDecision(
        comm_id=int(entry["comm_id"]),
        step=int(entry["step"]),
        kind=layout.KINDS[int(entry["kind"])],
        num_bytes=int(entry["num_bytes"]),
        occurrence=None if occurrence == layout.ANY_OCCURRENCE else occurrence,
        num_pipe_ops=int(entry["num_pipe_ops"]),
        flags=Flag(int(entry["flags"])),
        generation=int(entry["generation"]),
        offered_s=MappingProxyType(
            {
                (layout.ALGORITHMS[a], layout.PROTOCOLS[p]): float(costs_us[a, p]) * US
                for a, p in np.argwhere(costs_us >= 0)
            }
        ),
        algorithm=layout.ALGORITHMS[algorithm] if algorithm >= 0 else None,
        protocol=layout.PROTOCOLS[protocol] if protocol >= 0 else None,
        num_channels=int(entry["num_channels"]) or None,
        chunk_bytes=int(entry["chunk_set"]) or None,
    )


def _chunk(entry: np.void) -> RecordedChunk:
    return RecordedChunk(
        comm_id=int(entry["comm_id"]),
        step=int(entry["step"]),
        kind=layout.KINDS[int(entry["kind"])],
        num_bytes=int(entry["num_bytes"]),
        algorithm=layout.ALGORITHMS[int(entry["algorithm"])],
        protocol=layout.PROTOCOLS[int(entry["protocol"])],
        offered_bytes=int(entry["chunk_offered"]),
        chunk_bytes=int(entry["chunk_set"]),
    )


_FORMAT: Final = RingFormat("record", layout.RECORD_MAGIC, layout.RECORD_VERSION, layout.RECORD_ENTRY, _log_of)


class RecordRing(RingFile[RecordLog]):
    """The tuner plug-in's ring while it is written."""

    def __init__(self, path: Path, flush: Callable[[], None] = lambda: None) -> None:
        super().__init__(path, _FORMAT, flush)
