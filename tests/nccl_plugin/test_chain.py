"""Calls without a decision go to the tuner that NCCL would have loaded without us."""

import ctypes
import shutil
from pathlib import Path

import pytest
from c_build import compile_c

from lagom_overlap.collective import Algorithm, CollectiveKind, CommConfig, Protocol
from lagom_overlap.nccl_plugin.fake_host import RELEASES, Fault, HostMode

MIB = 1 << 20
AR = CollectiveKind.ALL_REDUCE
OWN, FOREIGN = 64 * MIB, 32 * MIB
HOST_VERSION = {"2.21": 2, "2.22": 3, "2.24": 4, "2.28": 5, "2.29": 5, "2.30": 6, "2.31": 6, "2.32.6": 7}
PAIRS = [(r, v) for r in RELEASES for v in (2, 3, 5, 6) if v <= HOST_VERSION[r]]


@pytest.fixture
def chained(plugin_library, tmp_path, plugin_path, monkeypatch):
    """Builds a tuner of one version and makes it the one to chain to."""

    def build(version, name="libother.so"):
        built = plugin_library.parent / f"libchained{version}.so"
        if not built.exists():
            compile_c(built, Path(__file__).parent / "chained_tuner.c", link=(f"-DCHAINED_VERSION={version}",))
        path = tmp_path / name
        shutil.copy(built, path)
        monkeypatch.setenv("LAGOM_CHAIN_TUNER", str(path))
        library = ctypes.CDLL(str(path))
        library.chained_comm_id.restype = ctypes.c_uint64
        return library

    return build


@pytest.mark.parametrize(("release", "version"), PAIRS)
def test_only_calls_without_a_decision_reach_the_chained_tuner(open_nccl, use_table, chained, release, version):
    use_table({(AR, OWN, 0): CommConfig(num_channels=7, chunk_bytes=8192)})
    library = chained(version)
    comm = open_nccl(release).comm(comm_id=1234)
    own = comm.run(AR, OWN)
    assert (own.tuner_channels, library.chained_calls()) == (7, 0)
    foreign = comm.run(AR, FOREIGN)
    assert (foreign.tuner_channels, foreign.algorithm, foreign.protocol) == (3, Algorithm.RING, Protocol.LL)
    assert library.chained_calls() == (2 if release == "2.21" else 1)
    assert library.chained_version() == (5 if version == 6 else version)
    if version >= 5:
        assert library.chained_comm_id() == 1234
    if version == 6:
        assert set(own.chunk_bytes) == {8192}
        assert set(foreign.chunk_bytes) == {4096}
    assert own.faults == foreign.faults == Fault(0)


@pytest.mark.parametrize("release", ["2.29", "2.30"])
def test_the_host_crashes_as_nccl_does_when_an_uneven_gather_gets_more_channels_than_there_are(
    open_nccl, chained, release
):
    chained(5)
    for num_channels, fault in ((3, Fault(0)), (2, Fault.CHANNELS)):
        comm = open_nccl(release).comm(num_channels=num_channels)
        assert comm.run(CollectiveKind.ALL_GATHER, OWN, HostMode.GATHER_V).faults == fault


def test_a_decision_that_nccl_does_not_offer_falls_through_too(open_nccl, use_table, chained):
    use_table({(AR, OWN, 0): CommConfig(algorithm=Algorithm.NVLS, protocol=Protocol.SIMPLE, num_channels=7)})
    chained(5)
    assert open_nccl("2.28").comm().run(AR, OWN).tuner_channels == 3


@pytest.mark.parametrize("release", RELEASES)
def test_an_error_of_the_chained_tuner_does_not_fail_the_collective(open_nccl, chained, release):
    chained(2)
    assert open_nccl(release).comm().run(AR, 4096).faults == Fault(0)


@pytest.mark.parametrize("release", RELEASES)
def test_a_chained_tuner_that_fails_to_start_is_left_out(open_nccl, chained, release):
    library = chained(2)
    nccl = open_nccl(release)
    assert nccl.comm(3).run(AR, OWN).is_untouched
    assert library.chained_calls() == 0
    assert "failed to start" in "\n".join(nccl.take_log())


def test_disabled_the_chained_tuner_still_answers(open_nccl, use_table, chained, monkeypatch):
    use_table({(AR, OWN, 0): CommConfig(num_channels=7)})
    chained(6)
    monkeypatch.setenv("LAGOM_DISABLE", "1")
    assert open_nccl("2.30").comm().run(AR, OWN).tuner_channels == 3


def test_a_tuner_newer_than_nccl_is_not_used(open_nccl, chained):
    chained(6)
    nccl = open_nccl("2.28")
    assert nccl.comm().run(AR, OWN).is_untouched
    assert "has no tuner that fits" in "\n".join(nccl.take_log())


def test_it_never_chains_to_itself(open_nccl, plugin_path, monkeypatch):
    monkeypatch.setenv("LAGOM_CHAIN_TUNER", str(plugin_path))
    nccl = open_nccl("2.30")
    assert nccl.comm().run(AR, OWN).is_untouched
    assert "has no tuner that fits" in "\n".join(nccl.take_log())


def test_a_tuner_inside_the_network_plug_in_is_found_as_nccl_would(open_nccl, chained, tmp_path, monkeypatch):
    library = chained(6, "libnccl-net-cloud.so")
    monkeypatch.delenv("LAGOM_CHAIN_TUNER")
    monkeypatch.setenv("NCCL_NET_PLUGIN", str(tmp_path / "libnccl-net-cloud.so"))
    assert open_nccl("2.30").comm().run(AR, OWN).tuner_channels == 3
    assert library.chained_calls() == 1


def test_a_list_of_network_plug_ins_is_looked_through(open_nccl, chained, tmp_path, monkeypatch):
    library = chained(6, "libnccl-net-cloud.so")
    monkeypatch.delenv("LAGOM_CHAIN_TUNER")
    monkeypatch.setenv("NCCL_NET_PLUGIN", f"missing,{tmp_path / 'libnccl-net-cloud.so'},libnccl-net-other.so")
    nccl = open_nccl("2.30")
    assert nccl.comm().run(AR, OWN).tuner_channels == 3
    assert library.chained_calls() == 1
    assert "calls without a decision go to" in "\n".join(nccl.take_log())


def test_where_there_is_no_other_tuner_the_log_says_so(open_nccl, plugin_path, monkeypatch):
    monkeypatch.delenv("LAGOM_CHAIN_TUNER")
    nccl = open_nccl("2.30")
    nccl.comm()
    assert "no other tuner is installed" in "\n".join(nccl.take_log())


def test_a_v7_hosts_wider_constants_reach_an_older_tuner_and_come_back(chained, plugin_path):
    """Only the constants: NCCL 2.32.6 lets a tuner rewrite them at init; v5 tuners know one generation less."""
    library = chained(5)
    library.chained_constant.restype = ctypes.c_double
    v7 = ctypes.c_void_p.in_dll(ctypes.CDLL(str(plugin_path)), "ncclTunerPlugin_v7")
    pointers = (ctypes.c_void_p * 5).from_address(ctypes.addressof(v7))
    init = ctypes.CFUNCTYPE(
        ctypes.c_int, *(ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_size_t), *([ctypes.c_void_p] * 3)
    )(pointers[1])
    constants = (ctypes.c_double * (21 + 63 + 5 * 5 * 3))(*range(159))
    last_known = 21 + 63 + 4 * 15 + 3 * 3 + 2  # bandwidths[4][generation 3][scale 2] of five generations
    context, domains = ctypes.c_void_p(), (ctypes.c_int * 3)(1, 8, 8)
    assert init(ctypes.addressof(context), 5, 8, 1, None, ctypes.addressof(domains), ctypes.addressof(constants)) == 0
    assert library.chained_constant() == last_known
    changed = {i: constants[i] for i in range(159) if constants[i] != i}
    assert changed == {last_known: 77.0}
    finalize = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(pointers[3])
    assert finalize(context) == 0
