"""The gloo route's settings without a collective: what is in force, and what comes back."""

import pytest

pytest.importorskip("torch")

import torch
from torch import distributed as dist
from torch.distributed import HashStore
from torch.distributed import distributed_c10d as c10d

from lagom_overlap.collective import CollectiveKind, CommConfig, CommunicatorId, ConfigKey, ConfigTable
from lagom_overlap.engines.gloo_engine import GlooEngine
from lagom_overlap.errors import BackendError
from lagom_overlap.online.device import engine_in_use
from lagom_overlap.online.routes import gloo
from lagom_overlap.online.routes.base import StepKeys, TableCursor
from lagom_overlap.online.routes.gloo import GlooRoute, _as_gloo_takes
from lagom_overlap.online.routes.group_route import GroupRoute, JobGroup

pytestmark = pytest.mark.torch

KEY = ConfigKey(
    communicator=CommunicatorId(description="all", ranks=(0, 1)),
    kind=CollectiveKind.ALL_GATHER,
    num_bytes=1 << 20,
    occurrence=0,
)
SET = ConfigTable({KEY: CommConfig(num_channels=2, chunk_bytes=1 << 19)})


def test_a_commit_that_is_taken_back_leaves_what_was_in_force_before() -> None:
    route = GlooRoute(HashStore())
    route.prepare(SET, 1)
    route.take_back(1)  # not committed: nothing to do
    assert not route.is_active
    route.commit(1)
    assert route.is_active
    route.prepare(ConfigTable({}), 2)
    route.commit(2)
    route.take_back(1)  # an earlier epoch: too late
    assert not route.is_active
    route.take_back(2)
    assert route.is_active
    with pytest.raises(BackendError, match="epoch 2 was not prepared"):
        route.commit(2)


def test_what_is_taken_back_goes_on_where_it_stood() -> None:
    name = KEY.communicator
    leased = ConfigTable(SET.rows, cycles={name: (KEY,)}, lease_steps=2)
    engine = GlooEngine(HashStore(), rank=0, num_ranks=2, make_device=lambda _: None)
    before = TableCursor(leased, name)
    before.next_row(KEY.kind, KEY.num_bytes)
    route = GlooRoute(HashStore())
    route._groups["all"] = known = gloo._Group(None, name, StepKeys(name), before, engine=engine)
    route._prepared = (1, ConfigTable({}))
    route.commit(1)
    assert known.cursor.is_over
    route.take_back(1)
    assert known.cursor is before


class Group:
    """As torch describes one."""

    group_desc = "tp"

    def __init__(self, name: str) -> None:
        self.group_name = name

    def size(self) -> int:
        return 2


class Groups(GroupRoute[JobGroup]):
    def _is_settable(self, group: object) -> bool:
        return True

    def _open(self, group: object, communicator: CommunicatorId) -> JobGroup:
        return JobGroup(group, communicator, StepKeys(communicator), TableCursor(ConfigTable({}), communicator))


def test_groups_of_one_role_are_told_apart_by_the_order_in_which_they_were_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
    route, groups = Groups(), [Group("1"), Group("2"), Group("1"), Group("of ours")]
    route._left_alone.add("of ours")
    for group in (groups[0], groups[1], groups[3]):
        monkeypatch.setitem(c10d._world.pg_map, group, ("gloo", None))
    assert [name.creation_order for name in route.communicators()] == [0, 1]
    monkeypatch.delitem(c10d._world.pg_map, groups[0])
    monkeypatch.setitem(c10d._world.pg_map, groups[2], ("gloo", None))  # destroyed, and made anew
    assert sorted(name.creation_order for name in route.communicators()) == [1, 2]


class OwnGroup(dist.ProcessGroup):
    """Written in Python, as torchft's are: torch gives it neither a name nor an engine."""


def test_a_class_of_groups_that_somebody_wrote_in_python_is_left_alone() -> None:
    dist.Backend.register_backend("mine", lambda *_: OwnGroup(0, 2), devices=["cpu"])
    dist.init_process_group("mine", store=HashStore(), rank=0, world_size=1)
    try:
        route, tensor, work = GlooRoute(HashStore()), torch.ones(1 << 18), dist.Work()
        assert route.communicators() == ()
        assert route.call(CollectiveKind.ALL_REDUCE, tensor, tensor, None, lambda: work) is work
        assert route.counts() == {}
        assert engine_in_use().startswith("mine of torch ")
    finally:
        dist.destroy_process_group()


def test_a_call_that_raises_was_never_issued() -> None:
    """One rank alone may make a mistake, catch the error and call again: the others have made one call."""
    name, tensor = KEY.communicator, torch.zeros(1 << 19)
    route = GlooRoute(HashStore())
    leased = ConfigTable({KEY: CommConfig()}, cycles={name: (KEY,)}, lease_steps=1)
    engine = GlooEngine(HashStore(), rank=0, num_ranks=2, make_device=lambda _: None)
    known = gloo._Group(None, name, StepKeys(name), TableCursor(leased, name), engine=engine)
    route._eligible = lambda *_: known
    route._groups["0"], route._table = known, leased
    half = tensor[: 1 << 18][: 1 << 17]

    def fails() -> None:
        raise ValueError("a mistake of the job's")

    arguments = (CollectiveKind.ALL_GATHER, tensor[: 1 << 18], half)

    def noted(native) -> None:
        with route.noted(*arguments, None):
            native()

    for call in (lambda: route.call(*arguments, None, fails), lambda: noted(fails)):
        with pytest.raises(ValueError, match="a mistake of the job's"):
            call()
        assert (known.num_calls, known.cursor.is_over) == (0, False)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # while it waits for the call, which is under way on all ranks
        noted(interrupted)
    assert (known.num_calls, known.cursor.is_over) == (1, True)


def test_a_closed_route_opens_nothing_any_more() -> None:
    route = GlooRoute(HashStore())
    route.close()
    with pytest.raises(BackendError, match="closed"):
        route.prepare(SET, 1)


@pytest.mark.parametrize(
    ("kind", "is_source", "expected"),
    [
        (CollectiveKind.ALL_REDUCE, False, "memory"),
        (CollectiveKind.ALL_GATHER, True, "indices"),
        (CollectiveKind.REDUCE_SCATTER, True, "indices"),
        (CollectiveKind.REDUCE_SCATTER, False, "indices"),
        (CollectiveKind.ALL_TO_ALL, False, "memory"),
    ],
)
def test_a_transposed_tensor_is_taken_as_torchs_gloo_takes_it(
    kind: CollectiveKind, is_source: bool, expected: str
) -> None:
    """As PyTorch 2.13 did where one of two ranks gave such a tensor; for a reduce-scatter, where both did."""
    tensor = torch.arange(6.0).view(2, 3).t()
    taken = _as_gloo_takes(kind, tensor, is_source=is_source).reshape(-1).tolist()
    assert taken == {"memory": [0, 1, 2, 3, 4, 5], "indices": [0, 3, 1, 4, 2, 5]}[expected]
