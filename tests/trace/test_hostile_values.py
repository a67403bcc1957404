"""Values that JSON and SQLite allow and no profiler writes: each reader drops them or refuses the file."""

import contextlib
import json
import sqlite3
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kineto_traces import KinetoFile

from lagom_overlap.errors import TraceError
from lagom_overlap.trace.event_columns import MAX_NS
from lagom_overlap.trace.fields import num_elements, to_int, to_ns, to_ranks, to_triple
from lagom_overlap.trace.gpu_trace import GpuTrace
from lagom_overlap.verbs.analyze import AnalyzeRequest, run_analyze

HUGE = [1e308, -1e308, 1e300, 4.7e15, 4.6e15, 1e18, 2.0**62, 2**62, 2**63, 2**64, 10**30, -(2**63), 5e-324, -0.0, 0]
NUMBERS = st.sampled_from(HUGE) | st.floats(allow_nan=False, allow_infinity=False) | st.integers()
VALUES = (
    NUMBERS | st.none() | st.booleans() | st.sampled_from(["1e308", "9" * 5000, "1e999999999", "nan", "", "[0, 1]"])
)
SIZES = st.lists(st.integers(0, 2**62), max_size=4) | st.sampled_from([[2**62] * 20, [0] * 3, ["9" * 5000]]) | VALUES
QUICK = settings(max_examples=60, deadline=None)


@given(NUMBERS | st.sampled_from([float("inf"), float("-inf"), float("nan"), Decimal("1e999"), Decimal("nan")]))
@example(1e308)
def test_microseconds_become_the_nearest_nanosecond_or_no_time(value):
    found = to_ns(value)
    exact = Fraction(value) * 1000 if Decimal(value).is_finite() and abs(value) < 1e300 else None
    if exact is None or abs(exact) >= MAX_NS:
        assert found is None
    elif abs(exact) < 2**52:
        assert found is not None
        assert abs(found - exact) <= Fraction(1, 2) + abs(exact) / 2**52
    else:
        assert found is None or abs(found - exact) <= abs(exact) / 2**50 + 1


@given(VALUES | SIZES)
@example("9" * 5000)
def test_a_field_of_any_value_is_a_number_within_bounds_or_unknown(value):
    assert -MAX_NS < to_int(value) < MAX_NS
    assert all(0 <= side < MAX_NS for side in to_triple(value))
    assert all(abs(rank) < MAX_NS for rank in to_ranks(value))
    assert 0 <= num_elements(value) < MAX_NS


@pytest.mark.parametrize("text", ["[0, " + "9" * 5000 + "]", "9" * 20])
def test_a_rank_of_more_digits_than_any_job_has_is_unknown(text):
    assert to_ranks(text) == ()
    assert to_ranks([0, 2**64]) == ()


def read_or_refuse(data: bytes, name: str = "t.json") -> None:
    """Analyses a file: either it is refused in words, or every duration found is finite and none negative."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        try:
            found = run_analyze(AnalyzeRequest(traces=(path,), num_jobs=1))
        except TraceError:
            return
    for rank in found.analysis.findings.ranks:
        _check(rank.trace)
    _check_numbers(json.loads(found.to_json()))


_SIGNED = {"gain_s", "low_s", "high_s"}
"""Of what-ifs: a loss is below zero."""


def _check_numbers(value: object, key: str = "") -> None:
    """Durations are none below zero: a sum that has left int64 would be."""
    if isinstance(value, dict):
        for name, held in value.items():
            _check_numbers(held, name)
    elif isinstance(value, list):
        for held in value:
            _check_numbers(held, key)
    elif isinstance(value, int | float) and key.endswith("_s") and key not in _SIGNED:
        assert value >= 0, key


def _check(trace: GpuTrace) -> None:
    assert np.all(trace.events.end_ns >= trace.events.start_ns)
    for call in trace.calls:
        assert 0 <= call.duration_ns < MAX_NS
        assert call.num_bytes >= 0


@QUICK
@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=6), VALUES, SIZES, st.integers(0, 3))
@example([(0, 1e308)], None, [], 1)
@example([(1e308, 1)], None, [], 1)
@example([(4.6e15, 1), (-4.6e15, 1)], None, [], 1)
@example([(0, 4.6e15)] * 4, None, [], 1)
def test_a_kineto_trace_of_hostile_times_is_read_or_refused(times, value, sizes, whole_kernels):
    file = KinetoFile(baseTimeNanoseconds=value, distributedInfo={"rank": value, "world_size": value})
    for n in range(whole_kernels):
        file.kernel("gemm", n * 20, 10)
        file.nccl("AllGather_RING_LL", n * 20 + 5, 10, op="_allgather_base", nelems=8)
    for at, length in times:
        shapes = {"Input Dims": sizes, "In msg nelems": value, "Group size": value, "Process Group Ranks": sizes}
        file.add(ph="X", cat="kernel", name="gemm", pid=0, tid=7, ts=at, dur=length, args={"stream": 7, "grid": sizes})
        file.add(ph="X", cat="kernel", name="ncclDevKernel_AllGather_RING_LL(x)", pid=0, tid=9, ts=at, dur=length,
                 args={"stream": 9, "Collective name": "_allgather_base", **shapes})  # fmt: skip
        file.add(ph="X", cat="user_annotation", name="ProfilerStep#1", pid=1, tid=1, ts=at, dur=length, args=shapes)
        file.add(ph="X", cat="cuda_runtime", name="cudaLaunchKernel", pid=1, tid=1, ts=at, dur=length,
                 args={"correlation": value})  # fmt: skip
    read_or_refuse(file.to_json())


@QUICK
@given(VALUES, VALUES, VALUES, VALUES)
@example(1e308, 1, 1, 1)
def test_inspector_lines_of_hostile_values_are_read_or_refused(time, size, rank, sequence):
    perf = {"coll": "AllReduce", "coll_sn": sequence, "coll_msg_size_bytes": size, "coll_exec_time_us": time}
    line = json.dumps({"header": {"id": "0x7f1", "rank": rank, "n_ranks": rank}, "coll_perf": perf})
    read_or_refuse("\n".join([line, line]).encode(), "inspector.log")


@QUICK
@given(VALUES, VALUES, SIZES, VALUES)
@example(1e308, 1, [], 1)
@example(1, 2**62, [2**62] * 20, "9" * 5000)
def test_a_flight_recorder_dump_of_hostile_values_is_read_or_refused(time, at, sizes, ranks):
    entry = {
        "process_group": ["0", "default_pg"], "collective_seq_id": at, "profiling_name": "nccl:all_gather",
        "input_sizes": [sizes], "input_dtypes": ["BFloat16"], "output_sizes": [sizes], "output_dtypes": ["BFloat16"],
        "time_discovered_started_ns": 1, "time_discovered_completed_ns": at, "duration_ms": time,
    }  # fmt: skip
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    read_or_refuse(json.dumps({"version": "2.10", "rank": at, "entries": [entry], "pg_config": groups}).encode())


SQL = st.sampled_from([1e308, -1e308, 2**62, 2**63 - 1, -(2**63), 0, 1, None, "x", b"\xff", 1e18]) | st.integers(
    -(2**63), 2**63 - 1
)


@QUICK
@given(st.lists(st.tuples(SQL, SQL, SQL), min_size=1, max_size=6))
def test_an_nsight_export_of_hostile_values_is_read_or_refused(rows):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "report.sqlite"
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.executescript(
                "CREATE TABLE StringIds (id, value); INSERT INTO StringIds VALUES (1, 'gemm'), (2, 'ncclDevKernel_x'),"
                " (3, 'iteration 4'); CREATE TABLE NVTX_EVENTS (start, end, text, textId, globalTid);"
                "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, correlationId);"
                "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start, end, deviceId, streamId, correlationId, globalPid,"
                " bytes, copyKind);"
                "CREATE TABLE TARGET_INFO_GPU (id, name, smCount);"
                "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, streamId, correlationId, globalPid,"
                " demangledName, gridX, gridY, gridZ, blockX)"
            )
            for start, end, value in rows:
                for name in (1, 2):
                    kernel = (start, end, value, name, value, value, name, value, value, value, value)
                    connection.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({'?,' * 10}?)", kernel)
                copy = (start, end, value, 7, value, value, value, value)
                connection.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES ({'?,' * 7}?)", copy)
                connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?)", (start, end, value, 1))
                connection.execute("INSERT INTO NVTX_EVENTS VALUES (?,?,?,3,?)", (start, end, value, value))
                connection.execute("INSERT INTO TARGET_INFO_GPU VALUES (?,?,?)", (value, value, value))
            connection.commit()
        read_or_refuse(path.read_bytes(), "report.sqlite")
