"""GPU events written by hand -> what was issued, ran and was waited for."""

import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from kineto_step import COMM, COMPUTE, COPY, SCATTER, Step

from lagom_overlap.collective import CollectiveKind, CommunicatorId, ConfigKey, ConfigSpace, Subspace
from lagom_overlap.online.program import events_of, fingerprint, groups_of, program_of, times_of
from lagom_overlap.online.routes.plugin_events import ended, step_length_s, step_record, timed_calls
from lagom_overlap.trace.gpu_trace import StreamWait
from lagom_overlap.units import MIB

US = 1e-6


def key(call):
    communicator = CommunicatorId(description="fsdp", ranks=tuple(range(8)))
    return ConfigKey(communicator=communicator, kind=call.kind, num_bytes=call.num_bytes)


def approx(*values):
    return pytest.approx([value * US for value in values])


def test_an_all_gather_into_a_list_is_grouped_broadcasts_which_nccl_asks_about_once(tmp_path):
    """Under PyTorch 2.15, as its profiler told it on emulated GPUs: a kernel for each rank, the whole as input."""
    step = Step()
    computed = step.compute(0, 100)
    step.wait(COMM, COMPUTE, computed)
    for number in range(8):
        kernel, fields = "Broadcast_RING_LL", {"op": "all_gather", "nelems": 8 << 20}
        gathered = step.nccl(kernel, 110 + 20 * number, 15, **fields, out_nelems=1 << 20)
    step.nccl("AllReduce_Sum_f32_RING_LL", 300, 5, op="allreduce", nelems=1)
    step.wait(COMPUTE, COMM, gathered)
    step.compute(310, 50)
    timed = timed_calls(step.trace(tmp_path))
    assert [(call.kind, call.num_bytes) for call in timed[:-1]] == [(CollectiveKind.BROADCAST, 2 * MIB)] * 8
    communicator = CommunicatorId(description="world", ranks=tuple(range(8)))
    asked = [
        ConfigKey(communicator=communicator, kind=CollectiveKind.BROADCAST, num_bytes=16 * MIB),
        ConfigKey(communicator=communicator, kind=CollectiveKind.ALL_REDUCE, num_bytes=2),
    ]
    record = step_record(asked, 360 * US, timed, MIB)
    assert record.is_timed
    (call,) = record.calls
    assert call.key == asked[0]
    assert [call.begun_s, call.ended_s, call.resumed_s] == approx(110, 265, 265)
    for wrong in (15 * MIB, 14 * MIB, 18 * MIB):
        other = [replace(asked[0], num_bytes=wrong), asked[1]]
        assert not step_record(other, 360 * US, timed, MIB).is_timed


def grouped(tmp_path, *, in_front=True, nelems=9 << 19):
    """A kernel of two gathers of 1 and 8 MiB, which NCCL asks about apart, behind one of 2 MiB."""
    step = Step()
    computed = step.compute(0, 100)
    step.wait(COMM, COMPUTE, computed)
    if in_front:
        step.nccl("AllGather_RING_LL", 110, 20, op="_allgather_base", out_nelems=1 << 20)
    together = step.nccl("AllGather_RING_LL", 140, 90, op="_allgather_base", nelems=0, out_nelems=nelems)
    step.wait(COMPUTE, COMM, together)
    step.compute(240, 60)
    return timed_calls(step.trace(tmp_path))


def gathers(*sizes):
    communicator = CommunicatorId(description="world", ranks=tuple(range(8)))
    return [
        ConfigKey(communicator=communicator, kind=CollectiveKind.ALL_GATHER, num_bytes=size, occurrence=0)
        for size in sizes
    ]


@pytest.mark.parametrize(("order", "cut"), [((MIB, 8 * MIB), 150), ((8 * MIB, MIB), 220)])
def test_unlike_calls_of_one_kernel_are_keys_of_their_own_that_share_its_time_by_bytes(tmp_path, order, cut):
    timed = grouped(tmp_path)
    assert [call.num_bytes for call in timed] == [2 * MIB, 9 * MIB]
    keys = gathers(2 * MIB, *order)
    record = step_record(keys, 300 * US, timed, MIB)
    assert record.is_timed
    assert [call.key for call in record.calls] == keys
    first, one, other = record.calls
    assert [first.begun_s, first.ended_s] == approx(110, 130)
    assert [one.begun_s, one.ended_s, one.joined_s, one.resumed_s] == approx(140, cut, 100, cut)
    assert [other.begun_s, other.ended_s, other.joined_s, other.resumed_s] == approx(cut, 230, cut, 230)
    program = program_of([record], [ConfigSpace((Subspace(num_channels=(1, 2)),))] * 3)
    (group,) = groups_of(program)
    times = times_of(program, (group,), record)[group.name]
    assert [times.makespan_s, times.comp_s, *times.comm_s] == approx(230, 100, 20, cut - 140, 230 - cut)


def test_a_small_call_of_such_a_kernel_is_no_part_of_the_step(tmp_path):
    keys = gathers(8 * MIB, 4096)
    record = step_record(keys, 300 * US, grouped(tmp_path, in_front=False, nelems=(8 * MIB + 4096) // 2), MIB)
    assert record.is_timed
    assert [call.key for call in record.calls] == keys[:1]


@pytest.mark.parametrize(
    "sizes", [(2 * MIB, MIB, 7 * MIB), (2 * MIB, MIB), (2 * MIB, MIB, 8 * MIB, MIB), (2 * MIB, 9 * MIB, MIB)]
)
def test_calls_that_do_not_make_up_a_kernel_leave_the_step_untimed(tmp_path, sizes):
    assert not step_record(gathers(*sizes), 300 * US, grouped(tmp_path), MIB).is_timed


def test_a_group_of_several_kinds_or_of_a_size_that_nobody_tells_is_not_timed(tmp_path):
    """As docs/guides/online_internals.md says."""
    timed = grouped(tmp_path, in_front=False)
    mixed = [gathers(MIB)[0], replace(gathers(8 * MIB)[0], kind=CollectiveKind.REDUCE_SCATTER)]
    assert not step_record(mixed, 300 * US, timed, MIB).is_timed
    unknown = [replace(call, num_bytes=0) for call in timed]
    assert not step_record(gathers(MIB, 8 * MIB), 300 * US, unknown, MIB).is_timed
    words = Path(__file__).parents[2] / "docs" / "guides" / "online_internals.md"
    assert "**Not timed** are steps with a group of several kinds" in words.read_text()


def test_what_is_launched_after_the_last_mark_is_no_part_of_the_step_but_for_large_collectives(tmp_path):
    """A gather of updated parameters is, with its join; a copy of data, a checkpoint and a summed loss are not."""

    def step(*, is_marked):
        step = Step()
        step.compute(0, 100)
        updated = step.compute(100, 50)
        step.launched(-10)
        if is_marked:
            step.host("ProfilerStep#0", -9)  # of a first optimizer
            step.host("ProfilerStep#1", -5)
        step.wait(COMM, COMPUTE, updated)
        gathered = step.nccl("AllGather_RING_LL", 160, 60, op="_allgather_base")
        step.wait(COMPUTE, COMM, gathered)
        step.launched(-4)
        step.nccl("AllReduce_Sum_f32_RING_LL", 9000, 30, op="allreduce", nelems=1)
        step.compute(90_000, 10)
        step.launched(80_000)
        return step.trace(tmp_path)

    whole = step(is_marked=False)
    assert ended(whole, MIB) is whole
    assert step_length_s(whole) == pytest.approx(90_010 * US)
    cut = ended(step(is_marked=True), MIB)
    assert step_length_s(cut) == pytest.approx(220 * US)
    (call,) = timed_calls(cut)
    assert (call.begun_s, call.ended_s, call.joined_s) == pytest.approx((160 * US, 220 * US, 150 * US))


def test_a_steps_length_and_its_calls_times_have_one_clock_and_one_origin(tmp_path):
    """What the host does before the first kernel and after the last is no part of the last window."""
    step = Step()
    step.compute(5_000, 100)
    gathered = step.nccl("AllGather_RING_LL", 5_050, 200, op="_allgather_base")
    step.wait(COMPUTE, COMM, gathered)
    step.compute(5_300, 60)
    trace = step.trace(tmp_path)
    (call,) = timed_calls(trace)
    assert step_length_s(trace) == pytest.approx(360 * US)
    assert call.resumed_s == pytest.approx(250 * US)
    assert call.resumed_s < step_length_s(trace)


def test_a_gather_beside_a_product_is_joined_by_the_kernel_that_waits_for_it(tmp_path):
    step = Step()
    step.compute(0, 10)
    gather = step.nccl("AllGather_RING_LL", 12, 30, op="_allgather_base", channels=4)
    step.compute(10, 20)
    step.wait(COMPUTE, COMM, gather)
    step.compute(42, 10)
    (call,) = timed_calls(step.trace(tmp_path))
    assert (call.kind, call.num_bytes, call.num_ranks, call.num_channels) == (CollectiveKind.ALL_GATHER, 2 << 20, 8, 4)
    assert [call.issued_s, call.begun_s, call.ended_s, call.joined_s, call.resumed_s] == approx(10, 12, 42, 30, 42)


def test_a_wait_that_costs_no_time_is_a_join_all_the_same(tmp_path):
    step = Step()
    step.compute(0, 10)
    gather = step.nccl("AllGather_RING_LL", 10, 5, op="_allgather_base")
    step.compute(10, 20)
    step.wait(COMPUTE, COMM, gather)
    step.compute(30, 10)
    (call,) = timed_calls(step.trace(tmp_path))
    assert [call.ended_s, call.joined_s, call.resumed_s] == approx(15, 30, 30)


def test_a_copy_stream_between_passes_the_dependence_on(tmp_path):
    step = Step()
    step.compute(0, 10)
    gather = step.nccl("AllGather_RING_LL", 10, 5, op="_allgather_base")
    step.wait(COPY, COMM, gather)
    copied = step.compute(15, 1, stream=COPY)
    step.compute(10, 20)
    step.wait(COMPUTE, COPY, copied)
    step.compute(30, 10)
    (call,) = timed_calls(step.trace(tmp_path))
    assert [call.joined_s, call.resumed_s] == approx(30, 30)


def test_an_event_recorded_before_a_collective_is_no_join_for_it(tmp_path):
    step = Step()
    step.compute(0, 10)
    first = step.nccl("AllGather_RING_LL", 10, 5, op="_allgather_base")
    step.nccl("ReduceScatter_Sum_bf16_RING_LL", 15, 5, op="_reduce_scatter_base")
    step.wait(COMPUTE, COMM, first)
    step.compute(15, 10)
    gather, scatter = timed_calls(step.trace(tmp_path))
    assert gather.joined_s is not None
    assert scatter.joined_s is None
    assert scatter.kind is CollectiveKind.REDUCE_SCATTER


def test_waits_of_the_communication_for_the_computation_are_no_joins(tmp_path):
    step = Step()
    done = step.compute(0, 10)
    step.wait(COMM, COMPUTE, done)
    step.nccl("AllReduce_Sum_bf16_RING_LL", 10, 5, op="allreduce")
    step.compute(10, 20)
    (call,) = timed_calls(step.trace(tmp_path))
    assert call.joined_s is None


def test_what_never_reaches_a_tuner_is_left_out(tmp_path):
    step = Step()
    step.compute(0, 10)
    sent = step.nccl("SendRecv", 10, 5, op="all_to_allv")
    step.wait(COMPUTE, COMM, sent)
    step._add("kernel", "ncclSymkDevKernel_AllGather_LL", 20, 5, stream=COMM, grid=[4, 1, 1])
    step.compute(25, 10)
    assert timed_calls(step.trace(tmp_path)) == ()


def test_without_waits_or_without_computation_nothing_is_told(tmp_path):
    step = Step()
    step.compute(0, 10)
    step.nccl("AllGather_RING_LL", 10, 5, op="_allgather_base")
    assert timed_calls(step.trace(tmp_path)) is None
    no_computation = Step()
    no_computation.nccl("AllGather_RING_LL", 10, 5, op="_allgather_base")
    assert timed_calls(no_computation.trace(tmp_path)) is None


def test_a_collective_on_the_computations_stream_is_joined_where_it_is_issued(tmp_path):
    """A logged loss (`async_op=False` on the current stream) must not make another stream "the computation"."""
    step = Step()
    step.compute(0, 10)
    gather = step.nccl("AllGather_RING_LL", 10, 5, op="_allgather_base")
    step.wait(COPY, COMM, gather)
    copied = step.compute(16, 2, stream=COPY)
    step.compute(10, 20)
    step.wait(COMPUTE, COPY, copied)
    step.compute(30, 40)
    step.nccl("AllReduce_Sum_f32_RING_LL", 70, 3, op="allreduce", stream=COMPUTE)
    step.compute(73, 10)
    gather_call, loss = timed_calls(step.trace(tmp_path))
    assert [gather_call.joined_s, gather_call.resumed_s] == approx(30, 30)
    assert [loss.issued_s, loss.begun_s, loss.joined_s, loss.resumed_s] == approx(70, 70, 70, 73)


def test_the_shape_of_a_step_does_not_depend_on_how_long_its_kernels_take(tmp_path):
    """The host issues the same sequence; near balance the gather begins now before, now after the product's end."""
    shapes = set()
    for begins in (8, 12, 31):
        step = Step()
        step.compute(0, 10)
        first = step.nccl("AllGather_RING_LL", begins, 10, op="_allgather_base")
        step.compute(10, 20)
        second = step.nccl("ReduceScatter_Sum_bf16_RING_LL", begins + 10, 20, op="_reduce_scatter_base")
        step.wait(COMPUTE, COMM, first)
        step.compute(max(30, begins + 10), 10)
        step.wait(COMPUTE, COMM, second)
        step.compute(90, 1)
        timed = timed_calls(step.trace(tmp_path))
        keys = [key(call) for call in timed]
        record = step_record(keys, 1e-4, timed)
        assert record.is_timed
        shapes.add(fingerprint(record))
        assert [(event.call, event.is_join) for event in events_of(record)] == [
            (0, False),
            (1, False),
            (0, True),
            (1, True),
        ]
    assert len(shapes) == 1


def random_step(draw, num_calls):
    """Collectives, products and waits on five streams, in any order."""
    step = Step()
    step.compute(0, 10)
    for at in range(num_calls):
        streams = draw.sample([COMPUTE, COMM, COPY, 22, 23], 2)
        what = draw.randrange(4)
        if what == 0:
            step.nccl("AllGather_RING_LL", 10 * at, 5, op="_allgather_base", stream=streams[0])
        elif what == 1:
            step.compute(10 * at, 5, stream=draw.choice([COMPUTE, COMPUTE, COPY]))
        else:
            step.wait(*streams, draw.randrange(1, step.correlation + 1))
    return step


def joins_by_definition(step):
    """Collective -> wait: every wait looks at every collective."""
    since = defaultdict(dict)
    for event in step.events[2:]:
        args = event["args"]
        mine = since[args["stream"]]
        if event["name"].startswith("nccl"):
            mine[args["correlation"]] = args["correlation"]
        elif event["cat"] == "cuda_sync":
            for comm, place in list(since[args["wait_on_stream"]].items()):
                if place <= args["wait_on_cuda_event_record_corr_id"]:
                    mine.setdefault(comm, args["correlation"])
    return since[COMPUTE]


def test_joins_are_those_of_a_search_through_all_waits_and_collectives(tmp_path):
    draw = random.Random(5)
    num_joined = 0
    for _ in range(200):
        step = random_step(draw, 60)
        step.compute(10_000, 10_000)  # the computation's stream is this one
        step.wait(COMPUTE, COMM, 1)
        joins = joins_by_definition(step)
        timed = timed_calls(step.trace(tmp_path))
        assert {call.issue_place: call.join_place for call in timed} == {
            call.issue_place: joins.get(call.issue_place) for call in timed
        }
        num_joined += len(joins)
    assert num_joined > 1000


class CountedPlace(int):
    """A recorded correlation that counts how often it is compared."""

    num_compared = 0

    def __ge__(self, other):
        CountedPlace.num_compared += 1
        return int(self) >= other


@pytest.mark.parametrize("num_micro_batches", [50, 400])
def test_the_work_grows_with_the_calls_not_with_their_square(tmp_path, num_micro_batches):
    """Gradient accumulation: every gather is waited for by a copy stream, and that by the computation."""
    step = Step()
    step.compute(0, 10)
    for at in range(num_micro_batches):
        gather = step.nccl("AllGather_RING_LL", 10 * at, 5, op="_allgather_base")
        step.wait(COPY, COMM, gather)
        copied = step.compute(10 * at + 5, 1, stream=COPY)
        step.wait(COMPUTE, COPY, copied)
        step.compute(10 * at + 6, 4)
    trace = step.trace(tmp_path)
    waits = tuple(
        StreamWait(
            correlation=wait.correlation,
            stream=wait.stream,
            waited_for=wait.waited_for,
            recorded=CountedPlace(wait.recorded),
        )
        for wait in trace.waits
    )
    CountedPlace.num_compared = 0
    timed = timed_calls(replace(trace, waits=waits))
    assert all(call.join_place is not None for call in timed)
    assert len(timed) == num_micro_batches
    assert 0 < CountedPlace.num_compared <= 2 * len(waits)


@pytest.mark.parametrize("place", ["unknown", "with the next collective", "with a product"])
def test_a_collective_without_a_place_of_its_own_leaves_the_step_untimed(tmp_path, place):
    """All kernels of a replayed CUDA graph have one correlation, that of its launch."""
    step = Step()
    product = step.compute(0, 10)
    gather = step.nccl("AllGather_RING_LL", 10, 5, op="_allgather_base")
    step.wait(COMPUTE, COMM, gather)
    second = step.nccl("AllGather_RING_LL", 20, 5, op="_allgather_base")
    step.compute(30, 10)
    assert len(timed_calls(step.trace(tmp_path))) == 2
    places = {"unknown": 0, "with the next collective": second, "with a product": product}
    step.events[2 + gather - 1]["args"]["correlation"] = places[place]
    assert timed_calls(step.trace(tmp_path)) is None


def test_a_replayed_graph_of_products_is_one_point_of_the_hosts_order(tmp_path):
    step = Step()
    first = step.compute(0, 10)
    inside = step.compute(10, 10)
    gather = step.nccl("AllGather_RING_LL", 12, 30, op="_allgather_base")
    step.wait(COMPUTE, COMM, gather)
    step.compute(42, 10)
    step.events[2 + inside - 1]["args"]["correlation"] = first
    (call,) = timed_calls(step.trace(tmp_path))
    assert [call.issued_s, call.joined_s, call.resumed_s] == approx(12, 20, 42)


def test_products_without_a_place_leave_the_step_untimed(tmp_path):
    step = Step()
    product = step.compute(0, 10)
    gather = step.nccl("AllGather_RING_LL", 12, 30, op="_allgather_base")
    step.wait(COMPUTE, COMM, gather)
    del step.events[2 + product - 1]["args"]["correlation"]
    assert timed_calls(step.trace(tmp_path)) is None


def test_a_loss_that_is_summed_in_some_steps_only_makes_no_other_step(tmp_path):
    def calls_of(*, logs):
        step = Step()
        step.compute(0, 100)
        step.nccl("AllGather_RING_LL(x)", 10, 50, op="_allgather_base", nelems=1 << 23)
        if logs:
            step.nccl("AllReduce_Sum_f32_RING_LL(x)", 120, 5, op="allreduce", nelems=1, channels=1, stream=COMPUTE)
        step.wait(COMPUTE, COMM, step.correlation)
        step.compute(130, 100)
        timed = timed_calls(step.trace(tmp_path))
        return step_record([key(call) for call in timed], 1e-3, timed, 1 << 20)

    with_log, without = calls_of(logs=True), calls_of(logs=False)
    assert with_log.is_timed
    assert [call.key for call in with_log.calls] == [call.key for call in without.calls]
    assert fingerprint(with_log) == fingerprint(without)


def test_calls_are_told_in_the_hosts_order_whichever_started_first(tmp_path):
    """Two communicators: the stream of the first is busy longer, so that its call starts behind the second's."""
    step = Step()
    step.compute(0, 10)
    step.nccl("AllGather_RING_LL", 60, 20, op="_allgather_base", stream=COMM)
    step.nccl("ReduceScatter_Sum_bf16_RING_LL", 20, 20, op="_reduce_scatter_base", stream=SCATTER)
    step.wait(COMPUTE, COMM, 3)
    step.compute(90, 10)
    calls = timed_calls(step.trace(tmp_path))
    assert [call.kind for call in calls] == [CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER]
    assert calls[0].issue_place < calls[1].issue_place
    assert calls[0].begun_s > calls[1].begun_s


def test_a_stream_of_long_copies_is_not_the_computation(tmp_path):
    """Offloaded parameters, batches: a copy of 10 ms beside products of 1 ms computes nothing."""
    step = Step()
    step.compute(0, 1000)
    step._add("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0, 10_000, stream=COPY)
    step.nccl("AllGather_RING_LL", 1000, 500, op="_allgather_base")
    step.wait(COMPUTE, COMM, 3)
    step.compute(1500, 1000)
    (call,) = timed_calls(step.trace(tmp_path))
    assert (call.joined_s, call.resumed_s) == pytest.approx((1000e-6, 1500e-6))
