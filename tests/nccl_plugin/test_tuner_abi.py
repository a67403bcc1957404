"""The plug-in under every release of the fake NCCL: what it sets, and what it leaves alone."""

import re

import numpy as np
import pytest
from c_build import CSRC

from lagom_overlap.collective import Algorithm, CollectiveKind, CommConfig, Protocol
from lagom_overlap.nccl_plugin import table_layout as layout
from lagom_overlap.nccl_plugin.fake_host import RELEASES, WITH_CHUNKS, Fault, HostMode

MIB = 1 << 20
AR, AG, RS = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
VERSIONS = {"2.21": 2, "2.22": 3, "2.24": 4, "2.28": 5, "2.29": 5, "2.30": 6, "2.31": 6, "2.32.6": 7}
WITH_COSTS = tuple(release for release in RELEASES if release != "2.21")
every_release = pytest.mark.parametrize("release", RELEASES)


def test_python_and_c_agree_on_every_offset_and_size():
    header = "".join((CSRC / f"lagom_{name}.h").read_text() for name in ("ring", "table", "profile"))
    for name, dtype in {
        "lagom_table_header": layout.HEADER,
        "lagom_communicator": layout.COMMUNICATOR,
        "lagom_decision": layout.DECISION,
        "lagom_cycle_call": layout.CYCLE_CALL,
        "lagom_ring_header": layout.RING_HEADER,
        "lagom_record_entry": layout.RECORD_ENTRY,
        "lagom_profile_entry": layout.PROFILE_ENTRY,
    }.items():
        offsets = {f: int(n) for f, n in re.findall(rf"LAGOM_AT\({name}, (\w+), (\d+)\)", header)}
        assert offsets, name
        assert {field: dtype.fields[field][1] for field in offsets} == offsets
        assert int(re.search(rf"sizeof\({name}\) == (\d+)", header)[1]) == dtype.itemsize
    limits = {"MAX_COMMUNICATORS", "MAX_DECISIONS", "MAX_CALLS", "TABLE_VERSION", "RECORD_VERSION", "PROFILE_VERSION"}
    for limit in limits:
        assert int(re.search(rf"LAGOM_{limit} = (\d+)", header)[1]) == getattr(layout, limit)
    magics = dict(re.findall(r"#define LAGOM_(TABLE|RECORD|PROFILE)_MAGIC 0x(\w+)ULL", header))
    assert int(magics["TABLE"], 16) == layout.TABLE_MAGIC
    assert int(magics["RECORD"], 16) == layout.RECORD_MAGIC
    assert int(magics["PROFILE"], 16) == layout.PROFILE_MAGIC


@every_release
def test_each_release_loads_the_newest_version_it_knows(open_nccl, release):
    nccl = open_nccl(release)
    assert (nccl.tuner_version, nccl.tuner_name) == (VERSIONS[release], "lagom")


@every_release
def test_a_decision_sets_algorithm_protocol_and_channels(open_nccl, use_table, release):
    use_table({(AR, 64 * MIB, 0): CommConfig(algorithm=Algorithm.TREE, protocol=Protocol.SIMPLE, num_channels=5)})
    outcome = open_nccl(release).comm().run(AR, 64 * MIB)
    assert (outcome.algorithm, outcome.protocol) == (Algorithm.TREE, Protocol.SIMPLE)
    assert (outcome.max_channels, outcome.num_channels, outcome.faults) == (5, 5, Fault(0))


@every_release
@pytest.mark.parametrize("kind_and_bytes", [(AR, 32 * MIB), (RS, 64 * MIB), (CollectiveKind.BROADCAST, 64 * MIB)])
def test_a_call_without_a_decision_is_left_as_it_was(open_nccl, use_table, release, kind_and_bytes):
    use_table({(AR, 64 * MIB, 0): CommConfig(algorithm=Algorithm.TREE, protocol=Protocol.LL, num_channels=5)})
    with_plugin = open_nccl(release).comm().run(*kind_and_bytes)
    assert with_plugin.is_untouched
    assert with_plugin.faults == Fault(0)


@every_release
def test_without_a_table_nothing_is_touched(open_nccl, release):
    nccl = open_nccl(release)
    assert nccl.comm().run(AR, MIB).is_untouched
    assert not [line for line in nccl.take_log() if line.startswith("WARN")]


@every_release
def test_channels_alone_leave_the_choice_of_algorithm_to_nccl(open_nccl, use_table, release):
    use_table({(RS, 64 * MIB, 0): CommConfig(num_channels=3)})
    outcome = open_nccl(release).comm().run(RS, 64 * MIB)
    assert (outcome.max_channels, outcome.cost_before == outcome.cost_after) == (3, True)


@pytest.mark.parametrize("release", WITH_COSTS)
def test_what_nccl_does_not_offer_is_never_touched(open_nccl, use_table, release):
    use_table({(AR, 64 * MIB, 0): CommConfig(algorithm=Algorithm.RING, protocol=Protocol.LL128, num_channels=2)})
    outcome = open_nccl(release).comm(has_ll128=False).run(AR, 64 * MIB)
    assert outcome.is_untouched  # the channels were meant for LL128, so they stay away, too
    assert outcome.faults == Fault(0)


@pytest.mark.parametrize("release", WITH_COSTS)
@pytest.mark.parametrize("config", [CommConfig(algorithm=Algorithm.RING), CommConfig(protocol=Protocol.LL)])
def test_a_lone_algorithm_or_protocol_disables_the_others_with_a_large_cost(open_nccl, use_table, release, config):
    use_table({(AR, 64 * MIB, 0): config})
    outcome = open_nccl(release).comm().run(AR, 64 * MIB)
    assert config.algorithm in (None, outcome.algorithm)
    assert config.protocol in (None, outcome.protocol)
    before, after = np.array(outcome.cost_before), np.array(outcome.cost_after)
    assert np.array_equal(before < 0, after < 0)
    changed = before != after
    assert changed.any()
    assert np.all(after[changed] == np.float32(1e30))
    allowed = [(a, p) for a in layout.ALGORITHMS for p in layout.PROTOCOLS]
    cheapest = min(
        (cost, a, p)
        for cost, (a, p) in zip(before, allowed, strict=True)
        if cost >= 0 and config.algorithm in (None, a) and config.protocol in (None, p)
    )
    assert cheapest[1:] == (outcome.algorithm, outcome.protocol)


@pytest.mark.parametrize("release", WITH_COSTS)
def test_the_choice_wins_a_tie_whichever_way_the_release_breaks_it(open_nccl, use_table, release):
    use_table({(AR, MIB, 0): CommConfig(algorithm=Algorithm.RING, protocol=Protocol.LL128)})
    comm = open_nccl(release).comm()
    free = {(Algorithm.TREE, Protocol.LL): 0.0, (Algorithm.NVLS, Protocol.SIMPLE): 0.0}
    comm.set_costs({**free, (Algorithm.RING, Protocol.LL128): 7.0, (Algorithm.RING, Protocol.SIMPLE): 9.0})
    outcome = comm.run(AR, MIB)
    assert (outcome.algorithm, outcome.protocol) == (Algorithm.RING, Protocol.LL128)


@every_release
@pytest.mark.parametrize("algorithm", [Algorithm.COLLNET_DIRECT, Algorithm.COLLNET_CHAIN, Algorithm.NVLS])
def test_channels_that_nccl_would_not_clamp_are_not_set(open_nccl, use_table, release, algorithm):
    config = CommConfig(algorithm=algorithm, protocol=Protocol.SIMPLE, num_channels=64)
    use_table({(AR, 64 * MIB, 0): config}, num_nodes=2)
    comm = open_nccl(release).comm(num_nodes=2, has_collnet=True, nvls_channels=16)
    outcome = comm.run(AR, 64 * MIB)
    assert (outcome.algorithm, outcome.tuner_channels, outcome.faults) == (algorithm, 0, Fault(0))


@pytest.mark.parametrize("release", WITH_COSTS)
def test_channels_alone_are_not_set_where_nccl_itself_takes_collnet(open_nccl, use_table, release):
    use_table({(AR, 64 * MIB, 0): CommConfig(num_channels=64)}, num_nodes=2)
    comm = open_nccl(release).comm(num_nodes=2)
    comm.set_costs({(Algorithm.COLLNET_DIRECT, Protocol.SIMPLE): 5.0, (Algorithm.RING, Protocol.SIMPLE): 6.0})
    outcome = comm.run(AR, 64 * MIB)
    assert (outcome.algorithm, outcome.tuner_channels) == (Algorithm.COLLNET_DIRECT, 0)


@every_release
def test_channels_may_be_raised_until_2_30_and_only_lowered_from_2_31_on(open_nccl, use_table, release):
    use_table({(AR, MIB // 2, 0): CommConfig(num_channels=24), (AR, 2 * MIB, 0): CommConfig(num_channels=1)})
    comm = open_nccl(release).comm()
    comm.set_costs({(Algorithm.RING, Protocol.SIMPLE): 5.0})
    assert comm.run(AR, 2 * MIB).max_channels == 1
    default = 16  # NCCL: fewer channels while bytes < channels * 512 threads * 64
    assert comm.run(AR, MIB // 2).max_channels == (default if release in ("2.31", "2.32.6") else 24)


def test_2_21_takes_only_what_is_known_to_be_safe(open_nccl, use_table):
    sizes = {
        MIB: CommConfig(algorithm=Algorithm.RING, protocol=Protocol.LL128),  # may be off: nobody tells
        2 * MIB: CommConfig(algorithm=Algorithm.NVLS, protocol=Protocol.SIMPLE),
        4 * MIB: CommConfig(algorithm=Algorithm.COLLNET_DIRECT, protocol=Protocol.SIMPLE),
        8 * MIB: CommConfig(algorithm=Algorithm.PAT, protocol=Protocol.SIMPLE),
        16 * MIB: CommConfig(algorithm=Algorithm.RING),  # one of the two alone
    }
    use_table({(AR, num_bytes, 0): config for num_bytes, config in sizes.items()})
    comm = open_nccl("2.21").comm()
    assert all(comm.run(AR, num_bytes).is_untouched for num_bytes in sizes)


def test_2_21_may_take_nvls_where_it_is_supported(open_nccl, use_table):
    use_table({(AR, MIB, 0): CommConfig(algorithm=Algorithm.NVLS, protocol=Protocol.SIMPLE)})
    assert open_nccl("2.21").comm(nvls_channels=16).run(AR, MIB).algorithm == Algorithm.NVLS


@every_release
def test_disabled_by_the_environment_it_touches_nothing(open_nccl, use_table, monkeypatch, release):
    use_table({(AR, MIB, 0): CommConfig(num_channels=2)})
    monkeypatch.setenv("LAGOM_DISABLE", "1")
    assert open_nccl(release).comm().run(AR, MIB).is_untouched


def test_it_can_be_switched_off_and_on_at_run_time(open_nccl, use_table, plugin):
    use_table({(AR, MIB, 0): CommConfig(num_channels=2)}, generation=9)
    comm = open_nccl("2.30").comm()
    assert (comm.run(AR, MIB).max_channels, plugin.generation) == (2, 9)
    plugin.enable(is_enabled=False)
    assert (comm.run(AR, MIB).is_untouched, plugin.generation) == (True, 0)
    plugin.enable(is_enabled=True)
    assert comm.run(AR, MIB).max_channels == 2


@every_release
@pytest.mark.parametrize("mode", [HostMode.HELPERS, HostMode.REGISTERED, HostMode.SYMMETRIC])
def test_helper_threads_registered_buffers_and_extra_queries_change_nothing(open_nccl, use_table, release, mode):
    use_table({(AR, 64 * MIB, 0): CommConfig(algorithm=Algorithm.TREE, protocol=Protocol.SIMPLE, chunk_bytes=65536)})
    comm = open_nccl(release).comm()
    plain, other = comm.run(AR, 64 * MIB), comm.run(AR, 64 * MIB, mode)
    assert other.algorithm == plain.algorithm == Algorithm.TREE
    assert other.chunk_bytes == plain.chunk_bytes
    assert (set(other.chunk_bytes) == {65536}) is (release in WITH_CHUNKS)
    assert other.faults == Fault(0)
