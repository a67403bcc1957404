"""Memory of a collective, and the numbers that show whether it worked.

The pattern is made of integers that depend on the rank and on the place, small enough that fp32 sums over any number
of ranks up to 256 are exact in any order. What each rank must hold afterwards is computed from the pattern alone,
without any communication.
"""

from typing import Final

import torch

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.engines.base import Buffers
from lagom_overlap.engines.cpu_limits import ELEMENT_BYTES, KINDS

PERIOD: Final = 65521
"""A prime, so that a slice put in another slice's place shows; 256 x 65520 < 2^24, the exact integers of fp32."""
UNTOUCHED_VALUE: Final = -1.0
"""What a target holds before the collective; no right answer is negative."""


def allocate(collective: Collective) -> Buffers:
    """Buffers of one rank, filled with zeros: repeated sums of them stay zero."""
    num_elements = collective.num_bytes // ELEMENT_BYTES
    part = num_elements // collective.num_ranks
    kind = collective.kind
    if kind not in KINDS:
        raise ValueError(f"no buffers for {kind}")
    source = torch.zeros(part if kind.traits.takes_part else num_elements)
    if kind is CollectiveKind.ALL_REDUCE:  # in place
        return Buffers(source, source)
    return Buffers(source, torch.zeros(part if kind.traits.leaves_part else num_elements))


def pattern(rank: int, start: int, num_elements: int) -> torch.Tensor:
    """Elements `start` to `start + num_elements` of the rank's pattern: (31 i + 7919 rank) mod 65521."""
    shift = (31 * start + 7919 * rank) % PERIOD
    period = ((torch.arange(PERIOD) * 31 + shift) % PERIOD).to(torch.float32)
    return period.repeat(-(-num_elements // PERIOD))[:num_elements]


def fill(collective: Collective, rank: int, buffers: Buffers) -> None:
    """Writes the rank's pattern into the source and a wrong value into a separate target."""
    if buffers.target is not buffers.source:
        buffers.target.fill_(UNTOUCHED_VALUE)
    buffers.source.copy_(pattern(rank, 0, buffers.source.numel()))


def clear(buffers: Buffers) -> None:
    """Back to zeros, in place."""
    buffers.source.zero_()
    buffers.target.zero_()


def expected(collective: Collective, rank: int) -> torch.Tensor:
    """What the rank's target must hold, from the patterns of all ranks."""
    ranks = range(collective.num_ranks)
    num_elements = collective.num_bytes // ELEMENT_BYTES
    part = num_elements // collective.num_ranks
    match collective.kind:
        case CollectiveKind.ALL_GATHER:
            return torch.cat([pattern(peer, 0, part) for peer in ranks])
        case CollectiveKind.ALL_TO_ALL:
            return torch.cat([pattern(peer, rank * part, part) for peer in ranks])
        case CollectiveKind.REDUCE_SCATTER:
            return _summed(ranks, rank * part, part)
        case CollectiveKind.ALL_REDUCE:
            return _summed(ranks, 0, num_elements)
        case _:
            raise ValueError(f"no expected result for {collective.kind}")


def _summed(ranks: range, start: int, num_elements: int) -> torch.Tensor:
    total = torch.zeros(num_elements)
    for peer in ranks:
        total += pattern(peer, start, num_elements)
    return total
