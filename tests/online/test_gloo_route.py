"""The gloo route's settings without a collective: what is in force, and what comes back."""

import pytest

pytest.importorskip("torch")

from torch.distributed import HashStore

from lagom_overlap.collective import CollectiveKind, CommConfig, CommunicatorId, ConfigKey, ConfigTable
from lagom_overlap.errors import BackendError
from lagom_overlap.online.routes.gloo import GlooRoute

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
