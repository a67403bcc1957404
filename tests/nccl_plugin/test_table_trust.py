"""A table that is damaged, foreign or writable by others is refused with one line; the job runs as without it."""

import ctypes
import os
import zlib

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tuner_rows import encode_rows

from lagom_overlap.collective import CollectiveKind, CommConfig, CommunicatorId, ConfigTable
from lagom_overlap.collective.sites import keys_of
from lagom_overlap.errors import TableError
from lagom_overlap.nccl_plugin import table_layout as layout
from lagom_overlap.nccl_plugin.fake_host import HostMode
from lagom_overlap.nccl_plugin.table_reader import decode_table
from lagom_overlap.nccl_plugin.table_writer import encode_table, table_checksum, write_table

MIB = 1 << 20
AR = CollectiveKind.ALL_REDUCE
ROWS = {(AR, 64 * MIB, n): CommConfig(num_channels=n + 1) for n in range(3)}
HEADER, ROW, CALL = layout.HEADER, layout.DECISION, layout.CYCLE_CALL


def edit(data, dtype, at, **fields):
    """`data` with some fields of one record changed and the checksum made right again."""
    record = np.frombuffer(data, dtype, 1, at).copy()
    for field, value in fields.items():
        record[field] = value
    data = data[:at] + record.tobytes() + data[at + dtype.itemsize :]
    if "checksum" not in fields:
        header = np.frombuffer(data, HEADER, 1).copy()
        header["checksum"] = table_checksum(data)
        data = header.tobytes() + data[HEADER.itemsize :]
    return data


def edit_header(**fields):
    return lambda data: edit(data, HEADER, 0, **fields)


def edit_communicator(**fields):
    return lambda data: edit(data, layout.COMMUNICATOR, HEADER.itemsize, **fields)


def edit_row(**fields):
    return lambda data: edit(data, ROW, HEADER.itemsize + layout.COMMUNICATOR.itemsize, **fields)


def edit_call(**fields):
    """The last call of the step."""
    return lambda data: edit(data, CALL, len(data) - CALL.itemsize, **fields)


DAMAGES = {
    "empty": lambda data: b"",
    "a header cut short": lambda data: data[:40],
    "a row cut short": lambda data: data[:-1],
    "a byte too many": lambda data: data + b"\0",
    "a flipped bit": lambda data: data[:-5] + bytes([data[-5] ^ 4]) + data[-4:],
    "another magic": edit_header(magic=1),
    "another version": edit_header(version=1),
    "a wrong checksum": edit_header(checksum=1),
    "generation 0": edit_header(generation=0),
    "another header size": edit_header(header_bytes=128),
    "another row size": edit_header(decision_bytes=47),
    "another call size": edit_header(call_bytes=24),
    "more calls than there are": edit_header(num_calls=4),
    "far more calls": edit_header(num_calls=0xFFFFFFFF),
    "a call of no communicator": edit_call(communicator=1),
    "a call of an unknown kind": edit_call(kind=5),
    "a call of another kind than any row": edit_call(kind=0),
    "a call of a size that no row has": edit_call(num_bytes=256 * MIB),
    "a call that is too small for a step": edit_call(num_bytes=MIB - 1),
    "a call of too many bytes": edit_call(num_bytes=2**63),
    "more rows than there are": edit_header(num_decisions=4),
    "far more rows": edit_header(num_decisions=0xFFFFFFFF, num_communicators=0xFFFFFFFF),
    "a size that wraps": edit_header(file_bytes=2**64 - 1),
    "unknown flags": edit_header(flags=1),
    "a description without an end": edit_communicator(description=b"x" * 64),
    "a control character": edit_communicator(description=b"a\nb"),
    "more nodes than ranks": edit_communicator(num_nodes=9),
    "no ranks": edit_communicator(num_ranks=0, num_nodes=0),
    "a communicator out of range": edit_row(communicator=1),
    "an unknown kind": edit_row(kind=5),
    "no bytes": edit_row(first_bytes=0),
    "too many bytes": edit_row(last_bytes=2**63),
    "an unknown algorithm": edit_row(algorithm=7),
    "a negative algorithm": edit_row(algorithm=-2),
    "an unknown protocol": edit_row(protocol=3),
    "too many channels": edit_row(num_channels=65),
    "negative channels": edit_row(num_channels=0xFFFFFFFF),
    "a chunk below a grain": edit_row(chunk_bytes=15),
    "a chunk below its protocol's grain": edit_row(protocol=1, chunk_bytes=1919),
    "a huge chunk": edit_row(chunk_bytes=2**40),
    "an occurrence beyond what it holds": edit_row(occurrence=1 << 16),
    "a range that ends before it begins": edit_row(last_bytes=1),
    "rows that disagree on their range": edit_row(last_bytes=65 * MIB),
    "ranges that overlap": edit_row(first_bytes=MIB),
    "the same call twice": edit_row(occurrence=1),
    "more channels than NCCL has": edit_communicator(max_channels=65),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_table_is_refused_with_one_line_and_touches_nothing(open_nccl, tmp_path, monkeypatch, plugin, damage):
    path = tmp_path / "table.bin"
    write_table(path, DAMAGES[damage](encode_rows(ROWS)))
    monkeypatch.setenv("LAGOM_TABLE", str(path))
    nccl = open_nccl("2.30")
    comm = nccl.comm()
    warnings = [line for line in nccl.take_log() if line.startswith("WARN")]
    assert len(warnings) == 1
    assert "refused" in warnings[0]
    assert comm.run(AR, 64 * MIB).is_untouched
    with pytest.raises(TableError, match="the plug-in refused the table"):
        plugin.swap()


@pytest.mark.parametrize(
    "damage",
    [
        *("a row cut short", "a flipped bit", "another version", "more rows than there are", "ranges that overlap"),
        *(name for name in DAMAGES if "call" in name),
    ],
)
def test_the_python_reader_refuses_it_too(damage):
    with pytest.raises(TableError):
        decode_table(DAMAGES[damage](encode_rows(ROWS)))


def test_the_checksum_is_plain_crc32_with_its_own_field_zero():
    data = encode_rows(ROWS)
    at = HEADER.fields["checksum"][1]
    stored = int.from_bytes(data[at : at + 4], "little")
    assert stored == table_checksum(data) == zlib.crc32(data[:at] + bytes(4) + data[at + 4 :])


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_table_that_others_may_write_is_refused(open_nccl, use_table, mode):
    use_table(ROWS).chmod(mode)
    nccl = open_nccl("2.30")
    assert nccl.comm().run(AR, 64 * MIB).is_untouched
    assert "only its owner may write" in "\n".join(nccl.take_log())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: gives a file to another user")
def test_a_table_of_another_user_is_refused_from_a_file_and_taken_from_memory(open_nccl, use_table, plugin):
    """Root-squashed NFS and EFS give files to another user: online tuning hands its tables over in memory."""
    path = use_table({(AR, 64 * MIB, 0): CommConfig(num_channels=5)})
    os.chown(path, 65534, -1)
    nccl = open_nccl("2.30")
    comm = nccl.comm()
    assert comm.run(AR, 64 * MIB).is_untouched
    assert "regular file of this user" in "\n".join(nccl.take_log())
    with pytest.raises(TableError, match="regular file of this user"):
        plugin.swap()
    plugin.prepare(path.read_bytes(), 0)
    plugin.commit(0)
    assert comm.run(AR, 64 * MIB).tuner_channels == 5


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe"])
def test_a_path_that_is_no_file_is_refused_and_never_waited_for(open_nccl, tmp_path, monkeypatch, kind):
    path = tmp_path / "odd"
    if kind == "folder":
        path.mkdir(mode=0o700)
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    monkeypatch.setenv("LAGOM_TABLE", str(path))
    nccl = open_nccl("2.28")
    assert nccl.comm().run(AR, 64 * MIB).is_untouched
    assert len([line for line in nccl.take_log() if line.startswith("WARN")]) == 1


def test_each_rank_finds_its_own_table_by_a_pattern(open_nccl, tmp_path, monkeypatch):
    write_table(tmp_path / f"rank3-{os.getpid()}.bin", encode_rows({(AR, MIB, 0): CommConfig(num_channels=5)}))
    monkeypatch.setenv("LAGOM_TABLE", str(tmp_path / "rank%r-%p.bin"))
    monkeypatch.setenv("RANK", "3")
    assert open_nccl("2.30").comm().run(AR, MIB).tuner_channels == 5


def test_a_swap_takes_effect_at_the_next_call_and_a_refused_one_changes_nothing(open_nccl, use_table, plugin):
    path = use_table({(AR, MIB, 0): CommConfig(num_channels=2)}, generation=1)
    comm = open_nccl("2.30").comm()
    assert comm.run(AR, MIB).tuner_channels == 2
    for generation in range(2, 6):
        write_table(path, encode_rows({(AR, MIB, 0): CommConfig(num_channels=generation)}, generation=generation))
        assert plugin.generation == generation - 1  # the file alone changes nothing
        with pytest.raises(TableError, match="another generation"):
            plugin.swap(generation + 1)
        assert plugin.generation == generation - 1
        plugin.swap(generation)
        assert (comm.run(AR, MIB).tuner_channels, plugin.generation) == (generation, generation)
    path.write_bytes(b"broken")
    with pytest.raises(TableError, match="another size"):
        plugin.swap()
    path.unlink()
    with pytest.raises(TableError, match="cannot be opened"):
        plugin.swap()
    assert comm.run(AR, MIB).tuner_channels == 5


def test_a_file_changed_in_place_without_a_swap_changes_nothing(open_nccl, use_table):
    path = use_table({(AR, MIB, 0): CommConfig(num_channels=2)})
    comm = open_nccl("2.30").comm()
    with path.open("r+b") as file:
        file.truncate(0)  # a mapped table would now kill the job with SIGBUS
    assert comm.run(AR, MIB).tuner_channels == 2


def test_a_table_can_be_installed_from_memory_before_and_after_a_communicator_is_made(open_nccl, plugin):
    plugin.install(encode_rows({(AR, MIB, 0): CommConfig(num_channels=2)}))
    comm = open_nccl("2.30").comm()
    assert comm.run(AR, MIB).tuner_channels == 2
    plugin.install(encode_rows({(AR, MIB, 0): CommConfig(num_channels=3)}, generation=8), 8)
    assert (comm.run(AR, MIB).tuner_channels, plugin.generation) == (3, 8)
    with pytest.raises(TableError, match="another size"):
        plugin.install(b"x" * 10)


def test_a_chunk_belongs_to_the_decision_of_its_call_though_the_table_was_swapped_between(open_nccl, plugin):
    def rows(chunk_bytes):
        return encode_rows({(AR, 64 * MIB, 0): CommConfig(num_channels=2, chunk_bytes=chunk_bytes)})

    plugin.install(rows(4096))
    comm = open_nccl("2.30").comm()
    comm.run(AR, 64 * MIB, HostMode.SIMULATE)  # asked, not launched
    plugin.install(rows(8192))
    assert set(comm.run(AR, 64 * MIB).chunk_bytes) == {8192}


def test_the_largest_table_is_taken_and_one_row_more_is_not_written(plugin, open_nccl):
    rows = {(AR, 4096 * (n + 1), 0): CommConfig(num_channels=1 + n % 64) for n in range(layout.MAX_DECISIONS)}
    plugin.install(encode_rows(rows))
    comm = open_nccl("2.30").comm()
    for n in (0, 77, layout.MAX_DECISIONS - 1):
        assert comm.run(AR, 4096 * (n + 1)).tuner_channels == 1 + n % 64
    with pytest.raises(TableError, match="16385 rows"):
        encode_rows({**rows, (AR, 1, 0): CommConfig(num_channels=1)})


def test_cycles_out_of_the_order_of_their_communicators_are_refused(plugin):
    names = [CommunicatorId(description=f"c{n}", ranks=(n, n + 1)) for n in range(2)]
    cycles = {name: keys_of(name, [(AR, MIB)]) for name in names}
    data = encode_table(ConfigTable({}, cycles=cycles), generation=1).data
    plugin.install(data)
    turned = edit(edit_call(communicator=0)(data), CALL, len(data) - 2 * CALL.itemsize, communicator=1)
    for take in (plugin.install, decode_table):
        with pytest.raises(TableError):
            take(turned)


def test_the_longest_cycle_is_taken_followed_to_its_end_and_one_call_more_is_not_written(plugin, open_nccl):
    rows = {(AR, MIB, layout.MAX_CALLS - 2): CommConfig(num_channels=7), (AR, MIB, 0): CommConfig(num_channels=5)}
    step = [(AR, MIB)] * (layout.MAX_CALLS - 1)
    plugin.install(encode_rows(rows, cycle=[*step, (AR, 2 * MIB)]))
    comm = open_nccl("2.28").comm()
    assert comm.run(AR, MIB).tuner_channels == 5
    for _ in range(layout.MAX_CALLS - 3):
        comm.ask_raw(AR, MIB, num_pipe_ops=1, costs_us=[5.0] * 21)
    assert [comm.run(AR, size).tuner_channels for size in (MIB, 2 * MIB, MIB)] == [7, 0, 5]
    with pytest.raises(TableError, match="65537 calls"):
        encode_rows(rows, cycle=[*step, *step[:2]])


def test_a_communicator_made_between_prepare_and_commit_decides_by_the_new_table(open_nccl, plugin):
    nccl = open_nccl("2.30")
    nccl.comm(2)
    plugin.prepare(encode_rows({(AR, MIB, 0): CommConfig(num_channels=2)}), 1)
    comm = nccl.comm()
    assert comm.run(AR, MIB).is_untouched
    plugin.commit(1)
    assert comm.run(AR, MIB).tuner_channels == 2
    with pytest.raises(TableError, match="was not prepared"):
        plugin.commit(1)


def with_fields(data, changes):
    """Fields of any record set to any bits, under a right checksum."""
    header = np.frombuffer(data, HEADER, 1)[0]
    kinds = [HEADER] + [layout.COMMUNICATOR] * int(header["num_communicators"]) + [ROW] * int(header["num_decisions"])
    kinds += [CALL] * int(header["num_calls"])
    starts = [sum(kind.itemsize for kind in kinds[:number]) for number in range(len(kinds))]
    for place, field, value in changes:
        number = place % len(kinds)
        name = kinds[number].names[field % len(kinds[number].names)]
        if name in ("checksum", "num_communicators", "num_decisions", "num_calls"):
            continue
        width = kinds[number][name].itemsize
        bits = np.frombuffer((value % (1 << 8 * width)).to_bytes(width, "little"), kinds[number][name])[0]
        data = edit(data, kinds[number], starts[number], **{name: bits})
    return data


VALUES = st.sampled_from([0, 1, 2, 3, 6, 7, 63, 64, 65, 511, 512, 4096, 65535, 65536, 1 << 24, 1 << 31, (1 << 64) - 1])


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 12), VALUES), max_size=3))
@example([(5, 0, 1 << 20)])  # a call of a step that no row is for
@example([(1, 1, 0)])  # a communicator of no rank: found by the fuzzer
@example([(1, 0, (1 << 512) - 1), (3, 2, 1)])  # a description of 64 bytes
@example([(2, 4, 65536)])
def test_our_reader_takes_exactly_the_tables_that_the_plugin_takes(plugin_library, changes):
    data = with_fields(encode_rows(ROWS), changes)
    plugin = ctypes.CDLL(str(plugin_library))
    plugin.lagom_install.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64]
    is_taken = plugin.lagom_install(data, len(data), 0) == 0
    assert _takes(data) == is_taken


def _takes(data):
    try:
        decode_table(data)
    except TableError:
        return False
    return True
