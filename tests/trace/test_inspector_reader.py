import json

import pytest

from lagom_overlap.analysis.findings import analyse
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import TraceError
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


def test_broken_lines_are_counted_wherever_they_are_and_a_file_of_them_is_refused(tmp_path):
    path = tmp_path / "inspector.jsonl"
    path.write_text(line(0, 1) + "\n" + line(0, 2)[:40])
    (trace,) = read_traces([path])
    assert len(trace.calls) == 1
    assert any("was left out" in text for text in trace.warnings)
    # A job that was started again writes on behind the line that the crash cut; it may log there, too.
    path.write_text(line(0, 1) + "\n" + line(0, 2)[:40] + line(0, 3) + "\nNCCL INFO\n" + line(0, 4) + "\n" + line(0, 5))
    (trace,) = read_traces([path])
    assert [call.sequence for call in trace.calls] == [1, 4, 5]
    assert any(f"2 broken lines, the first at byte {len(line(0, 1)) + 1}, were" in text for text in trace.warnings)
    path.write_text(line(0, 1) + "\n" + line(0, 2)[:40] + "\n" + line(0, 3)[:30])
    with pytest.raises(TraceError, match=rf"line at byte {len(line(0, 1)) + 1}"):
        read_traces([path])


def p2p_line(number: int, what: str) -> str:
    perf = {"p2p": what, "p2p_sn": number, "p2p_peer": 1, "p2p_msg_size_bytes": 4 * MIB, "p2p_exec_time_us": 50}
    return json.dumps({"header": {"id": "0x7f1", "rank": 0, "n_ranks": 2}, "p2p_perf": perf})


def test_point_to_point_rows_count_alone_and_among_collectives(tmp_path):
    path = tmp_path / "inspector.jsonl"
    path.write_text("\n".join(p2p_line(n, ("Recv", "Send")[n % 2]) for n in range(4)))
    (trace,) = read_traces([path])
    assert [(call.kind, call.num_bytes, call.duration_ns) for call in trace.calls] == [
        (CollectiveKind.SEND_RECV, 4 * MIB, 50_000)
    ] * 4
    path.write_text("\n".join([line(0, 1), p2p_line(2, "Send")]))
    assert [call.op for call in read_traces([path])[0].calls] == ["all_reduce", "send_recv"]


def test_calls_that_the_inspector_lost_are_counted(tmp_path):
    def stats(lost: int) -> str:
        return json.dumps({"header": {"id": "0x7f1", "rank": 0}, "dump_stats": {"coll_dropped_total": lost}})

    path = tmp_path / "inspector.jsonl"
    path.write_text("\n".join([stats(400), *(line(0, n) for n in range(4)), stats(960)]))
    (trace,) = read_traces([path])
    assert any("lost 960 calls of 964: 964 ran, 4 are here" in text for text in trace.warnings)
    path.write_text(stats(960))
    with pytest.raises(TraceError, match="no call in it; the inspector lost all 960 that ran"):
        read_traces([path])
    path.write_text("\n".join([stats(0), line(0, 1)]))
    assert len(read_traces([path])[0].warnings) == 1


def test_algorithm_protocol_and_channels_tell_calls_apart(tmp_path):
    rows = [json.loads(line(0, n)) for n in range(4)]
    rows[0]["coll_perf"] |= {"coll_algo": "RING", "coll_proto": "LL", "coll_n_channels": 8}
    rows[1]["coll_perf"] |= {"coll_algo": "TREE", "coll_proto": "LL", "coll_n_channels": 8}
    events = [{"channel_id": n, "kernel_start_ts": 1, "kernel_stop_ts": 2} for n in range(6)]
    rows[2]["coll_perf"] |= {"event_trace_ts": {"kernel_events": events}}
    path = tmp_path / "inspector.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    keys = [row.key for row in analyse(read_traces([path])).rows]
    assert {(key.algorithm, key.protocol, key.num_channels) for key in keys} == {
        ("RING", "LL", 8),
        ("TREE", "LL", 8),
        ("", "", 6),
        ("", "", 0),
    }


def test_calls_without_a_time_are_in_no_bandwidth(tmp_path):
    path = tmp_path / "inspector.jsonl"
    path.write_text("\n".join(line(0, number, us=us) for number, us in enumerate((100.0, 0, -5, 1e300))))
    found = analyse(read_traces([path]))
    (row,) = found.rows
    assert (row.count, row.total_ns, row.median_ns, row.min_ns) == (4, 100_000, 100_000, 100_000)
    assert row.busbw_bytes_per_s == pytest.approx(MIB * 7 / 4 / 100e-6)
    assert any("3 of 4 calls have no duration" in text for text in found.warnings)


def test_a_byte_order_mark_and_lines_that_end_as_on_windows_change_nothing(tmp_path):
    path = tmp_path / "inspector.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(line(0, number) for number in range(3)).encode())
    (trace,) = read_traces([path])
    assert len(trace.calls) == 3


@pytest.mark.parametrize(
    ("rows", "why"),
    [([json.loads(line(0, 1))], "from lines"), ([{"entries": [], "rank": 0}], "one rank's dump")],
)
def test_a_list_of_what_is_no_trace_says_how_it_is_read(tmp_path, rows, why):
    path = tmp_path / "list.json"
    path.write_text(json.dumps(rows))
    with pytest.raises(TraceError, match=why):
        read_traces([path])
