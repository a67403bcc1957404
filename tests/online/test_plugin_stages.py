"""Communicators of one size in different roles under the plug-in: told apart by NCCL's id where it gives one.

Four ranks, each with the real shared object under a fake NCCL of its own; what ran is compared per communicator.
"""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from test_plugin_route import AG, RS, start  # noqa: F401 - a fixture

from lagom_overlap.backends.fake_nccl import _environment, communicator_of
from lagom_overlap.collective import Collective, CommConfig, ConfigTable
from lagom_overlap.collective.sites import cycles_of
from lagom_overlap.online.options import OnlineOptions
from lagom_overlap.online.ranks.exchange import Exchange
from lagom_overlap.online.ranks.leader import Leader
from lagom_overlap.online.ranks.member import Member
from lagom_overlap.online.ranks.messages import SwitchState
from lagom_overlap.tuners.guard import Guarded
from lagom_overlap.tuners.lagom import Lagom
from lagom_overlap.tuners.study import Study
from lagom_overlap.units import MIB
from lagom_overlap.workload import CommOp, CompOp, Gemm, OverlapGroup

pytestmark = pytest.mark.torch
OPTIONS = OnlineOptions(window_steps=4, num_pairs=3, watch_steps=8, max_steps=300)


def step_of(*calls):
    """A rank's step: (kind, communicator's name), each on two ranks."""
    comms = tuple(
        CommOp(name=f"{place}", collective=Collective(kind, 64 * MIB, 2), communicator=name)
        for place, (kind, name) in enumerate(calls)
    )
    computations = tuple(CompOp(name=f"mm{i}", work=Gemm(4096, 4096, 4096)) for i in range(4))
    return OverlapGroup(name="step", computations=computations, comms=comms)


class Ranks:
    """Four ranks; `ids` are NCCL's of this run, by the communicator's name."""

    def __init__(self, begin, release, groups, ids):
        self.store = pytest.importorskip("torch.distributed").HashStore()
        self.barrier = Barrier(len(groups))
        self.ran = defaultdict(list)
        self.members, self.jobs = [], []
        self.release = release
        for rank, group in enumerate(groups):
            job, route = begin(release, group)
            for op in group.comms:
                self._make(job.rehearsal, op, ids[op.communicator])
            exchange = Exchange(self.store, rank=rank, num_ranks=len(groups), timeout_s=20.0)
            leader = Leader(OPTIONS, self._study, num_ranks=len(groups), route_name=route.name) if rank == 0 else None
            self.members.append(Member(exchange, route, leader=leader))
            self.jobs.append(job)

    @staticmethod
    def _study(problems, warm, _):
        return Study(problems, Guarded(Lagom(problems, seed=1), problems), seed=1, num_pairs=3)

    @staticmethod
    def _make(rehearsal, op, comm_id):
        name = communicator_of(op)
        if name not in rehearsal._comms:
            with _environment(rehearsal._environment):
                rehearsal._comms[name] = rehearsal._nccl.comm(2, 1, comm_id=comm_id)

    def run(self, steps):
        """What each communicator's ranks ran in every step, in the order of its calls."""

        def live(rank):
            for step in range(steps):
                self.members[rank].begin_step()
                self.jobs[rank].step()
                self.barrier.wait(60)
                for op, config in zip(self.jobs[rank].comms, self.jobs[rank].effective, strict=True):
                    self.ran[op.communicator, step, rank].append(config)
                self.members[rank].end_step()

        with ThreadPoolExecutor(len(self.jobs)) as pool:
            list(pool.map(live, range(len(self.jobs))))

    def check_alike(self):
        """No communicator ever had different settings on its two ranks."""
        seen = defaultdict(list)
        for (name, step, _), configs in self.ran.items():
            seen[name, step].append(configs)
        assert all(len(both) == 2 and both[0] == both[1] for both in seen.values())


STAGES = [step_of((AG, f"tp{stage}"), (RS, f"tp{stage}"), *last) for stage, last in ((0, [(AG, "tp0")]), (1, []))]


@pytest.mark.parametrize("release", ["2.28", "2.30"])
def test_pipeline_stages_whose_calls_differ_are_tuned_side_by_side(start, release):  # noqa: F811
    ranks = Ranks(start, release, [STAGES[0], STAGES[0], STAGES[1], STAGES[1]], {"tp0": 7001, "tp1": 7002})
    ranks.run(150)
    assert {member.plan.state for member in ranks.members} == {SwitchState.WATCH}, ranks.members[0].plan.reason
    ranks.check_alike()
    assert len({tuple(configs) for (name, _, _), configs in ranks.ran.items() if name == "tp1"}) > 2
    assert ranks.members[0].settings == ranks.members[3].settings


def test_a_rank_of_a_communicator_that_calls_something_else_still_freezes_the_tuning(start):  # noqa: F811
    ranks = Ranks(start, "2.28", [STAGES[0], STAGES[1]] * 2, {"tp0": 7001, "tp1": 7001})
    ranks.run(8)
    assert ranks.members[0].plan.state is SwitchState.FROZEN
    assert "different calls on communicator" in ranks.members[3].plan.reason


def test_without_ids_ranks_of_one_role_must_make_the_same_calls(start):  # noqa: F811
    ranks = Ranks(start, "2.24", [STAGES[0], STAGES[0], STAGES[1], STAGES[1]], {"tp0": 7001, "tp1": 7002})
    ranks.run(8)
    assert ranks.members[0].plan.state is SwitchState.FROZEN


def test_ranks_that_know_one_communicator_by_different_roles_are_never_tuned(start):  # noqa: F811
    """Pairs in a ring: each rank counts two communicators of two ranks, and two of the four it counts the other way."""
    groups = [
        step_of((AG, "a"), (AG, "d")),
        step_of((AG, "a"), (AG, "b")),
        step_of((AG, "b"), (AG, "c")),
        step_of((AG, "c"), (AG, "d")),
    ]
    ranks = Ranks(start, "2.28", groups, {"a": 1, "b": 2, "c": 3, "d": 4})
    ranks.run(30)
    assert {member.plan.state for member in ranks.members} == {SwitchState.FROZEN}
    ranks.check_alike()


def test_a_stage_that_calls_a_site_less_often_takes_the_rows_that_it_has(start):  # noqa: F811
    """A table is made for a role: occurrences that this rank never reaches do not keep it from a switch."""
    job, route = start("2.28", STAGES[1])
    route.begin_step(is_measured=True)
    job.step()
    keys = [call.key for call in route.end_step().calls]
    key = next(key for key in keys if key.kind is AG)
    later = type(key)(communicator=key.communicator, kind=key.kind, num_bytes=key.num_bytes, occurrence=1)
    for rows in ((key, later), (later, key)):
        route.prepare(ConfigTable(dict.fromkeys(rows, CommConfig(num_channels=3)), cycles=cycles_of(keys)), 1)
        route.commit(1)
        route.begin_step(is_measured=False)
        job.step()
        assert job.effective[0].num_channels == 3
