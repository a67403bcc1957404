"""Write what a job reads: the table of the NCCL tuner plug-in, and read back what the plug-in recorded."""

from lagom_overlap.deploy.record_log import (
    RecordedChunk,
    RecordedCommunicator,
    RecordedDecision,
    RecordLog,
    read_record,
)
from lagom_overlap.deploy.table_reader import DecodedTable, TableCommunicator, TableDecision, decode_table, read_table
from lagom_overlap.deploy.table_writer import EncodedTable, LeftOut, ProcessCommunicator, encode_table, write_table

__all__ = [
    "DecodedTable",
    "EncodedTable",
    "LeftOut",
    "ProcessCommunicator",
    "RecordLog",
    "RecordedChunk",
    "RecordedCommunicator",
    "RecordedDecision",
    "TableCommunicator",
    "TableDecision",
    "decode_table",
    "encode_table",
    "read_record",
    "read_table",
    "write_table",
]
