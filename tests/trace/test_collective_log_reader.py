import json
from pathlib import Path

import pytest

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import TraceError
from lagom_overlap.trace.gpu_trace import KnobReach
from lagom_overlap.trace.reader import read_traces
from lagom_overlap.units import MIB


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
    """Torch 2.15 writes `nccl2:` for its own engine."""
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


DUMPS = Path(__file__).parents[1] / "data" / "flight_recorder"


@pytest.mark.parametrize("engine", ["nccl2", "nccl"])
def test_a_dump_of_pytorch_2_15_itself_is_read(engine):
    """Written by it on four emulated GPUs, by its own engine and by the one before: the same calls."""
    (trace,) = read_traces([DUMPS / f"{engine}_rank_0.json"])
    calls = [(call.op, call.num_bytes, call.communicator, call.ranks, call.reach) for call in trace.calls]
    world, half = ("default_pg", (0, 1, 2, 3), KnobReach.TUNER), ("pg 1", (0, 1), KnobReach.TUNER)
    assert calls == [
        ("all_reduce", 4 * MIB, *world),
        ("all_reduce", 4 * MIB, *half),
        ("all_gather", 16 * MIB, *world),
        ("all_gather", 16 * MIB, *world),  # into a list
    ]
    assert [call.sequence for call in trace.calls] == [1, 1, 2, 3]
    assert trace.rank == 0
    assert all(call.duration_ns > 0 for call in trace.calls) == (engine == "nccl")
    assert any("TORCH_DIST_USE_NCCL2=0" in text for text in trace.warnings) == (engine == "nccl2")


def test_gloos_dump_of_pytorch_2_15_is_read_and_has_no_name_for_its_group():
    (call,) = read_traces([DUMPS / "gloo_rank_0.json"])[0].calls
    assert (call.op, call.num_bytes, call.communicator, call.reach) == ("all_reduce", 4000, "pg 3", KnobReach.NONE)


@pytest.mark.parametrize(
    ("name", "rank"), [("nccl2.json", None), ("dump_nccl2.json", None), ("nccl_trace_rank_12", 12)]
)
def test_the_engines_name_is_no_rank(tmp_path, name, rank):
    path = tmp_path / name
    path.write_text(json.dumps(flight()))
    assert read_traces([path])[0].rank == rank


def test_an_empty_dump_says_where_its_calls_are(tmp_path):
    """What `_dump_nccl_trace_json` gives under PyTorch 2.15's own engine."""
    path = tmp_path / "dump.json"
    path.write_text('{"version": "2.10", "entries": [], "pg_config": {}, "nccl_comm_state": {}}')
    with pytest.raises(TraceError, match=r"_dump_fr_trace_json\(backend='nccl2'\)"):
        read_traces([path])


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
