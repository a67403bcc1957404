"""Each form read back by a reader of its own, written from what the program that takes it documents."""

import shlex

import pytest

from lagom_overlap.collective import (
    Algorithm,
    CollectiveKind,
    CommConfig,
    CommunicatorId,
    ConfigKey,
    ConfigTable,
    Protocol,
)
from lagom_overlap.collective.sites import keys_of
from lagom_overlap.errors import JobError
from lagom_overlap.export.deployment import Deployment, within_maps
from lagom_overlap.export.env_file import env_file
from lagom_overlap.export.megatron_yaml import megatron_yaml
from lagom_overlap.export.nvidia_csv import nvidia_csv
from lagom_overlap.export.plugin_table import plugin_table
from lagom_overlap.nccl_plugin.box import Box
from lagom_overlap.nccl_plugin.capability import BoxMaps, CapabilityMap, MapKey, write_map
from lagom_overlap.nccl_plugin.table_reader import decode_table
from lagom_overlap.nccl_plugin.table_writer import ProcessCommunicator
from lagom_overlap.units import KIB, MIB

AG, RS, AR, A2A = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_TO_ALL,
)
FSDP = CommunicatorId(description="fsdp", ranks=tuple(range(8)))
TP = CommunicatorId(description="tp", ranks=tuple(range(4)))
RING = {"algorithm": Algorithm.RING, "protocol": Protocol.SIMPLE}


def deployment(rows, *, calls=None, num_nodes=1, max_channels=None, step=()):
    table = {
        ConfigKey(communicator=name, kind=kind, num_bytes=num_bytes, occurrence=n): CommConfig(**knobs)
        for (name, kind, num_bytes, n), knobs in rows.items()
    }
    names = dict.fromkeys(key.communicator for key in table)
    return Deployment(
        table=ConfigTable(table, cycles={name: keys_of(name, step) for name in names} if step else {}),
        communicators=tuple(ProcessCommunicator(name, num_nodes, max_channels) for name in names),
        calls_per_step=calls or {},
    )


def read_csv(content):
    """As plugins/tuner/example/plugin.c reads it: comments and empty lines skipped, commas, at least eight fields."""
    rows = []
    for line in content.decode().splitlines():
        assert len(line) < 255
        if line and not line.startswith("#"):
            kind, least, most, algorithm, protocol, *numbers = (field.strip(" \t") for field in line.split(","))
            rows.append((kind, int(least), int(most), algorithm, protocol, *map(int, numbers)))
    return rows


def read_env(content):
    """As a shell or a container runtime reads it."""
    lines = [line for line in content.decode().splitlines() if line and not line.startswith("#")]
    found = dict(line.split("=", 1) for line in lines)
    assert all(shlex.split(f"'{value}'") == [value] for value in found.values())
    return found


def read_yaml(content):
    """The two levels of mappings of whole numbers that Megatron's file has."""
    found, group = {}, ""
    for line in content.decode().splitlines():
        if line.startswith("#") or line == "{}":
            continue
        if line.startswith("  "):
            key, value = line.split(":")
            found[group][key.strip()] = int(value)
        else:
            group = line.removesuffix(":")
            found[group] = {}
    return found


def said(exported, word):
    return any(word in note for note in exported.not_carried)


def test_the_plug_in_table_holds_every_row_and_says_what_a_tuner_cannot_set():
    exported = plugin_table(
        deployment(
            {
                (FSDP, AG, 8 * MIB, 0): {**RING, "num_channels": 4, "chunk_bytes": 256 * KIB},
                (FSDP, AG, 8 * MIB, 1): {"num_channels": 2, "num_threads": 256},
                (TP, AR, MIB, 0): {"num_channels": 1},
                (FSDP, A2A, MIB, 0): {"num_channels": 8},
            },
            calls={(FSDP, AG, 8 * MIB): 3},
            step=[(AG, 8 * MIB), (AR, MIB), (AG, 8 * MIB), (AG, 8 * MIB)],
        )
    )
    read = decode_table(exported.content)
    assert len(read.calls) == 2 * 4
    assert all(d.first_bytes <= (8 * MIB if d.kind is AG else MIB) <= d.last_bytes for d in read.decisions)
    rows = {
        (d.communicator.description, d.kind, d.occurrence): d.config
        for d in read.decisions
        if not d.config.is_untouched
    }
    assert rows == {
        ("fsdp", AG, 0): CommConfig(**RING, num_channels=4, chunk_bytes=256 * KIB),
        ("fsdp", AG, 1): CommConfig(num_channels=2),
        ("tp", AR, None): CommConfig(num_channels=1),
    }
    assert said(exported, "num_threads cannot be set")
    assert said(exported, "all_to_all never reaches a tuner")


def test_the_csv_has_a_row_per_call_site_of_one_configuration():
    exported = nvidia_csv(
        deployment(
            {
                (FSDP, AG, 8 * MIB, 0): {**RING, "num_channels": 4},
                (FSDP, AG, 8 * MIB, 1): {**RING, "num_channels": 4},
                (TP, AR, MIB, 0): {"algorithm": Algorithm.TREE, "protocol": Protocol.LL128, "chunk_bytes": 64 * KIB},
            },
            num_nodes=2,
            max_channels=24,
        )
    )
    assert read_csv(exported.content) == [
        ("allgather", 5931642, 11863283, "ring", "simple", 0, 2, 8),  # sqrt(2) either way
        ("allreduce", MIB, 1482910, "tree", "ll128", 0, 2, 4),  # smaller ones are left alone
    ]
    assert said(exported, "1 channel for every call that has no row")
    assert said(exported, "chunk_bytes has no column")


@pytest.mark.parametrize(
    ("rows", "calls", "word"),
    [
        (
            {(FSDP, AG, MIB, 0): RING | {"num_channels": 1}, (FSDP, AG, MIB, 1): RING | {"num_channels": 2}},
            {},
            "differ",
        ),
        ({(FSDP, AG, MIB, 0): RING | {"num_channels": 1}}, {(FSDP, AG, MIB): 2}, "differ"),
        ({(FSDP, AG, MIB, 0): {"num_channels": 1}}, {}, "must name algorithm"),
        ({(FSDP, A2A, MIB, 0): RING | {"num_channels": 1}}, {}, "never reaches a tuner"),
    ],
)
def test_the_csv_leaves_out_and_names_what_a_row_cannot_say(rows, calls, word):
    exported = nvidia_csv(deployment(rows, calls=calls))
    assert read_csv(exported.content) == []
    assert said(exported, word)


@pytest.mark.parametrize("most", [None, 3, 24])
def test_a_gather_is_given_no_channels_whatever_its_communicator_had_when_it_was_tuned(most):
    """NVIDIA's plug-in passes them on unchecked, and NCCL 2.29 and 2.30 index an uneven gather's channels by them."""
    rows = {(FSDP, kind, 8 * MIB, 0): RING | {"num_channels": 4} for kind in (AG, AR)}
    exported = nvidia_csv(deployment(rows, max_channels=most))
    channels = {row[0]: row[5] for row in read_csv(exported.content)}
    assert channels == {"allgather": 0, "allreduce": min(4, most or 4)}
    assert said(exported, "an uneven all-gather")
    assert said(plugin_table(deployment(rows, max_channels=most)), "uneven all-gather")


def test_the_sizes_of_the_csv_are_divided_among_all_that_are_called():
    rows = {(FSDP, AR, 8 * MIB, 0): RING}
    exported = nvidia_csv(deployment(rows, calls={(FSDP, AR, 8 * MIB): 1, (FSDP, AR, 10 * MIB): 1}))
    [(_, first, last, *_)] = read_csv(exported.content)
    assert first < 8 * MIB < last < 9 * MIB


def test_the_csv_writes_neither_of_two_communicators_that_it_cannot_tell_apart():
    other = CommunicatorId(description="ep", ranks=tuple(range(8)))
    rows = {(FSDP, AR, MIB, 0): RING | {"num_channels": 1}, (other, AR, MIB, 0): RING | {"num_channels": 2}}
    exported = nvidia_csv(deployment(rows, max_channels=24))
    assert read_csv(exported.content) == []
    assert said(exported, "cannot tell them")


def test_the_env_file_holds_what_all_tuned_calls_share():
    exported = env_file(
        deployment(
            {
                (FSDP, AG, 8 * MIB, 0): {**RING, "num_channels": 4, "chunk_bytes": 512 * KIB, "num_threads": 256},
                (FSDP, RS, 8 * MIB, 0): {**RING, "num_channels": 4, "chunk_bytes": 512 * KIB, "num_threads": 256},
            }
        )
    )
    assert read_env(exported.content) == {
        "NCCL_MAX_CTAS": "4",
        "NCCL_ALGO": "allgather:ring;reducescatter:ring",
        "NCCL_PROTO": "allgather:SIMPLE;reducescatter:SIMPLE",
        "NCCL_NTHREADS": "256",
        "NCCL_BUFFSIZE": str(MIB),
    }
    assert said(exported, "untouched take it, too")


def test_the_env_file_names_what_differs_between_calls():
    exported = env_file(
        deployment(
            {
                (FSDP, AG, 8 * MIB, 0): {**RING, "num_channels": 4, "chunk_bytes": 512 * KIB},
                (FSDP, AG, MIB, 0): {
                    "algorithm": Algorithm.RING,
                    "protocol": Protocol.LL,
                    "num_channels": 2,
                    "num_threads": 256,
                    "chunk_bytes": 32 * KIB,
                },
                (FSDP, A2A, MIB, 0): {"num_channels": 2},
            }
        )
    )
    assert read_env(exported.content) == {"NCCL_ALGO": "allgather:ring"}
    for word in ("num_channels", "protocol", "num_threads", "chunk_bytes", "NCCL_MAX_P2P_NCHANNELS"):
        assert said(exported, word)


def test_the_megatron_file_caps_each_group_that_agrees():
    exported = megatron_yaml(
        deployment(
            {
                (FSDP, AG, 8 * MIB, 0): {**RING, "num_channels": 4},
                (FSDP, RS, 8 * MIB, 0): {"num_channels": 4},
                (TP, AR, MIB, 0): {"num_channels": 2},
            }
        ),
        {"fsdp": "dp_cp"},
    )
    assert read_yaml(exported.content) == {"dp_cp": {"max_ctas": 4}, "tp": {"max_ctas": 2}}
    assert said(exported, "only channels fit")


@pytest.mark.parametrize(
    ("rows", "groups", "word"),
    [
        ({(FSDP, AG, MIB, 0): {"num_channels": 4}}, {}, "no group of Megatron's"),
        ({(TP, AG, MIB, 0): {"num_channels": 4}, (TP, AR, MIB, 0): {"num_channels": 2}}, {}, "differ in channels"),
        ({(TP, AG, MIB, 0): RING}, {}, "differ in channels"),
        ({(TP, AG, MIB, 0): {"num_channels": 4}, (FSDP, AG, MIB, 0): {"num_channels": 2}}, {"fsdp": "tp"}, "two comm"),
    ],
)
def test_the_megatron_file_names_what_a_group_cannot_hold(rows, groups, word):
    exported = megatron_yaml(deployment(rows), groups)
    assert read_yaml(exported.content) == {}
    assert b"{}" in exported.content
    assert said(exported, word)


def test_a_group_that_megatron_lacks_is_refused():
    with pytest.raises(JobError, match=r"no group 'nope'.*allowed: dp,"):
        megatron_yaml(deployment({(TP, AG, MIB, 0): {"num_channels": 4}}), {"tp": "nope"})


def test_an_empty_deployment_gives_files_that_set_nothing():
    empty = Deployment(table=ConfigTable({}), communicators=())
    assert decode_table(plugin_table(empty).content).decisions == ()
    assert read_csv(nvidia_csv(empty).content) == []
    assert read_env(env_file(empty).content) == {}
    assert read_yaml(megatron_yaml(empty, {}).content) == {}


def test_rows_that_this_boxs_map_refuses_are_left_out_with_the_reason(tmp_path):
    key = MapKey(nccl=(2, 30, 7), gpu="H100", num_gpus=8, ranks_per_gpu=1, topology="0" * 16)
    write_map(CapabilityMap(key=key, measured_on="2026-11-22", max_channels=24, rows=()), tmp_path)
    maps = BoxMaps((2, 30, 7), Box(gpu="H100", num_gpus=8, topology="0" * 16), tmp_path)
    rows = {(FSDP, AG, MIB, 0): {"num_channels": 32}, (FSDP, RS, MIB, 0): {"num_channels": 24}}
    kept, refused = within_maps(deployment(rows), maps)
    assert [(key.kind, config.num_channels) for key, config in kept.table] == [(RS, 24)]
    assert len(refused) == 1
    assert "all_gather of 1048576 bytes" in refused[0]
    assert "32 channels, this box's communicator has 24" in refused[0]
    for known in (deployment(rows, num_nodes=2), deployment({(TP, AG, MIB, 0): {"num_channels": 32}})):
        assert within_maps(known, maps) == (known, ())  # no map is of these
