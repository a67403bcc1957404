"""A sibling of a part of the ranks is refused where PyTorch would split the world's communicator: it would hang."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch import distributed  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from lagom_overlap.collective import CollectiveKind, CommConfig, ConfigKey, ConfigTable  # noqa: E402
from lagom_overlap.errors import BackendError  # noqa: E402
from lagom_overlap.online.routes import sibling  # noqa: E402
from lagom_overlap.online.routes.sibling import SiblingRoute, open_nccl_sibling, splits_the_world  # noqa: E402
from lagom_overlap.units import MIB  # noqa: E402

pytestmark = pytest.mark.torch


class ProcessGroupNCCL2:
    """PyTorch 2.15's, by its name."""


class ProcessGroupNCCLLazy:
    """Its backend `nccl-lazy`."""


class World:
    """What is asked of a process group."""

    group_desc = "dp"

    def __init__(self, num_ranks, backend=object, bound_device_id=None):
        self.num_ranks, self.backend, self.bound_device_id = num_ranks, backend, bound_device_id

    def size(self):
        return self.num_ranks

    def _get_backend(self, device):
        if self.backend is None:
            raise RuntimeError("No backend type associated with device type cuda")
        return self.backend()


SPLITTING = [
    World(8, bound_device_id=torch.device("cuda", 0)),
    World(8, backend=ProcessGroupNCCL2),
    World(8, backend=ProcessGroupNCCLLazy),
]


@pytest.mark.parametrize("world", SPLITTING, ids=["bound to a device", "2.15's engine", "2.15's lazy engine"])
def test_a_part_of_the_ranks_is_refused(monkeypatch, world):
    monkeypatch.setattr(distributed_c10d, "_get_default_group", lambda: world)
    with pytest.raises(BackendError, match="'dp' would split the communicator of all ranks"):
        open_nccl_sibling(World(4), (8, None))


@pytest.mark.parametrize("world", [World(8), World(8, backend=None)])
def test_a_world_that_is_not_split_is_known(world):
    assert not splits_the_world(world)
    assert all(splits_the_world(other) for other in SPLITTING)


@pytest.fixture
def world(monkeypatch):
    """A process group of two ranks whose collectives do nothing, and GPU 5, which is not the current one."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    monkeypatch.setattr(sibling, "job_device", lambda: torch.device("cuda", 5))
    yield distributed_c10d._get_default_group()
    distributed.destroy_process_group()


def test_a_call_that_a_cuda_graph_captures_stays_on_the_jobs_own_group(world, monkeypatch):
    """A graph keeps its communicators for good: what is only tried must not get into one."""
    route = SiblingRoute("fake", None, lambda group, limits: distributed.new_group([0, 1]))
    (name,) = route.communicators()
    key = ConfigKey(communicator=name, kind=CollectiveKind.ALL_GATHER, num_bytes=8 * MIB)
    route.prepare(ConfigTable({key: CommConfig(num_channels=2)}, cycles={name: (key,)}), 1)
    route.commit(1)
    route._device = sibling.job_device()  # as of an NCCL job
    captures = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    route.begin_step(is_measured=False)
    assert route.group_for(CollectiveKind.ALL_GATHER, 8 * MIB, world) is world
    captures = False
    assert route.group_for(CollectiveKind.ALL_GATHER, 8 * MIB, world) is not world


def test_a_lease_holds_to_its_last_call_after_closing_and_a_failure_then_is_not_the_jobs(world, capfd):
    """The other ranks may make these calls under it; taking our hands off happens within the job's own call."""
    route = SiblingRoute("fake", None, lambda group, limits: distributed.new_group([0, 1]))
    (name,) = route.communicators()
    key = ConfigKey(communicator=name, kind=CollectiveKind.ALL_GATHER, num_bytes=8 * MIB)
    table = ConfigTable({key: CommConfig(num_channels=2)}, cycles={name: (key,)}, lease_steps=2)
    route.prepare(table, 1)
    route.commit(1)

    def undo():
        raise RuntimeError("somebody wrapped it")

    route.on_close(undo)
    route.close()
    chosen = [route.group_for(CollectiveKind.ALL_GATHER, 8 * MIB, world) for _ in range(3)]
    assert [group is world for group in chosen] == [False, False, True]
    assert "somebody wrapped it" in capfd.readouterr().err


def test_siblings_are_made_on_the_jobs_device_from_whatever_thread(world, monkeypatch):
    """Settings are prepared in a thread of their own, whose current device is GPU 0."""
    current, used, opened = [0], [], []

    class OnDevice:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            used.append(self.device)
            current.append(self.device.index)

        def __exit__(self, *_):
            current.pop()

    monkeypatch.setattr(torch.cuda, "device", OnDevice)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    made = []

    def open_sibling(group, limits):
        opened.append(torch.cuda.current_device())
        made.append(distributed.new_group([0, 1]))
        return made[-1]

    monkeypatch.setattr(distributed, "all_reduce", lambda tensor, group: opened.append(torch.cuda.current_device()))
    monkeypatch.setattr(sibling.torch, "zeros", lambda *_, device: device)
    route = SiblingRoute("fake", None, open_sibling)
    route._device = sibling.job_device()  # as of an NCCL job
    (name,) = route.communicators()
    key = ConfigKey(communicator=name, kind=CollectiveKind.ALL_GATHER, num_bytes=8 * MIB)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(route.prepare, ConfigTable({key: CommConfig(num_channels=2)}), 1).result()
    assert used == [torch.device("cuda", 5)]
    assert opened == [5, 5]
    assert current == [0]
    assert route.communicators() == (name,), "a sibling of ours is no group of the job's"


@pytest.mark.parametrize(
    ("ranks", "world"),
    [
        ([0], World(2, backend=None)),
        ([0, 1], World(2, bound_device_id=torch.device("cuda", 0))),  # all of the world can split it
        ([0, 1], World(2, backend=ProcessGroupNCCL2)),
    ],
)
def test_a_sibling_is_made_by_its_own_ranks_alone(monkeypatch, ranks, world):
    """PyTorch otherwise waits in `new_group` for ranks that are not in it, and are elsewhere in their step."""
    asked = []

    class Options:
        def __init__(self):
            self.config = SimpleNamespace(min_ctas=None, max_ctas=None)

    def new_group(members, **options):
        asked.append((members, options))
        return World(len(members))

    monkeypatch.setattr(distributed_c10d, "_get_default_group", lambda: world)
    monkeypatch.setattr(sibling, "job_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(
        sibling,
        "dist",
        SimpleNamespace(
            ProcessGroupNCCL=SimpleNamespace(Options=Options),
            get_process_group_ranks=lambda group: ranks,
            new_group=new_group,
            all_reduce=lambda tensor, group: None,
        ),
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    open_nccl_sibling(World(len(ranks)), (8, None))
    ((members, options),) = asked
    assert members == ranks
    assert options["use_local_synchronization"] is True
    assert options["pg_options"].config.max_ctas == 8
