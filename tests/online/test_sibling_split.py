"""A sibling of a part of the ranks is refused where PyTorch would split the world's communicator: it would hang."""

import pytest

torch = pytest.importorskip("torch")

from torch.distributed import distributed_c10d  # noqa: E402

from lagom_overlap.errors import BackendError  # noqa: E402
from lagom_overlap.online.routes.sibling import open_nccl_sibling, splits_the_world  # noqa: E402

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
