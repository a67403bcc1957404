"""The settings of a self-test, ordered so that it is useful wherever it is cut off: every size before any detail."""

from collections.abc import Collection, Iterator
from enum import IntEnum
from itertools import product
from typing import Final

from lagom_overlap.collective import Algorithm, CollectiveKind, CommConfig
from lagom_overlap.nccl_plugin.record_log import Implementation
from lagom_overlap.nccl_plugin.space import CHANNELS, CHUNKS, FIRST_VERSION_WITH_CHUNKS, NVLS_CHUNKS
from lagom_overlap.units import MIB

SIZES: Final = (16 * MIB, 128 * MIB, MIB)
"""A usual bucket first, then a large and a small message. Chosen, not measured."""
USUAL: Final = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)
"""The collectives of training, tested at every depth before the others."""
OTHERS: Final = (CollectiveKind.BROADCAST, CollectiveKind.REDUCE)
CHUNK_CHANNELS: Final = 8
"""Channels of the settings with a chunk. Chosen, not measured."""
_FEW: Final = (1, CHUNK_CHANNELS)
_PART_BYTES: Final = 512
"""Each rank's part is a multiple of this many bytes, so that no call has a remainder."""


class Depth(IntEnum):
    """How much of the grid is asked; each holds what those before it do not."""

    WAYS = 0
    CHUNKS = 1
    CHANNELS = 2


def divisible(num_bytes: int, num_ranks: int) -> int:
    """The next smaller size that every rank has an equal part of."""
    return num_bytes - num_bytes % (_PART_BYTES * num_ranks)


def calls(num_ranks: int) -> Iterator[tuple[Depth, CollectiveKind, int]]:
    """Every (depth, kind, bytes) in order."""
    for kinds in (USUAL, OTHERS):
        for depth, size, kind in product(Depth, SIZES, kinds):
            yield depth, kind, divisible(size, num_ranks)


def configs(depth: Depth, offered: Collection[Implementation], tuner_version: int) -> Iterator[CommConfig]:
    """The settings of one call at one depth: NCCL's own choice, and every way that it offers.

    Chunks are asked beyond what a buffer holds, because what NCCL makes of them is what is to be learnt.
    """
    match depth:
        case Depth.WAYS:
            yield CommConfig()
            for algorithm, protocol in sorted(offered):
                for channels in _FEW:
                    yield CommConfig(algorithm=algorithm, protocol=protocol, num_channels=channels)
        case Depth.CHUNKS if tuner_version >= FIRST_VERSION_WITH_CHUNKS:
            for algorithm, protocol in sorted(offered):
                for chunk in NVLS_CHUNKS if algorithm in (Algorithm.NVLS, Algorithm.NVLS_TREE) else CHUNKS[protocol]:
                    yield CommConfig(
                        algorithm=algorithm, protocol=protocol, num_channels=CHUNK_CHANNELS, chunk_bytes=chunk
                    )
        case Depth.CHANNELS:
            for channels in CHANNELS:
                yield CommConfig(num_channels=channels)
            for algorithm, protocol in sorted(offered):
                for channels in CHANNELS:
                    if channels not in _FEW:
                        yield CommConfig(algorithm=algorithm, protocol=protocol, num_channels=channels)
