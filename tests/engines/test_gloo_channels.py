"""What a search opened is closed when it is over."""

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import distributed as dist  # noqa: E402

from lagom_overlap.collective import CollectiveKind, CommConfig, CommunicatorId, ConfigKey, ConfigTable  # noqa: E402
from lagom_overlap.engines.base import Buffers  # noqa: E402
from lagom_overlap.engines.gloo_engine import GlooEngine  # noqa: E402
from lagom_overlap.units import MIB  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.gloo]
KEY = ConfigKey(
    communicator=CommunicatorId(description="pair", ranks=(0, 1)), kind=CollectiveKind.ALL_REDUCE, num_bytes=2 * MIB
)


def opened():
    """This process's descriptors and threads."""
    gc.collect()
    return tuple(len(list(Path(f"/proc/self/{what}").iterdir())) for what in ("fd", "task"))


def is_more(one, other):
    """Of both; what else lives in this process may end meanwhile, and does not begin."""
    return all(mine > theirs for mine, theirs in zip(one, other, strict=True))


@pytest.fixture
def ranks():
    """Two ranks in this process, and what makes both do something at once."""
    store = dist.HashStore()
    engines = [
        GlooEngine(
            store=store,
            rank=rank,
            num_ranks=2,
            make_device=lambda _: dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False),
        )
        for rank in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        yield lambda work: list(pool.map(work, engines))


def table(num_channels):
    return ConfigTable({} if num_channels == 0 else {KEY: CommConfig(num_channels=num_channels, chunk_bytes=MIB // 2)})


def summed(engine):
    values = torch.full((MIB // 2,), 1.0 + engine.rank)
    engine.execute(KEY, Buffers(values, values)).wait()
    return values.unique().tolist()


def test_channels_that_nothing_needs_any_more_leave_no_descriptor_and_no_thread(ranks):
    ranks(lambda engine: engine.apply(table(1), 1))
    assert ranks(summed) == [[3.0]] * 2
    one = opened()
    ranks(lambda engine: engine.apply(table(4), 2))
    assert ranks(summed) == [[3.0]] * 2
    many = opened()
    assert is_more(many, one)
    ranks(lambda engine: engine.apply(table(1), 3))
    assert is_more(opened(), one)  # another rank's calls may be in flight
    ranks(lambda engine: engine.close_channels(table(1)))
    assert not is_more(opened(), one)
    assert ranks(summed) == [[3.0]] * 2
    ranks(lambda engine: engine.apply(table(0), 4))
    ranks(lambda engine: engine.close_channels(table(0)))
    assert is_more(one, opened())
    ranks(lambda engine: engine.close_channels(table(0)))


def test_channels_are_opened_anew_after_they_were_closed(ranks):
    for epoch in range(1, 7, 2):
        ranks(lambda engine, epoch=epoch: engine.apply(table(3), epoch))
        assert ranks(summed) == [[3.0]] * 2
        ranks(lambda engine, epoch=epoch: engine.apply(table(0), epoch + 1))
        ranks(lambda engine: engine.close_channels(table(0)))
