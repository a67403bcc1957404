"""A whole online search on the fake NCCL, measured by NCCL's profiler and by PyTorch's: one job, one answer."""

import pytest
from c_build import build_libraries
from kineto_step import COMM, COMPUTE, Step
from plugin_job import Job, tuned

from lagom_overlap.backends.fake_nccl import Rehearsal
from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.collective.size_class import LEAST_BYTES
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.hardware import load_preset
from lagom_overlap.nccl_plugin.profile_log import ProfiledCollective, ProfileFlag
from lagom_overlap.online.ranks.messages import SwitchState
from lagom_overlap.online.routes.connections import Connections
from lagom_overlap.online.routes.plugin import PluginRoute
from lagom_overlap.online.routes.plugin_events import step_length_s, timed_calls
from lagom_overlap.online.routes.profile_timer import ProfileTimer
from lagom_overlap.timeline import SpanKind
from lagom_overlap.units import MIB
from lagom_overlap.workload import CommOp, CompOp, Gemm, OverlapGroup

pytestmark = pytest.mark.torch

US = 1e6
KERNELS = {
    CollectiveKind.ALL_GATHER: ("AllGather_RING_LL", "_allgather_base"),
    CollectiveKind.REDUCE_SCATTER: ("ReduceScatter_Sum_bf16_RING_LL", "_reduce_scatter_base"),
}


def a_step(num_products, kinds):
    return OverlapGroup(
        name="step",
        computations=tuple(CompOp(name=f"mm{i}", work=Gemm(4096, 4096, 4096)) for i in range(num_products)),
        comms=tuple(
            CommOp(name=f"{kind}{i}", collective=Collective(kind, 64 * MIB, 8), communicator="fsdp")
            for i, kind in enumerate(kinds)
        ),
    )


class Profilers:
    """Both profilers of a job whose steps the simulator times."""

    def __init__(self, job, tmp_path):
        self.job, self.tmp_path = job, tmp_path
        self.num_kineto = self.num_ring = 0
        self.is_kineto = False
        self.numbers = dict.fromkeys(KERNELS, 0)
        self.timer = ProfileTimer(
            self, Ring(self), make_event=lambda: Event(self), synchronize=lambda: None, least_bytes=LEAST_BYTES
        )

    def spans(self, kind):
        return {span.name: span for span in self.job.simulator.timeline(self.job.effective).of(kind)}

    def mark_end(self):
        pass

    def begin(self):
        self.num_kineto += 1

    def trace(self):
        """All collectives are launched first; the computation waits for them at its end."""
        step, runs = Step(), self.spans(SpanKind.COMM)
        marks = []
        for op, config in zip(self.job.comms, self.job.effective, strict=True):
            span, (kernel, name) = runs[op.name], KERNELS[op.collective.kind]
            length = (span.end_s - span.start_s) * US
            how = {"op": name, "nelems": op.collective.num_bytes // 2, "channels": config.num_channels, "stream": COMM}
            marks.append(step.nccl(kernel, span.start_s * US, length, **how))
        for span in self.spans(SpanKind.COMP).values():
            step.compute(span.start_s * US, (span.end_s - span.start_s) * US)
        for mark in marks:
            step.wait(COMPUTE, COMM, mark)
        return step.trace(self.tmp_path)

    def end_trace(self):
        trace = self.trace()
        return step_length_s(trace), trace

    def end(self):
        trace = self.trace()
        return step_length_s(trace), timed_calls(trace)


class Event:
    """The device's clock at the begin and at the end of a step."""

    def __init__(self, profilers):
        self.profilers = profilers

    def record(self):
        """Nothing to note: the step is as long as the simulator says."""

    def elapsed_time(self, _):
        return self.profilers.job.makespan_s * 1e3


class Ring:
    def __init__(self, profilers):
        self.profilers = profilers

    def mark_end(self):
        pass

    def begin(self):
        self.profilers.num_ring += 1

    def end(self, is_whole):
        found, runs = [], self.profilers.spans(SpanKind.COMM)
        for place, (op, config) in enumerate(zip(self.profilers.job.comms, self.profilers.job.effective, strict=True)):
            kind, span = op.collective.kind, runs[op.name]
            self.profilers.numbers[kind] += 1
            found.append(
                ProfiledCollective(
                    comm_id=1,
                    call=self.profilers.numbers[kind],
                    kind=kind,
                    num_bytes=op.collective.num_bytes,
                    rank=0,
                    num_ranks=8,
                    algorithm=config.algorithm,
                    protocol=config.protocol,
                    num_channels=config.num_channels,
                    num_started=1,
                    num_ended=1,
                    called_ns=None,
                    launched_ns=place + 1,
                    seen_ns=None,
                    start_ns=10**18 + round(span.start_s * 1e9),
                    end_ns=10**18 + round(span.end_s * 1e9),
                    flags=ProfileFlag(0),
                    channels=(),
                )
            )
        assert is_whole(found)
        return found


@pytest.mark.parametrize("num_products", [2, 4, 9])
@pytest.mark.parametrize(
    "kinds",
    [
        (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER),
        (CollectiveKind.ALL_GATHER,),
    ],
)
def test_a_search_finds_the_same_setting_by_either_profiler(tmp_path, tmp_path_factory, num_products, kinds):
    library, fake = build_libraries(tmp_path_factory)
    found, measured = [], []
    for by_ring in (False, True):
        model = ContentionModel(load_preset("a40_nvlink", 1), load_profile("plausible"))
        rehearsal = Rehearsal(model, fake_library=fake, plugin_library=library, release="2.30")
        try:
            job = Job(rehearsal, model, a_step(num_products, kinds))
            profilers = Profilers(job, tmp_path)
            route = PluginRoute(
                rehearsal.plugin,
                record=rehearsal.record,
                timer=profilers.timer if by_ring else profilers,
                connections=Connections(lambda: 0, all_connected=True),
            )
            member, _ = tuned(job, route)
            assert member.plan.state is SwitchState.DONE, member.plan.reason
            found.append(member.settings)
            measured.append((profilers.num_kineto, profilers.num_ring))
        finally:
            rehearsal.close()
    assert found[0] == found[1]
    (by_kineto, none), (kineto_left, by_both) = measured
    assert none == 0
    assert kineto_left == 2 + (by_both - 2) // 20
    assert by_both > 20
    assert by_kineto > 20
