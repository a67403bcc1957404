import json
import pickle
from pathlib import Path

import pytest

from lagom_overlap.analysis.findings import analyse
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import TraceError
from lagom_overlap.trace.gpu_trace import KnobReach
from lagom_overlap.trace.reader import read_traces
from lagom_overlap.units import MIB


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


def test_numbers_and_characters_that_json_forbids_refuse_no_dump(tmp_path):
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(flight(duration_ms=float("nan"))).replace("default_pg", "default_pg\x01"))
    (call,) = read_traces([path])[0].calls
    assert (call.duration_ns, call.communicator) == (2_000_000, "default_pg ")


def test_foreign_types_in_a_dump_are_unknown(tmp_path):
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(flight(input_sizes="x", output_dtypes=[3], process_group=[], collective_seq_id="n")))
    (call,) = read_traces([path])[0].calls
    assert (call.num_bytes, call.sequence) == (0, None)


def test_a_call_that_never_ended_counts_nowhere(tmp_path):
    entries = [flight(collective_seq_id=n)["entries"][0] for n in range(5)]
    entries.append(entries[0] | {"collective_seq_id": 5, "state": "started", "time_discovered_completed_ns": None})
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(flight() | {"entries": entries}))
    findings = analyse(read_traces([path]))
    (row,) = findings.rows
    assert (row.count, row.min_ns, row.total_ns) == (5, 2_000_000, 10_000_000)
    assert any(
        "not ended when recorded" in text and "1 call," in text and "all_gather number 5" in text
        for text in findings.warnings
    )


@pytest.mark.parametrize("protocol", [2, 4])
def test_the_default_pickle_of_a_dump_is_read_as_its_json(tmp_path, protocol):
    held = json.loads((DUMPS / "nccl_rank_0.json").read_text())
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps(held, protocol))
    (ours,), (theirs,) = read_traces([tmp_path]), read_traces([DUMPS / "nccl_rank_0.json"])
    assert ours.calls == theirs.calls
    assert ours.rank == 0


class _Explodes:
    def __reduce__(self):
        return Path.touch, (Path("touched"),)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(_Explodes(), 2),
        pickle.dumps({"entries": [_Explodes()]}, 4),
        b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00truetR.",
        b"\x80\x02X\x01\x00\x00\x00aQ.",  # a reference to something outside
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f",  # a text of 2^63 bytes
        b"\x80\x02Nr\x00\x00\x00\x04.",  # one value, counted as number 2^26, for which C's unpickler allots 1 GiB
        pickle.dumps(5, 2),
        pickle.dumps({"entries": 5}, 2),
        pickle.dumps(flight(), 2)[:-20],
    ],
)
def test_a_pickle_that_is_no_dump_is_refused_in_one_line_and_runs_nothing(tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=r"^nccl_trace_rank_0: .*no flight recorder dump") as caught:
        read_traces([path])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "touched").exists()


def test_a_dump_that_counts_its_values_otherwise_is_refused_before_it_takes_memory(tmp_path):
    """An empty table, stored as value 2^26: C's unpickler allots 1 GiB for it, and what it loads would be a dump."""
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(b"\x80\x02}r\x00\x00\x00\x04.")
    with pytest.raises(TraceError, match="its opcode 2 is value 67108864"):
        read_traces([path])
