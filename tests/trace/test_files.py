import gzip
import io
import json
import os
import pickle
import zipfile

import pytest
from kineto_traces import KinetoFile, tar_gz, zipped

from lagom_overlap.errors import TraceError
from lagom_overlap.trace.files import ByteStream, Limits, open_streams, trace_paths
from lagom_overlap.trace.reader import ReadOptions, read_traces

SMALL = ReadOptions(limits=Limits(max_bytes=1 << 20, max_ratio=50, free_bytes=1 << 16, max_members=5))


def one_kernel() -> bytes:
    file = KinetoFile()
    for n in range(50):
        file.kernel("a", n * 10, 5)
    return file.to_json()


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("t.json", lambda data: data),
        ("t.json.gz", gzip.compress),
        ("t.tar.gz", lambda data: tar_gz({"x/w0.json": data})),
        ("t.tar.gz", lambda data: tar_gz({"x/w0.json.gz": gzip.compress(data), "x/readme.txt": b"no"})),
        ("t.zip", lambda data: zipped({"x/w0.json": data, "x/": b"", "__MACOSX/x/._w0.json": b"no"})),
        ("t.zip", lambda data: zipped({"x/w0.json.gz": gzip.compress(data), "x/readme.txt": b"no"})),
        ("any name", lambda data: zipped({"../../w0.json": data})),  # a name in an archive is no path
        ("any name", gzip.compress),
    ],
)
def test_a_trace_reads_the_same_however_it_is_packed(tmp_path, name, pack):
    path = tmp_path / name
    path.write_bytes(pack(one_kernel()))
    (trace,) = read_traces([path])
    assert len(trace.events) == 50
    assert trace.warnings == ()


def test_a_tar_of_ranks_gives_one_trace_for_each_in_order_of_rank(tmp_path):
    members = {}
    for rank in (2, 0, 1):
        file = KinetoFile(distributedInfo={"rank": rank, "world_size": 3})
        file.kernel("a", 0, rank + 1)
        members[f"r/worker{rank}.json"] = file.to_json()
    path = tmp_path / "t.tar.gz"
    path.write_bytes(tar_gz(members))
    traces = read_traces([path])
    assert [trace.rank for trace in traces] == [0, 1, 2]
    assert traces[1].file == "t.tar.gz:worker1.json"


def test_a_folder_gives_its_traces_and_nothing_else(tmp_path):
    (tmp_path / "b.json").write_bytes(one_kernel())
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(one_kernel()))
    (tmp_path / "notes.txt").write_bytes(b"no")
    assert [path.name for path in trace_paths(tmp_path)] == ["a.json.gz", "b.json"]


def test_of_a_run_s_folder_the_traces_are_meant(tmp_path):
    (tmp_path / "traces").mkdir()
    for name in ("run.json", "events.0.jsonl", "traces/rank0.json.gz"):
        (tmp_path / name).write_bytes(b"{}")
    assert trace_paths(tmp_path) == (tmp_path / "traces" / "rank0.json.gz",)


def test_a_folder_whose_folders_hold_traces_names_one_of_them(tmp_path):
    (tmp_path / "profile_trace" / "iteration_10").mkdir(parents=True)
    (tmp_path / "profile_trace" / "iteration_10" / "rank0_trace.json").write_bytes(one_kernel())
    with pytest.raises(TraceError, match=r"holds no trace, '.*profile_trace/iteration_10' does"):
        trace_paths(tmp_path)


def test_a_gzip_file_cut_in_the_middle_is_read_as_far_as_it_goes(tmp_path):
    packed = gzip.compress(one_kernel())
    path = tmp_path / "t.json.gz"
    path.write_bytes(packed[: len(packed) * 3 // 4])
    (trace,) = read_traces([path])
    assert 0 < len(trace.events) < 50
    assert any("ends early" in text for text in trace.warnings)


def test_a_gzip_bomb_is_refused_by_its_size_before_it_fills_the_memory(tmp_path):
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (1 << 22)))
    with pytest.raises(TraceError, match="refused, it unpacks to more than"):
        read_traces([path], SMALL)


def test_a_bomb_inside_a_tar_is_refused_too(tmp_path):
    path = tmp_path / "bomb.tar.gz"
    path.write_bytes(tar_gz({"a.json": b"[" + b" " * (1 << 22)}))
    with pytest.raises(TraceError, match="refused"):
        read_traces([path], SMALL)
    path.write_bytes(tar_gz({"a.json.gz": gzip.compress(b"[" * (1 << 22))}))
    with pytest.raises(TraceError, match="refused"):
        read_traces([path], SMALL)


def test_zip_bombs_are_refused_each_alone_and_all_together(tmp_path):
    path = tmp_path / "bomb.zip"
    path.write_bytes(zipped({"a.json": b"[" + b" " * (1 << 22)}))
    with pytest.raises(TraceError, match="refused"):
        read_traces([path], SMALL)
    many = {f"{n}.json": b'{"traceEvents": [' + b" " * 60_000 for n in range(5)}  # each below the limit of 64 KiB
    path.write_bytes(zipped(many))
    unread = []
    with pytest.raises(TraceError):
        read_traces([path], SMALL, unread=unread)
    with open_streams(path, SMALL.limits) as streams, pytest.raises(TraceError, match="refused"):
        [stream.read(1 << 20) for stream in streams]
    path.write_bytes(zipped({f"{n}.txt": b"" for n in range(9)}))
    with pytest.raises(TraceError, match="more than 5 files"):
        read_traces([path], SMALL)


def test_one_damaged_member_of_a_zip_does_not_take_the_others_down(tmp_path):
    good, whole = one_kernel(), gzip.compress(one_kernel())
    bad = whole[: len(whole) // 2] + b"\xff" * 30
    path = tmp_path / "t.zip"
    path.write_bytes(zipped({"rank0.json": good, "rank1.json.gz": bad, "rank2.json": good}))
    unread = []
    assert [trace.file for trace in read_traces([path], unread=unread)] == ["t.zip:rank0.json", "t.zip:rank2.json"]
    assert len(unread) == 1
    assert unread[0].startswith("t.zip:rank1.json.gz: cannot be unpacked")
    packed = zipped({"rank0.json": good, "rank1.json": good}, zipfile.ZIP_STORED)
    at = packed.rindex(b'"dur": 5')
    path.write_bytes(packed[:at] + b"X" + packed[at + 1 :])  # the checksum no longer fits
    unread = []
    assert [trace.file for trace in read_traces([path], unread=unread)] == ["t.zip:rank0.json"]
    assert "Bad CRC-32 for file 'rank1.json'" in unread[0]


def test_an_encrypted_zip_is_told_in_one_line_without_the_folders_in_it(tmp_path):
    packed = bytearray(zipped({"secret/t.json": one_kernel()}))
    for magic, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        packed[packed.index(magic) + flags] |= 1
    (tmp_path / "t.zip").write_bytes(packed)
    with pytest.raises(TraceError, match=r"^t.zip:t.json: is encrypted; unpack it yourself$"):
        read_traces([tmp_path / "t.zip"])


def test_a_tar_of_too_many_files_is_refused(tmp_path):
    path = tmp_path / "many.tar.gz"
    path.write_bytes(tar_gz({f"{n}.txt": b"" for n in range(9)}))
    with pytest.raises(TraceError, match="more than 5 files"):
        read_traces([path], SMALL)


class _Explodes:
    def __reduce__(self):
        return os.system, ("touch pickled",)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is empty"),
        (b"  \n ", "is empty"),
        (b"PK\x03\x04zip", "damaged zip archive, or a part of one"),
        (pickle.dumps(_Explodes()), "refused, this pickle is no flight recorder dump"),
        (b"hello", "is not a trace"),
        (
            b'{"rocprofiler-sdk-tool": [{"metadata": {}}]}',
            "rocprofv3's JSON, which is not read; the trace that torch.profiler",
        ),
        (b'"Kind","Agent_Id","Queue_Id"\n"KERNEL_DISPATCH","Agent 4",1\n', "a table of rocprofv3"),
        (b"\n\x8a\x01\x08\x01\x12\r/device:TPU:0\x1a\x0cXLA Modules", r"a profile of XLA \(JAX or TensorFlow\)"),
        (
            b'{"traceEvents": [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},'
            b'{"ph": "X", "pid": 1, "tid": 13, "ts": 1.0, "dur": 50.0, "name": "gemm_fusion"}]}',
            r"a profile of XLA \(JAX or TensorFlow\)",
        ),
        ('{"traceEvents": []}'.encode("utf-16"), "text in UTF-16, as PowerShell writes; save it as UTF-8"),
        (
            b'{"traceEvents": [{"ph": "B", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1},'
            b'{"ph": "E", "pid": 0, "tid": 7, "ts": 9}]}',
            r'no GPU event among 2 events; its events are pairs of begin and end \("ph": "B"\), and only complete ones',
        ),
        (b"Device_id,Model ID,Task ID,Stream ID,Op Name\n0,4294967295,1,2,MatMul\n", "a profile of Ascend"),
        (b'{"a": 1}', "is not a trace"),
        (b"{", "is not a trace"),
        (b"[1, 2", "no GPU event among 0 events"),
        (b'"text"', "is not a trace"),
        (gzip.compress(b"", mtime=0), "is empty"),
        (
            gzip.compress(b'{"traceEvents": []}', mtime=0)[:-12] + b"xxxxxxxxxxxx",
            "damaged|cannot be unpacked|is not a trace",
        ),
        (b"\x1f\x8bnot gzip at all", "cannot be unpacked"),
        (b'{"traceEvents": []}', "no GPU event"),
        (b'{"traceEvents": 5}', "is not a trace|broken"),
        (b'{"traceEvents": [5]}', r"no GPU event among 0 events \(1 entries of the list are no events"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path, data, why):
    path = tmp_path / "t.json"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=why) as caught:
        read_traces([path])
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("t.json")


@pytest.mark.parametrize(
    ("at", "value"),
    [(2, 7), (3, 0xFF), (-8, None), (-1, None)],
    ids=["method", "flags", "checksum", "length"],
)
def test_damaged_gzip_names_the_byte_of_the_packed_file(tmp_path, at, value):
    events = [{"ph": "X", "cat": "kernel", "name": f"k{n * n}", "ts": n, "dur": 1} for n in range(20_000)]
    packed = bytearray(gzip.compress(json.dumps({"traceEvents": events}).encode(), mtime=0))
    packed[at] = packed[at] ^ 0xFF if value is None else value
    path = tmp_path / "t.json.gz"
    path.write_bytes(packed)
    with pytest.raises(TraceError, match=r"damaged gzip near byte \d+ of the packed file") as caught:
        read_traces([path])
    found = int(str(caught.value).partition("near byte ")[2].split()[0])
    assert abs(found - at % len(packed)) <= 8  # zlib looks at the whole header, and at the whole checksum, at once


def test_a_missing_file_and_an_empty_folder_are_named(tmp_path):
    with pytest.raises(TraceError, match="does not exist"):
        read_traces([tmp_path / "none.json"])
    with pytest.raises(TraceError, match=r"holds no trace \(folders in it are not searched\)"):
        read_traces([tmp_path])


def test_a_stream_gives_exactly_what_it_holds():
    stream = ByteStream(io.BytesIO(b"abcdef"), "x", None, Limits())
    assert (stream.read(4), stream.read(4), stream.read(4)) == (b"abcd", b"ef", b"")


def test_links_in_a_tar_are_not_followed(tmp_path):
    import tarfile

    path = tmp_path / "t.tar"
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("a.json")
        info.type = tarfile.SYMTYPE
        info.linkname = "/etc/passwd"
        archive.addfile(info)
    with pytest.raises(TraceError, match="without a trace"), open_streams(path):
        read_traces([path])


def test_a_file_that_cannot_be_read_does_not_take_the_others_of_its_folder_down(tmp_path):
    for rank in range(2):
        file = KinetoFile(distributedInfo={"rank": rank, "world_size": 4})
        file.kernel("k", 0, 5)
        file.write(tmp_path / f"rank{rank}.json")
    (tmp_path / "rank2.json").write_text('{"traceEvents": [{"ph": "X", "ts": nonsense}]}')
    (tmp_path / "notes.json").write_text('{"epochs": 3}')
    unread: list[str] = []
    traces = read_traces([tmp_path], unread=unread)
    assert [trace.rank for trace in traces] == [0, 1]
    assert [line.partition(":")[0] for line in unread] == ["notes.json", "rank2.json"]
    assert all(line.endswith("this file is left out") for line in unread)
    with pytest.raises(TraceError, match=r"notes\.json: is not a trace"):
        read_traces([tmp_path])
    with pytest.raises(TraceError, match=r"notes\.json: is not a trace"):
        read_traces([tmp_path / "notes.json", tmp_path / "rank2.json"], unread=[])


def test_a_damaged_trace_in_an_archive_does_not_take_the_others_down(tmp_path):
    file = KinetoFile()
    file.kernel("k", 0, 5)
    path = tmp_path / "run.tar.gz"
    path.write_bytes(tar_gz({"rank0.json": b'{"traceEvents": [}', "rank1.json": file.to_json()}))
    unread: list[str] = []
    (trace,) = read_traces([path], unread=unread)
    assert trace.rank is not None
    assert trace.file == "run.tar.gz:rank1.json"
    assert len(unread) == 1
    assert "rank0.json" in unread[0]


def test_a_zip_that_python_cannot_read_is_one_line_and_the_other_files_are_read(tmp_path):
    good = zipped({"t.json": one_kernel()})
    newer, name, offset = bytearray(good), bytearray(good), bytearray(good)
    newer[good.index(b"PK\x01\x02") + 6] = 99  # the version that unpacks it
    name[good.index(b"PK\x01\x02") + 46] = 0xFF
    name[good.index(b"PK\x01\x02") + 9] |= 8  # names are UTF-8
    offset[good.index(b"PK\x05\x06") + 16] ^= 0xFF
    packed = bytearray(zipped({"t.json": one_kernel() * 9}, zipfile.ZIP_LZMA))
    packed[60:70] = b"\xff" * 10
    for number, bad in enumerate((newer, name, offset, packed)):
        (tmp_path / f"bad{number}.zip").write_bytes(bad)
    (tmp_path / "rank0.json").write_bytes(one_kernel())
    unread = []
    assert [trace.file for trace in read_traces([tmp_path], unread=unread)] == ["rank0.json"]
    assert sorted(line.partition(".zip")[0] for line in unread) == ["bad0", "bad1", "bad2", "bad3"]
