"""GPU events written by hand -> what was issued, ran and was waited for."""

import pytest

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.runtime.plugin_route_events import timed_calls

COMPUTE, COMM, COPY = 7, 20, 21
US = 1e-6


class Step:
    """A step's events; the host's order is the order of the calls here."""

    def __init__(self):
        self.events = [{"ph": "M", "name": "process_name"}, "noise", {"cat": "kernel", "args": {"stream": "x"}}]
        self.correlation = 0

    def _add(self, cat, name, ts, dur, **args):
        self.correlation += 1
        self.events.append(
            {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": args | {"correlation": self.correlation}}
        )
        return self.correlation

    def compute(self, start, length, stream=COMPUTE):
        return self._add("kernel", "ampere_bf16_gemm", start, length, stream=stream)

    def nccl(self, what, start, length, *, op, nelems=1 << 20, channels=16, stream=COMM):
        return self._add(
            "kernel",
            f"ncclDevKernel_{what}(ncclDevKernelArgsStorage<4096ul>)",
            start,
            length,
            stream=stream,
            grid=[channels, 1, 1],
            dtype="BFloat16",
            **{"Collective name": op, "In msg nelems": nelems, "Out msg nelems": nelems, "Group size": 8},
        )

    def wait(self, stream, waited_for, recorded):
        self._add(
            "cuda_sync",
            "Stream Wait Event",
            0,
            0,
            stream=stream,
            wait_on_stream=waited_for,
            wait_on_cuda_event_record_corr_id=recorded,
        )


def approx(*values):
    return pytest.approx([value * US for value in values])


def test_a_gather_beside_a_product_is_joined_by_the_kernel_that_waits_for_it():
    step = Step()
    step.compute(0, 10)
    gather = step.nccl("AllGather_RING_LL", 12, 30, op="_allgather_base", channels=4)
    step.compute(10, 20)
    step.wait(COMPUTE, COMM, gather)
    step.compute(42, 10)
    (call,) = timed_calls(step.events)
    assert (call.kind, call.num_bytes, call.num_ranks, call.num_channels) == (CollectiveKind.ALL_GATHER, 2 << 20, 8, 4)
    assert [call.issued_s, call.begun_s, call.ended_s, call.joined_s, call.resumed_s] == approx(10, 12, 42, 30, 42)


def test_a_wait_that_costs_no_time_is_a_join_all_the_same():
    step = Step()
    step.compute(0, 10)
    gather = step.nccl("AllGather_RING_LL", 10, 5, op="_allgather_base")
    step.compute(10, 20)
    step.wait(COMPUTE, COMM, gather)
    step.compute(30, 10)
    (call,) = timed_calls(step.events)
    assert [call.ended_s, call.joined_s, call.resumed_s] == approx(15, 30, 30)


def test_a_copy_stream_between_passes_the_dependence_on():
    step = Step()
    step.compute(0, 10)
    gather = step.nccl("AllGather_RING_LL", 10, 5, op="_allgather_base")
    step.wait(COPY, COMM, gather)
    copied = step.compute(15, 1, stream=COPY)
    step.compute(10, 20)
    step.wait(COMPUTE, COPY, copied)
    step.compute(30, 10)
    (call,) = timed_calls(step.events)
    assert [call.joined_s, call.resumed_s] == approx(30, 30)


def test_an_event_recorded_before_a_collective_is_no_join_for_it():
    step = Step()
    step.compute(0, 10)
    first = step.nccl("AllGather_RING_LL", 10, 5, op="_allgather_base")
    step.nccl("ReduceScatter_Sum_bf16_RING_LL", 15, 5, op="_reduce_scatter_base")
    step.wait(COMPUTE, COMM, first)
    step.compute(15, 10)
    gather, scatter = timed_calls(step.events)
    assert gather.joined_s is not None
    assert scatter.joined_s is None
    assert scatter.kind is CollectiveKind.REDUCE_SCATTER


def test_waits_of_the_communication_for_the_computation_are_no_joins():
    step = Step()
    done = step.compute(0, 10)
    step.wait(COMM, COMPUTE, done)
    step.nccl("AllReduce_Sum_bf16_RING_LL", 10, 5, op="allreduce")
    step.compute(10, 20)
    (call,) = timed_calls(step.events)
    assert call.joined_s is None


def test_what_never_reaches_a_tuner_is_left_out():
    step = Step()
    step.compute(0, 10)
    sent = step.nccl("SendRecv", 10, 5, op="all_to_allv")
    step.wait(COMPUTE, COMM, sent)
    step._add("kernel", "ncclSymkDevKernel_AllGather_LL", 20, 5, stream=COMM, grid=[4, 1, 1])
    step.compute(25, 10)
    assert timed_calls(step.events) == ()


def test_without_waits_or_without_computation_nothing_is_told():
    step = Step()
    step.compute(0, 10)
    step.nccl("AllGather_RING_LL", 10, 5, op="_allgather_base")
    assert timed_calls(step.events) is None
    assert timed_calls([]) is None
