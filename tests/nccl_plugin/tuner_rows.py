"""Tables for the tests: one communicator of eight ranks on one node, the first of its kind."""

from collections.abc import Collection, Sequence

from lagom_overlap.collective import CollectiveKind, CommConfig, CommunicatorId, ConfigKey, ConfigTable
from lagom_overlap.collective.sites import cycles_of, keys_of
from lagom_overlap.nccl_plugin.table_writer import ProcessCommunicator, encode_table

FSDP = CommunicatorId(description="fsdp", ranks=tuple(range(8)))

Rows = dict[tuple[CollectiveKind, int, int], CommConfig]


def table_of_rows(
    rows: Rows, cycle: Sequence[tuple[CollectiveKind, int]] | None = None, lease_steps: int | None = None
) -> ConfigTable:
    """(kind, bytes, occurrence) -> config; a step calls what `cycle` says, or the rows in their order."""
    configs = {
        ConfigKey(communicator=FSDP, kind=kind, num_bytes=num_bytes, occurrence=n): config
        for (kind, num_bytes, n), config in rows.items()
    }
    cycles = cycles_of(configs) if cycle is None else {FSDP: keys_of(FSDP, cycle)}
    return ConfigTable(configs, cycles=cycles, lease_steps=lease_steps)


def encode_rows(
    rows: Rows,
    *,
    cycle: Sequence[tuple[CollectiveKind, int]] | None = None,
    lease_steps: int | None = None,
    generation: int = 1,
    num_nodes: int | None = 1,
    max_channels: int | None = 64,
    known: Collection[tuple[CollectiveKind, int]] = (),
) -> bytes:
    """A table for one communicator of eight ranks."""
    return encode_table(
        table_of_rows(rows, cycle, lease_steps),
        generation=generation,
        communicators=[ProcessCommunicator(FSDP, num_nodes, max_channels)],
        known_sites=[(FSDP, kind, num_bytes) for kind, num_bytes in known],
    ).data
