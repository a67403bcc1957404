"""Which call of the step it is: the counter, its reset, and the calls that are none."""

import pytest

from lagom_overlap.collective import CollectiveKind, CommConfig
from lagom_overlap.nccl_plugin.fake_host import RELEASES, WITH_CHUNKS, HostCall, HostMode

MIB = 1 << 20
AR, AG, RS = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
every_release = pytest.mark.parametrize("release", RELEASES)
with_chunks = pytest.mark.parametrize("release", WITH_CHUNKS)


def counting_rows(num_calls, kind=AR, num_bytes=64 * MIB):
    """Occurrence n is given n + 1 channels."""
    return {(kind, num_bytes, n): CommConfig(num_channels=n + 1) for n in range(num_calls)}


@every_release
def test_each_call_of_the_step_has_its_own_decision_and_the_next_step_starts_over(
    open_nccl, use_table, plugin, release
):
    use_table(counting_rows(5), calls_per_step={(AR, 64 * MIB): 8})
    comm = open_nccl(release).comm()
    for _ in range(3):
        plugin.step()
        channels = [comm.run(AR, 64 * MIB).tuner_channels for _ in range(7)]
        assert channels == [1, 2, 3, 4, 5, 0, 0]


@every_release
def test_without_step_marks_what_most_calls_have_holds_for_all(open_nccl, use_table, release):
    """A call too many, of an evaluation say, must not shift the decisions of every later step."""
    common, other = CommConfig(num_channels=6), CommConfig(num_channels=3)
    use_table({(AR, 64 * MIB, n): other if n == 1 else common for n in range(3)})
    comm = open_nccl(release).comm()
    assert [comm.run(AR, 64 * MIB).tuner_channels for _ in range(7)] == [6] * 7


@every_release
def test_calls_beyond_those_of_a_marked_step_have_what_most_have_and_untouched_ones_nothing(
    open_nccl, use_table, plugin, release
):
    common = CommConfig(num_channels=6)
    use_table({(AR, 64 * MIB, n): common for n in (0, 2)}, calls_per_step={(AR, 64 * MIB): 3})
    comm = open_nccl(release).comm()
    for _ in range(2):
        plugin.step()
        assert [comm.run(AR, 64 * MIB).tuner_channels for _ in range(5)] == [6, 0, 6, 6, 6]


@every_release
def test_without_step_marks_calls_that_have_nothing_in_common_are_left_alone(open_nccl, use_table, plugin, release):
    use_table({**counting_rows(2), (RS, 64 * MIB, 0): CommConfig(num_channels=6)}, calls_per_step={(RS, 64 * MIB): 3})
    comm = open_nccl(release).comm()
    assert all(comm.run(kind, 64 * MIB).is_untouched for kind in (AR, RS) * 4)
    plugin.step()
    assert [comm.run(AR, 64 * MIB).tuner_channels for _ in range(3)] == [1, 2, 0]
    assert [comm.run(RS, 64 * MIB).tuner_channels for _ in range(3)] == [6, 0, 0]


@every_release
def test_a_tuned_size_stands_for_its_neighbours_and_counts_them_together(open_nccl, use_table, plugin, release):
    use_table(counting_rows(3), known=[(AR, 40 * MIB)])
    comm = open_nccl(release).comm()
    for sizes in ((64 * MIB + 256, 64 * MIB, 63 * MIB), (80 * MIB, 90 * MIB, 52 * MIB)):
        plugin.step()
        assert [comm.run(AR, size).tuner_channels for size in sizes] == [1, 2, 3]
    plugin.step()
    assert [comm.run(AR, size).tuner_channels for size in (40 * MIB, 50 * MIB, 92 * MIB, 64 * MIB)] == [0, 0, 0, 1]


@with_chunks
def test_neighbours_in_one_group_are_counted_one_after_the_other(open_nccl, use_table, plugin, release):
    use_table({(AR, 64 * MIB, n): CommConfig(num_channels=n + 1) for n in range(4)})
    comm = open_nccl(release).comm()
    for _ in range(2):
        plugin.step()
        outcomes = comm.group(*[HostCall(AR, (64 + n) * MIB, op_and_type=n) for n in range(3)])
        assert sorted(o.tuner_channels for o in outcomes) == [1, 2, 3]
        assert comm.run(AR, 64 * MIB).tuner_channels == 4


@every_release
def test_kinds_sizes_and_communicators_are_counted_apart(open_nccl, use_table, plugin, release):
    use_table({**counting_rows(2), **counting_rows(2, RS), **counting_rows(2, AR, 32 * MIB)})
    nccl = open_nccl(release)
    comm, stranger = nccl.comm(), nccl.comm()
    for n in (1, 2, 1):
        if n == 1:
            plugin.step()
        assert comm.run(AR, 64 * MIB).tuner_channels == n
        assert stranger.run(AR, 64 * MIB).tuner_channels == 0
        assert comm.run(RS, 64 * MIB).tuner_channels == n
        assert comm.run(AR, 32 * MIB).tuner_channels == n
        assert comm.run(AG, 64 * MIB).tuner_channels == 0


@every_release
def test_one_row_for_every_call_needs_no_counting(open_nccl, use_table, release):
    use_table({(AR, 64 * MIB, n): CommConfig(num_channels=7) for n in range(4)})
    comm = open_nccl(release).comm()
    assert {comm.run(AR, 64 * MIB).tuner_channels for _ in range(9)} == {7}


@pytest.mark.parametrize("release", ["2.31", "2.32.6", "2.30"])
def test_the_extra_queries_of_symmetric_memory_are_not_counted(open_nccl, use_table, plugin, release):
    use_table(counting_rows(4))
    comm = open_nccl(release).comm()
    for _ in range(2):
        plugin.step()
        outcomes = [comm.run(AR, 64 * MIB, HostMode.SYMMETRIC) for _ in range(4)]
        assert [o.num_tuner_calls for o in outcomes] == [2 if release == "2.30" else 3] * 4
        assert [o.tuner_channels for o in outcomes] == [1, 2, 3, 4]


@with_chunks
def test_simulated_calls_are_not_counted(open_nccl, use_table, plugin, release):
    use_table(counting_rows(4))
    comm = open_nccl(release).comm()
    plugin.step()
    seen = []
    for mode in (
        HostMode.SIMULATE,
        HostMode.PLAIN,
        HostMode.SIMULATE,
        HostMode.SIMULATE,
        HostMode.PLAIN,
        HostMode.PLAIN,
    ):
        outcome = comm.run(AR, 64 * MIB, mode)
        if mode == HostMode.PLAIN:
            seen.append(outcome.tuner_channels)
    assert seen == [1, 2, 3]


@with_chunks
def test_a_simulated_call_is_not_counted_when_another_one_is_launched_after_it(open_nccl, use_table, plugin, release):
    use_table(counting_rows(4))
    comm = open_nccl(release).comm()
    plugin.step()
    for expected in (1, 2, 3):
        comm.run(AR, 64 * MIB, HostMode.SIMULATE)
        comm.run(RS, 64 * MIB)
        assert comm.run(AR, 64 * MIB).tuner_channels == expected


@pytest.mark.parametrize("release", ["2.22", "2.24", "2.28"])
def test_before_2_30_a_simulated_call_counts_until_the_next_step_mark(open_nccl, use_table, plugin, release):
    use_table(counting_rows(4))
    comm = open_nccl(release).comm()
    plugin.step()
    comm.run(AR, 64 * MIB, HostMode.SIMULATE)
    assert comm.run(AR, 64 * MIB).tuner_channels == 2  # nothing tells it from a call
    plugin.step()
    assert comm.run(AR, 64 * MIB).tuner_channels == 1


def test_2_21_asks_twice_for_a_call_that_is_counted_once(open_nccl, use_table, plugin):
    use_table(counting_rows(3))
    comm = open_nccl("2.21").comm()
    plugin.step()
    outcomes = [comm.run(AR, 64 * MIB) for _ in range(4)]
    assert [o.num_tuner_calls for o in outcomes] == [2] * 4
    assert [o.tuner_channels for o in outcomes] == [1, 2, 3, 0]


@every_release
def test_aggregated_calls_are_one_call_of_their_summed_bytes(open_nccl, use_table, plugin, release):
    use_table({**counting_rows(2, AR, 60 * MIB), (AR, 20 * MIB, 0): CommConfig(num_channels=9)})
    comm = open_nccl(release).comm()
    for expected in (1, 2, 1):
        if expected == 1:
            plugin.step()
        outcomes = comm.group(*[HostCall(AR, 20 * MIB)] * 3)
        assert [o.max_channels for o in outcomes] == [expected] * 3
    assert comm.run(AR, 20 * MIB).max_channels == 9  # alone it is another call site


@every_release
def test_calls_that_differ_are_decided_one_by_one_within_a_group(open_nccl, use_table, plugin, release):
    use_table({**counting_rows(2, AR), **counting_rows(2, RS), **counting_rows(2, AR, 4 * MIB)})
    comm = open_nccl(release).comm()
    for expected in (1, 2, 1):
        if expected == 1:
            plugin.step()
        # two sizes of one kind stay apart by operator (2.21) and by more than four times the size (later)
        outcomes = comm.group(HostCall(AR, 64 * MIB), HostCall(RS, 64 * MIB), HostCall(AR, 4 * MIB, op_and_type=1))
        assert [o.max_channels for o in outcomes] == [expected] * 3


@every_release
def test_a_large_group_has_several_pipelined_operations_and_is_still_one_call(open_nccl, use_table, plugin, release):
    use_table(counting_rows(2, AR, 50 * MIB))
    comm = open_nccl(release).comm(num_channels=8)
    for expected in (1, 2, 1):
        if expected == 1:
            plugin.step()
        outcomes = comm.group(*[HostCall(AR, MIB)] * 50)
        assert {o.max_channels for o in outcomes} == {expected}


@every_release
@pytest.mark.parametrize("num_marks", [1, 80])
def test_sizes_without_a_row_never_take_the_counters_of_those_with_one(
    open_nccl, use_table, plugin, release, num_marks
):
    """More sizes than there are counters, in one step and over many; sites of the table that come late, and early."""
    early, late = (
        counting_rows(3),
        {(RS, MIB * m, n): CommConfig(num_channels=n + 1) for m in (2, 3, 5) for n in (0, 1)},
    )
    use_table({**early, **late})
    comm = open_nccl(release).comm()
    plugin.step()
    assert comm.run(AR, 64 * MIB).tuner_channels == 1
    for size in range(1, 1601):
        if size % (1600 // num_marks) == 0 and num_marks > 1:
            plugin.step()
            assert comm.run(AR, 64 * MIB).tuner_channels == 1
        comm.run(AG, 4096 * size)
    assert [comm.run(AR, 64 * MIB).tuner_channels for _ in range(3)] == [2, 3, 0]
    for m in (2, 3, 5):
        assert [comm.run(RS, MIB * m).tuner_channels for _ in range(3)] == [1, 2, 0]


@with_chunks
def test_a_counter_that_is_taken_within_a_group_counts_for_its_new_site_alone(open_nccl, use_table, plugin, release):
    use_table(counting_rows(3))
    comm = open_nccl(release).comm()
    plugin.step()
    for size in range(1, 1023):
        comm.run(AG, 4096 * size)
    comm.group(HostCall(AG, 5 * MIB, op_and_type=1), HostCall(AR, 64 * MIB, op_and_type=2))
    assert [comm.run(AR, 64 * MIB).tuner_channels for _ in range(2)] == [2, 3]


def test_a_call_without_pipelined_operations_is_a_query_even_with_a_full_table(open_nccl, use_table, plugin):
    use_table(counting_rows(3))
    comm = open_nccl("2.31").comm()
    plugin.step()
    assert comm.run(AR, 64 * MIB).tuner_channels == 1
    offered = [5.0 + n for n in range(21)]
    for _ in range(5):
        assert comm.ask_raw(AR, 64 * MIB, num_pipe_ops=0, costs_us=offered) == (offered, 0)
    assert comm.run(AR, 64 * MIB).tuner_channels == 2


@with_chunks
def test_calls_beyond_those_it_remembers_do_not_get_the_chunk_of_others(open_nccl, use_table, release):
    remembered = [HostCall(AG, MIB + 8192 * n, op_and_type=n) for n in range(32)]
    use_table({(AG, call.num_bytes, 0): CommConfig(chunk_bytes=4096) for call in remembered})
    comm = open_nccl(release).comm()
    outcomes = comm.group(*remembered, *(HostCall(AG, MIB // 2 + 8192 * n, op_and_type=40 + n) for n in range(8)))
    assert all(4096 not in o.chunk_bytes for o in outcomes[32:])
    assert set(comm.group(*remembered)[0].chunk_bytes) == {4096}


@with_chunks
def test_more_different_calls_in_one_group_than_it_remembers_are_safe(open_nccl, use_table, release):
    use_table({(AR, 5000, 0): CommConfig(num_channels=2, chunk_bytes=4096)})
    comm = open_nccl(release).comm()
    calls = [HostCall(AG, 8192 * (n + 1), op_and_type=n) for n in range(60)]
    outcomes = comm.group(*calls, HostCall(AR, 5000, op_and_type=99))
    assert all(not o.faults for o in outcomes)
    assert outcomes[-1].tuner_channels == 2
    assert set(comm.run(AR, 5000).chunk_bytes) == {4096}  # the next group is not affected
