"""From a `ConfigTable` to the plug-in's bytes and back."""

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
from lagom_overlap.errors import OutputError, TableError
from lagom_overlap.nccl_plugin import ProcessCommunicator, decode_table, encode_table, read_table, write_table
from lagom_overlap.nccl_plugin.table_layout import GRAIN_BYTES, KINDS

FSDP = CommunicatorId(description="fsdp", ranks=(0, 1, 2, 3))
TP = CommunicatorId(description="tp", ranks=(0, 1))
AR = CollectiveKind.ALL_REDUCE


def key(num_bytes=1024, occurrence=0, communicator=FSDP, kind=AR):
    return ConfigKey(communicator=communicator, kind=kind, num_bytes=num_bytes, occurrence=occurrence)


def decoded(rows, **options):
    return decode_table(encode_table(ConfigTable(rows), generation=1, **options).data)


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
            num_bytes=st.integers(1, 1 << 40),
            occurrence=st.integers(0, 5),
            communicator=st.sampled_from([FSDP, TP]),
            kind=st.sampled_from(KINDS),
        ),
        configs(),
        max_size=30,
    ),
    st.integers(1, 2**64 - 1),
)
def test_what_is_written_decides_every_call_as_the_table_does(rows, generation):
    encoded = encode_table(ConfigTable(rows), generation=generation)
    table = decode_table(encoded.data)
    assert (table.generation, encoded.left_out) == (generation, ())
    for k, config in rows.items():
        of_site = {
            d.occurrence: d.config
            for d in table.decisions
            if (d.communicator.description, d.kind) == (k.communicator.description, k.kind)
            and d.first_bytes <= k.num_bytes <= d.last_bytes
        }
        own = {n: found for n, found in of_site.items() if n is not None}
        assert (own.get(k.occurrence, CommConfig()) if own else of_site.get(None, CommConfig())) == config


def test_one_row_stands_for_all_calls_only_if_all_are_configured_alike():
    same, other = CommConfig(num_channels=2), CommConfig(num_channels=3)
    alike = decoded({key(occurrence=n): same for n in range(3)}).decisions
    assert [(d.occurrence, d.config) for d in alike] == [(None, same)]
    differing = decoded({key(occurrence=0): same, key(occurrence=1): other}).decisions
    assert [(d.occurrence, d.config) for d in differing] == [(0, same), (1, other)]
    partial = decoded({key(occurrence=0): same}, calls_per_step={(FSDP, AR, 1024): 3}).decisions
    assert [(d.occurrence, d.config) for d in partial] == [(0, same)]


def test_what_more_than_half_of_the_calls_have_is_written_for_jobs_without_step_marks():
    most, other = CommConfig(num_channels=2), CommConfig(num_channels=3)
    rows = {key(occurrence=0): most, key(occurrence=1): other, key(occurrence=2): most}
    assert [(d.occurrence, d.config) for d in decoded(rows).decisions] == [
        (0, most),
        (1, other),
        (2, most),
        (None, most),
    ]
    with_others = decoded({key(occurrence=n): most for n in (0, 2)}, calls_per_step={(FSDP, AR, 1024): 3}).decisions
    assert [(d.occurrence, d.config) for d in with_others] == [(0, most), (1, CommConfig()), (2, most), (None, most)]
    unknown = decoded(rows, calls_per_step={(FSDP, AR, 1024): 0}).decisions
    assert [d.occurrence for d in unknown] == [0, 1, 2]  # nobody knows of how many


def test_an_untouched_call_has_no_row_and_is_not_covered_by_the_others():
    rows = {key(occurrence=0): CommConfig(num_channels=2), key(occurrence=1): CommConfig()}
    assert [d.occurrence for d in decoded(rows).decisions] == [0]


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
