"""Capture files: what is written is read, byte for byte the same; what is none ends in one line."""

import errno
import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lagom_overlap.capturing import file as capture_file
from lagom_overlap.capturing.file import encode_capture, read_capture, write_capture
from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.errors import JobError, OutputError
from lagom_overlap.workload import (
    Attention,
    Buffer,
    CommOp,
    CompOp,
    Gather,
    Gemm,
    Iteration,
    Kernel,
    MemoryBound,
    Origin,
    Phase,
    Reduce,
    ShardSpec,
    TensorUse,
)
from lagom_overlap.workload.issued import IssuedStep

MM = CompOp(
    name="mm",
    work=Gemm(4, 8, 6, 2),
    origin=Origin(phase=Phase.FORWARD, layer=3, module="layers.3", kernel="aten.mm"),
    shards=ShardSpec((TensorUse("", (0, 1)), TensorUse("", (1, None))), (Gather(0), Reduce()), (4, 6)),
)
AG = CommOp(
    name="ag",
    collective=Collective(CollectiveKind.ALL_GATHER, 64, 2, 2),
    communicator="fsdp",
    deps=("mm",),
    stream="all_gather",
)
OTHERS = (
    CompOp(
        name="attention",
        work=Attention(batch=1, num_heads=2, seq_len=4, head_dim=8, causal=False, passes=2.5),
        deps=("ag",),
    ),
    CompOp(name="add", work=MemoryBound(96), origin=Origin(microbatch=2)),
    CompOp(name="kernel", work=Kernel(num_blocks=3, blocks_per_sm=1, wave_s=1e-6, block_bytes=0.5)),
)
BUFFERS = (
    Buffer(name="b", num_bytes=9, maker="mm", users=("ag",)),
    Buffer(name="kept", num_bytes=1, maker="add"),
)
WHOLE = IssuedStep(
    iteration=Iteration("tiny", (MM, AG, *OTHERS), True, BUFFERS, 123),
    num_ranks=4,
    groups={"fsdp": (1, 3), "tp": (0, 1)},
    waits={"add": ("ag",)},
    notes=("something was left out",),
)


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    write_capture(tmp_path / name, WHOLE)
    assert read_capture(tmp_path / name) == WHOLE


def test_the_same_capture_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.json.gz", "b.json.gz"):
        write_capture(tmp_path / name, WHOLE)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_issued_adds_the_waits_and_forbids_reordering() -> None:
    ops = {op.name: op for op in WHOLE.issued.ops}
    assert ops["add"].deps == ("ag",)
    assert not WHOLE.issued.is_dataflow
    assert WHOLE.iteration.ops[3].deps == ()


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("mine")
    with pytest.raises(OutputError, match="exists already"):
        write_capture(tmp_path / "a.json", WHOLE)
    assert (tmp_path / "a.json").read_text() == "mine"


def test_a_capture_is_private_and_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_capture(tmp_path / "a.json", WHOLE)
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o600

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OutputError, match="No space left"):
        write_capture(tmp_path / "b.json", WHOLE)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def _changed(**changes: Any) -> bytes:
    document = json.loads(encode_capture(WHOLE))
    for path, value in changes.items():
        *parents, last = path.split("__")
        place: Any = document
        for part in parents:
            place = place[int(part) if part.isdigit() else part]
        place[last] = value
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is no capture"),
        (b"[1]", "is no capture"),
        (b'{"a": 1}', "is no capture: format is ''"),
        (b"\xff\xfe", "is no capture"),
        (b"[" * 100_000, "is no capture"),
        (_changed(version=2), "has version 2"),
        (_changed(surprise=1), "unknown field `surprise`"),
        (_changed(ops__0__gemm=[1, 2, 3]), "length >= 4"),
        (_changed(ops__0__gemm=[0, 2, 3, 2]), "m is 0, must be positive"),
        (_changed(ops__0__memory=5), "exactly one of gemm"),
        (_changed(ops__1__deps=["nobody"]), "'ag' waits for 'nobody', no operator"),
        (_changed(ops__0__waits=["ag"]), "'mm' waits for 'ag', not issued before it"),
        (_changed(ops__0__waits=["nobody"]), "'mm' waits for 'nobody', no operator"),
        (_changed(ops__2__name="mm"), "'mm' occurs twice"),
        (_changed(ops__1__collective__kind="gossip"), "gossip"),
        (_changed(ops__1__collective__num_ranks=4), "runs over 4 ranks"),
        (_changed(groups__fsdp=[0, 9]), "ranks of 'fsdp' are [0, 9], must be different ones of 0 to 3"),
        (_changed(groups__fsdp=[1, 1]), "ranks of 'fsdp'"),
        (_changed(ops__0__shards__combine=["mean", "sum"]), "combine is 'mean'"),
        (_changed(ops__0__shards__sizes=[4]), "1 sizes for 2 axes"),
        (_changed(buffers__0__maker="nobody"), "names 'nobody'"),
        (_changed(num_ranks=0), "ranks is 0"),
        (gzip.compress(encode_capture(WHOLE))[:-20], "is damaged"),
        (b"\x1f\x8b" + b"x" * 40, "is damaged"),
    ],
)
def test_what_is_no_capture_ends_in_one_line(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "step.json"
    path.write_bytes(content)
    with pytest.raises(JobError) as error:
        read_capture(path)
    assert words in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_file, "MAX_FILE_BYTES", 100)
    write_capture(tmp_path / "a.json.gz", WHOLE)
    with pytest.raises(JobError, match="unpacks to more than 100 B"):
        read_capture(tmp_path / "a.json.gz")


@pytest.mark.parametrize("name", ["nothing.json", "."])
def test_what_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(JobError, match=r"does not exist|no regular file"):
        read_capture(tmp_path / name)


def test_a_collective_whose_group_is_not_given_is_refused() -> None:
    with pytest.raises(JobError, match="no ranks are given for 'fsdp'"):
        replace(WHOLE, groups={})
