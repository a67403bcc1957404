import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import TraceError
from lagom_overlap.trace.gpu_trace import NO_TIME, EventRole
from lagom_overlap.trace.reader import read_traces

SCHEMA = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT, smCount INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER,
  contextId INTEGER,
  streamId INTEGER, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER,
  gridX INTEGER, gridY INTEGER, gridZ INTEGER, blockX INTEGER, blockY INTEGER, blockZ INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER,
  streamId INTEGER,
  correlationId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER,
  nameId INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, text TEXT, textId INTEGER, globalTid INTEGER, eventType INTEGER);
INSERT INTO StringIds VALUES (1, 'ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)'),
  (2, 'gemm'),
  (3, 'iteration 4');
INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA H100', 132), (1, 'NVIDIA H100', 132);
"""
PROCESS = (77 << 24, 78 << 24)


def database(path: Path) -> Path:
    with sqlite3.connect(path) as connection:
        connection.executescript(SCHEMA)
        for device, process in enumerate(PROCESS):
            rows = [
                (1000, 3000, device, 1, 7, 11, process, 2, 2, 64, 2, 1, 256, 1, 1),
                (2000, 5000 + device, device, 1, 20, 12, process, 1, 1, 16, 1, 1, 544, 1, 1),
            ]
            connection.executemany(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)", rows
            )
            connection.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (6000, 6500, ?, 1, 7, 13, ?, 4096, 1)", (device, process)
            )
            connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (900, 950, ?, 11, 2)", (process + 5,))
            connection.execute("INSERT INTO NVTX_EVENTS VALUES (500, 9000, NULL, 3, ?, 59)", (process + 5,))
    connection.close()
    return path


def test_every_process_and_device_becomes_a_rank(tmp_path):
    first, second = read_traces([database(tmp_path / "report.sqlite")])
    assert (first.rank, second.rank, first.num_sms, first.gpu_name) == (0, 1, 132, "NVIDIA H100")
    assert first.events.start_ns.tolist() == [1000, 2000, 6000]
    assert second.events.end_ns.tolist() == [3000, 5001, 6500]
    assert first.events.grid.tolist()[0] == [64, 2, 1]
    assert first.events.launch_ns.tolist() == [900, NO_TIME, NO_TIME]
    assert first.events.rows(EventRole.MEMORY).tolist() == [2]
    assert [(step.number, step.start_ns) for step in first.steps] == [(4, 500)]
    (call,) = first.calls
    assert (call.kind, call.num_channels, call.num_threads) == (CollectiveKind.ALL_REDUCE, 16, 544)


def test_columns_that_an_older_nsight_lacks_are_unknown(tmp_path):
    path = database(tmp_path / "report.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN demangledName")
        connection.execute("DROP TABLE NVTX_EVENTS")
    connection.close()
    first, _ = read_traces([path])
    assert first.events.names[0] == "gemm"
    assert first.steps == ()


def test_a_view_in_place_of_a_table_is_refused(tmp_path):
    path = tmp_path / "evil.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute(
            "CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS WITH RECURSIVE n(x) AS "
            "(SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x AS start, x AS end FROM n"
        )
    connection.close()
    with pytest.raises(TraceError, match="is not a table"):
        read_traces([path])


def test_a_database_without_gpu_events_and_a_damaged_one_are_refused(tmp_path):
    path = tmp_path / "empty.sqlite"
    with sqlite3.connect(path) as connection:
        connection.executescript(SCHEMA)
    connection.close()
    with pytest.raises(TraceError, match="no GPU event"):
        read_traces([path])
    whole = database(tmp_path / "whole.sqlite").read_bytes()
    path.write_bytes(whole[:4096] + bytes(len(whole) - 4096))
    with pytest.raises(TraceError):
        read_traces([path])
    path.write_bytes(whole[:60])
    with pytest.raises(TraceError):
        read_traces([path])


def test_values_of_foreign_types_are_dropped(tmp_path):
    path = database(tmp_path / "report.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = 'soon', gridX = -5 WHERE correlationId = 11")
    connection.close()
    first, _ = read_traces([path])
    assert len(first.events) == 2
    assert any("were dropped" in text for text in first.warnings)


def test_a_name_that_is_no_utf8_refuses_no_export(tmp_path):
    path = database(tmp_path / "report.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE StringIds SET value = CAST(x'67656dff' AS TEXT) WHERE id = 2")
    connection.close()
    first, _ = read_traces([path])
    assert first.events.names[0] == "gem\ufffd"
    assert len(first.events) == 3


@pytest.mark.parametrize("tables", [("KERNEL", "RUNTIME", "NVTX_EVENTS"), ("RUNTIME",), ("NVTX_EVENTS",)])
def test_tables_that_end_in_a_version_are_read_as_the_plain_ones(tmp_path, tables):
    plain, versioned = tmp_path / "plain.sqlite", tmp_path / "versioned.sqlite"
    database(plain)
    database(versioned)
    with sqlite3.connect(versioned) as connection:
        for table in tables:
            name = table if table == "NVTX_EVENTS" else f"CUPTI_ACTIVITY_KIND_{table}"
            connection.execute(f"ALTER TABLE {name} RENAME TO {name}_V3")
    connection.close()
    for ours, theirs in zip(read_traces([versioned]), read_traces([plain]), strict=True):
        for column in ("start_ns", "end_ns", "launch_ns", "stream"):
            assert getattr(ours.events, column).tolist() == getattr(theirs.events, column).tolist()
        assert ours.steps == theirs.steps


def test_of_two_versions_of_a_table_the_newer_counts(tmp_path):
    path = database(tmp_path / "report.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL_V2 AS SELECT * FROM CUPTI_ACTIVITY_KIND_KERNEL")
        connection.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL_V3 (start INTEGER, end INTEGER)")
    connection.close()
    assert [len(trace.events) for trace in read_traces([path])] == [3, 3]


def payload(schema: int, *numbers: int) -> bytes:
    body = b"".join(number.to_bytes(8, "little") for number in numbers)
    return b"".join(number.to_bytes(8, "little") for number in (1, schema, len(body), 32)) + body


def with_payloads(path: Path, *, as_json: bool) -> Path:
    """NCCL's ranges: process 0 is rank 5 of 8 and 1 of 2, and calls an all-reduce of 4 MiB on the larger group."""
    database(path)
    thread = PROCESS[0] + 5
    rows = [
        (10, 20, "ncclCommInitRankConfig", payload(7, 0xABC, 8 + (5 << 32)), {"id": 0xABC, "ranks": 8, "rank": 5}),
        (30, 40, "ncclCommInitRankConfig", payload(7, 0xDEF, 2 + (1 << 32)), {"id": 0xDEF, "ranks": 2, "rank": 1}),
        (1500, 1900, "ncclAllReduce", payload(8, 0xABC, 4 << 20), {"id": 0xABC, "bytes": 4 << 20}),
    ]
    words = {
        "id": "NCCL communicator ID",
        "ranks": "No. of ranks",
        "rank": "Rank",
        "bytes": "Message size [bytes]",
    }
    with sqlite3.connect(path) as connection:
        connection.executescript("""
            ALTER TABLE NVTX_EVENTS ADD COLUMN jsonText TEXT;
            ALTER TABLE NVTX_EVENTS ADD COLUMN binaryData BLOB;
            CREATE TABLE NVTX_PAYLOAD_SCHEMA_ENTRIES (schemaId INTEGER, idx INTEGER, type INTEGER, name TEXT,
              offset INTEGER);
            INSERT INTO NVTX_PAYLOAD_SCHEMA_ENTRIES VALUES (7, 0, 18, 'NCCL communicator ID', NULL),
              (7, 1, 5, 'No. of ranks', 8), (7, 2, 15, 'Rank', 12),
              (8, 0, 18, 'NCCL communicator ID', NULL), (8, 1, 22, 'Message size [bytes]', 8);
        """)
        for start, end, name, data, fields in rows:
            text = json.dumps({"payload": {words[key]: value for key, value in fields.items()}}) if as_json else None
            connection.execute(
                "INSERT INTO NVTX_EVENTS (start, end, text, globalTid, jsonText, binaryData) VALUES (?,?,?,?,?,?)",
                (start, end, name, thread, text, None if as_json else data),
            )
        connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (1600, 1650, ?, 12, 2)", (thread,))
    connection.close()
    return path


@pytest.mark.parametrize("as_json", [True, False])
def test_nccls_nvtx_payloads_say_communicator_bytes_and_ranks(tmp_path, as_json):
    other, ours = read_traces([with_payloads(tmp_path / "report.sqlite", as_json=as_json)])
    assert (ours.rank, ours.world_size) == (5, 8)
    assert other.rank == 1  # of which NCCL said nothing: the second process
    (call,) = ours.calls
    assert (call.op, call.communicator, call.num_ranks, call.num_bytes) == ("all_reduce", "comm abc", 8, 4 << 20)


def test_graphs_that_were_recorded_whole_are_named(tmp_path):
    path = database(tmp_path / "report.sqlite")
    with sqlite3.connect(path) as connection:
        connection.executescript("""
            CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, end INTEGER);
            INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (1, 2), (3, 4);
        """)
    connection.close()
    assert any("2 launches of CUDA graphs" in text for text in read_traces([path])[0].warnings)


def test_kernels_without_names_are_counted(tmp_path):
    path = database(tmp_path / "t.sqlite")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM StringIds")
    traces = read_traces([path])
    assert not any(trace.calls for trace in traces)
    assert any("kernels have no name: those that communicate count as computation" in w for w in traces[0].warnings)
