"""Tables for the tests: one communicator of eight ranks on one node, the first of its kind."""

from collections.abc import Collection

from lagom_overlap.collective import CollectiveKind, CommConfig, CommunicatorId, ConfigKey, ConfigTable
from lagom_overlap.nccl_plugin import ProcessCommunicator, encode_table

FSDP = CommunicatorId(description="fsdp", ranks=tuple(range(8)))

Rows = dict[tuple[CollectiveKind, int, int], CommConfig]


def encode_rows(
    rows: Rows,
    *,
    generation: int = 1,
    calls_per_step: dict[tuple[CollectiveKind, int], int] | None = None,
    num_nodes: int | None = 1,
    max_channels: int | None = 64,
    known: Collection[tuple[CollectiveKind, int]] = (),
) -> bytes:
    """A table for one communicator of eight ranks: (kind, bytes, occurrence) -> config."""
    table = ConfigTable(
        {
            ConfigKey(communicator=FSDP, kind=kind, num_bytes=num_bytes, occurrence=n): config
            for (kind, num_bytes, n), config in rows.items()
        }
    )
    calls = {(FSDP, kind, num_bytes): n for (kind, num_bytes), n in (calls_per_step or {}).items()}
    return encode_table(
        table,
        generation=generation,
        communicators=[ProcessCommunicator(FSDP, num_nodes, max_channels)],
        calls_per_step=calls,
        known_sites=[(FSDP, kind, num_bytes) for kind, num_bytes in known],
    ).data
