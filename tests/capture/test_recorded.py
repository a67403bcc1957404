"""Recordings of one JSON object per line: what streams enforce, with FSDP's gathers set free."""

import gzip
import json
from pathlib import Path

import pytest

from lagom_overlap.capture.recorded import read_recording
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.workload import Gemm, MemoryBound


def _line(kind: str, op: str, **more: object) -> dict[str, object]:
    return {"kind": kind, "op": op, "in_bytes": 64, "out_bytes": 64, "dtype": "bfloat16", **more}


def _comm(op: str, **more: object) -> dict[str, object]:
    return _line("comm", op, group_desc="mesh_dp", ranks=[0, 1], stream=2, ann="FSDP::all_gather (layers.0)", **more)


LINES = [
    _line("compute", "aten.mm.default", shapes=[[4, 8], [8, 16]]),
    _line("compute", "fsdp.all_gather_copy_in.default", stream=1, ann="FSDP::all_gather (layers.0)"),
    _line("sync", "record", stream=1, in_bytes=5),
    _line("sync", "wait_event", stream=2, in_bytes=5),
    _comm("c10d._allgather_base_.default"),
    _line("sync", "wait_stream", stream=0, in_bytes=2),
    _line("compute", "fsdp.split_with_sizes_copy.default", ann="FSDP::all_gather_copy_out (layers.0)"),
]


def _write(path: Path, lines: list[dict[str, object]]) -> Path:
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_operators_wait_for_what_their_streams_wait_for(tmp_path: Path, name: str) -> None:
    capture = read_recording(_write(tmp_path / name, LINES))
    product, copy, gather, copy_out = capture.iteration.ops
    assert product.work == Gemm(4, 16, 8, 2)
    assert isinstance(copy.work, MemoryBound)
    assert copy.deps == ()
    assert gather.deps == (copy.name,)
    assert set(copy_out.deps) == {product.name, gather.name}
    assert gather.collective.kind is CollectiveKind.ALL_GATHER
    assert capture.groups == {"dp": (0, 1)}
    assert capture.iteration.is_dataflow


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"no json\n", "line 1"),
        (b'{"kind": "compute"}\n', "line 1"),
        (json.dumps(_line("comm", "c10d.gossip", ranks=[0, 1])).encode(), "'c10d.gossip' is not known"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(JobError, match=words):
        read_recording(path)


def test_a_missing_or_cut_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="does not exist"):
        read_recording(tmp_path / "a.jsonl")
    cut = _write(tmp_path / "b.jsonl.gz", LINES)
    cut.write_bytes(cut.read_bytes()[:-12])
    with pytest.raises(JobError, match="cannot be read"):
        read_recording(cut)
