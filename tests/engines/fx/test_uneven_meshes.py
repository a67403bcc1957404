"""Collectives over meshes whose axes differ, on up to twelve played ranks of this process.

On 2 x 2 a wrong order is no wrong order, and where an axis has two ranks the last of three steps brings blocks of one
row or column. Each rank's graph is run by itself; where graphs issue a collective, their threads meet.
"""

import threading

import pytest
import torch
from torch import distributed as dist
from torch import fx

from lagom_overlap.capturing.fake_world import fake_world
from lagom_overlap.engines.fx.apply import apply_rewrites
from lagom_overlap.engines.fx.nodes import OP_NAME
from lagom_overlap.engines.fx.program import capture_step
from lagom_overlap.workload.rewrite.steps import ChainLink, PartitionGroups

pytestmark = pytest.mark.torch

FC = torch.ops._c10d_functional
AG, RS, AR, A2A = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single"


class PlayedGroups:
    """A group is called after its ranks."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks

    def ranks(self, group: str) -> tuple[int, ...]:
        return tuple(map(int, group.split(","))) if "," in group else tuple(range(self.num_ranks))

    def position(self, group: str) -> int:
        return self.ranks(group).index(self.rank)

    def made_of(self, ranks: tuple[int, ...], purpose: str) -> str:
        return ",".join(map(str, ranks))


class Meeting:
    """Where the ranks of a group bring a tensor each and take all of them, call by call."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._brought: dict[tuple[object, ...], dict[int, torch.Tensor]] = {}
        self._calls: dict[tuple[int, str], int] = {}

    def exchange(self, rank: int, group: str, ranks: tuple[int, ...], tensor: torch.Tensor) -> list[torch.Tensor]:
        with self._changed:
            call = self._calls[rank, group] = self._calls.get((rank, group), 0) + 1
            brought = self._brought.setdefault((group, call), {})
            brought[rank] = tensor
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: len(brought) == len(ranks), 60), f"{group}: only {set(brought)} came"
            return [brought[one] for one in ranks]


class Played(fx.Interpreter):
    """Runs a rank's graph; what the collectives do is written here from their definitions."""

    def __init__(self, module: fx.GraphModule, groups: PlayedGroups, meeting: Meeting) -> None:
        super().__init__(module)
        self._groups, self._meeting = groups, meeting

    def call_function(self, target, args, kwargs):
        if target is FC.wait_tensor.default:
            return args[0]
        if not str(target).startswith("_c10d_functional."):
            return super().call_function(target, args, kwargs)
        ranks, place = self._groups.ranks(args[-1]), self._groups.position(args[-1])
        brought = self._meeting.exchange(self._groups.rank, args[-1], ranks, args[0])
        match str(target).split(".")[1]:
            case "all_gather_into_tensor":
                return torch.cat(brought)
            case "reduce_scatter_tensor":
                return sum(brought).chunk(len(ranks))[place]
            case "all_reduce":
                return sum(brought)
            case "all_to_all_single":
                return torch.cat([one.chunk(len(ranks))[place] for one in brought])
        raise AssertionError(target)


def world():
    return dist.get_world_size(), dist.group.WORLD.group_name


def gathered(x, w1, w2):
    h = FC.wait_tensor(FC.all_gather_into_tensor(x, *world())) @ w1
    return (torch.relu(h) @ w2, h)


def scattered(x, w):
    return (FC.wait_tensor(FC.reduce_scatter_tensor(torch.relu(x) @ w, "sum", *world())),)


def reduced(x, w):
    return (FC.wait_tensor(FC.all_reduce(x, "sum", world()[1])) @ w,)


def exchanged(x, w):
    part = [x.shape[0] // world()[0]] * world()[0]
    return (FC.wait_tensor(FC.all_to_all_single(x, part, part, world()[1])) @ w,)


def whole(case, inputs, rank):
    """What the collective over all ranks is, without one."""
    xs, own = [one[0] for one in inputs], inputs[rank][1:]
    if case is gathered:
        h = torch.cat(xs) @ own[0]
        return (torch.relu(h) @ own[1], h)
    if case is scattered:
        return (sum(torch.relu(x) @ w for x, w in inputs).chunk(len(inputs))[rank],)
    if case is reduced:
        return (sum(xs) @ own[0],)
    return (torch.cat([x.chunk(len(inputs))[rank] for x in xs]) @ own[0],)


WEIGHTS = {gathered: ((5, 4), (4, 6)), scattered: ((5, 4),), reduced: ((5, 4),), exchanged: ((5, 4),)}


def outputs(case, step):
    """Those of each rank, planned, and what they have to be; whole numbers, so that sums are exact in any order."""
    random, num = torch.Generator().manual_seed(3), step.num_ranks
    shapes = ((2 * num if case in (scattered, exchanged) else 3, 5), *WEIGHTS[case])
    inputs = [[torch.randint(-4, 5, shape, generator=random).float() for shape in shapes] for _ in range(num)]
    groups = [PlayedGroups(rank, num) for rank in range(num)]
    with fake_world(num):
        captured = capture_step(case, inputs[0], name="case")
        modules = [apply_rewrites(captured.graph_module, captured.iteration, (step,), one) for one in groups]
    meeting, results = Meeting(), {}

    def run(rank):
        results[rank] = Played(modules[rank], groups[rank], meeting).run(*inputs[rank])

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(results) == list(range(num))
    names = {tuple(node.meta[OP_NAME] for node in module.graph.nodes if OP_NAME in node.meta) for module in modules}
    assert len(names) == 1  # all ranks issue the same, in the same order
    return [(results[rank], whole(case, inputs, rank)) for rank in range(num)], names.pop()


def check(case, step):
    """The names of what is issued."""
    ranks, names = outputs(case, step)
    for rank, (found, expected) in enumerate(ranks):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other), f"rank {rank}"
    return names


MESHES = [(2, 4), (4, 2)]
BOTH_LARGER = [(3, 4), (4, 3)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(("case", "comm"), [(gathered, AG), (scattered, RS), (reduced, AR), (exchanged, A2A)])
def test_a_collective_over_both_axes_is_the_one_over_all_ranks(case, comm, mesh, order):
    check(case, PartitionGroups(comm, mesh, order))


def test_axes_are_three_as_well():
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        for case, comm in ((reduced, AR), (exchanged, A2A), (scattered, RS)):
            check(case, PartitionGroups(comm, (2, 2, 2), order))


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 0, 1)])
@pytest.mark.parametrize("mesh", [*MESHES, *BOTH_LARGER])
def test_an_all_gather_brings_its_blocks_to_products_in_their_places(mesh, order):
    chain = (ChainLink("mm", 0), ChainLink("relu", 0), ChainLink("mm_1", 0))
    names = check(gathered, PartitionGroups(AG, mesh, order, 0, chain))
    assert sum(name.startswith("relu#") for name in names) == len(order)  # a part for what each step brings
    check(gathered, PartitionGroups(AG, mesh, order, 0, chain[:1]))


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 0, 1)])
@pytest.mark.parametrize("mesh", [*MESHES, *BOTH_LARGER])
def test_a_reduce_scatter_takes_in_blocks_by_their_places(mesh, order):
    check(scattered, PartitionGroups(RS, mesh, order, 0, (ChainLink("relu", 0), ChainLink("mm", 0))))


@pytest.mark.parametrize("mesh", BOTH_LARGER)
def test_three_steps_without_a_chain_are_one(mesh):
    check(gathered, PartitionGroups(AG, mesh, (1, 0, 1)))
    check(scattered, PartitionGroups(RS, mesh, (1, 0, 1)))
