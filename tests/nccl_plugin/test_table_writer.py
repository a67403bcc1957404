"""From a `ConfigTable` to the plug-in's bytes and back."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagom_overlap.collective import (
    Algorithm,
    CollectiveKind,
    CommConfig,
    CommunicatorId,
    ConfigKey,
    ConfigTable,
    Protocol,
    Transport,
)
from lagom_overlap.collective.sites import NO_CYCLES, cycles_of, keys_of
from lagom_overlap.errors import OutputError, TableError
from lagom_overlap.nccl_plugin.table_layout import GRAIN_BYTES, KINDS
from lagom_overlap.nccl_plugin.table_reader import decode_table, read_table
from lagom_overlap.nccl_plugin.table_writer import ProcessCommunicator, encode_table, write_table

FSDP = CommunicatorId(description="fsdp", ranks=(0, 1, 2, 3))
TP = CommunicatorId(description="tp", ranks=(0, 1))
AR = CollectiveKind.ALL_REDUCE
MIB = 1 << 20


def key(num_bytes=1024, occurrence=0, communicator=FSDP, kind=AR):
    return ConfigKey(communicator=communicator, kind=kind, num_bytes=num_bytes, occurrence=occurrence)


def decoded(rows, cycles=NO_CYCLES, **options):
    return decode_table(encode_table(ConfigTable(rows, cycles=cycles), generation=1, **options).data)


def configs():
    return st.builds(
        lambda algorithm, protocol, channels, grains: CommConfig(
            algorithm=algorithm,
            protocol=protocol,
            num_channels=channels,
            chunk_bytes=grains and grains * (GRAIN_BYTES[protocol] if protocol else 16),
        ),
        st.none() | st.sampled_from(Algorithm),
        st.none() | st.sampled_from(Protocol),
        st.none() | st.integers(1, 64),
        st.none() | st.integers(1, 4096),
    )


@given(
    st.dictionaries(
        st.builds(
            key,
            num_bytes=st.integers(MIB, 1 << 40),
            occurrence=st.integers(0, 5),
            communicator=st.sampled_from([FSDP, TP]),
            kind=st.sampled_from(KINDS),
        ),
        configs(),
        max_size=30,
    ),
    st.integers(1, 2**64 - 1),
    st.none() | st.integers(1, 50),
    st.randoms(use_true_random=False),
)
def test_what_is_written_decides_every_call_as_the_table_does(rows, generation, lease_steps, chance):
    """The steps' calls, those of sites without a row among them, in any order: each has what its row says."""
    calls = [(k.kind, k.num_bytes) for k in rows for _ in range(chance.randint(0, 3))] + [(AR, 3 * MIB)] * 2
    chance.shuffle(calls)
    cycles = {name: keys_of(name, calls) for name in (FSDP, TP)}
    encoded = encode_table(ConfigTable(rows, cycles=cycles, lease_steps=lease_steps), generation=generation)
    table = decode_table(encoded.data)
    assert table.generation == generation
    ranks = {len(name.ranks): name for name in (FSDP, TP)}
    assert {c.lease_calls for c in table.communicators} == {lease_steps and lease_steps * len(calls)}
    found, seen = [], Counter()
    for call in table.calls:
        mine = {d.occurrence: d.config for d in table.decisions if _is_of(d, call)}
        site = ranks[call.communicator.num_ranks], call.kind, call.num_bytes
        config = mine.get(seen[site], mine.get(None, CommConfig()))
        found.append((site, seen[site], config))
        seen[site] += 1
    wanted = [
        ((k.communicator, k.kind, k.num_bytes), k.occurrence, rows.get(k, CommConfig()))
        for c in table.communicators
        for k in cycles[ranks[c.num_ranks]]
    ]
    assert found == wanted
    left_out = {left.key for left in encoded.left_out}
    assert left_out == {
        k for k, config in rows.items() if not config.is_untouched and k not in {*cycles[FSDP], *cycles[TP]}
    }


def _is_of(decision, call):
    return (decision.communicator, decision.kind) == (call.communicator, call.kind) and (
        decision.first_bytes <= call.num_bytes <= decision.last_bytes
    )


def test_one_row_stands_for_all_calls_only_if_all_are_configured_alike():
    same, other = CommConfig(num_channels=2), CommConfig(num_channels=3)
    alike = decoded({key(occurrence=n): same for n in range(3)}).decisions
    assert [(d.occurrence, d.config) for d in alike] == [(None, same)]
    unlike = {key(MIB, occurrence=0): same, key(MIB, occurrence=1): other}
    assert [(d.occurrence, d.config) for d in decoded(unlike, cycles=cycles_of(unlike)).decisions] == [
        (0, same),
        (1, other),
    ]
    partial = decoded({key(MIB): same}, cycles={FSDP: keys_of(FSDP, [(AR, MIB)] * 3)}).decisions
    assert [(d.occurrence, d.config) for d in partial] == [(0, same)]


def test_calls_that_nothing_tells_apart_are_left_out_and_said():
    """No step is known, or they are too small for one, or the step has no such call."""
    rows = {key(size, n): CommConfig(num_channels=2 + n) for size in (1024, MIB) for n in range(2)}
    table = ConfigTable(rows)
    encoded = encode_table(table, generation=1)
    assert decode_table(encoded.data).decisions == ()
    assert [left.key for left in encoded.left_out] == list(rows)
    known = encode_table(replace(table, cycles={FSDP: keys_of(FSDP, [(AR, MIB), (AR, 2 * MIB)])}), generation=1)
    assert [left.key for left in known.left_out] == [key(1024, 0), key(1024, 1), key(MIB, 1)]
    decisions = decode_table(known.data).decisions
    assert [(d.first_bytes, d.occurrence, d.config.num_channels) for d in decisions] == [
        (MIB, None, 2),
        (2 * MIB, None, None),
    ]


def test_a_lease_needs_the_steps_calls():
    rows = {key(MIB): CommConfig(num_channels=2), key(MIB, communicator=TP): CommConfig(num_channels=2)}
    table = ConfigTable(rows, cycles={TP: keys_of(TP, [(AR, MIB)])}, lease_steps=7)
    encoded = encode_table(table, generation=1)
    assert [left.key for left in encoded.left_out] == [key(MIB)]
    found = decode_table(encoded.data)
    assert [(c.description, c.lease_calls) for c in found.communicators] == [("fsdp", None), ("tp", 7)]
    assert [d.communicator.description for d in found.decisions] == ["tp"]


def test_communicators_are_numbered_among_those_the_plug_in_cannot_tell_apart():
    names = [
        CommunicatorId(description="tp", ranks=(0, 1)),
        CommunicatorId(description="dp", ranks=(0, 8)),
        CommunicatorId(description="tp", ranks=(0, 1), creation_order=1),
        CommunicatorId(description="pp", ranks=(0, 4)),
        CommunicatorId(description="all", ranks=tuple(range(16))),
    ]
    nodes = [1, 2, 1, None, 2]
    listed = [ProcessCommunicator(i, n) for i, n in zip(names, nodes, strict=True)]
    table = decoded({}, communicators=listed)
    assert [(c.description, c.num_nodes, c.creation_order) for c in table.communicators] == [
        ("tp", 1, 0),
        ("dp", 2, 0),
        ("tp", 1, 1),
        ("pp", None, 3),
        ("all", 2, 0),
    ]


def test_what_a_tuner_cannot_set_is_left_out_and_said():
    rows = {
        key(1): CommConfig(num_channels=2, num_threads=256, transport=Transport.SHM),
        key(2, kind=CollectiveKind.ALL_TO_ALL): CommConfig(num_channels=2),
    }
    encoded = encode_table(ConfigTable(rows), generation=1)
    assert [d.config for d in decode_table(encoded.data).decisions] == [CommConfig(num_channels=2)]
    assert [(left.key.num_bytes, left.what) for left in encoded.left_out] == [
        (1, "transport cannot be set by a tuner"),
        (1, "num_threads cannot be set by a tuner"),
        (2, "all_to_all never reaches a tuner"),
    ]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CommConfig(num_channels=65), "num_channels is 65, at most 64"),
        (CommConfig(chunk_bytes=8), "chunk_bytes is 8, must be from 16"),
        (CommConfig(protocol=Protocol.LL128, chunk_bytes=1900), "must be from 1920"),
        (CommConfig(chunk_bytes=2**31), "to 1073741824"),
    ],
)
def test_a_knob_outside_the_plug_ins_range_is_an_error(config, message):
    with pytest.raises(TableError, match=message):
        encode_table(ConfigTable({key(): config}), generation=1)


@pytest.mark.parametrize("description", ["x" * 64, "a\nb", "ö" * 32])
def test_a_description_that_does_not_fit_is_an_error(description):
    name = CommunicatorId(description=description, ranks=(0, 1))
    with pytest.raises(TableError, match="must be printable and at most 63 bytes"):
        encode_table(ConfigTable({}), generation=1, communicators=[ProcessCommunicator(name)])


def test_a_row_of_an_unlisted_communicator_a_zero_generation_and_a_missing_call_are_errors():
    table = ConfigTable({key(): CommConfig(num_channels=2)})
    with pytest.raises(ValueError, match="not among the process's communicators"):
        encode_table(table, generation=1, communicators=[ProcessCommunicator(TP)])
    with pytest.raises(ValueError, match="listed twice"):
        encode_table(table, generation=1, communicators=[ProcessCommunicator(FSDP)] * 2)
    with pytest.raises(ValueError, match="generation is 0"):
        encode_table(table, generation=0)
    with pytest.raises(TableError, match="occurrence 3, but 2 calls"):
        encode_table(
            ConfigTable({key(occurrence=3): CommConfig(num_channels=2)}),
            generation=1,
            calls_per_step={(FSDP, AR, 1024): 2},
        )


def test_a_table_is_put_in_place_whole_private_and_over_an_older_one(tmp_path):
    path = tmp_path / "table.bin"
    path.write_bytes(b"older")
    path.chmod(0o644)
    data = encode_table(ConfigTable({key(): CommConfig(num_channels=2)}), generation=3).data
    with path.open("rb") as reader:
        write_table(path, data)
        assert reader.read() == b"older"
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_table(path).generation == 3
    assert [p.name for p in tmp_path.iterdir()] == ["table.bin"]


def test_a_folder_that_is_missing_is_said(tmp_path):
    with pytest.raises(OutputError, match="cannot write"):
        write_table(tmp_path / "missing" / "table.bin", b"")
    with pytest.raises(TableError, match="cannot read"):
        read_table(tmp_path / "table.bin")
