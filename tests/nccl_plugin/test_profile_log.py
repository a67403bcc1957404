"""The profiler plug-in, called in NCCL's order, and the reader of what it writes."""

import os
import threading

import numpy as np
import pytest
from own_rings import flushed, profile_ring, read_profile
from played_profiler import CHANNEL, COLLECTIVE, COLLECTIVE_CALL, PlayedComm

from lagom_overlap.collective import Algorithm, CollectiveKind, Protocol
from lagom_overlap.errors import TableError
from lagom_overlap.nccl_plugin import profile_log
from lagom_overlap.nccl_plugin import table_layout as layout
from lagom_overlap.nccl_plugin.profile_log import ProfileFlag
from lagom_overlap.nccl_plugin.ring_file import RingFile

AR, AG, RS = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
VERSIONS = (4, 5, 6, 7)
NOW_NS = 1_764_000_000_000_000_000  # globaltimer counts from 1970
POOL = 4096
every_version = pytest.mark.parametrize("version", VERSIONS)


@pytest.fixture
def profile(tmp_path, monkeypatch):
    path = tmp_path / "profile.bin"
    for name in ("LAGOM_PROFILE_ENTRIES", "LAGOM_PROFILE_CHANNELS", "LAGOM_PROFILE_NETWORK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LAGOM_PROFILE", str(path))
    return path


@pytest.fixture
def make_comm(plugin_path):
    return lambda version=6, comm_id=7, **options: PlayedComm(plugin_path, version, comm_id, **options)


@every_version
def test_a_collective_lasts_from_its_first_channels_start_to_its_last_channels_end(make_comm, profile, version):
    comm = make_comm(version, comm_id=99, rank=1, num_ranks=4)
    handle = comm.launch("AllReduce", 1000, "ncclBfloat16", 3, algo="NVLS_TREE", proto="LL128")
    comm.run(handle, {2: (NOW_NS + 7, NOW_NS + 900), 0: (NOW_NS + 3, NOW_NS + 800), 1: (NOW_NS + 5, NOW_NS + 1003)})
    log = read_profile(profile)
    assert [(c.comm_id, c.rank, c.num_ranks, c.abi_version) for c in log.communicators] == [(99, 1, 4, version)]
    (found,) = log.collectives
    assert (found.comm_id, found.call, found.kind, found.num_bytes, found.rank) == (99, 0, AR, 2000, 1)
    assert (found.algorithm, found.protocol, found.num_channels) == (Algorithm.NVLS_TREE, Protocol.LL128, 3)
    assert (found.start_ns, found.end_ns, found.duration_s) == (
        NOW_NS + 3,
        NOW_NS + 1003,
        pytest.approx(1e-6, rel=1e-12),
    )
    assert (found.num_started, found.num_ended, found.is_complete, found.channels) == (3, 3, True, ())
    assert (found.called_ns is None) == (version == 4)
    assert (found.called_ns or 0) <= found.launched_ns <= found.seen_ns


@every_version
def test_nccl_is_asked_for_collectives_and_channels_and_from_v5_for_calls(make_comm, profile, version):
    assert make_comm(version).mask.value == COLLECTIVE | CHANNEL | (COLLECTIVE_CALL if version >= 5 else 0)


@every_version
def test_without_its_variable_it_asks_for_nothing_and_leaves_no_context(make_comm, monkeypatch, version):
    monkeypatch.delenv("LAGOM_PROFILE", raising=False)
    comm = make_comm(version)
    assert (comm.mask.value, comm.context.value) == (0, None)
    comm.finalize()


def test_bytes_are_those_of_the_larger_buffer_as_the_tuner_is_told(make_comm, profile):
    comm = make_comm(num_ranks=8)
    calls = [("AllGather", 4096, "ncclInt8"), ("ReduceScatter", 10, "ncclFloat32"), ("Broadcast", 64, "ncclInt8")]
    calls += [("Reduce", 5, "ncclFloat64"), ("AllReduce", 3, "ncclFloat8e4m3"), ("AllReduce", 3, "ncclOfTomorrow")]
    for func, count, datatype in calls:
        comm.run(comm.launch(func, count, datatype, 1), {0: (1, 2)})
    found = read_profile(profile).collectives
    assert [c.num_bytes for c in found] == [8 * 4096, 8 * 10 * 4, 64, 40, 3, None]
    assert [c.call for c in found] == [0, 0, 0, 0, 0, 1]


def test_a_word_that_we_do_not_know_is_none_and_another_kind_of_call_is_left_alone(make_comm, profile):
    comm = make_comm()
    handle = comm.launch("AllReduce", 1, "ncclInt8", 1, algo="SPIRAL", proto="LL256")
    comm.run(handle, {0: (1, 2)})
    assert (comm.send(), comm.launch("AlltoAll", 1, "ncclInt8", 1)) == (None, None)
    assert comm.start_channel(None, 0, 5) is None  # of a send
    (found,) = read_profile(profile).collectives
    assert (found.algorithm, found.protocol) == (None, None)


@pytest.mark.parametrize(
    ("version", "flags"), [(4, ProfileFlag(0)), *((version, ProfileFlag.CAPTURED) for version in (5, 6, 7))]
)
def test_a_captured_collective_says_so_from_v5_on(make_comm, profile, version, flags):
    comm = make_comm(version)
    comm.run(comm.launch("AllReduce", 1, "ncclInt8", 1, is_captured=True), {0: (1, 2)})
    assert read_profile(profile).collectives[0].flags == flags


@pytest.mark.parametrize("version", [5, 6, 7])
def test_each_replay_of_a_graph_is_a_timed_collective(make_comm, profile, version):
    """As `hostStreamPlanCallback` of NCCL 2.28 to 2.30 tells it, where channel events were on at the capture."""
    comm = make_comm(version)
    captured = comm.call("AllReduce", 1, is_captured=True)
    for start_ns, end_ns in ((NOW_NS, NOW_NS + 500), (NOW_NS + 9000, NOW_NS + 9700)):
        comm.run(comm.replay(captured, "AllReduce", 1, "ncclInt8", 1), {0: (start_ns, end_ns)})
    calls = read_profile(profile).collectives
    assert [(c.call, c.is_captured, c.end_ns - c.start_ns) for c in calls] == [(0, True, 500), (1, True, 700)]
    assert calls[0].called_ns == calls[1].called_ns < calls[0].launched_ns < calls[1].launched_ns


@pytest.mark.parametrize(("version", "flags"), [(5, ProfileFlag(0)), (6, ProfileFlag(0)), (7, ProfileFlag.SYMMETRIC)])
def test_a_collective_by_symmetric_memory_says_so_from_v7_on(make_comm, profile, version, flags):
    comm = make_comm(version)
    comm.run(comm.launch("AllReduce", 1, "ncclInt8", 1, is_symmetric=True), {0: (1, 2)})
    assert read_profile(profile).collectives[0].flags == flags


@every_version
def test_collectives_of_one_kernel_have_its_number_and_those_of_another_another(make_comm, profile, version):
    comm = make_comm(version)
    with comm.group():
        together = [comm.launch("AllGather", 64, "ncclInt8", 1) for _ in range(3)]
    alone = comm.launch("AllGather", 64, "ncclInt8", 1)
    for handle in (*together, alone):
        comm.run(handle, {0: (1, 2)})
    launches = [call.launch for call in read_profile(profile).collectives]
    assert launches == [launches[0]] * 3 + [launches[0] + 1]


def test_channels_have_entries_of_their_own_on_request(make_comm, profile, monkeypatch):
    monkeypatch.setenv("LAGOM_PROFILE_CHANNELS", "1")
    comm = make_comm()
    times = {0: (10, 20), 63: (11, 25)}
    comm.run(comm.launch("AllGather", 8, "ncclInt8", 2), times)
    (found,) = read_profile(profile).collectives
    assert {c.channel: (c.start_ns, c.end_ns) for c in found.channels} == times


def test_two_communicators_and_their_ranks_are_told_apart(make_comm, profile):
    comms = [make_comm(comm_id=i, rank=r) for i, r in ((5, 0), (5, 1), (6, 0))]
    handles = [comm.launch("AllReduce", 4, "ncclInt8", 1) for comm in comms]
    for place in (2, 0, 1):
        comms[place].run(handles[place], {0: (100 * place + 1, 100 * place + 9)})
    found = {(c.comm_id, c.rank): c.start_ns for c in read_profile(profile).collectives}
    assert found == {(5, 0): 1, (5, 1): 101, (6, 0): 201}


def test_a_collective_without_all_its_ends_is_written_when_its_communicator_goes(make_comm, profile):
    comm, other = make_comm(comm_id=1), make_comm(comm_id=2)
    handle, untouched = comm.launch("AllReduce", 4, "ncclInt8", 3), other.launch("AllReduce", 4, "ncclInt8", 1)
    comm.run(handle, {0: (10, 50), 1: (9, 40)})
    late = comm.start_channel(handle, 2, 8)
    assert read_profile(profile).collectives == ()
    comm.finalize()
    (found,) = read_profile(profile).collectives
    assert (found.start_ns, found.end_ns, found.num_started, found.num_ended) == (8, 50, 3, 2)
    assert (found.is_complete, found.duration_s) == (False, None)
    comm.end_channel(late, 99)  # NCCL's threads may outlive the communicator
    other.run(untouched, {0: (1, 2)})
    assert [c.comm_id for c in read_profile(profile).collectives] == [1, 2]
    assert profile_ring(profile).num_late == 1


def test_what_a_shared_proxy_thread_calls_after_the_end_of_a_communicator_is_harmless(make_comm, profile):
    """Communicators that share resources share the thread, which may be in a callback when one of them ends."""
    comm, other = make_comm(comm_id=1), make_comm(comm_id=2)
    comm.finalize()
    for _ in range(1000):  # what had been freed would be somebody else's by now
        make_comm(comm_id=3).finalize()
    assert comm.launch("AllReduce", 4, "ncclInt8", 1) is None
    comm.finalize()
    other.run(other.launch("AllReduce", 4, "ncclInt8", 1), {0: (1, 2)})
    assert [c.comm_id for c in read_profile(profile).collectives] == [2]


def test_a_collective_that_nccl_gives_no_channel_count_for_is_complete_with_what_it_had(make_comm, profile):
    comm = make_comm()
    comm.run(comm.launch("AllReduce", 4, "ncclInt8", 0, algo="COLLNET_DIRECT"), {0: (10, 50), 1: (9, 40)})
    comm.finalize()
    (found,) = read_profile(profile).collectives
    assert (found.num_channels, found.num_ended, found.is_complete, found.end_ns) == (None, 2, True, 50)


def test_a_full_pool_gives_up_the_oldest_and_ignores_what_comes_for_it_later(make_comm, profile):
    comm = make_comm()
    first = comm.launch("AllReduce", 4, "ncclInt8", 2)
    started = comm.start_channel(first, 0, 3)
    for _ in range(POOL):
        comm.launch("AllGather", 4, "ncclInt8", 1)
    (found,) = read_profile(profile).collectives
    assert (found.kind, found.call, found.is_complete, found.start_ns, found.end_ns) == (AR, 0, False, 3, None)
    comm.end_channel(started, 9)
    assert comm.start_channel(first, 1, 4) is None
    ring = profile_ring(profile)
    assert (ring.num_late, ring.num_dropped) == (2, 0)
    comm.finalize()
    assert len(ring.take().collectives) == 1 + POOL


def test_ends_from_several_threads_at_once_make_one_entry(make_comm, profile):
    comm = make_comm()
    for turn in range(50):
        handle = comm.launch("AllReduce", 4, "ncclInt8", 16)
        started = [comm.start_channel(handle, channel, 1 + turn + channel) for channel in range(16)]
        gate = threading.Barrier(4)

        def end(part, started=started, gate=gate):
            gate.wait()
            for channel in range(part, 16, 4):
                comm.end_channel(started[channel], 1000 + channel)

        threads = [threading.Thread(target=end, args=(part,)) for part in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = read_profile(profile).collectives
    assert [(c.call, c.num_ended, c.start_ns, c.end_ns) for c in found] == [(n, 16, 1 + n, 1015) for n in range(50)]


def test_it_is_switched_off_and_on_at_run_time(make_comm, plugin, profile):
    comms = [make_comm(4), make_comm(6)]
    masks = [comm.mask.value for comm in comms]
    assert plugin.profile(is_enabled=False) == 2
    assert [comm.mask.value for comm in comms] == [0, COLLECTIVE_CALL]  # which tells what is captured
    assert plugin.profile(is_enabled=True) == 2
    assert [comm.mask.value for comm in comms] == masks
    comms[0].finalize()
    assert plugin.profile(is_enabled=False) == 1
    assert make_comm().mask.value == COLLECTIVE_CALL  # a new communicator, too


def test_the_ring_is_private_and_each_process_may_have_its_own(make_comm, tmp_path, profile, monkeypatch):
    monkeypatch.setenv("LAGOM_PROFILE", str(tmp_path / "p-%r-%p"))
    monkeypatch.setenv("RANK", "3")
    make_comm()
    path = tmp_path / f"p-3-{os.getpid()}"
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(profile_ring(path).take().communicators) == 1


def test_a_ring_that_cannot_be_made_profiles_nothing(make_comm, tmp_path, profile, monkeypatch):
    monkeypatch.setenv("LAGOM_PROFILE", str(tmp_path / "missing" / "profile"))
    assert make_comm().mask.value == 0


def test_a_ring_is_read_piece_by_piece_and_an_entry_under_way_is_left_for_later(make_comm, profile):
    comm = make_comm()
    ring = profile_ring(profile)
    assert len(ring.take().communicators) == 1
    for _ in range(3):
        comm.run(comm.launch("AllReduce", 4, "ncclInt8", 1), {0: (1, 2)})
    file = np.memmap(flushed(profile), layout.PROFILE_ENTRY, "r+", layout.RING_HEADER.itemsize)
    file[2]["sequence"] = 0  # the second collective is being written
    assert [c.call for c in ring.take().collectives] == [0]
    assert ring.take().collectives == ()
    file[2]["sequence"] = 3
    log = ring.take()
    assert ([c.call for c in log.collectives], log.num_lost) == ([1, 2], 0)


def test_an_entry_that_is_completed_between_two_looks_is_taken_later(make_comm, profile, monkeypatch):
    comm = make_comm()
    ring = profile_ring(profile)
    for _ in range(3):
        comm.run(comm.launch("AllReduce", 4, "ncclInt8", 1), {0: (1, 2)})
    read, looks = RingFile._entries, []

    def read_early(file, first, end):
        entries = read(file, first, end).copy()
        if not looks:
            entries[-1]["sequence"] = 0  # still being written
        looks.append(end)
        return entries

    monkeypatch.setattr(RingFile, "_entries", read_early)
    log = ring.take()
    assert ([c.call for c in log.collectives], log.num_lost) == ([0, 1], 0)
    log = ring.take()
    assert ([c.call for c in log.collectives], log.num_lost) == ([2], 0)


def test_a_ring_that_was_overrun_says_how_many_entries_are_lost(make_comm, profile, monkeypatch):
    monkeypatch.setenv("LAGOM_PROFILE_ENTRIES", "16")
    comm = make_comm()
    ring = profile_ring(profile)
    for _ in range(40):
        comm.run(comm.launch("AllReduce", 4, "ncclInt8", 1), {0: (1, 2)})
    log = ring.take()
    assert ([c.call for c in log.collectives], log.num_lost) == (list(range(24, 40)), 25)


def test_a_ring_that_is_truncated_while_it_is_read_is_an_error_and_not_the_end_of_the_process(
    make_comm, profile, tmp_path
):
    comm = make_comm()
    for _ in range(40):
        comm.run(comm.launch("AllReduce", 4, "ncclInt8", 1), {0: (1, 2)})
    copy = tmp_path / "copy"  # the plug-in would mend its own
    copy.write_bytes(flushed(profile).read_bytes())
    ring = profile_log.ProfileRing(copy)
    assert ring.process_id == os.getpid()
    for num_bytes in (layout.RING_HEADER.itemsize + 10 * layout.PROFILE_ENTRY.itemsize, 8, 0):
        os.truncate(copy, num_bytes)
        with pytest.raises(TableError, match="truncated"):
            ring.take()


def test_a_ring_that_begins_anew_in_the_same_file_is_an_error(make_comm, profile, tmp_path):
    """As a process leaves it that was started in the place of another, with the same file."""
    comm, copy = make_comm(), tmp_path / "copy"
    few = flushed(profile).read_bytes()
    for _ in range(40):
        comm.run(comm.launch("AllReduce", 4, "ncclInt8", 1), {0: (1, 2)})
    copy.write_bytes(flushed(profile).read_bytes())
    ring = profile_log.ProfileRing(copy)
    assert len(ring.take().collectives) == 40
    copy.write_bytes(few)
    with pytest.raises(TableError, match="was begun anew"):
        ring.take()


def test_a_ring_is_read_over_its_edge(make_comm, profile, monkeypatch):
    monkeypatch.setenv("LAGOM_PROFILE_ENTRIES", "16")
    comm = make_comm()
    ring = profile_ring(profile)
    ring.take()
    seen = []
    for num in (10, 10, 3):
        for _ in range(num):
            comm.run(comm.launch("AllReduce", 4, "ncclInt8", 1), {0: (1, 2)})
        seen += [c.call for c in ring.take().collectives]
    assert seen == list(range(23))


def test_what_is_no_ring_or_not_ours_alone_is_refused(make_comm, profile, tmp_path):
    make_comm()
    link = tmp_path / "link"
    link.symlink_to(profile)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "short").write_bytes(flushed(profile).read_bytes()[:-1])
    (tmp_path / "zeros").write_bytes(bytes(4096))
    for name in ("link", "fifo", "short", "zeros", "missing"):
        with pytest.raises(TableError):
            profile_log.ProfileRing(tmp_path / name)
