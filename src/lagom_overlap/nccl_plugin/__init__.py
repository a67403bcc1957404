"""The NCCL tuner plug-in: its table, its record, its functions in this process, and the fake NCCL that drives it."""

from lagom_overlap.nccl_plugin.library import TunerPlugin, installed_library
from lagom_overlap.nccl_plugin.record_log import (
    RecordedChunk,
    RecordedCommunicator,
    RecordedDecision,
    RecordLog,
    RecordRing,
    read_record,
)
from lagom_overlap.nccl_plugin.table_reader import (
    DecodedTable,
    TableCommunicator,
    TableDecision,
    decode_table,
    read_table,
)
from lagom_overlap.nccl_plugin.table_writer import EncodedTable, LeftOut, ProcessCommunicator, encode_table, write_table

__all__ = [
    "DecodedTable",
    "EncodedTable",
    "LeftOut",
    "ProcessCommunicator",
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
    "read_record",
    "read_table",
    "write_table",
]
