"""Which call of the step it is: told by the sequence of calls on the communicator, whatever a rank counts by itself."""

import random

import pytest
from tuner_rows import FSDP, encode_rows, table_of_rows

from lagom_overlap.collective import CallCycle, CollectiveKind, CommConfig
from lagom_overlap.nccl_plugin.fake_host import RELEASES, WITH_CHUNKS, HostCall, HostMode

MIB = 1 << 20
AR, AG, RS = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
BROADCAST = CollectiveKind.BROADCAST
every_release = pytest.mark.parametrize("release", RELEASES)
with_chunks = pytest.mark.parametrize("release", WITH_CHUNKS)


def counting_rows(num_calls, kind=AR, num_bytes=64 * MIB):
    """Occurrence n is given n + 1 channels."""
    return {(kind, num_bytes, n): CommConfig(num_channels=n + 1) for n in range(num_calls)}


def channels(comm, *calls):
    return [comm.run(kind, num_bytes).tuner_channels for kind, num_bytes in calls]


@every_release
def test_each_call_of_the_step_has_its_own_decision_and_the_next_step_starts_over(open_nccl, use_table, release):
    use_table(counting_rows(5), cycle=[(AR, 64 * MIB)] * 7)
    comm = open_nccl(release).comm()
    for _ in range(3):
        assert channels(comm, *[(AR, 64 * MIB)] * 7) == [1, 2, 3, 4, 5, 0, 0]


@every_release
@pytest.mark.parametrize("marks", [(), (0,), (1, 2), (0, 3, 3, 5), range(12)])
def test_ranks_that_mark_their_steps_differently_decide_alike(open_nccl, use_table, plugin, release, marks):
    """A rank skips an update, or has an optimizer of its own; where it begins a step is its own affair."""
    step = [(AR, 64 * MIB), (RS, 32 * MIB), (AR, 64 * MIB)]
    use_table({**counting_rows(2), **counting_rows(1, RS, 32 * MIB)}, cycle=step)
    comm = open_nccl(release).comm()
    found = []
    for place, (kind, num_bytes) in enumerate(step * 4):
        for _ in range(list(marks).count(place)):
            plugin.step()
        found.append(comm.run(kind, num_bytes).tuner_channels)
    assert found == [1, 1, 2] * 4


@every_release
def test_an_evaluation_and_a_step_cut_short_are_followed_by_the_right_calls(open_nccl, use_table, release):
    step = [(AR, 64 * MIB), (AR, 64 * MIB), (RS, 64 * MIB), (AR, 64 * MIB), (RS, 32 * MIB)]
    use_table({**counting_rows(3), (RS, 64 * MIB, 0): CommConfig(num_channels=9)}, cycle=step)
    comm = open_nccl(release).comm()
    whole = [1, 2, 9, 3, 0]
    assert channels(comm, *step) == whole
    channels(comm, *[(AR, 64 * MIB)] * 2)  # a forward without a backward
    channels(comm, *[(AR, 64 * MIB)] * 2)  # and another one
    assert channels(comm, *step)[2:] == whole[2:]
    assert channels(comm, *step) == whole
    channels(comm, *step[:3])  # an update that is skipped, and what belongs to it
    assert channels(comm, *step)[2:] == whole[2:]
    assert channels(comm, *step) == whole


@every_release
def test_without_the_steps_calls_rows_of_single_calls_do_not_apply_and_one_for_all_does(open_nccl, use_table, release):
    same = {(RS, 64 * MIB, n): CommConfig(num_channels=6) for n in range(2)}
    use_table({**counting_rows(2), **same}, cycle=())
    comm = open_nccl(release).comm()
    assert channels(comm, *[(AR, 64 * MIB)] * 3) == [0] * 3
    assert channels(comm, *[(RS, 64 * MIB)] * 3) == [6] * 3


@every_release
def test_a_tuned_size_stands_for_its_neighbours_and_counts_them_together(open_nccl, use_table, release):
    use_table(counting_rows(3), known=[(AR, 40 * MIB)])
    comm = open_nccl(release).comm()
    for sizes in ((64 * MIB + 256, 64 * MIB, 63 * MIB), (80 * MIB, 90 * MIB, 52 * MIB)):
        assert [comm.run(AR, size).tuner_channels for size in sizes] == [1, 2, 3]
    assert [comm.run(AR, size).tuner_channels for size in (40 * MIB, 50 * MIB, 92 * MIB, 64 * MIB)] == [0, 0, 0, 1]


@with_chunks
def test_neighbours_in_one_group_are_counted_one_after_the_other(open_nccl, use_table, release):
    use_table(counting_rows(4), known=[(AR, 64 * MIB)])
    comm = open_nccl(release).comm()
    for _ in range(2):
        outcomes = comm.group(*[HostCall(AR, (64 + n) * MIB, op_and_type=n) for n in range(3)])
        assert sorted(o.tuner_channels for o in outcomes) == [1, 2, 3]
        assert comm.run(AR, 64 * MIB).tuner_channels == 4


@every_release
def test_communicators_are_followed_apart_and_a_stranger_is_left_alone(open_nccl, use_table, release):
    use_table({**counting_rows(2), **counting_rows(2, RS), **counting_rows(2, AR, 32 * MIB)})
    nccl = open_nccl(release)
    comm, stranger = nccl.comm(), nccl.comm()
    for _ in range(2):
        found = []
        for call in [(AR, 64 * MIB)] * 2 + [(RS, 64 * MIB)] * 2 + [(AR, 32 * MIB)] * 2:
            assert channels(stranger, call, call) == [0, 0]
            found += channels(comm, call)
        assert found == [1, 2, 1, 2, 1, 2]
    assert comm.run(AG, 64 * MIB).tuner_channels == 0


@every_release
def test_one_row_for_every_call_needs_no_counting(open_nccl, use_table, release):
    use_table({(AR, 64 * MIB, n): CommConfig(num_channels=7) for n in range(4)}, cycle=())
    comm = open_nccl(release).comm()
    assert {comm.run(AR, 64 * MIB).tuner_channels for _ in range(9)} == {7}


@pytest.mark.parametrize("release", ["2.31", "2.32.6", "2.30"])
def test_the_extra_queries_of_symmetric_memory_are_not_counted(open_nccl, use_table, release):
    use_table(counting_rows(4))
    comm = open_nccl(release).comm()
    for _ in range(2):
        outcomes = [comm.run(AR, 64 * MIB, HostMode.SYMMETRIC) for _ in range(4)]
        assert [o.num_tuner_calls for o in outcomes] == [2 if release == "2.30" else 3] * 4
        assert [o.tuner_channels for o in outcomes] == [1, 2, 3, 4]


@with_chunks
def test_simulated_calls_are_not_counted(open_nccl, use_table, plugin, release):
    use_table(counting_rows(4))
    comm = open_nccl(release).comm()
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
    assert plugin.num_large() == 3


@with_chunks
def test_a_simulated_call_is_not_counted_when_another_one_is_launched_after_it(open_nccl, use_table, plugin, release):
    use_table({**counting_rows(4), (RS, 64 * MIB, 0): CommConfig(num_channels=9)}, cycle=[(AR, 64 * MIB)] * 4)
    comm = open_nccl(release).comm()
    for expected in (1, 2, 3):
        comm.run(AR, 64 * MIB, HostMode.SIMULATE)
        comm.run(RS, 64 * MIB)
        assert comm.run(AR, 64 * MIB).tuner_channels == expected
    assert [calls.num_calls for calls in plugin.calls()] == [6]


@pytest.mark.parametrize("release", ["2.22", "2.24", "2.28"])
def test_before_2_30_a_simulated_call_counts_as_one(open_nccl, use_table, release):
    use_table(counting_rows(4))
    comm = open_nccl(release).comm()
    comm.run(AR, 64 * MIB, HostMode.SIMULATE)
    assert comm.run(AR, 64 * MIB).tuner_channels == 2  # nothing tells it from a call


def test_2_21_asks_twice_for_a_call_that_is_counted_once(open_nccl, use_table):
    use_table(counting_rows(3), cycle=[(AR, 64 * MIB)] * 4)
    comm = open_nccl("2.21").comm()
    outcomes = [comm.run(AR, 64 * MIB) for _ in range(4)]
    assert [o.num_tuner_calls for o in outcomes] == [2] * 4
    assert [o.tuner_channels for o in outcomes] == [1, 2, 3, 0]


@every_release
def test_aggregated_calls_are_one_call_of_their_summed_bytes(open_nccl, use_table, release):
    use_table({**counting_rows(2, AR, 60 * MIB), (AR, 20 * MIB, 0): CommConfig(num_channels=9)})
    comm = open_nccl(release).comm()
    for expected in (1, 2, 1):
        outcomes = comm.group(*[HostCall(AR, 20 * MIB)] * 3)
        assert [o.max_channels for o in outcomes] == [expected] * 3
    assert comm.run(AR, 20 * MIB).max_channels == 9  # alone it is another call site


@every_release
def test_calls_that_differ_are_decided_one_by_one_within_a_group(open_nccl, use_table, release):
    sites = ((AR, 64 * MIB), (RS, 64 * MIB), (AR, 4 * MIB))
    use_table({(*site, 0): CommConfig(num_channels=1 + n) for n, site in enumerate(sites)})
    comm = open_nccl(release).comm()
    for _ in range(3):
        # two sizes of one kind stay apart by operator (2.21) and by more than four times the size (later)
        outcomes = comm.group(HostCall(AR, 64 * MIB), HostCall(RS, 64 * MIB), HostCall(AR, 4 * MIB, op_and_type=1))
        assert [o.max_channels for o in outcomes] == [1, 2, 3]


@every_release
def test_a_large_group_has_several_pipelined_operations_and_is_still_one_call(open_nccl, use_table, release):
    use_table(counting_rows(2, AR, 50 * MIB))
    comm = open_nccl(release).comm(num_channels=8)
    for expected in (1, 2, 1):
        outcomes = comm.group(*[HostCall(AR, MIB)] * 50)
        assert {o.max_channels for o in outcomes} == {expected}


@every_release
def test_calls_of_no_site_and_small_ones_leave_the_place_in_the_step(open_nccl, use_table, release):
    use_table(counting_rows(3))
    comm = open_nccl(release).comm()
    for expected in (1, 2, 3, 1):
        for size in range(1, 500):
            comm.run(AG, 65536 * size)
        assert comm.run(AR, 64 * MIB).tuner_channels == expected


def test_a_call_without_pipelined_operations_is_a_query_even_with_a_full_table(open_nccl, use_table):
    use_table(counting_rows(3))
    comm = open_nccl("2.31").comm()
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


# Sizes so far apart that no other one's channels hold them: what was asked and not launched is told from what was.
SITES = [(AR, 1 * MIB), (AR, 8 * MIB), (RS, 64 * MIB), (BROADCAST, 2 * MIB)]
FOREIGN = [(AG, 16 * MIB), (AR, 1 << 19), (RS, 3 * MIB)]
QUESTIONS = [(CollectiveKind.REDUCE, size * MIB) for size in (1, 8, 64)]


@every_release
@pytest.mark.parametrize("seed", range(12))
def test_the_plugin_finds_the_places_that_the_python_twin_finds(open_nccl, use_table, plugin, release, seed):
    """Random steps, and random calls in place of them: whole steps, cut ones, others, questions that launch nothing."""
    chance = random.Random(seed)
    cycle = [chance.choice(SITES) for _ in range(chance.randint(1, 12))]
    rows = {(*call, n): CommConfig(num_channels=1 + n) for call in SITES for n in range(cycle.count(call))}
    use_table(rows, cycle=cycle)
    comm = open_nccl(release).comm()
    twin = CallCycle(table_of_rows(rows, cycle).cycles[FSDP])
    calls = []
    for _ in range(40):
        way = chance.random()
        calls += cycle if way < 0.5 else cycle[: chance.randrange(len(cycle))] if way < 0.7 else [chance.choice(SITES)]
        if chance.random() < 0.3:
            calls.append(chance.choice(FOREIGN))
    for call in calls:
        if release in WITH_CHUNKS and chance.random() < 0.2:
            comm.run(*chance.choice([call, *QUESTIONS]), HostMode.SIMULATE)
        if chance.random() < 0.1:
            plugin.step()
        key = twin.next_key(*call) if call[1] >= MIB else None
        expected = 0 if key is None else 1 + key.occurrence
        assert comm.run(*call).tuner_channels == expected


@every_release
def test_a_lease_ends_at_one_call_whoever_marks_steps_and_whatever_is_called(open_nccl, use_table, plugin, release):
    """Two steps of three calls: six large calls, those without a row included; then nothing, small calls included."""
    step = [(AR, 64 * MIB), (RS, 32 * MIB), (AR, 64 * MIB)]
    small = {(AR, 4096, 0): CommConfig(num_channels=5)}
    use_table({**counting_rows(2), **small}, cycle=step, lease_steps=2)
    comm = open_nccl(release).comm()
    assert channels(comm, (AR, 4096), *step, (AR, 4096)) == [5, 1, 0, 2, 5]
    plugin.step()
    assert channels(comm, (AG, 16 * MIB), *step[:2], (AR, 4096)) == [0, 1, 0, 0]  # six large calls are made
    assert channels(comm, *step, (AR, 4096), *step) == [0] * 7
    plugin.install(encode_rows(counting_rows(2), cycle=step, lease_steps=1, generation=2))
    assert channels(comm, *step, *step) == [1, 0, 2, 0, 0, 0]


def test_a_lease_is_left_out_where_a_steps_calls_are_not_known(open_nccl, use_table):
    use_table({(AR, 64 * MIB, 0): CommConfig(num_channels=5)}, cycle=(), lease_steps=2)
    assert channels(open_nccl("2.30").comm(), (AR, 64 * MIB)) == [0]


@every_release
def test_a_table_taken_back_is_followed_from_where_it_had_come(open_nccl, use_table, plugin, release):
    use_table(counting_rows(4))
    comm = open_nccl(release).comm()
    assert channels(comm, *[(AR, 64 * MIB)] * 3) == [1, 2, 3]
    plugin.prepare(encode_rows({(AR, 64 * MIB, 0): CommConfig(num_channels=9)}, generation=2), 2)
    plugin.take_back(2)  # not in force: nothing to do
    assert plugin.generation == 1
    plugin.commit(2)
    plugin.take_back(2)
    assert plugin.generation == 1
    assert channels(comm, *[(AR, 64 * MIB)] * 2) == [4, 1]


@every_release
def test_calls_are_counted_alike_whatever_is_in_force(open_nccl, use_table, plugin, release):
    nccl = open_nccl(release)
    comm, other = nccl.comm(), nccl.comm(2)
    channels(comm, *[(AR, 64 * MIB)] * 3, (AR, 4096))
    plugin.install(encode_rows(counting_rows(2), generation=2))
    channels(comm, (AR, 64 * MIB), (AG, 2 * MIB))
    plugin.enable(is_enabled=False)
    channels(comm, (AR, 64 * MIB))
    channels(other, (AR, MIB))
    assert sorted((calls.num_ranks, calls.num_calls) for calls in plugin.calls()) == [(2, 1), (8, 6)]
    plugin.enable(is_enabled=True)
    assert channels(comm, (AR, 64 * MIB)) == [1]  # two calls of the cycle were made: one before, one while it was off
    del nccl
