"""Which measured steps NCCL's profiler times, which PyTorch's, and what is said where NCCL's cannot."""

import os
from dataclasses import dataclass, replace

import numpy as np
import pytest
from c_build import build_libraries
from kineto_step import COMM, COMPUTE, sharded_step
from played_profiler import COLLECTIVE_CALL, PlayedComm

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import TableError
from lagom_overlap.nccl_plugin import table_layout as layout
from lagom_overlap.nccl_plugin.library import TunerPlugin
from lagom_overlap.nccl_plugin.profile_log import ProfiledCollective, ProfileFlag
from lagom_overlap.online.routes.plugin_events import ended, step_length_s, timed_calls
from lagom_overlap.online.routes.profile_timer import CHECK_EVERY, MOST_MISSES, ProfileTimer, RingRecorder
from lagom_overlap.units import MIB

US = 1e-6
NOW_NS = 1_764_000_000_000_000_000  # globaltimer counts from 1970
IDLE_S = 30 * US
"""From the first event to the step's first kernel."""


@dataclass
class Event:
    at_s: float = 0.0
    record_at: object = None

    def record(self):
        self.at_s = self.record_at()

    def elapsed_time(self, later):
        return (later.at_s - self.at_s) * 1e3


class Job:
    """A job of simulated steps: both profilers, the device's events, and what may go wrong with each."""

    def __init__(self, tmp_path):
        self.tmp_path = tmp_path
        self.program = sharded_step(4)
        self.length, self.slower = 100.0, 1.2
        self.num_kineto = self.num_steps = 0
        self.begin_error = self.end_error = None
        self.num_lost = self.loss_bytes = 0
        self.skew_ns = 0
        self.now_s = 0.0
        self.loads_us = 0.0  # data that the host reads and copies after the last update, before the next step begins
        self.is_gathered_late = False
        self.num_members = 1  # of each kernel: calls that PyTorch coalesces, whose sizes its profiler may not tell
        self.sizes = {}
        self.captured = ProfileFlag(0)  # of the first call of a step
        self.timer = ProfileTimer(
            self,
            Ring(self),
            make_event=lambda: Event(record_at=lambda: self.now_s),
            synchronize=lambda: None,
            least_bytes=MIB,
            clock_ns=lambda: 1_000 + (50 if not self.is_gathered_late else 10),
        )

    @property
    def kineto(self):
        """The step, with what follows it until the next one begins, up to which PyTorch's profiler runs."""
        step = self.program.kineto(**self.sizes)
        step.launched()
        step.host("ProfilerStep#0", 1.0)
        if self.loads_us:
            end = max(op.end for op in self.program.ops)
            step.compute(end + self.loads_us, 10.0)
            step.launched(end + self.loads_us)
        return ended(step.trace(self.tmp_path), MIB)

    def mark_end(self):
        pass

    def begin(self):
        self.num_kineto += 1

    def end(self):
        return step_length_s(self.kineto), timed_calls(self.kineto)

    def end_trace(self):
        return step_length_s(self.kineto), self.kineto

    def calls(self):
        """What NCCL's profiler has of the step; the ring holds it in the order of the ends."""
        numbers = {}
        found = []
        for place, op in enumerate(self.program.collectives):
            kind = CollectiveKind(op.what)
            is_late = place % 2 and self.skew_ns
            start = NOW_NS + round(op.start * 1e3)
            end = NOW_NS + round(op.end * 1e3) + (self.skew_ns if is_late else 0)
            for member in range(self.num_members):
                number = numbers[kind] = numbers.get(kind, 99 + self.num_steps) + 1
                own = {"kind": kind, "num_bytes": 2 * MIB // self.num_members, "place": place, "launch": place + 1}
                early = end - member * (end - start) // 4  # a part of the channels may be done before the others
                found.append(profiled(5, number, **own, start_ns=start, end_ns=early))
        if self.loss_bytes:
            loss = {"kind": CollectiveKind.ALL_REDUCE, "num_bytes": self.loss_bytes, "place": 99}
            found.append(profiled(6, 1, **loss, start_ns=NOW_NS, end_ns=NOW_NS + 9))
        found[0] = replace(found[0], flags=self.captured)
        return sorted(found, key=lambda call: call.end_ns)[self.num_lost :]

    def measured(self):
        """What the timer says of the next step."""
        self.num_steps += 1
        self.timer.begin()
        length = self.program.run([self.length] * len(self.program.collectives), self.slower)
        update = max((op for op in self.program.ops if op.what == "compute"), key=lambda op: op.length).end
        self.now_s += IDLE_S + update * US
        self.timer.mark_end()
        self.now_s += (length - update + self.loads_us) * US
        return self.timer.end()


class Ring:
    def __init__(self, job):
        self.job = job
        self.num_begun = 0

    def begin(self):
        self.num_begun += 1
        if self.job.begin_error:
            raise TableError(self.job.begin_error)

    def end(self, is_whole):
        if self.job.end_error:
            raise TableError(self.job.end_error)
        return self.job.calls()


def profiled(comm_id, call, *, kind, num_bytes, place, start_ns, end_ns, launch=None):
    return ProfiledCollective(
        comm_id=comm_id,
        call=call,
        kind=kind,
        num_bytes=num_bytes,
        rank=0,
        num_ranks=8,
        algorithm=None,
        protocol=None,
        num_channels=16,
        num_started=16,
        num_ended=16,
        called_ns=None,
        launched_ns=1_000 + place,
        seen_ns=None,
        start_ns=start_ns,
        end_ns=end_ns,
        flags=ProfileFlag(0),
        channels=(),
        launch=launch,
    )


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def fallen_back(caplog):
    return [record.getMessage() for record in caplog.records if "timed by PyTorch's" in record.getMessage()]


def test_two_steps_of_the_job_run_under_both_and_then_one_in_twenty(job, caplog):
    modes = []
    for _ in range(3 * CHECK_EVERY):
        before = job.num_kineto
        assert job.measured()[1] is not None
        modes.append(job.num_kineto - before)
    assert [number for number, is_kineto in enumerate(modes) if is_kineto] == [0, 1, 21, 41]
    assert not fallen_back(caplog)


@pytest.mark.parametrize(("length", "slower"), [(40.0, 1.2), (100.0, 1.0), (250.0, 1.3), (600.0, 1.1)])
def test_a_step_told_by_the_ring_is_the_step_that_pytorchs_profiler_would_have_told(job, length, slower):
    for _ in range(2):
        job.measured()
    num_kineto = job.num_kineto
    job.length, job.slower = length, slower
    duration_s, told = job.measured()
    seen, length_s = timed_calls(job.kineto), step_length_s(job.kineto)
    assert job.num_kineto == num_kineto
    assert duration_s == pytest.approx(length_s, abs=US)  # the ring's and the events' clocks were tied
    for ours, theirs in zip(told, seen, strict=True):
        assert (ours.kind, ours.num_bytes, ours.num_channels) == (theirs.kind, theirs.num_bytes, 16)
        assert (ours.begun_s, ours.ended_s) == pytest.approx((theirs.begun_s, theirs.ended_s), abs=0.1 * US)
        assert ours.resumed_s == pytest.approx(theirs.resumed_s, abs=0.02 * length_s)


@pytest.mark.parametrize("sizes", [{}, {"nelems": 0}], ids=["with the kernel's size", "of unknown size"])
def test_coalesced_calls_are_told_by_the_ring_as_the_one_kernel_that_they_are(job, caplog, sizes):
    """Four calls to a kernel: PyTorch's profiler sees one, of which PyTorch 2.15 does not say how large it is."""
    job.num_members, job.sizes = 4, sizes
    for _ in range(2):
        assert [call.num_bytes for call in job.measured()[1]] == [2 * MIB] * len(job.program.collectives)
    job.length, job.slower = 250.0, 1.3
    duration_s, told = job.measured()
    assert (job.num_kineto, fallen_back(caplog)) == (2, [])
    assert duration_s == pytest.approx(step_length_s(job.kineto), abs=US)
    assert [call.num_bytes for call in told] == [2 * MIB] * len(job.program.collectives)
    for ours, theirs in zip(told, timed_calls(job.kineto), strict=True):
        assert (ours.begun_s, ours.ended_s) == pytest.approx((theirs.begun_s, theirs.ended_s), abs=0.1 * US)


def test_a_step_with_a_call_that_a_graph_replays_is_not_told_by_the_ring(job):
    """It has no place in the host's order, so that it cannot be told what it ran beside."""
    for _ in range(3):
        assert job.measured()[1] is not None
    job.captured = ProfileFlag.CAPTURED
    assert job.measured()[1] is None


def test_a_group_of_other_calls_than_the_patterns_is_another_step(job):
    for _ in range(3):
        job.measured()
    job.num_members = 3  # 3 times 699,050 bytes
    assert job.measured()[1] is None


def test_a_changed_sequence_leaves_one_step_untimed_and_is_learned_and_checked(job, caplog):
    for _ in range(4):
        job.measured()
    job.program = sharded_step(3)
    ran = []
    for _ in range(4):
        before = job.num_kineto
        ran.append((job.measured()[1] is not None, job.num_kineto - before))
    assert ran == [(False, 0), (False, 0), (True, 1), (True, 1)]
    assert job.measured()[1] is not None
    assert (job.num_kineto, fallen_back(caplog)) == (4, [])


def test_a_job_whose_every_fifth_step_is_another_is_told_by_the_ring_all_the_same(job, caplog):
    """An evaluation, a log: untimed, and not learned; only in the rare step under both it is met by PyTorch's."""
    told = 0
    for step in range(5 * CHECK_EVERY):
        job.program = sharded_step(3 if step % 5 == 4 else 4)
        told += job.measured()[1] is not None
    assert told >= 4 * CHECK_EVERY
    assert job.num_kineto <= 2 + 2 * 5
    assert not fallen_back(caplog)


@pytest.mark.parametrize("is_gathered_late", [False, True])
def test_data_that_is_loaded_after_the_update_is_no_part_of_the_step(job, caplog, is_gathered_late):
    """0 to 90 ms, in steps of 3; with parameters gathered after the update, too, which are of the step."""
    job.is_gathered_late = is_gathered_late
    job.program = gathered_late() if is_gathered_late else sharded_step(4)
    for step in range(CHECK_EVERY + 4):
        job.loads_us = 1e3 * (37 * step % 91)
        job.length = 100.0 if step < 2 else 60.0 + 10 * (step % 5)
        duration_s, told = job.measured()
        length_s = max(op.end for op in job.program.ops) * US
        assert duration_s == pytest.approx(length_s, abs=US)
        if is_gathered_late:
            assert told[-1].ended_s == pytest.approx(length_s - US, abs=US)
            assert told[-1].joined_s is not None
    assert job.num_kineto == 3
    assert not fallen_back(caplog)


def gathered_late():
    """A step whose updated parameters are gathered behind the optimizer, as DeepSpeed's ZeRO-1 does."""
    program = sharded_step(4)
    program.wait(COMM, len(program.ops) - 1)
    program.wait(COMPUTE, program.collective("all_gather"))
    program.compute(1.0)
    return program


def test_a_loss_that_is_summed_in_some_steps_is_no_other_sequence(job):
    for step in range(12):
        job.loss_bytes = 4 if step % 5 == 0 else 0
        assert job.measured()[1] is not None
    assert job.num_kineto == 2


def test_a_job_whose_every_step_is_another_keeps_pytorchs_profiler_and_says_so_once(job, caplog):
    for step in range(3 * MOST_MISSES):
        job.program = sharded_step(3 + step % 2)
        job.measured()
    assert job.num_kineto == 3 * MOST_MISSES
    (line,) = fallen_back(caplog)
    assert line.endswith("their calls change from step to step")


def test_profilers_that_disagree_leave_pytorchs_and_say_by_how_much(job, caplog):
    """Every second collective is told to end 500 us late, from some step on: NCCL's times are those of later calls."""
    for _ in range(CHECK_EVERY + 1):
        job.measured()
    assert job.num_kineto == 2
    job.skew_ns = 500_000
    assert job.measured() == (step_length_s(job.kineto), timed_calls(job.kineto))
    (line,) = fallen_back(caplog)
    assert "more than 2.0 %" in line
    for _ in range(3):
        assert job.measured()[1] is not None
    assert job.num_kineto == 6


def test_a_noisy_job_is_given_its_own_noise(job, caplog):
    """Two untouched steps differ by a third under PyTorch's profiler alone: then 11 % are no disagreement."""
    job.measured()
    job.length, job.slower = 330.0, 1.5
    job.measured()
    job.length, job.slower = 100.0, 1.2
    job.skew_ns = 300_000
    for _ in range(CHECK_EVERY):
        job.measured()
    assert job.num_kineto == 3
    assert not fallen_back(caplog)


@pytest.mark.parametrize("is_at_begin", [True, False])
@pytest.mark.parametrize("num_before", [0, 1, 5])
def test_a_ring_that_cannot_be_read_leaves_pytorchs_profiler(job, caplog, is_at_begin, num_before):
    for _ in range(num_before):
        job.measured()
    num_kineto = job.num_kineto
    if is_at_begin:
        job.begin_error = "cannot read the profile"
    else:
        job.end_error = "cannot read the profile"
    told = [job.measured()[1] is not None for _ in range(4)]
    was_by_ring = num_before == 5
    assert told == [is_at_begin or not was_by_ring, True, True, True]
    assert job.num_kineto - num_kineto == (4 if told[0] else 3)
    (line,) = fallen_back(caplog)
    assert line.endswith("not by NCCL's: cannot read the profile")


def test_calls_that_nccl_never_reports_make_untimed_steps_and_then_pytorchs_profiler(job, caplog):
    for _ in range(4):
        job.measured()
    job.num_lost = 2
    told = [job.measured()[1] is not None for _ in range(MOST_MISSES + 2)]
    assert told == [False, False, *[True] * MOST_MISSES]
    (line,) = fallen_back(caplog)
    assert "it saw 9 collectives of a step, PyTorch's 11" in line


# The ring itself. -----------------------------------------------------------------------------------------------------


@pytest.fixture
def played(tmp_path, tmp_path_factory, monkeypatch):
    """A communicator as NCCL plays it, and the recorder of its ring."""
    for name in ("LAGOM_PROFILE_ENTRIES", "LAGOM_PROFILE_CHANNELS"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "profile.bin"
    monkeypatch.setenv("LAGOM_PROFILE", str(path))
    library = tmp_path / "liblagom_tuner.so"  # an instance of its own, which reads the environment anew
    library.write_bytes(build_libraries(tmp_path_factory)[0].read_bytes())
    return lambda **how: (PlayedComm(library, 6, 7), RingRecorder(TunerPlugin(library), path, **how), path)


def ran(comm, num=1):
    for _ in range(num):
        comm.run(comm.launch("AllReduce", 4, "ncclInt8", 1), {0: (1, 2)})


def test_calls_are_recorded_in_measured_steps_only(played):
    comm, recorder, _ = played()
    assert comm.mask.value == COLLECTIVE_CALL
    ran(comm)
    for num in (1, 3):
        recorder.begin()
        assert comm.mask.value & ~COLLECTIVE_CALL
        ran(comm, num)
        assert len(recorder.end(lambda calls, num=num: len(calls) >= num)) == num
        assert comm.mask.value == COLLECTIVE_CALL
        ran(comm)


def test_calls_that_do_not_come_are_waited_for_no_longer_than_the_limit(played):
    looked = iter(range(100))
    comm, recorder, _ = played(clock=lambda: float(next(looked)), limit_s=3.0)
    recorder.begin()
    ran(comm)
    comm.launch("AllReduce", 4, "ncclInt8", 1)  # whose end nobody reports
    assert len(recorder.end(lambda calls: len(calls) == 2)) == 1
    assert next(looked) == 4


def test_a_step_of_fewer_calls_than_expected_is_waited_for_no_longer_than_its_own_take(played):
    """An evaluation must not cost the second that NCCL's proxy thread may take for the calls of a whole step."""
    comm, recorder, _ = played(clock=lambda: 0.0)
    recorder.begin()
    ran(comm, 3)
    assert len(recorder.end(lambda calls: len(calls) == 9)) == 3
    recorder.begin()
    handle = comm.launch("AllReduce", 4, "ncclInt8", 1)
    assert recorder._ring.num_open == 1
    seen = []

    def ends_while_it_is_waited_for(calls):
        seen.append(len(calls))
        if len(seen) == 3:
            comm.run(handle, {0: (1, 2)})
        return False

    assert len(recorder.end(ends_while_it_is_waited_for)) == 1
    assert seen == [0, 0, 0]
    assert recorder._ring.num_open == 0


def test_a_ring_that_is_not_there_of_another_process_or_no_ring_is_refused(played):
    _, recorder, path = played()
    data = path.read_bytes()
    stale = np.frombuffer(bytearray(data), layout.RING_HEADER, 1).copy()
    stale["process_id"] = os.getpid() + 1
    for content, words in (
        (None, "cannot read the profile"),
        (stale.tobytes() + data[layout.RING_HEADER.itemsize :], f"is the profile of process {os.getpid() + 1}"),
        (bytes(4096), "not a profile of version"),
        (data[:-128], "do not hold"),
        (b"", "too few"),
    ):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(TableError, match=words):
            recorder.begin()


def test_a_ring_that_is_truncated_later_is_refused_and_ends_nothing(played):
    comm, recorder, path = played()
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    path.rename(path.with_name("mapped"))  # the plug-in writes on there
    copy.rename(path)
    recorder.begin()
    os.truncate(path, 10)
    ran(comm)
    with pytest.raises(TableError, match="was truncated"):
        recorder.end(lambda calls: True)
    assert comm.mask.value == COLLECTIVE_CALL


def test_a_ring_that_was_overrun_in_a_step_is_refused(played, monkeypatch):
    monkeypatch.setenv("LAGOM_PROFILE_ENTRIES", "16")
    comm, recorder, _ = played()
    recorder.begin()
    ran(comm, 40)
    with pytest.raises(TableError, match="has lost calls of the step"):
        recorder.end(lambda calls: True)


def test_a_call_whose_events_came_too_late_in_a_step_is_refused(played):
    """The plug-in has given it up for newer ones: what it took is not known."""
    comm, recorder, _ = played()
    recorder.begin()
    started = comm.start_channel(comm.launch("AllReduce", 4, "ncclInt8", 1), 0, 3)
    while recorder._ring.num_open == comm.num_launched:  # until its place is taken
        comm.launch("AllGather", 4, "ncclInt8", 1)
    comm.end_channel(started, 9)
    with pytest.raises(TableError, match="has lost calls of the step"):
        recorder.end(lambda calls: True)


def test_a_call_of_the_step_before_that_ends_in_this_one_is_none_of_it(played):
    comm, recorder, _ = played()
    recorder.begin()
    earlier = comm.launch("AllReduce", 4, "ncclInt8", 1)
    assert recorder.end(lambda calls: True) == []
    recorder.begin()
    comm.run(earlier, {0: (1, 2)})
    comm.run(comm.launch("AllGather", 4, "ncclInt8", 1), {0: (3, 4)})
    (call,) = recorder.end(lambda calls: len(calls) == 2)
    assert (call.kind, call.start_ns) == (CollectiveKind.ALL_GATHER, 3)


def test_a_profiler_that_nccl_has_not_loaded_is_found_out(played):
    comm, recorder, _ = played()
    comm.finalize()
    with pytest.raises(TableError, match="NCCL runs no communicator under it"):
        recorder.begin()
