"""`lagom analyze` of a ring that was written entry by entry."""

import json

import numpy as np
import pytest

from lagom_overlap.cli.main import main
from lagom_overlap.nccl_plugin import table_layout as layout

MS = 1_000_000


def write_ring(path, entries):
    header = np.zeros(1, layout.RING_HEADER)
    header["magic"], header["version"] = layout.PROFILE_MAGIC, layout.PROFILE_VERSION
    header["entry_bytes"], header["num_entries"] = layout.PROFILE_ENTRY.itemsize, 16
    header["num_written"], header["process_id"] = len(entries), 1
    ring = np.zeros(16, layout.PROFILE_ENTRY)
    for place, entry in enumerate(entries):
        values = {"event": 2, "kind": 4, "num_ranks": 16, "algorithm": 1, "protocol": 2, "num_channels": 8}
        values |= {"num_started": 8, "num_ended": 8, "call": place, "num_bytes": 1 << 20, "launched_ns": 1} | entry
        ring[place]["sequence"] = place + 1
        for name, value in values.items():
            ring[place][name] = value
    path.write_bytes(header.tobytes() + ring.tobytes())
    return path


@pytest.fixture
def ring(tmp_path):
    sent = {"sent_bytes": 3 << 20, "received_bytes": 1 << 20, "num_sends": 6, "num_receipts": 2}
    sent |= {"network_start_ns": 5 * MS, "network_end_ns": 7 * MS, "network_busy_ns": MS, "send_network_ns": 4 * MS}
    calls = [
        {"start_ns": 1, "end_ns": 1 + 2 * MS, "flags": 2, **sent},
        {"start_ns": 1, "end_ns": 1 + 4 * MS, **sent},
        {"kind": 2, "start_ns": 1, "end_ns": 1 + 8 * MS},
        {"kind": 2, "start_ns": 1, "flags": 1, "num_ended": 0},
    ]
    return write_ring(tmp_path / "profile.0.bin", calls)


def test_each_call_site_has_its_gpu_time_and_its_network(ring, capsys):
    assert main(["analyze", str(ring), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    gather, reduced = found["sites"]
    assert (gather["kind"], gather["num_calls"], gather["num_incomplete"], gather["gpu_s"]) == (
        "all_gather",
        2,
        1,
        pytest.approx(8e-3),
    )
    assert gather["network"] is None
    assert (reduced["kind"], reduced["num_captured"], reduced["gpu_s"]) == ("all_reduce", 1, pytest.approx(3e-3))
    network = reduced["network"]
    assert (network["sent_bytes"], network["received_bytes"]) == (3 << 20, 1 << 20)
    assert [network[name] for name in ("span_s", "busy_s", "send_network_s")] == pytest.approx([2e-3, 1e-3, 4e-3])


def test_the_terminal_says_the_same(ring, capsys):
    assert main(["analyze", str(ring)]) == 0
    out = capsys.readouterr().out
    assert "4 collectives at 2 call sites" in out
    assert "all_reduce 1 MiB on 16 ranks" in out
    assert "3 MiB sent, 1 MiB received in 2.00 ms, busiest channel 1.00 ms" in out
    assert out.count("network:") == 1


def test_flags_of_traces_are_refused(ring, tmp_path, capsys):
    assert main(["analyze", str(ring), "--out", str(tmp_path / "run")]) == 2
    assert "--out is for traces" in capsys.readouterr().err
