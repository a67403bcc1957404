"""Hangs worked by hand: what a person reads from the dumps of four ranks."""

import json
import pickle
from dataclasses import replace

import pytest

from lagom_overlap.analysis.findings import analyse
from lagom_overlap.analysis.hang import hangs_of
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.trace.gpu_trace import UNKNOWN, CommCall, GpuTrace, KnobReach, empty_events
from lagom_overlap.trace.reader import read_traces
from lagom_overlap.units import MIB

WORLD = (0, 1, 2, 3)


def call(number: int, op: str = "all_reduce", size: int = 2 * MIB, state: str = "completed", group: str = "dp"):
    return CommCall(
        event=UNKNOWN,
        op=op,
        kind=CollectiveKind(op),
        communicator=group,
        reach=KnobReach.TUNER,
        duration_ns=0,
        ranks=WORLD,
        num_bytes=size,
        sequence=number,
        is_started=state != "scheduled",
        is_finished=state == "completed",
    )


def job(*ranks: list[CommCall]) -> list[GpuTrace]:
    return [
        GpuTrace(file=f"{n}", format="flight recorder", rank=n, events=empty_events(), calls=tuple(calls))
        for n, calls in enumerate(ranks)
    ]


def test_a_rank_that_never_came_is_named_with_what_it_did_last():
    waits = [call(4), call(5, state="started")]
    (hang,) = hangs_of(job(waits, waits, waits, [call(4)]))
    assert str(hang) == (
        "all_reduce of 2 MiB: ranks 0-2 wait, rank 3 never called it (its last was all_reduce, number 4) "
        "(number 5 on dp)"
    )
    assert hang.rank_is_at_fault


def test_ranks_that_call_different_operations_or_sizes_are_named():
    waits = [call(4), call(5, state="started")]
    (hang,) = hangs_of(job(waits, waits, [call(4), call(5, "all_gather", state="started")], waits))
    assert str(hang).startswith("ranks call different operations: all_reduce on ranks 0-1, 3, all_gather on rank 2")
    (hang,) = hangs_of(job(waits, [call(4), call(5, size=MIB, state="started")], waits, waits))
    assert str(hang).startswith("ranks give all_reduce different sizes: 2 MiB on ranks 0, 2-3, 1 MiB on rank 1")
    (hang,) = hangs_of(job(waits, [call(4), call(5, size=2 * MIB - 8, state="started")], waits, waits))
    assert "2097152 B on ranks 0, 2-3, 2097144 B on rank 1" in str(hang)  # rounded, both are 2 MiB


def p2p(rank: int, words: str, size: int = MIB, state: str = "started") -> dict[str, object]:
    """A dump of a rank of a pipeline whose group is ranks 4 to 7, as PyTorch writes sends and receives."""
    entry = {
        "record_id": 0, "pg_id": 1, "process_group": ["1", "pp"], "collective_seq_id": 3, "p2p_seq_id": 9, "op_id": 9,
        "profiling_name": f"nccl:{words}", "time_created_ns": 10**15, "duration_ms": None, "input_sizes": [[size // 4]],
        "input_dtypes": ["Float"], "output_sizes": [[size // 4]], "output_dtypes": ["Float"], "state": state,
        "time_discovered_started_ns": 10**15 + 100, "time_discovered_completed_ns": None, "retired": False,
        "timeout_ms": 600000, "is_p2p": True, "frames": [],
    }  # fmt: skip
    times = {"time_discovered_completed_ns": 10**15 + 900, "state": "completed", "retired": True}
    ended = entry | times | {"profiling_name": "nccl:all_reduce", "is_p2p": False, "collective_seq_id": 2}
    groups = {"1": {"name": "1", "desc": "pp", "ranks": "[4, 5, 6, 7]"}}
    return {"version": "2.10", "pg_config": groups, "rank": rank, "entries": [ended, entry] if words else [ended]}


@pytest.mark.parametrize(
    ("dumps", "told"),
    [
        ([p2p(4, ""), p2p(5, "recv 1<-0")], ["rank 5 receives 1 MiB from rank 4, which sends nothing to it"]),
        ([p2p(4, "send 0->1"), p2p(5, "")], ["rank 4 sends 1 MiB to rank 5, which receives nothing from it"]),
        (
            [p2p(4, "send 0->1"), p2p(5, "recv 1<-0", size=2 * MIB)],
            ["rank 4 sends 1 MiB, rank 5 receives 2 MiB"],
        ),
        (
            [p2p(4, "send 0->1"), p2p(5, "recv 1<-0")],
            ["send of 1 MiB from rank 4 to rank 5: started and not ended on both"],
        ),
        ([p2p(5, "recv 1<-0")], ["rank 5 receives 1 MiB from rank 4: started and not ended; no dump of rank 4"]),
        ([p2p(4, ""), p2p(5, "recv 1<-0", state="scheduled")], []),  # as every call of a batch
    ],
)
def test_a_pair_of_a_pipeline_that_waits_is_named(tmp_path, dumps, told):
    for number, dump in enumerate(dumps):
        (tmp_path / f"nccl_trace_rank_{number}").write_bytes(pickle.dumps(dump))
    found = hangs_of(read_traces([tmp_path]))
    assert [hang.cause for hang in found] == told
    assert all(str(hang).endswith("(number 3 on pp)") for hang in found)


def test_sizes_that_may_differ_or_did_no_harm_are_not_blamed():
    """Of a scatter one rank gives all: the recorder has its size alone. And what ended is not what a job hangs in."""
    scatters = [replace(call(4, size=size), op="scatter", kind=None) for size in (MIB, 0)]
    uneven = [call(5, size=size) for size in (MIB, 2 * MIB)]
    waits = call(6, state="started")
    found = hangs_of(job([scatters[0], uneven[0], waits], [scatters[1], uneven[1]]))
    assert [hang.sequence for hang in found] == [6]
    stuck = [replace(scatter, is_finished=False) for scatter in scatters]
    (hang,) = hangs_of(job(stuck[:1], stuck[1:]))
    assert not hang.rank_is_at_fault


def test_a_call_that_all_ranks_are_in_says_where_it_started():
    started, queued = [call(5, state="started")], [call(5, state="scheduled")]
    (hang,) = hangs_of(job(started, queued, started, started))
    assert "started and not ended on ranks 0, 2-3, queued and not started on rank 1" in str(hang)
    assert not hang.rank_is_at_fault


def test_ranks_without_a_dump_are_said_to_be_unknown():
    (hang,) = hangs_of(job([call(5, state="started")], [call(5, state="started")]))
    assert "no dump of ranks 2-3" in str(hang)


def test_the_group_in_which_ranks_disagree_comes_before_those_that_wait():
    waits = [call(5, state="started"), call(7, group="tp", state="started")]
    found = hangs_of(job(waits, waits, waits, waits[:1]))
    assert [hang.communicator for hang in found] == ["tp", "dp"]


@pytest.mark.parametrize("oldest", [0, 3])
def test_calls_that_all_ended_hang_nowhere_however_far_back_each_dump_goes(oldest):
    assert hangs_of(job([call(n) for n in range(6)], [call(n) for n in range(oldest, 6)])) == ()


def dump(rank, engine, calls, last):
    """A rank's dump as an engine writes it: all-reduces of 2 MiB, `calls` that ended and `last` that did not."""
    entries = []
    for number in range(calls + last):
        ended = number < calls
        entry = {
            "process_group": ["0", "default_pg"],
            "collective_seq_id": number + 1,
            "profiling_name": "nccl:all_reduce" if engine.startswith("nccl,") else "nccl2:all_reduce",
            "input_sizes": [[1 << 20]],
            "input_dtypes": ["BFloat16"],
            "output_sizes": [[1 << 20]],
            "output_dtypes": ["BFloat16"],
            "state": "completed" if ended else "scheduled",
            "retired": ended,
            "time_discovered_started_ns": 0,
            "time_discovered_completed_ns": 5 if ended else 0,
        }
        match engine:
            case "nccl, timed":
                entry |= {"time_discovered_started_ns": 3, "state": "completed" if ended else "started"}
            case "2.15.0":  # never told of an end
                entry |= {"state": "scheduled", "retired": False, "time_discovered_completed_ns": 0}
            case "hook":  # taken off the list as it is issued
                entry |= {"state": "scheduled", "retired": True, "time_discovered_completed_ns": 0}
            case "2.15 later":
                entry |= {"time_discovered_started_ns": 5 if ended else 0}
        entries.append(entry)
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    return {"version": "2.10", "rank": rank, "entries": entries, "pg_config": groups}


def hang_lines(folder, engine, *ranks):
    for rank, (calls, last) in enumerate(ranks):
        text = json.dumps(dump(rank, engine, calls, last))
        data = text.encode() if rank % 2 else pickle.dumps(json.loads(text), protocol=2)
        (folder / f"nccl_trace_rank_{rank}").write_bytes(data)
    return [str(hang) for hang in hangs_of(read_traces([folder]))]


@pytest.mark.parametrize("engine", ["nccl, timed", "nccl, untimed", "2.15 later", "2.15.0", "hook"])
def test_dumps_of_every_engine_say_the_same_of_a_rank_that_never_came(tmp_path, engine):
    assert hang_lines(tmp_path, engine, (2, 1), (2, 1), (2, 0), (2, 1)) == [
        "all_reduce of 2 MiB: ranks 0-1, 3 wait, rank 2 never called it (its last was all_reduce, number 2) "
        "(number 3 on default_pg)"
    ]


@pytest.mark.parametrize(
    ("engine", "found"),
    [
        ("nccl, timed", ["all_reduce of 2 MiB: started and not ended on ranks 0-3 (number 3 on default_pg)"]),
        ("nccl, untimed", ["all_reduce of 2 MiB: not ended on ranks 0-3 (number 3 on default_pg)"]),
        ("2.15 later", ["all_reduce of 2 MiB: not ended on ranks 0-3 (number 3 on default_pg)"]),
        ("2.15.0", []),  # a job that stands and one that does not leave the same dump
        ("hook", []),
    ],
)
def test_a_call_that_no_rank_ends_is_found_where_the_recorder_is_told_of_ends(tmp_path, engine, found):
    assert hang_lines(tmp_path, engine, *[(2, 1)] * 4) == found
    said = [text for text in analyse(read_traces([tmp_path])).warnings if "does not know whether they ended" in text]
    assert bool(said) == (engine in ("2.15.0", "hook"))
