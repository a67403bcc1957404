"""No call gets more channels than its communicator is known to have."""

import pytest

from lagom_overlap.collective import Algorithm, CollectiveKind, CommConfig, Protocol
from lagom_overlap.nccl_plugin.channel_limit import UNEVEN_VARIABLE, channels_within, runs_uneven_gathers
from lagom_overlap.nccl_plugin.fake_host import RELEASES, Fault, HostMode
from lagom_overlap.nccl_plugin.library import TunerPlugin

MIB = 1 << 20
AG, AR = CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE
RING = CommConfig(algorithm=Algorithm.RING, protocol=Protocol.SIMPLE, num_channels=60)
ROWS = {(kind, 64 * MIB, 0): RING for kind in (AG, AR)}
WITH_GATHER_V = ("2.29", "2.30")


@pytest.mark.parametrize("release", WITH_GATHER_V)
@pytest.mark.parametrize("limit", [None, 64])
def test_an_uneven_gather_keeps_nccls_channels_whatever_was_seen_elsewhere(open_nccl, use_table, release, limit):
    """64 is what another communicator of the role had, or an earlier run under another NCCL_MAX_NCHANNELS."""
    use_table(ROWS, max_channels=limit)
    comm = open_nccl(release).comm(num_channels=24)
    for mode in (HostMode.GATHER_V, HostMode.PLAIN):  # nothing tells the two apart here
        outcome = comm.run(AG, 64 * MIB, mode)
        assert (outcome.faults, outcome.tuner_channels, outcome.algorithm) == (Fault(0), 0, Algorithm.RING)
    assert comm.run(AR, 64 * MIB).tuner_channels == 60  # NCCL caps these


@pytest.mark.parametrize("release", WITH_GATHER_V)
def test_a_gather_that_is_offered_nvls_on_one_node_is_even_and_takes_channels(open_nccl, use_table, release):
    use_table(ROWS, max_channels=None)
    nccl = open_nccl(release)
    comm = nccl.comm(num_channels=24, nvls_channels=16)
    outcome = comm.run(AG, 64 * MIB)
    assert (outcome.faults, outcome.tuner_channels) == (Fault(0), 60)
    outcome = comm.run(AG, 64 * MIB, HostMode.GATHER_V)
    assert (outcome.faults, outcome.tuner_channels) == (Fault(0), 0)


@pytest.mark.parametrize("release", WITH_GATHER_V)
def test_without_that_path_all_gathers_take_channels(open_nccl, use_table, monkeypatch, release):
    monkeypatch.setenv("NCCL_ALLGATHERV_ENABLE", "0")
    use_table(ROWS, max_channels=None)
    comm = open_nccl(release).comm(num_channels=24)
    for mode in (HostMode.PLAIN, HostMode.GATHER_V):
        outcome = comm.run(AG, 64 * MIB, mode)
        assert (outcome.faults, outcome.tuner_channels) == (Fault(0), 60)


@pytest.mark.parametrize(
    ("nccl", "value", "runs"),
    [
        ((2, 28, 9), None, False),
        ((2, 29, 2), None, True),
        ((2, 30, 7), "1", True),
        ((2, 30, 7), "0", False),
        ((2, 30, 7), "0x0", False),
        ((2, 30, 7), "no", True),
        ((2, 31, 2), None, False),
    ],
)
def test_python_knows_of_the_path_what_the_plug_in_does(nccl, value, runs):
    assert runs_uneven_gathers(nccl, {} if value is None else {UNEVEN_VARIABLE: value}) is runs


@pytest.mark.parametrize("release", RELEASES)
def test_where_they_are_known_no_call_is_given_more(open_nccl, use_table, release):
    use_table(ROWS, max_channels=24)
    comm = open_nccl(release).comm(num_channels=32)
    assert comm.run(AR, 64 * MIB).tuner_channels == 24


@pytest.mark.parametrize("release", [release for release in RELEASES if release not in WITH_GATHER_V])
def test_a_release_that_caps_them_takes_channels_for_its_gathers(open_nccl, use_table, release):
    """The plug-in asks the library that calls it for its release: 2.28 and 2.29 have one interface."""
    use_table(ROWS, max_channels=None)
    outcome = open_nccl(release).comm(num_channels=24).run(AG, 64 * MIB)
    assert (outcome.tuner_channels, outcome.faults) == (60, Fault(0))


def test_the_limit_holds_after_a_swap_too(open_nccl, use_table, plugin: TunerPlugin):
    use_table(ROWS, max_channels=24)
    comm = open_nccl("2.30").comm()
    assert comm.run(AR, 64 * MIB).tuner_channels == 24
    use_table(ROWS, max_channels=8, generation=2)
    plugin.swap(2)
    assert comm.run(AR, 64 * MIB).tuner_channels == 8


def test_channels_to_try_double_with_one_between_and_end_at_the_default_s() -> None:
    assert channels_within(1) == (1,)
    assert channels_within(12) == (1, 2, 3, 4, 6, 8, 12)
    assert channels_within(24) == (1, 2, 3, 4, 6, 8, 12, 16, 24)
    assert channels_within(20) == (1, 2, 3, 4, 6, 8, 12, 16, 20)
