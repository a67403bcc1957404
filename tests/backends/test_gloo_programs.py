"""Programs on two gloo ranks: operators timed alone, a plan against the program, refusals that leave ranks alive."""

import pytest
from forked_ranks import forked_ranks

from lagom_overlap.backends.gloo.programs import ProgramRanks
from lagom_overlap.capturing.fake_world import fake_world
from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.engines.fx.program import load_program
from lagom_overlap.errors import JobError
from lagom_overlap.workload.iteration import graph_digest
from lagom_overlap.workload.rewrite.steps import ChainLink, Fuse, Reorder, Split

__all__ = ["forked_ranks"]
pytestmark = [pytest.mark.torch, pytest.mark.gloo, pytest.mark.slow]

PROGRAM = """
import torch
from torch import distributed as dist
C10D = torch.ops._c10d_functional

def gather(x):
    return C10D.wait_tensor(C10D.all_gather_into_tensor(x, dist.group.WORLD.size(), dist.group.WORLD.group_name))

def step():
    generator = torch.Generator().manual_seed(dist.get_rank())
    def run(x, y, w):
        return (torch.relu(gather(x) @ w), gather(y) @ w)
    return run, [torch.randn(shape, generator=generator) for shape in ((4, 8), (4, 8), (8, 8))]

def elsewhere():
    if dist.get_rank() == 1:
        raise RuntimeError("rank 1 has no data")
    return step()
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "small.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture(scope="module")
def iteration(program):
    with fake_world(2):
        return load_program(program, "step").captured("step").iteration


@pytest.fixture(scope="module")
def ranks(program):
    opened = ProgramRanks(program, "step", num_ranks=2, link_bytes_per_s=None, timeout_s=100)
    yield opened
    opened.close()


def test_every_operator_is_timed_alone(ranks, iteration):
    profiled = ranks.profile(3)
    assert set(profiled.seconds) == {op.name for op in iteration.ops}
    assert min(profiled.seconds.values()) > 0
    assert all(0 < rate <= 1 for rate in profiled.rates.values())


def test_collectives_of_given_sizes_are_timed_on_data_of_their_own(ranks):
    kinds = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)
    asked = [Collective(kind, num_bytes, 2) for kind in kinds for num_bytes in (1 << 10, 1 << 24)]
    seconds = ranks.time_collectives(asked, 3)
    assert list(seconds) == asked
    assert all(time_s > 0 for time_s in seconds.values())
    assert ranks.time_collectives([], 3) == {}


@pytest.mark.parametrize(
    "collective",
    [
        Collective(CollectiveKind.ALL_GATHER, 1 << 10, 4),
        Collective(CollectiveKind.BROADCAST, 1 << 10, 2),
        Collective(CollectiveKind.ALL_REDUCE, 12, 2),
    ],
)
def test_a_collective_of_other_ranks_kind_or_half_elements_is_not_timed(ranks, collective):
    with pytest.raises(ValueError, match="over all 2 ranks can be timed"):
        ranks.time_collectives([collective], 3)


def test_a_plan_runs_beside_the_program_and_gives_its_results(ranks, iteration):
    names = [op.name for op in iteration.ops]
    comms = [op.name for op in iteration.comms]
    rewrites = [Reorder((*comms, *(name for name in names if name not in comms)))]
    run = ranks.run(rewrites, rounds=3, seed=0, graph=graph_digest(iteration))
    assert run.max_error == 0
    assert len(run.before.makespan_s) == len(run.after.exposed_s) == 3
    assert {span.name for span in run.after.spans} == set(names)
    assert all(exposed <= whole for exposed, whole in zip(run.after.exposed_s, run.after.makespan_s, strict=True))


def test_a_split_plan_is_equal_within_rounding(ranks, iteration):
    split = Split(iteration.comms[0].name, 0, 2, after=(ChainLink("mm", 0), ChainLink("relu", 0)))
    run = ranks.run([split], rounds=3, seed=0, graph=graph_digest(iteration))
    assert run.max_error < 1e-6
    assert {"mm#0", "mm#1"} <= {span.name for span in run.after.spans}


def test_a_plan_for_another_graph_or_of_nonsense_is_refused_and_the_ranks_live_on(ranks, iteration):
    with pytest.raises(JobError, match="the plan is for graph 0123"):
        ranks.run([], rounds=3, seed=0, graph="0123")
    with pytest.raises(JobError, match="nobody"):
        ranks.run([Fuse(("nobody", "else"))], rounds=3, seed=0, graph=graph_digest(iteration))
    assert ranks.run([], rounds=3, seed=0, graph=graph_digest(iteration)).max_error == 0


def test_a_program_that_fails_on_one_rank_is_refused_on_all(program):
    opened = ProgramRanks(program, "elsewhere", num_ranks=2, link_bytes_per_s=None, timeout_s=100)
    try:
        with pytest.raises(JobError, match="rank 1 cannot load"):
            opened.profile(3)
    finally:
        opened.close()
