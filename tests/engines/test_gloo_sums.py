# ruff: noqa: E402  # without torch the file is skipped before it imports what needs torch
"""Sliced reduce-scatters against the native call, bit by bit, on ranks that are threads of this process."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

from torch import distributed as dist

from lagom_overlap.collective import CollectiveKind, CommConfig, CommunicatorId, ConfigKey, ConfigTable
from lagom_overlap.engines.base import Buffers
from lagom_overlap.engines.gloo_engine import GlooEngine, slice_bounds, sums_by_part
from lagom_overlap.engines.gloo_group import PrefixStore, _address_of, open_group

pytestmark = [pytest.mark.torch, pytest.mark.gloo]
LIMIT = timedelta(seconds=50)


def device(_: int = 0) -> object:
    return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")


def differing(num_ranks: int, part: int, slice_elements: int) -> int:
    """Elements of all ranks whose sums differ from the native call's."""
    store = dist.HashStore()
    num_bytes = 4 * part * num_ranks
    ranks = tuple(range(num_ranks))
    communicator = CommunicatorId(description="all", ranks=ranks)
    kind = CollectiveKind.REDUCE_SCATTER
    key = ConfigKey(communicator=communicator, kind=kind, num_bytes=num_bytes, occurrence=0)
    config = CommConfig(num_channels=2, chunk_bytes=4 * slice_elements * num_ranks)

    def live(rank: int) -> int:
        native = open_group(PrefixStore("native", store), rank, num_ranks, device(), meeting_timeout=LIMIT)
        engine = GlooEngine(
            store=PrefixStore("ours", store),
            rank=rank,
            num_ranks=num_ranks,
            make_device=device,
            meeting_timeout=LIMIT,
            sums_as_native=True,
        )
        engine.apply(ConfigTable({key: config}), 1)
        generator = torch.Generator().manual_seed(rank)
        source = torch.randn(num_ranks * part, generator=generator).exp()
        expected, found = torch.empty(part), torch.empty(part)
        native._reduce_scatter_base(expected, source, dist.ReduceScatterOptions()).wait()
        engine.execute(key, Buffers(source, found)).wait()
        native.barrier().wait()
        return int((expected != found).sum())

    with ThreadPoolExecutor(num_ranks) as pool:
        return sum(pool.map(live, ranks))


@pytest.mark.parametrize(
    ("num_ranks", "part", "slice_elements"),
    [
        (3, 400_001, 131_072),  # odd parts, two segments each
        (4, 400_001, 131_072),
        (6, 87_595, 43_000),  # FSDP2's, of a layer that six ranks do not divide
        (3, 400_000, 131_073),  # odd slices of an even part
        (3, 1_200_001, 400_000),
        (4, 400_000, 131_072),  # nothing odd: sliced
    ],
)
def test_a_sliced_reduce_scatter_sums_as_the_native_call_does(num_ranks: int, part: int, slice_elements: int) -> None:
    assert differing(num_ranks, part, slice_elements) == 0


def test_parts_that_begin_within_a_neighbours_segment_are_told_apart() -> None:
    assert sums_by_part(400_000, 4)
    assert not sums_by_part(400_001, 4)
    assert sums_by_part(786_432, 3)  # 9 MiB: three segments of 1 MiB each
    assert not sums_by_part(786_434, 3)
    assert all(sums_by_part(end - start, 4) for start, end in slice_bounds(400_000, 131_072))


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1"])
def test_the_address_that_a_device_listens_on_can_be_read(address: str) -> None:
    assert _address_of(dist.ProcessGroupGloo.create_device(hostname=address)) == address
