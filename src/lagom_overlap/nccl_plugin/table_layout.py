"""The bytes of the plug-ins' files, as the headers in `csrc/` lay them out; a test compares both.

Little endian, fixed size, no pointers. docs/formats.md says what each field means.
"""

from typing import Final

import numpy as np

from lagom_overlap.collective import Algorithm, CollectiveKind, Protocol
from lagom_overlap.toml_tables import MAX_SIZE_BYTES

TABLE_MAGIC: Final = int.from_bytes(b"LAGOMTBL", "little")
RECORD_MAGIC: Final = int.from_bytes(b"LAGOMREC", "little")
PROFILE_MAGIC: Final = int.from_bytes(b"LAGOMPRF", "little")
TABLE_VERSION: Final = 3
"""LAGOM_TABLE_VERSION: the plug-in refuses a table of another version."""
RECORD_VERSION: Final = 2
"""LAGOM_RECORD_VERSION; a record of another is refused here."""
PROFILE_VERSION: Final = 3
"""LAGOM_PROFILE_VERSION, likewise."""
MAX_COMMUNICATORS: Final = 1024
"""Chosen, as the next, far above any job that is known: a table has a fixed size."""
MAX_DECISIONS: Final = 16384
"""Rows of a table."""
MAX_CALLS: Final = 65536
"""Calls of all cycles together; every occurrence is below it."""
MAX_CHANNELS: Final = 64
"""NCCL's MAXCHANNELS since 2.25 (device.h)."""
MAX_RANKS: Final = 1 << 24
"""More than any job has. Chosen, as the next two, so that every number fits its field."""
MAX_CHUNK_BYTES: Final = 1 << 30
"""Larger than any chunk."""
MAX_BYTES: Final = MAX_SIZE_BYTES
"""Of a message."""
MAX_DESCRIPTION_BYTES: Final = 63
"""UTF-8 bytes of a description; the field has one more for the closing NUL."""
ANY_OCCURRENCE: Final = 0xFFFFFFFF
"""In place of a call's number in the step: every call of that kind and size."""

KINDS: Final = (
    CollectiveKind.BROADCAST,
    CollectiveKind.REDUCE,
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_REDUCE,
)
"""The collectives that reach a tuner, by NCCL's number."""
ALGORITHMS: Final = tuple(Algorithm)
PROTOCOLS: Final = tuple(Protocol)
GRAIN_BYTES: Final = {Protocol.LL: 16, Protocol.LL128: 1920, Protocol.SIMPLE: 512}
"""A chunk is a multiple of this, and at least one."""

HEADER: Final = np.dtype(
    [
        ("magic", "<u8"),
        ("version", "<u4"),
        ("header_bytes", "<u4"),
        ("file_bytes", "<u8"),
        ("generation", "<u8"),
        ("checksum", "<u4"),
        ("communicator_bytes", "<u4"),
        ("decision_bytes", "<u4"),
        ("num_communicators", "<u4"),
        ("num_decisions", "<u4"),
        ("flags", "<u4"),
        ("num_calls", "<u4"),
        ("call_bytes", "<u4"),
    ]
)
COMMUNICATOR: Final = np.dtype(
    [
        ("description", "S64"),
        ("num_ranks", "<u4"),
        ("num_nodes", "<u4"),
        ("creation_order", "<u4"),
        ("max_channels", "<u4"),
        ("lease_calls", "<u8"),
    ]
)
DECISION: Final = np.dtype(
    [
        ("first_bytes", "<u8"),
        ("last_bytes", "<u8"),
        ("communicator", "<u4"),
        ("kind", "<u4"),
        ("occurrence", "<u4"),
        ("algorithm", "<i4"),
        ("protocol", "<i4"),
        ("num_channels", "<u4"),
        ("chunk_bytes", "<u8"),
    ]
)
CYCLE_CALL: Final = np.dtype(
    [
        ("num_bytes", "<u8"),
        ("communicator", "<u4"),
        ("kind", "<u4"),
    ]
)
RING_HEADER: Final = np.dtype(
    [
        ("magic", "<u8"),
        ("version", "<u4"),
        ("entry_bytes", "<u4"),
        ("num_entries", "<u8"),
        ("num_written", "<u8"),
        ("process_id", "<u8"),
        ("num_dropped", "<u8"),
        ("num_late", "<u8"),
        ("num_open", "<u8"),
    ]
)
RECORD_ENTRY: Final = np.dtype(
    [
        ("sequence", "<u8"),
        ("comm_id", "<u8"),
        ("num_bytes", "<u8"),
        ("generation", "<u8"),
        ("chunk_offered", "<u8"),
        ("chunk_set", "<u8"),
        ("step", "<u4"),
        ("occurrence", "<u4"),
        ("communicator", "<u4"),
        ("event", "<u4"),
        ("kind", "<u4"),
        ("flags", "<u4"),
        ("abi_version", "<u4"),
        ("num_pipe_ops", "<i4"),
        ("registered", "<i4"),
        ("algorithm", "<i4"),
        ("protocol", "<i4"),
        ("num_channels", "<i4"),
        ("cost_us", "<f4", 21),
        ("reserved", "<u4"),
    ]
)
PROFILE_ENTRY: Final = np.dtype(
    [
        ("sequence", "<u8"),
        ("comm_id", "<u8"),
        ("call", "<u8"),
        ("num_bytes", "<u8"),
        ("called_ns", "<u8"),
        ("launched_ns", "<u8"),
        ("start_ns", "<u8"),
        ("end_ns", "<u8"),
        ("seen_ns", "<u8"),
        ("event", "<u4"),
        ("kind", "<u4"),
        ("rank", "<u4"),
        ("num_ranks", "<u4"),
        ("num_nodes", "<u4"),
        ("algorithm", "<i4"),
        ("protocol", "<i4"),
        ("num_channels", "<u4"),
        ("num_started", "<u4"),
        ("num_ended", "<u4"),
        ("channel", "<u4"),
        ("flags", "<u4"),
        ("abi_version", "<u4"),
        ("launch", "<u4"),
        ("sent_bytes", "<u8"),
        ("received_bytes", "<u8"),
        ("send_gpu_ns", "<u8"),
        ("send_peer_ns", "<u8"),
        ("send_network_ns", "<u8"),
        ("receive_network_ns", "<u8"),
        ("receive_flush_ns", "<u8"),
        ("receive_gpu_ns", "<u8"),
        ("network_busy_ns", "<u8"),
        ("network_start_ns", "<u8"),
        ("network_end_ns", "<u8"),
        ("num_sends", "<u4"),
        ("num_receipts", "<u4"),
    ]
)
