"""No call gets more channels than its communicator is known to have."""

import pytest

from lagom_overlap.collective import Algorithm, CollectiveKind, CommConfig, Protocol
from lagom_overlap.nccl_plugin.fake_host import RELEASES, Fault, HostMode
from lagom_overlap.nccl_plugin.library import TunerPlugin

MIB = 1 << 20
AG, AR = CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE
RING = CommConfig(algorithm=Algorithm.RING, protocol=Protocol.SIMPLE, num_channels=60)
ROWS = {(kind, 64 * MIB, 0): RING for kind in (AG, AR)}
WITH_GATHER_V = ("2.29", "2.30")


@pytest.mark.parametrize("release", WITH_GATHER_V)
def test_the_host_of_the_tests_crashes_as_nccl_does_when_an_uneven_gather_gets_too_many_channels(
    open_nccl, use_table, release
):
    use_table(ROWS, max_channels=64)  # as if the communicator had them
    comm = open_nccl(release).comm(num_channels=24)
    assert not comm.run(AG, 64 * MIB).faults
    assert comm.run(AG, 64 * MIB, HostMode.GATHER_V).faults == Fault.CHANNELS


@pytest.mark.parametrize("release", WITH_GATHER_V)
def test_an_uneven_gather_keeps_nccls_channels_where_the_communicators_are_not_known(open_nccl, use_table, release):
    use_table(ROWS, max_channels=None)
    comm = open_nccl(release).comm(num_channels=24)
    outcome = comm.run(AG, 64 * MIB, HostMode.GATHER_V)
    assert (outcome.faults, outcome.tuner_channels, outcome.algorithm) == (Fault(0), 0, Algorithm.RING)
    assert comm.run(AR, 64 * MIB).tuner_channels == 60  # NCCL caps these


@pytest.mark.parametrize("release", RELEASES)
def test_where_they_are_known_no_call_is_given_more(open_nccl, use_table, release):
    use_table(ROWS, max_channels=24)
    comm = open_nccl(release).comm(num_channels=24)
    for kind in (AG, AR):
        assert comm.run(kind, 64 * MIB).tuner_channels == 24
    assert not comm.run(AG, 64 * MIB, HostMode.GATHER_V).faults


@pytest.mark.parametrize("release", [release for release in RELEASES if release not in WITH_GATHER_V])
def test_a_release_that_caps_them_takes_channels_for_its_gathers(open_nccl, use_table, release):
    """The plug-in asks the library that calls it for its release: 2.28 and 2.29 have one interface."""
    use_table(ROWS, max_channels=None)
    outcome = open_nccl(release).comm(num_channels=24).run(AG, 64 * MIB)
    assert (outcome.tuner_channels, outcome.faults) == (60, Fault(0))


def test_the_limit_holds_after_a_swap_too(open_nccl, use_table, plugin: TunerPlugin):
    use_table(ROWS, max_channels=24)
    comm = open_nccl("2.30").comm()
    assert comm.run(AG, 64 * MIB).tuner_channels == 24
    use_table(ROWS, max_channels=8, generation=2)
    plugin.swap(2)
    assert comm.run(AG, 64 * MIB).tuner_channels == 8
