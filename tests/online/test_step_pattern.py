"""Steps that a small simulation ran -> their joins, by when their collectives ran and one step that was profiled."""

import random

import pytest
from kineto_step import COMM, COMPUTE, COPY, Program, sharded_step

from lagom_overlap.collective import CollectiveKind, CommunicatorId, ConfigKey, ConfigSpace, Subspace
from lagom_overlap.errors import TraceError
from lagom_overlap.online.program import groups_of, program_of, times_of
from lagom_overlap.online.routes.launch_order import computation_of, launched, starts_of
from lagom_overlap.online.routes.plugin_events import step_length_s, step_record, timed_calls
from lagom_overlap.online.routes.step_pattern import KernelSpan, is_same_sequence, pattern_of
from lagom_overlap.units import MIB

US = 1e-6


def spans_of(calls):
    return [KernelSpan(call.begun_s, call.ended_s, call.num_channels) for call in calls]


def profiled(program, tmp_path, length, slower=1.0, **sizes):
    """The step with collectives of a length (or of several), under PyTorch's profiler."""
    lengths = length if isinstance(length, list) else [length] * len(program.collectives)
    program.run(lengths, slower)
    return program.kineto(**sizes).trace(tmp_path)


def makespans_s(calls, length_s, shape=None):
    """By group; which calls are late or exposed, and so the groups, may be told by other calls' times (`shape`)."""
    keys = []
    for at, call in enumerate(calls):
        name = CommunicatorId(description="fsdp", ranks=tuple(range(8)))
        keys.append(ConfigKey(communicator=name, kind=call.kind, num_bytes=call.num_bytes, occurrence=at))
    record = step_record(keys, length_s, calls)
    assert record.is_timed
    told_by = record if shape is None else step_record(keys, length_s, shape)
    program = program_of([told_by], [ConfigSpace((Subspace(num_channels=(1,)),))] * len(keys))
    times = times_of(program, groups_of(program), record)
    return {name: time.makespan_s for name, time in times.items()}


@pytest.mark.parametrize("length", [30.0, 60.0, 100.0, 140.0, 200.0, 400.0, 800.0])
@pytest.mark.parametrize("slower", [1.0, 1.2, 1.5])
def test_a_sharded_step_under_another_setting_is_told_as_pytorchs_profiler_tells_it(tmp_path, length, slower):
    """Hidden and exposed waits, more and less contention than in the step that was profiled."""
    program = sharded_step(6)
    pattern = pattern_of(profiled(program, tmp_path, 100.0, 1.2), MIB)
    trace = profiled(program, tmp_path, length, slower)
    seen, length_s = timed_calls(trace), step_length_s(trace)
    told = pattern.replay(spans_of(seen), length_s)
    assert [(call.begun_s, call.ended_s) for call in told] == [(call.begun_s, call.ended_s) for call in seen]
    for ours, theirs in zip(told, seen, strict=True):
        assert ours.resumed_s == pytest.approx(theirs.resumed_s, abs=0.01 * length_s)
        assert ours.resumed_s >= max(ours.joined_s, ours.ended_s)
    groups = makespans_s(seen, length_s)
    assert makespans_s(told, length_s, seen) == pytest.approx(groups, rel=0.04, abs=10 * US)


def test_steps_whose_collectives_differ_among_each_other_are_told_too(tmp_path):
    draw = random.Random(7)
    program = sharded_step(6)
    pattern = pattern_of(profiled(program, tmp_path, 100.0, 1.2), MIB)
    for _ in range(30):
        lengths = [draw.uniform(30, 600) for _ in range(len(program.collectives))]
        trace = profiled(program, tmp_path, lengths, draw.uniform(1.0, 1.5))
        seen, length_s = timed_calls(trace), step_length_s(trace)
        told = pattern.replay(spans_of(seen), length_s)
        off = [abs(ours.resumed_s - theirs.resumed_s) for ours, theirs in zip(told, seen, strict=True)]
        assert sum(off) / len(off) < 0.01 * length_s


def test_the_step_that_was_profiled_comes_out_as_it_was(tmp_path):
    program = sharded_step(4)
    trace = profiled(program, tmp_path, 120.0, 1.3)
    pattern = pattern_of(trace, MIB)
    for ours, theirs in zip(pattern.replay(spans_of(pattern.seen), step_length_s(trace)), pattern.seen, strict=True):
        assert (ours.joined_s, ours.resumed_s) == pytest.approx((theirs.joined_s, theirs.resumed_s))
        assert (ours.issued_s, ours.issue_place, ours.join_place) == pytest.approx(
            (theirs.issued_s, theirs.issue_place, theirs.join_place)
        )


def test_a_start_on_an_idle_stream_dates_the_wait_before_it_by_hand(tmp_path):
    """The gather is hidden behind 100 us of computation; now these take 150, which only the next start can tell."""
    program = Program()
    first = program.compute(10.0)
    program.wait(COMM, first)
    gather = program.collective("all_gather")
    program.compute(100.0)
    program.wait(COMPUTE, gather)
    copied = program.compute(4.0)
    program.wait(COMM, copied)
    scatter = program.collective("reduce_scatter")
    program.compute(50.0)
    program.wait(COMPUTE, scatter)
    program.compute(30.0)
    pattern = pattern_of(profiled(program, tmp_path, 20.0), MIB)
    assert [call.lag_s for call in pattern.calls] == [0.0, 0.0]
    spans = [KernelSpan(10 * US, 30 * US, 8), KernelSpan(166 * US, 366 * US, 8)]
    gathered, scattered = pattern.replay(spans, 396 * US)
    assert gathered.joined_s == gathered.resumed_s == pytest.approx(160 * US, abs=0.1 * US)  # 10 + 1.5 x 100
    assert scattered.issued_s == pytest.approx(166 * US)
    assert (scattered.joined_s, scattered.resumed_s) == pytest.approx((216 * US, 366 * US))
    assert [call.num_channels for call in (gathered, scattered)] == [8, 8]


def test_a_start_that_the_host_launched_late_does_not_shift_the_dates_of_later_steps(tmp_path):
    """PyTorch's profiler slows the host; a step without it launches in time, and starts mean what they usually mean."""
    program = sharded_step(6)
    program.run([100.0] * len(program.collectives), 1.2)
    told = []
    for late in (0.0, 80.0):
        step = program.kineto()
        gathers = [event for event in step.events if event.get("name", "").startswith("ncclDevKernel_AllGather")]
        gathers[4]["ts"] += late
        trace = step.trace(tmp_path)
        on_time = spans_of(timed_calls(program.kineto().trace(tmp_path)))
        told.append(pattern_of(trace, MIB).replay(on_time, step_length_s(trace)))
    for ours, undisturbed in zip(*told, strict=True):
        assert ours.resumed_s == pytest.approx(undisturbed.resumed_s, abs=5 * US)


def test_what_a_collective_waits_for_passes_through_the_streams_between(tmp_path):
    """The copy-in stream has waited for the computation, and the gather for the copy; what came later it has not."""
    program = Program()
    done = program.compute(10.0)
    program.wait(COPY, done)
    copied = program.compute(5.0, COPY)
    program.compute(10.0)
    program.wait(COMM, copied)
    first = program.collective("all_gather")
    program.wait(COPY, first)
    late = program.compute(5.0, COPY)
    program.wait(30, late)
    program.collective("all_gather", 30)
    program.wait(COMPUTE, first)
    program.compute(100.0)
    trace = profiled(program, tmp_path, 20.0)
    comms = launched(trace)
    starts = [starts_of(comms, trace.waits, computation_of(trace).stream)[comm.correlation] for comm in comms]
    assert [start.computed for start in starts] == [2 * done + 3] * 2
    assert [start.comms for start in starts] == [(), (comms[0].correlation,)]


def test_a_collective_on_the_computations_own_stream_is_its_own_mark(tmp_path):
    program = Program()
    program.compute(10.0)
    program.collective("all_reduce", COMPUTE)
    program.compute(100.0)
    pattern = pattern_of(profiled(program, tmp_path, 20.0), MIB)
    (call,) = pattern.replay([KernelSpan(30 * US, 80 * US, 4)], 180 * US)
    assert [call.issued_s, call.joined_s, call.resumed_s] == pytest.approx([30 * US, 30 * US, 80 * US])


def test_streams_that_never_idle_tell_nothing_of_the_computation_and_are_refused(tmp_path):
    """All gathers are queued before the first product: where the computation waits for them, no start says."""
    program = Program()
    gathers = [program.collective("all_gather") for _ in range(6)]
    for gather in gathers:
        program.wait(COMPUTE, gather)
        done = program.compute(50.0)
        program.wait(COMM, done)
        program.collective("reduce_scatter")
    with pytest.raises(TraceError, match="keep their streams busy: 5 of 6 waits"):
        pattern_of(profiled(program, tmp_path, 40.0), MIB)


def test_what_the_profiler_plug_in_never_reports_is_refused_if_it_is_large(tmp_path):
    program = sharded_step(3)
    program.run([100.0] * len(program.collectives))
    step = program.kineto()
    step.nccl("SendRecv", 5_000, 10, op="all_to_allv", nelems=4)
    pattern_of(step.trace(tmp_path), MIB)
    step.nccl("SendRecv", 6_000, 10, op="all_to_allv")
    with pytest.raises(TraceError, match="NCCL's profiler does not report its all_to_all"):
        pattern_of(step.trace(tmp_path), MIB)


def test_a_step_without_collectives_of_a_size_or_without_waits_has_no_pattern(tmp_path):
    with pytest.raises(TraceError, match="no collectives"):
        pattern_of(profiled(sharded_step(2), tmp_path, 10.0, nelems=4), MIB)
    program = Program()
    program.compute(10.0)
    program.collective("all_gather")
    with pytest.raises(TraceError, match="does not tell what waits for what"):
        pattern_of(profiled(program, tmp_path, 10.0), MIB)


def test_steps_are_one_sequence_whatever_their_times(tmp_path):
    steps = [timed_calls(profiled(sharded_step(layers), tmp_path, length)) for layers, length in ((3, 50), (3, 900))]
    assert is_same_sequence(*steps)
    assert not is_same_sequence(steps[0], timed_calls(profiled(sharded_step(4), tmp_path, 50)))
    assert not is_same_sequence(steps[0], steps[0][:-1])
    assert {call.kind for call in steps[0]} == {CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER}
