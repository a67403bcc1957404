# ruff: noqa: E402  # without torch the file is skipped before it imports what needs torch
"""How long a call of the gloo engine may take: as long as the job's own calls, not as long as ranks had to meet."""

from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

from torch.distributed import HashStore

from lagom_overlap.collective import CollectiveKind, CommConfig, CommunicatorId, ConfigKey, ConfigTable
from lagom_overlap.engines.base import Buffers
from lagom_overlap.engines.gloo_engine import GlooEngine

pytestmark = pytest.mark.torch


class Channel:
    """Notes how long its messages are waited for; a wait without a time is gloo's, that of the ranks' meeting."""

    def __init__(self) -> None:
        self.waited: list[timedelta | None] = []

    def send(self, tensors: list[object], peer: int, tag: int) -> "Channel":
        return self

    recv = send

    def wait(self, timeout: timedelta | None = None) -> None:
        self.waited.append(timeout)


def test_messages_of_an_exchange_may_take_as_long_as_the_jobs_own_calls() -> None:
    channel = Channel()
    engine = GlooEngine(
        store=HashStore(),
        rank=0,
        num_ranks=3,
        make_device=lambda number: None,
        meeting_timeout=timedelta(seconds=60),
        call_timeout=timedelta(minutes=30),
    )
    engine._channels = [channel]  # type: ignore[list-item]
    world = CommunicatorId(description="default_pg", ranks=(0, 1, 2))
    key = ConfigKey(communicator=world, kind=CollectiveKind.ALL_TO_ALL, num_bytes=3 << 19, occurrence=0)
    engine.apply(ConfigTable({key: CommConfig(num_channels=1, chunk_bytes=3 << 19)}), 1)
    engine.execute(key, Buffers(torch.zeros(3 << 17), torch.zeros(3 << 17))).wait()
    assert channel.waited == [timedelta(minutes=30)] * 4
