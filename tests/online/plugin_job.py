"""A training process on the fake NCCL, and how it is tuned: the real plug-in, leader and member, simulated times."""

import itertools
from dataclasses import replace

import pytest

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig
from lagom_overlap.online.options import OnlineOptions
from lagom_overlap.online.ranks.exchange import Exchange
from lagom_overlap.online.ranks.leader import Leader
from lagom_overlap.online.ranks.member import Member
from lagom_overlap.online.routes.plugin_events import TimedCall
from lagom_overlap.sim import GroupSimulator
from lagom_overlap.timeline import SpanKind
from lagom_overlap.tuners.guard import Guarded
from lagom_overlap.tuners.lagom import Lagom
from lagom_overlap.tuners.study import Study
from lagom_overlap.units import MIB
from lagom_overlap.workload import CommOp, CompOp, Gemm, OverlapGroup

AG, RS = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
STEP = OverlapGroup(
    name="step",
    computations=tuple(CompOp(name=f"mm{i}", work=Gemm(4096, 4096, 4096)) for i in range(4)),
    comms=tuple(
        CommOp(name=f"{kind}{i}", collective=Collective(kind, 64 * MIB, 8), communicator="fsdp")
        for i, kind in enumerate((AG, RS, AG))
    ),
)


class Job:
    """A training process on the fake NCCL: a step issues its collectives, its times are the simulator's."""

    def __init__(self, rehearsal, model, group=STEP):
        self.rehearsal = rehearsal
        self.comms = group.comms
        self.simulator = GroupSimulator(group, model)
        self.effective = ()
        self.is_profiled = False
        self.num_steps = 0

    def step(self):
        self.effective = tuple(self.rehearsal.run(op) for op in self.comms)
        assert all(isinstance(config, CommConfig) for config in self.effective), self.effective
        self.num_steps += 1

    @property
    def makespan_s(self):
        return self.simulator.evaluate(self.effective).makespan_s

    # The route's timer: what a profiler would say of the step.

    def mark_end(self):
        pass

    def begin(self):
        self.is_profiled = True

    def end(self):
        assert self.is_profiled
        self.is_profiled = False
        timeline = self.simulator.timeline(self.effective)
        computed_s = max(span.end_s for span in timeline.of(SpanKind.COMP))
        spans = {span.name: span for span in timeline.of(SpanKind.COMM)}
        calls = [
            TimedCall(
                kind=op.collective.kind,
                num_bytes=op.collective.num_bytes,
                num_ranks=op.collective.num_ranks,
                num_channels=config.num_channels,
                issued_s=0.0,
                begun_s=spans[op.name].start_s,
                ended_s=spans[op.name].end_s,
                joined_s=computed_s,
                resumed_s=max(computed_s, spans[op.name].end_s),
                issue_place=place,
                join_place=len(self.comms) + place,
            )
            for place, (op, config) in enumerate(zip(self.comms, self.effective, strict=True))
        ]
        return self.makespan_s, tuple(calls)


def stands_for(route, num_ranks):
    """The route counts for that many ranks of its communicator: those that nobody plays make the same calls."""
    counts = route.counts
    route.counts = lambda: {name: replace(count, num_here=num_ranks) for name, count in counts().items()}


def tuned(job, route):
    """The job's member after its search and verdict, and the makespan of every step."""
    options = OnlineOptions(window_steps=4, num_pairs=3, watch_steps=0, max_steps=1500)

    def make_study(problems, warm, steps_left):
        return Study(problems, Guarded(Lagom(problems, seed=1, ladder="thirds"), problems), seed=1, num_pairs=3)

    store = pytest.importorskip("torch.distributed").HashStore()
    stands_for(route, 8)
    exchange = Exchange(store, rank=0, num_ranks=1, timeout_s=5.0)
    leader, now = Leader(options, make_study, num_ranks=1, route_name=route.name), [0.0]
    member = Member(exchange, route, leader=leader, clock=lambda: now[0])
    makespans = []
    for _ in itertools.takewhile(lambda _: not member.is_over, range(3000)):
        member.begin_step()
        job.step()
        makespans.append(job.makespan_s)
        now[0] += round(job.makespan_s * 2**30) / 2**30  # exact differences, as the made-up times are
        member.end_step()
    return member, makespans
