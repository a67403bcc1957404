"""The NCCL tuner and profiler plug-in: table, record, profile, its functions here, and the fake NCCL that drives it."""

from lagom_overlap.nccl_plugin.library import TunerPlugin, installed_library
from lagom_overlap.nccl_plugin.profile_log import (
    ProfiledChannel,
    ProfiledCollective,
    ProfiledCommunicator,
    ProfiledNetwork,
    ProfileLog,
    ProfileRing,
    is_profile,
    read_profile,
)
from lagom_overlap.nccl_plugin.record_log import (
    RecordedChunk,
    RecordedCommunicator,
    RecordedDecision,
    RecordLog,
    RecordRing,
    read_record,
)
from lagom_overlap.nccl_plugin.table_reader import (
    MAX_TABLE_BYTES,
    DecodedTable,
    TableCommunicator,
    TableDecision,
    decode_table,
    read_table,
)
from lagom_overlap.nccl_plugin.table_writer import EncodedTable, LeftOut, ProcessCommunicator, encode_table, write_table

__all__ = [
    "MAX_TABLE_BYTES",
    "DecodedTable",
    "EncodedTable",
    "LeftOut",
    "ProcessCommunicator",
    "ProfileLog",
    "ProfileRing",
    "ProfiledChannel",
    "ProfiledCollective",
    "ProfiledCommunicator",
    "ProfiledNetwork",
    "RecordLog",
    "RecordRing",
    "RecordedChunk",
    "RecordedCommunicator",
    "RecordedDecision",
    "TableCommunicator",
    "TableDecision",
    "TunerPlugin",
    "decode_table",
    "encode_table",
    "installed_library",
    "is_profile",
    "read_profile",
    "read_record",
    "read_table",
    "write_table",
]
