"""Blocks decoded by columns and events taken one by one end in the same trace."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kineto_traces import KinetoFile

from lagom_overlap.trace import kineto_events
from lagom_overlap.trace.files import open_streams
from lagom_overlap.trace.gpu_trace import GpuTrace
from lagom_overlap.trace.kineto_reader import read_kineto

TRACES = Path(__file__).parents[3] / "shared" / "data" / "traces"
BLOCK = 2048


def read(path: Path, block: int = BLOCK) -> tuple[GpuTrace, ...]:
    with open_streams(path) as streams:
        return tuple(trace for stream in streams for trace in read_kineto(stream, b"", block_bytes=block))


@pytest.fixture
def taken(monkeypatch):
    """How many blocks were offered, and how many of them taken by columns; `taken.off` turns columns off."""

    class Count:
        offered = by_columns = 0
        off = False

    original = kineto_events.KinetoEvents.take_usual

    def counted(self, block):
        done = not Count.off and original(self, block)
        Count.offered, Count.by_columns = Count.offered + 1, Count.by_columns + done
        return done

    monkeypatch.setattr(kineto_events.KinetoEvents, "take_usual", counted)
    return Count


def assert_equal(ours: tuple[GpuTrace, ...], theirs: tuple[GpuTrace, ...]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        for field in dataclasses.fields(GpuTrace):
            first, second = getattr(one, field.name), getattr(other, field.name)
            if field.name == "marked":  # a set of times: their order in the file means nothing
                first, second = sorted(first, key=str), sorted(second, key=str)
            if field.name != "events":
                assert first == second, field.name
                continue
            for column in dataclasses.fields(first):
                assert np.array_equal(getattr(first, column.name), getattr(second, column.name)), column.name


def both(path: Path, taken, block: int = BLOCK) -> tuple[GpuTrace, ...]:
    """The trace, after it was read both ways and found equal."""
    taken.off = False
    ours = read(path, block)
    taken.off = True
    assert_equal(ours, read(path, block))
    return ours


def job(*, whole_us: bool = False) -> KinetoFile:
    """Steps, operators with shapes, flows, stream waits, copies, and collectives told by metadata, name, CPU event."""
    file = KinetoFile()
    unit = 1 if whole_us else 1.001
    for n in range(60):
        at = 1000.0 * n * unit if not whole_us else 1_661_938_466_265_584 + 1000 * n
        if n % 20 == 0:
            file.step(n // 20, at, 900)
        dims = {"Input Dims": [[n % 3, 4], []], "External id": n + 1}
        file.add(ph="X", cat="cpu_op", name="aten::mm", pid=1, tid="main", ts=at, dur=3, args=dims)
        file.add(ph="s", cat="ac2g", name="ac2g", id=n, pid=1, tid=1, ts=at)
        file.kernel(f"gemm_{n % 5}", at + 10, 7 * unit if not whole_us else 7, **{"External id": n + 1})
        file.add(
            ph="X", cat="cuda_runtime", name="cudaStreamWaitEvent", pid=1, tid=1, ts=at, dur=1,
            args={"stream": 7, "correlation": 5000 + n},
        )  # fmt: skip
        if n % 3 == 0:
            file.nccl("AllReduce_Sum_bf16_RING_LL", at + 30, 90, op="allreduce", nelems=1 << 20)
        if n % 7 == 0:
            file.kernel("Memcpy DtoH (Device -> Pageable)", at + 200, 4, cat="gpu_memcpy", bytes=512, stream=8)
            file.kernel("Memset (Device)", at + 210, 1, cat="gpu_memset", stream=8)
        if n % 11 == 0:
            args = {"Input Dims": [[8, 100]], "Input type": ["float"]}
            file.add(
                ph="X", cat="user_annotation", name="nccl:all_reduce", pid=10, tid=4, ts=at + 390, dur=40, args=args
            )
            file.kernel("ncclKernel_AllReduce_RING_LL_Sum_float(x)", at + 400, 50, tid=4, stream=9)
    return file


@pytest.mark.parametrize("whole_us", [False, True])
def test_the_usual_events_are_taken_by_columns_and_give_the_same_trace(whole_us, tmp_path, taken):
    (trace,) = both(job(whole_us=whole_us).write(tmp_path / "rank0.json"), taken)
    assert taken.by_columns > 3
    assert len(trace.events) == 60 + 20 + 9 + 9 + 6
    assert len(trace.calls) == 26
    assert len(trace.marked) == 60
    assert sum(call.num_bytes == 3200 for call in trace.calls) == 6


ODD = [
    {"ts": "12.5"},
    {"ts": None},
    {"dur": -3.5},
    {"ts": 2**70},
    {"ts": -(2**63)},
    {"ts": 1e308},
    {"dur": 1e308},
    {"dur": 9e10},
    {"name": 5},
    {"name": "x" * 5000},
    {"cat": "some_new_category"},
    {"cat": None},
    {"ph": "B"},
    {"pid": [1]},
    {"args": None},
    {"args": {"stream": "7", "correlation": "101"}},
    {"args": {"device": 0, "stream": 7, "correlation": 2**80}},
    {"args": {"device": 0, "stream": 7, "correlation": -(2**63)}},
    {"args": {"device": 0, "stream": 7, "correlation": 101, "grid": [1, 1, -1], "block": "[2, 2, 1]"}},
    {"args": {"device": 0, "stream": 7, "correlation": 101, "Collective name": "", "bytes": -4}},
    {"args": {"device": 0, "stream": 7, "correlation": 101, "external id": 3, "Collective name": 4}},
]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 300), st.sampled_from(ODD)), max_size=3), st.integers(700, 6000))
def test_events_out_of_the_ordinary_are_taken_alike(changes, block):
    file = job()
    for at, change in changes:
        file.events[at % len(file.events)] |= change
    data = file.to_json()

    def traces(*, by_columns: bool) -> object:
        held = _Bytes(data)
        original = kineto_events.KinetoEvents.take_usual
        try:
            if not by_columns:
                kineto_events.KinetoEvents.take_usual = lambda *_: False
            return read_kineto(held, b"", block_bytes=block)
        finally:
            kineto_events.KinetoEvents.take_usual = original

    assert_equal(traces(by_columns=True), traces(by_columns=False))


class _Bytes:
    """A `Stream` over bytes."""

    def __init__(self, data: bytes) -> None:
        self.name, self.was_cut, self._data, self._at = "t.json", False, data, 0

    def read(self, num_bytes: int) -> bytes:
        self._at += num_bytes
        return self._data[self._at - num_bytes : self._at]


def test_times_that_floats_do_not_hold_are_left_to_the_exact_way(tmp_path, taken):
    file = job()
    for event in file.events:
        event["ts"] += 1_694_128_201_000_000
    path = tmp_path / "rank0.json"
    path.write_bytes(re.sub(rb'"ts": (\d+)[.0-9]*', rb'"ts": \1.123', file.to_json()))
    (trace,) = both(path, taken)
    assert taken.by_columns == 0
    assert set((trace.events.start_ns % 1000).tolist()) == {123}
    assert {step.start_ns % 1000 for step in trace.steps} == {123}


def test_blocks_that_never_are_as_usual_are_soon_no_longer_offered(tmp_path, taken):
    file = KinetoFile()
    for n in range(400):
        file.kernel(f"k{n}", 10.0 * n, 5, cat="kernel")
        file.events[-1]["args"]["grid"] = "(1, 1, 1)"
    both(file.write(tmp_path / "rank0.json"), taken)
    assert taken.by_columns == 0
    assert taken.offered <= 16  # eight with columns, eight without


@pytest.mark.skipif(not TRACES.exists(), reason="the recorded traces are not here")
@pytest.mark.parametrize(
    "name",
    [
        "hta/nccl_data.json.gz",
        "hta/v100_rank1of2_test.json.gz",
        "tracelens/b200_eager_trace.json.gz",
        "param_dlrm_8xV100/dlrm_kineto.tar.gz",
    ],
)
def test_recorded_traces_are_taken_alike_and_by_columns(name, taken):
    both(TRACES / name, taken, 256 * 1024)
    assert taken.by_columns >= 0.4 * taken.offered


def test_json_text_of_the_job_is_what_json_reads():
    assert len(json.loads(job().to_json())["traceEvents"]) == len(job().events)
