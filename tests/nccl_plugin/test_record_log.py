"""What the plug-in records: NCCL's offer and the choice, per decision."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from c_build import build_libraries
from own_rings import flushed, read_record, record_ring

from lagom_overlap.collective import Algorithm, CollectiveKind, CommConfig, Protocol
from lagom_overlap.collective.size_class import LEAST_BYTES
from lagom_overlap.errors import TableError
from lagom_overlap.nccl_plugin import record_log
from lagom_overlap.nccl_plugin.fake_host import RELEASES, WITH_CHUNKS, HostCall, HostMode
from lagom_overlap.nccl_plugin.record_log import Flag
from lagom_overlap.online.events import rank_of

MIB = 1 << 20
AR, AG, RS = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER


@pytest.fixture
def record(tmp_path, monkeypatch):
    path = tmp_path / "record.bin"
    monkeypatch.setenv("LAGOM_RECORD", str(path))
    monkeypatch.setenv("LAGOM_RECORD_ENTRIES", "64")
    return path


@pytest.mark.parametrize("release", RELEASES)
def test_large_calls_are_counted_apart_those_of_communicators_that_are_gone_too(open_nccl, plugin, release):
    nccl = open_nccl(release)
    comm = nccl.comm(8, 1, comm_id=99)
    before = plugin.num_large()
    for num_bytes in (LEAST_BYTES - 1, LEAST_BYTES, 64 * MIB, 4):
        comm.run(AR, num_bytes)
    assert plugin.num_large() - before == 2
    comm.finalize()
    assert plugin.num_large() - before == 2


@pytest.mark.parametrize("release", RELEASES)
def test_a_step_is_recorded_as_it_happened(open_nccl, use_table, plugin, record, release):
    config = CommConfig(algorithm=Algorithm.TREE, protocol=Protocol.LL, num_channels=5, chunk_bytes=4096)
    use_table({(AR, 64 * MIB, 1): config}, generation=6, cycle=[(AR, 64 * MIB)] * 2)
    comm = open_nccl(release).comm(8, 1, comm_id=99)
    plugin.step()
    outcomes = [comm.run(AR, 64 * MIB), comm.run(AG, 32 * MIB), comm.run(AR, 64 * MIB)]
    log = read_record(record)
    assert [(c.num_ranks, c.num_nodes, c.creation_order) for c in log.communicators] == [(8, 1, 0)]
    counted = [d for d in log.decisions if Flag.NOT_COUNTED not in d.flags]
    assert [(d.kind, d.num_bytes, d.occurrence, d.step) for d in counted] == [
        (AR, 64 * MIB, 0, 1),
        (AG, 32 * MIB, None, 1),
        (AR, 64 * MIB, 1, 1),
    ]
    assert [d.flags for d in counted] == [Flag(0), Flag(0), Flag.MATCHED | Flag.APPLIED]
    last = counted[-1]
    assert (last.algorithm, last.protocol, last.num_channels) == (Algorithm.TREE, Protocol.LL, 5)
    assert (last.chunk_bytes, last.generation) == (4096, 6)
    assert counted[0].num_channels is None
    if release in ("2.28", *WITH_CHUNKS):
        assert {d.comm_id for d in log.decisions} == {99}
    assert len(log.chunks) == sum(o.num_chunk_calls for o in outcomes)
    assert all(
        c.chunk_bytes == (c.offered_bytes if c.kind == AG or c.protocol != Protocol.LL else 4096) for c in log.chunks
    )


@pytest.mark.parametrize("release", RELEASES)
def test_the_offer_is_nccls_cost_table_in_seconds(open_nccl, record, release):
    comm = open_nccl(release).comm(comm_id=5, has_ll128=False)
    outcome = comm.run(RS, 8 * MIB)
    log = read_record(record)
    decision = log.decisions[-1]
    if release == "2.21":
        assert decision.offered_s == {}
        return
    assert set(decision.offered_s) == {(Algorithm.RING, Protocol.LL), (Algorithm.RING, Protocol.SIMPLE)}
    assert decision.offered_s[outcome.algorithm, outcome.protocol] == pytest.approx(outcome.predicted_us * 1e-6)
    comm_id = log.decisions[0].comm_id
    assert log.offered(comm_id, RS, 8 * MIB) == frozenset(decision.offered_s)
    assert log.offered(comm_id, AR, 8 * MIB) == frozenset()


def test_queries_are_recorded_as_not_counted(open_nccl, record):
    open_nccl("2.31").comm().run(AR, MIB, HostMode.SYMMETRIC)
    first, second, third = read_record(record).decisions
    assert (first.flags, first.num_pipe_ops, first.occurrence) == (Flag.NOT_COUNTED, 0, None)
    assert first.offered_s == {}
    assert [Flag.NOT_COUNTED in d.flags for d in (second, third)] == [False, False]


def test_the_ring_keeps_the_newest_entries_and_says_how_many_are_lost(open_nccl, record):
    comm = open_nccl("2.28").comm()
    for n in range(200):
        comm.group(HostCall(AR, 4096 * (n + 1)))
    log = read_record(record)
    assert [d.num_bytes for d in log.decisions] == [4096 * (n + 1) for n in range(200 - 64, 200)]
    assert (log.num_lost, log.communicators) == (201 - 64, ())


def test_the_record_is_private_and_replaces_an_older_one_without_touching_it(open_nccl, record):
    record.write_bytes(b"older")
    kept = record.open("rb")
    open_nccl("2.30").comm()
    assert record.stat().st_mode & 0o777 == 0o600
    with kept:
        assert kept.read() == b"older"  # a process that still maps it is safe
    assert len(read_record(record).communicators) == 1


def test_a_record_that_cannot_be_made_costs_one_warning(open_nccl, tmp_path, monkeypatch):
    monkeypatch.setenv("LAGOM_RECORD", str(tmp_path / "missing" / "record"))
    nccl = open_nccl("2.30")
    assert nccl.comm().run(AR, MIB).is_untouched
    assert len([line for line in nccl.take_log() if line.startswith("WARN")]) == 1


def test_each_process_may_have_its_own_record_by_a_pattern(open_nccl, tmp_path, monkeypatch):
    monkeypatch.setenv("LAGOM_RECORD", str(tmp_path / "record-%r-%p"))
    monkeypatch.setenv("SLURM_PROCID", "12")
    open_nccl("2.30").comm()
    assert len(read_record(tmp_path / f"record-12-{os.getpid()}").communicators) == 1


@pytest.mark.parametrize(("noted", "rank"), [("{}:3", "3"), ("1{}:3", "7"), ("{}:", "7"), ("{}", "7"), ("", "7")])
def test_a_rank_that_python_noted_for_this_process_goes_before_the_launchers(
    open_nccl, tmp_path, monkeypatch, noted, rank
):
    monkeypatch.setenv("LAGOM_RECORD", str(tmp_path / "record-%r"))
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("LAGOM_RANK", noted.format(os.getpid()))
    open_nccl("2.30").comm()
    assert [path.name for path in tmp_path.glob("record-*")] == [f"record-{rank}"]
    assert rank_of(os.environ) == int(rank)


@pytest.mark.parametrize("damage", [b"", b"x" * 64, "short"])
def test_a_file_that_is_no_record_is_refused(open_nccl, record, damage):
    open_nccl("2.30").comm()
    record.write_bytes(flushed(record).read_bytes()[:-1] if damage == "short" else damage)
    with pytest.raises(TableError):
        record_log.read_record(record)


def test_a_ring_is_read_piece_by_piece_each_entry_once(open_nccl, use_table, record):
    use_table({(AR, 64 * MIB, 0): CommConfig(num_channels=3)})
    comm = open_nccl("2.28").comm()
    ring = record_ring(record)
    assert [c.num_ranks for c in ring.take().communicators] == [8]
    for _ in range(2):
        sizes = [64 * MIB, 32 * MIB, MIB]
        for num_bytes in sizes:
            comm.run(AR, num_bytes)
        log = ring.take()
        assert [d.num_bytes for d in log.decisions] == sizes
        assert log.communicators == ()
        assert log.num_lost == 0
    assert ring.take().decisions == ()


def test_a_ring_that_was_overrun_says_how_many_entries_are_lost(open_nccl, use_table, record, monkeypatch):
    monkeypatch.setenv("LAGOM_RECORD_ENTRIES", "16")
    use_table({(AR, 64 * MIB, 0): CommConfig(num_channels=3)})
    comm = open_nccl("2.28").comm()
    ring = record_ring(record)
    ring.take()
    for size in range(1, 41):
        comm.run(AR, size * MIB)
    log = ring.take()
    assert [d.num_bytes // MIB for d in log.decisions] == list(range(25, 41))
    assert log.num_lost == 24


@pytest.mark.parametrize("harm", ["truncated", "halved", "grown", "overwritten", "deleted", "replaced"])
def test_no_file_operation_of_an_outsider_ends_the_job(plugin_path, record, tmp_path, tmp_path_factory, harm):
    """Both rings, between two calls of NCCL's; a ring that is mapped ends the process with SIGBUS in the next one."""
    child = Path(__file__).with_name("harmed_rings.py")
    environment = {**os.environ, "LAGOM_PROFILE": str(tmp_path / "profile.bin"), "LAGOM_RECORD_ENTRIES": "1024"}
    command = [sys.executable, child, plugin_path, build_libraries(tmp_path_factory)[1], harm]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_a_step_writes_what_is_new_once_it_is_a_sixteenth_of_the_ring(open_nccl, plugin, record):
    comm = open_nccl("2.28").comm()
    plugin.flush_record()
    seen = []
    for _ in range(3):
        for _ in range(2):
            comm.run(AR, MIB)
        plugin.step()
        seen.append(len(record_log.read_record(record).decisions))
    assert seen == [0, 4, 4]  # of 64 entries


def test_what_was_lost_by_a_truncation_is_lost_alone(open_nccl, plugin, record):
    comm = open_nccl("2.30").comm()
    ring = record_ring(record)
    comm.run(AR, MIB)
    assert len(ring.take().decisions) == 1
    os.truncate(record, 0)
    comm.run(AR, 2 * MIB)
    assert [d.num_bytes for d in ring.take().decisions] == [2 * MIB]


def test_a_process_that_ends_leaves_its_record_whole_and_a_forked_child_leaves_it_alone(
    plugin_path, fake_library, record, tmp_path
):
    child = tmp_path / "child.py"
    child.write_text(ENDING)
    command = [sys.executable, child, fake_library._name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    log = record_log.read_record(record)
    assert [d.num_bytes for d in log.decisions] == [MIB, 2 * MIB]


def test_a_file_that_has_taken_the_rings_number_is_left_alone(open_nccl, plugin, record, tmp_path):
    """A job that closes every descriptor it does not know, and opens files of its own."""
    comm = open_nccl("2.30").comm()
    [descriptor] = [n for n in range(3, 4096) if _names(n, record)]
    own = tmp_path / "own"
    own.write_bytes(b"the job's")
    file = os.open(own, os.O_RDWR)
    os.dup2(file, descriptor)
    comm.run(AR, MIB)
    plugin.flush_record()
    assert own.read_bytes() == b"the job's"
    os.close(descriptor)
    os.close(file)


def _names(descriptor, path):
    try:
        return Path(f"/proc/self/fd/{descriptor}").readlink() == path
    except OSError:
        return False


ENDING = """
import os
import sys
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.nccl_plugin.fake_host import FakeNccl, load_fake_library

comm = FakeNccl(load_fake_library(sys.argv[1]), "2.30").comm()
comm.run(CollectiveKind.ALL_REDUCE, 1 << 20)
pid = os.fork()
if pid == 0:
    for _ in range(9):
        comm.run(CollectiveKind.ALL_REDUCE, 1 << 22)
    sys.exit(0)
os.waitpid(pid, 0)
comm.run(CollectiveKind.ALL_REDUCE, 2 << 20)
"""
