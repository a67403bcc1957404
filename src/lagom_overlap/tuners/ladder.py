"""Rungs for a joint climb of channels and chunk: the quantised step of Lagom's Algorithm 2, as data.

The paper reports (2 channels, 684 KB) and (4 channels, 1366 KB) on the way from the minimum to NCCL's (8, 2 MB). Two
readings fit both pairs; they agree on the reported rungs and the top, and differ below:

- `THIRDS` (default): channels double, the chunk climbs by thirds of its range: 2, 684, 1366, 2048 KB.
- `PROPORTIONAL`: the chunk is proportional to the channels, 341 KB each: 342, 684, 1366, 2048 KB.

The paper's C is AutoCCL's C, a *slice* of NCCL's Simple buffer; `CommConfig.chunk_bytes` is the chunk on the wire. In a
subspace of protocol Simple whose chunks all fit that buffer (2 MiB) the rungs are computed in slices on a 2 KB grid and
converted; elsewhere (gloo, LL, LL128) the allowed chunk sizes themselves are climbed. Every rung is rounded up to the
lattice. Source: spec, Lagom sections 1.4 and 2.1b, table rows 2, 3, 15.
"""

from dataclasses import dataclass
from itertools import count
from typing import Final

from lagom_overlap.collective import Protocol, Subspace, chunk_bytes_of_slice
from lagom_overlap.collective.config import MAX_SLICE_BYTES
from lagom_overlap.errors import UnknownNameError
from lagom_overlap.units import KIB

SLICE_GRID_BYTES: Final = 2 * KIB
"""Slices are rounded up to this grid: AutoCCL's i x NT x 8 B; the reported sizes are multiples of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Channels double from rung to rung; `chunk_shares[r]` says how far the chunk has climbed at rung r.

    The share is of the range above the minimum, or, `from_zero`, of the maximum itself. Beyond the last entry the chunk
    stays at its maximum.
    """

    name: str
    chunk_shares: tuple[float, ...]
    from_zero: bool

    def chunk_target(self, rung: int, low: int, high: int) -> float:
        """The wanted chunk (or slice) bytes of a rung between the least and the most allowed."""
        share = self.chunk_shares[min(rung, len(self.chunk_shares) - 1)]
        return max(float(low), share * high) if self.from_zero else low + share * (high - low)


THIRDS: Final = Ladder(name="thirds", chunk_shares=(0.0, 1 / 3, 2 / 3, 1.0), from_zero=False)
PROPORTIONAL: Final = Ladder(name="proportional", chunk_shares=(1 / 6, 1 / 3, 2 / 3, 1.0), from_zero=True)
LADDERS: Final = {ladder.name: ladder for ladder in (THIRDS, PROPORTIONAL)}


def ladder_named(name: str) -> Ladder:
    """The ladder of that name.

    Raises:
        UnknownNameError: if there is none.
    """
    if name not in LADDERS:
        raise UnknownNameError.among("ladder", name, LADDERS)
    return LADDERS[name]


def round_up(axis: tuple[int | None, ...], wanted: float) -> int:
    """The position of the smallest value that is at least `wanted`, else of the largest."""
    # The relative slack keeps a third of a range, computed in floating point, on the lattice value that equals it.
    slack = wanted * (1 - 1e-12)
    return next((index for index, value in enumerate(axis) if value is None or value >= slack), len(axis) - 1)


def counts_slices(subspace: Subspace) -> bool:
    """Whether C means a slice here: protocol Simple, every chunk within NCCL's buffer."""
    top = subspace.chunk_bytes[-1]
    return subspace.protocol is Protocol.SIMPLE and top is not None and top <= MAX_SLICE_BYTES


def _slice_bounds(chunks: tuple[int | None, ...]) -> tuple[int, int]:
    """The slices whose chunks are the least and the most allowed: a small chunk holds 4 slices, a large one 1."""
    return max(1, (chunks[0] or 1) // 4), chunks[-1] or 1


def _on_grid(slice_bytes: float, low: int, high: int) -> int:
    steps = -(-slice_bytes * (1 - 1e-12) // SLICE_GRID_BYTES)
    return max(low, min(int(steps) * SLICE_GRID_BYTES, high))


def rungs(subspace: Subspace, ladder: Ladder) -> tuple[tuple[int, int], ...]:
    """The climb as (channel position, chunk position) on the lattice, from the minimum to the maximum.

    The first rung is the corner of minimal resources whatever the ladder says; rungs that fall on the one before are
    left out.
    """
    channels, chunks = subspace.num_channels, subspace.chunk_bytes
    climb = [(0, 0)]
    top = (len(channels) - 1, len(chunks) - 1)
    for rung in count(1):
        if climb[-1] == top:
            break
        channel = round_up(channels, (channels[0] or 1) * 2.0**rung)
        low, high = chunks[0] or 0, chunks[-1] or 0
        if counts_slices(subspace):
            least, most = _slice_bounds(chunks)
            wanted: float = chunk_bytes_of_slice(_on_grid(ladder.chunk_target(rung, least, most), least, most))
        else:
            wanted = ladder.chunk_target(rung, low, high)
        at_end = rung >= len(ladder.chunk_shares) - 1
        place = (channel, top[1] if at_end else round_up(chunks, wanted))
        if place != climb[-1]:
            climb.append(place)
    return tuple(climb)
