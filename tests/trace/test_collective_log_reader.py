import json

import pytest

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import TraceError
from lagom_overlap.trace.gpu_trace import KnobReach
from lagom_overlap.trace.reader import read_traces


def line(rank: int, number: int, coll: str = "AllReduce", size: int = 1 << 20, us: float = 100.5) -> str:
    return json.dumps(
        {
            "header": {"id": "0x7f1", "rank": rank, "n_ranks": 8, "nnodes": 1},
            "metadata": {"inspector_output_format_version": "v4.0"},
            "coll_perf": {
                "coll": coll,
                "coll_sn": number,
                "coll_msg_size_bytes": size,
                "coll_exec_time_us": us,
                "coll_algobw_gbs": 1.0,
                "coll_busbw_gbs": 1.75,
            },
        }
    )


def test_inspector_lines_become_collectives_by_rank(tmp_path):
    path = tmp_path / "inspector.log"
    path.write_text("\n".join([line(0, 1), line(1, 1), line(0, 2, "AllGather"), "", line(1, 2, "SendRecv")]) + "\n")
    first, second = read_traces([path])
    assert (first.rank, second.rank, len(first.events)) == (0, 1, 0)
    assert [call.kind for call in first.calls] == [CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER]
    assert first.calls[0].duration_ns == 100_500
    assert (first.calls[0].num_ranks, first.calls[0].num_bytes, first.calls[0].sequence) == (8, 1 << 20, 1)
    assert second.calls[1].kind is CollectiveKind.SEND_RECV
    assert any("without a timeline" in text for text in first.warnings)


def test_a_broken_last_line_is_a_warning_and_one_in_the_middle_an_error(tmp_path):
    path = tmp_path / "inspector.jsonl"
    path.write_text(line(0, 1) + "\n" + line(0, 2)[:40])
    (trace,) = read_traces([path])
    assert len(trace.calls) == 1
    assert any("was left out" in text for text in trace.warnings)
    path.write_text(line(0, 1) + "\n" + line(0, 2)[:40] + "\n" + line(0, 3))
    with pytest.raises(TraceError, match=rf"line at byte {len(line(0, 1)) + 1}"):
        read_traces([path])


def flight(**entry: object) -> dict[str, object]:
    held = {
        "record_id": 0,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": 5,
        "profiling_name": "nccl:all_gather",
        "input_sizes": [[1024]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[8192]],
        "output_dtypes": ["BFloat16"],
        "time_discovered_started_ns": 1_000_000,
        "time_discovered_completed_ns": 3_000_000,
        "state": "completed",
    }
    return {
        "version": "2.10",
        "entries": [held | entry],
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3, 4, 5, 6, 7]"}},
    }


def test_a_flight_recorder_dump_gives_sizes_groups_and_durations(tmp_path):
    path = tmp_path / "nccl_trace_rank_3.json"
    path.write_text(json.dumps(flight()))
    (trace,) = read_traces([path])
    (call,) = trace.calls
    assert trace.rank == 3
    assert (call.kind, call.num_bytes, call.num_ranks) == (CollectiveKind.ALL_GATHER, 8192 * 2, 8)
    assert (call.communicator, call.sequence, call.duration_ns) == ("default_pg", 5, 2_000_000)


@pytest.mark.parametrize(
    ("engine", "reach"),
    [("nccl", KnobReach.TUNER), ("nccl2", KnobReach.TUNER), ("gloo", KnobReach.NONE)],
)
def test_the_engines_name_before_a_call_is_taken_off_and_no_knob_of_nccl_reaches_gloo(tmp_path, engine, reach):
    """Torch 2.15 writes `nccl2:` for its own engine, and gloo's calls into the same dump."""
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(flight(profiling_name=f"{engine}:all_gather")))
    (call,) = read_traces([path])[0].calls
    assert (call.kind, call.op, call.reach) == (CollectiveKind.ALL_GATHER, "all_gather", reach)


def test_the_recorded_duration_goes_before_the_discovered_times(tmp_path):
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(flight(duration_ms=1.25)))
    assert read_traces([path])[0].calls[0].duration_ns == 1_250_000


def test_a_dump_without_durations_says_how_to_get_them(tmp_path):
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(flight(time_discovered_started_ns=None)))
    assert any("TORCH_NCCL_ENABLE_TIMING" in text for text in read_traces([path])[0].warnings)


@pytest.mark.parametrize("entries", ["5", "[5]", "[", "[]"])
def test_a_broken_dump_is_refused(tmp_path, entries):
    path = tmp_path / "dump.json"
    path.write_text('{"version": "2.10", "entries": ' + entries + "}")
    with pytest.raises(TraceError):
        read_traces([path])


def test_foreign_types_in_a_dump_are_unknown(tmp_path):
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(flight(input_sizes="x", output_dtypes=[3], process_group=[], collective_seq_id="n")))
    (call,) = read_traces([path])[0].calls
    assert (call.num_bytes, call.sequence) == (0, None)
