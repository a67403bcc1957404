"""The capability map: what it refuses of settings, and of files."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from lagom_overlap.collective import Algorithm, CollectiveKind, CommConfig, Protocol
from lagom_overlap.errors import OutputError, TableError
from lagom_overlap.nccl_plugin.box import Box
from lagom_overlap.nccl_plugin.capability import (
    MAX_FILE_BYTES,
    MAX_ROWS,
    BoxMaps,
    CapabilityMap,
    Knobs,
    MapKey,
    MapRow,
    SettingOutcome,
    is_same_chunk,
    judged,
    read_map,
    write_map,
)
from lagom_overlap.units import KIB, MIB

KEY = MapKey(nccl=(2, 30, 7), gpu="NVIDIA H100 80GB HBM3", num_gpus=1, ranks_per_gpu=2, topology="0123456789abcdef")
ALL_REDUCE = CollectiveKind.ALL_REDUCE


def row(asked: Knobs, ran: Knobs, outcome: SettingOutcome = SettingOutcome.AS_ASKED, num_bytes: int = MIB) -> MapRow:
    return MapRow(kind=ALL_REDUCE, num_bytes=num_bytes, asked=asked, ran=ran, outcome=outcome, time_s=1e-4)


def tree(num_channels: int | None = 8, chunk_bytes: int | None = None) -> Knobs:
    return Knobs(Algorithm.TREE, Protocol.SIMPLE, num_channels, chunk_bytes)


def map_of(*rows: MapRow, max_channels: int | None = 24) -> CapabilityMap:
    return CapabilityMap(key=KEY, measured_on="2026-11-22", max_channels=max_channels, rows=rows)


def config(knobs: Knobs) -> CommConfig:
    return CommConfig(
        algorithm=knobs.algorithm,
        protocol=knobs.protocol,
        num_channels=knobs.num_channels,
        chunk_bytes=knobs.chunk_bytes,
    )


def test_a_chunk_that_was_clamped_at_every_size_is_refused_and_the_one_it_became_is_not() -> None:
    found = map_of(
        row(tree(chunk_bytes=MIB), tree(chunk_bytes=512 * KIB), SettingOutcome.ALIASED),
        row(tree(chunk_bytes=MIB), tree(chunk_bytes=512 * KIB), SettingOutcome.ALIASED, num_bytes=16 * MIB),
        row(tree(chunk_bytes=512 * KIB), tree(chunk_bytes=512 * KIB)),
    )
    assert "ran as 524288" in (found.refuses(ALL_REDUCE, config(tree(chunk_bytes=MIB))) or "")
    assert found.refuses(ALL_REDUCE, config(tree(chunk_bytes=512 * KIB))) is None
    assert found.refuses(CollectiveKind.ALL_GATHER, config(tree(chunk_bytes=MIB))) is None  # not measured


def test_a_chunk_that_ran_at_one_size_is_not_refused_for_what_became_of_it_at_another() -> None:
    found = map_of(
        row(tree(chunk_bytes=MIB), tree(chunk_bytes=512 * KIB), SettingOutcome.CLAMPED),
        row(tree(chunk_bytes=MIB), tree(chunk_bytes=MIB), num_bytes=16 * MIB),
    )
    assert found.refuses(ALL_REDUCE, config(tree(chunk_bytes=MIB))) is None


def test_more_channels_than_the_communicator_has_are_refused_also_where_nothing_was_measured() -> None:
    found = map_of()
    assert "has 24" in (found.refuses(ALL_REDUCE, CommConfig(num_channels=32)) or "")
    assert found.refuses(ALL_REDUCE, CommConfig(num_channels=24)) is None
    assert map_of(max_channels=None).refuses(ALL_REDUCE, CommConfig(num_channels=32)) is None


def test_an_implementation_that_gave_a_wrong_result_or_never_ran_is_refused() -> None:
    wrong = map_of(row(tree(), tree(), SettingOutcome.WRONG), row(tree(16), tree(16)))
    assert "wrong results" in (wrong.refuses(ALL_REDUCE, config(tree(16))) or "")
    ring = Knobs(Algorithm.RING, Protocol.SIMPLE, 8)
    other = map_of(row(tree(), ring, SettingOutcome.NOT_APPLIED))
    assert "was not what ran" in (other.refuses(ALL_REDUCE, config(tree(16))) or "")


@pytest.mark.parametrize(
    ("asked", "ran", "outcome"),
    [
        (Knobs(), tree(24, 512 * KIB), SettingOutcome.AS_ASKED),
        (tree(8), tree(8, 512 * KIB), SettingOutcome.AS_ASKED),
        (tree(32), tree(24), SettingOutcome.CLAMPED),
        (tree(8, MIB), tree(8, 512 * KIB), SettingOutcome.CLAMPED),
        (tree(8), Knobs(Algorithm.RING, Protocol.SIMPLE, 8), SettingOutcome.NOT_APPLIED),
        (tree(8), Knobs(), SettingOutcome.AS_ASKED),  # not told
    ],
)
def test_what_ran_is_judged_by_what_was_asked(asked: Knobs, ran: Knobs, outcome: SettingOutcome) -> None:
    assert judged(asked, ran, is_right=True) is outcome
    assert judged(asked, ran, is_right=False) is SettingOutcome.WRONG


def test_a_chunk_counts_as_asked_down_to_the_protocols_grain() -> None:
    # The H100's record: 64, 128 and 256 KiB asked of LL128 became these.
    for asked, ran in ((64 * KIB, 65280), (128 * KIB, 130560), (256 * KIB, 261120), (576000, 576000)):
        assert is_same_chunk(asked, ran, Protocol.LL128)
    assert not is_same_chunk(MIB, 512 * KIB, Protocol.SIMPLE)


def test_a_map_comes_back_as_it_was_written(tmp_path: Path) -> None:
    found = map_of(row(tree(chunk_bytes=MIB), tree(chunk_bytes=512 * KIB), SettingOutcome.ALIASED))
    path = write_map(found, tmp_path / "new" / "folder")
    assert path.name == "nccl-2.30.7_nvidia-h100-80gb-hbm3_1x2_0123456789abcdef.json"
    assert read_map(path) == found
    assert list(path.parent.iterdir()) == [path]  # nothing temporary is left
    with pytest.raises(OutputError, match="cannot create"):
        write_map(found, path / "below a file")


def changed(**keys: object) -> bytes:
    held = json.loads(msgspec.json.encode(map_of(row(tree(), tree()))))
    return json.dumps(held | keys).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        changed(extra=1),
        changed(version=2),
        changed(max_channels=65),
        changed(max_channels="24"),
        changed(measured_on="yesterday"),
        changed(key={"nccl": [2, 30], "gpu": "x", "num_gpus": 1, "ranks_per_gpu": 1, "topology": "0" * 16}),
        changed(rows=[{"kind": "all_reduce"}]),
        changed(rows=[{"kind": "gossip", "num_bytes": 1, "asked": {}, "ran": {}, "outcome": "as asked"}]),
        changed(rows=[{"kind": "all_reduce", "num_bytes": 0, "asked": {}, "ran": {}, "outcome": "as asked"}]),
        changed(rows=[{"kind": "all_reduce", "num_bytes": 1, "asked": {"x": 1}, "ran": {}, "outcome": "as asked"}]),
        changed(
            rows=[{"kind": "all_reduce", "num_bytes": 1, "asked": {}, "ran": {}, "outcome": "as asked"}]
            * (MAX_ROWS + 1)
        ),
        b" " * (MAX_FILE_BYTES + 1),
    ],
)
def test_a_file_that_is_no_map_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "map.json"
    path.write_bytes(data)
    with pytest.raises(TableError, match=r"map\.json"):
        read_map(path)


def test_a_map_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="cannot read"):
        read_map(tmp_path / "absent.json")


BOX = Box(gpu=KEY.gpu, num_gpus=8, topology=KEY.topology)


def test_a_boxs_maps_are_found_by_ranks_and_only_within_a_node(tmp_path: Path) -> None:
    shared = map_of()
    whole = msgspec.structs.replace(shared, key=msgspec.structs.replace(KEY, num_gpus=8, ranks_per_gpu=1))
    for each in (shared, whole):
        write_map(each, tmp_path)
    maps = BoxMaps((2, 30, 7), BOX, tmp_path)
    one = BoxMaps((2, 30, 7), Box(gpu=KEY.gpu, num_gpus=1, topology=KEY.topology), tmp_path)
    assert one.of(num_ranks=2, num_nodes=1) == shared
    assert maps.of(num_ranks=2, num_nodes=1) is None  # eight GPUs: two ranks do not share one
    assert maps.of(num_ranks=8, num_nodes=1) == whole
    assert maps.of(num_ranks=8, num_nodes=2) is None
    assert maps.of(num_ranks=8, num_nodes=None) is None
    assert maps.of(num_ranks=4, num_nodes=1) is None
    assert set(maps.every()) == {shared, whole}
    assert BoxMaps((2, 29, 7), BOX, tmp_path).every() == ()
    assert BoxMaps(None, BOX, tmp_path).every() == BoxMaps((2, 30, 7), None, tmp_path).every() == ()


def test_a_damaged_map_is_said_once_and_stands_in_nobodys_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_map(map_of(), tmp_path).write_text("{}")
    maps = BoxMaps((2, 30, 7), replace(BOX, num_gpus=1), tmp_path)
    assert [maps.of(num_ranks=2, num_nodes=1) for _ in range(2)] == [None, None]
    assert maps.every() == ()
    assert len(caplog.records) == 1
    assert "support matrix" in caplog.text


def test_a_map_under_another_maps_name_is_not_taken(tmp_path: Path) -> None:
    other = msgspec.structs.replace(KEY, nccl=(2, 29, 7))
    path = write_map(msgspec.structs.replace(map_of(), key=other), tmp_path)
    path.rename(tmp_path / KEY.file_name)
    assert BoxMaps((2, 30, 7), replace(BOX, num_gpus=1), tmp_path).of(num_ranks=2, num_nodes=1) is None
