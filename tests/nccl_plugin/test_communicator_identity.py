"""Which communicator of the table NCCL's is, when NCCL's id is new in every run or not told at all."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from lagom_overlap.collective import CollectiveKind, CommConfig, CommunicatorId, ConfigKey, ConfigTable
from lagom_overlap.nccl_plugin.fake_host import RELEASES
from lagom_overlap.nccl_plugin.table_writer import ProcessCommunicator, encode_table, write_table

MIB = 1 << 20
AR = CollectiveKind.ALL_REDUCE
every_release = pytest.mark.parametrize("release", RELEASES)


def name(description, ranks, order=0):
    return CommunicatorId(description=description, ranks=tuple(range(ranks)), creation_order=order)


@pytest.fixture
def use_communicators(tmp_path, monkeypatch):
    """Communicator i of the list is given i + 1 channels for a 64 MiB all-reduce."""

    def write(*communicators):
        table = ConfigTable(
            {
                ConfigKey(communicator=c.id, kind=AR, num_bytes=64 * MIB): CommConfig(num_channels=i + 1)
                for i, c in enumerate(communicators)
            }
        )
        path = tmp_path / "named.bin"
        write_table(path, encode_table(table, generation=1, communicators=communicators).data)
        monkeypatch.setenv("LAGOM_TABLE", str(path))

    return write


def channels(comm):
    return comm.run(AR, 64 * MIB).tuner_channels


@every_release
def test_equal_communicators_are_told_apart_by_creation_order_whatever_their_ids(open_nccl, use_communicators, release):
    use_communicators(*(ProcessCommunicator(name("dp", 8, n), 1) for n in range(3)))
    nccl = open_nccl(release)
    assert [channels(nccl.comm()) for _ in range(4)] == [1, 2, 3, 0]


@every_release
def test_ranks_and_nodes_tell_communicators_apart(open_nccl, use_communicators, release):
    use_communicators(
        ProcessCommunicator(name("tp", 8), 1),
        ProcessCommunicator(name("dp", 8), 8),
        ProcessCommunicator(name("pp", 4), 4),
    )
    nccl = open_nccl(release)
    data, pipeline, tensor, other = nccl.comm(8, 8), nccl.comm(4, 4), nccl.comm(8, 1), nccl.comm(16, 2)
    assert [channels(c) for c in (tensor, data, pipeline, other)] == [1, 2, 3, 0]


@every_release
def test_with_unknown_nodes_the_order_among_equal_ranks_counts(open_nccl, use_communicators, release):
    use_communicators(ProcessCommunicator(name("tp", 8)), ProcessCommunicator(name("dp", 8)))
    nccl = open_nccl(release)
    assert [channels(nccl.comm(8, 1)), channels(nccl.comm(8, 8)), channels(nccl.comm(8, 1))] == [1, 2, 0]


@every_release
def test_a_known_and_an_unknown_number_of_nodes_live_side_by_side(open_nccl, use_communicators, release):
    use_communicators(ProcessCommunicator(name("tp", 8), 1), ProcessCommunicator(name("any", 8)))
    nccl = open_nccl(release)
    assert [channels(nccl.comm(8, 1)), channels(nccl.comm(8, 8))] == [1, 2]


@pytest.mark.parametrize("release", ["2.28", "2.30", "2.31", "2.32.6"])
def test_ranks_of_one_communicator_in_one_process_are_one_communicator(open_nccl, use_communicators, release):
    use_communicators(*(ProcessCommunicator(name("dp", 4, n), 1) for n in range(2)))
    nccl = open_nccl(release)
    first = [nccl.comm(4, comm_id=11) for _ in range(4)]
    second = [nccl.comm(4, comm_id=22) for _ in range(4)]
    assert [channels(c) for c in first + second] == [1] * 4 + [2] * 4


@every_release
@pytest.mark.parametrize("is_destroyed_first", [True, False])
def test_a_place_does_not_depend_on_when_a_rank_destroys_the_old_communicator(
    open_nccl, use_communicators, release, is_destroyed_first
):
    """Each rank destroys in its own time; creation is the same on all."""
    use_communicators(*(ProcessCommunicator(name("dp", 8, n), 1) for n in range(3)))
    nccl = open_nccl(release)
    first, second = nccl.comm(), nccl.comm()
    if is_destroyed_first:
        second.finalize()
    assert [channels(first), channels(nccl.comm())] == [1, 3]
    if not is_destroyed_first:
        second.finalize()


@every_release
@pytest.mark.parametrize("has_another", [True, False])
def test_a_table_and_the_places_stay_when_a_rank_has_destroyed_all_it_has(
    open_nccl, use_communicators, plugin, release, has_another
):
    """Another rank may still hold a communicator of its own: what one process destroyed says nothing of the others."""
    use_communicators(*(ProcessCommunicator(name("dp", 8, n), 1) for n in range(2)))
    nccl = open_nccl(release)
    if has_another:
        nccl.comm(2)
    first = nccl.comm()
    table = ConfigTable(
        {ConfigKey(communicator=name("dp", 8), kind=AR, num_bytes=64 * MIB): CommConfig(num_channels=7)}
    )
    plugin.install(encode_table(table, generation=9).data)
    plugin.step()
    assert channels(first) == 7
    first.finalize()
    assert plugin.generation == 9
    assert channels(nccl.comm()) == 0  # the second of its kind, which the table does not name


def test_the_process_may_say_which_communicator_an_id_is(open_nccl, use_communicators, plugin):
    use_communicators(*(ProcessCommunicator(name("dp", 8, n), 1) for n in range(2)))
    nccl = open_nccl("2.30")
    late, early = nccl.comm(comm_id=7), nccl.comm(comm_id=8)
    assert plugin.bind(7, num_nodes=1, creation_order=1)
    assert plugin.bind(8, num_nodes=1, creation_order=0)
    assert not plugin.bind(9, num_nodes=1, creation_order=0)
    assert [channels(early), channels(late)] == [1, 2]


def test_the_log_names_the_communicator_that_was_recognised(open_nccl, use_communicators):
    use_communicators(ProcessCommunicator(name("fsdp-größe", 8), 1))
    nccl = open_nccl("2.30")
    nccl.comm()
    nccl.comm(4)
    log = "\n".join(nccl.take_log())
    assert "communicator of 8 ranks on 1 nodes, number 0 of its kind: fsdp-größe" in log
    assert "communicator of 4 ranks on 1 nodes, number 0 of its kind: not in the table" in log


def test_many_communicators_made_and_used_by_many_threads_keep_their_decisions(open_nccl, use_communicators):
    sizes = range(2, 34)
    use_communicators(*(ProcessCommunicator(name("dp", n), 1) for n in sizes))
    nccl = open_nccl("2.31")

    def use(num_ranks):
        comm = nccl.comm(num_ranks, num_channels=64)
        return {channels(comm) for _ in range(200)}

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(use, sizes)) == [{i + 1} for i in range(len(sizes))]
