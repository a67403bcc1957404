"""Rungs for a joint climb of channels and chunk: the quantised step of Lagom's Algorithm 2, as data.

The paper does not say how large a step is. It reports (2 channels, 684 KB) and (4 channels, 1366 KB) between the
minimum and NCCL's (8, 2 MB). Three readings:

- `UNIT` (default): the smallest joint step, one more value of each knob. It takes the reported numbers for places on
  the way rather than for the step. No reading comes closer to the gains of the paper's Fig. 7.
- `THIRDS`: channels double, the chunk climbs by thirds of its range: 2, 684, 1366, 2048 KB.
- `PROPORTIONAL`: channels double, the chunk is proportional to them, 341 KB each: 342, 684, 1366, 2048 KB.

A knob never falls from rung to rung, whatever the lattice.

The paper's C is AutoCCL's C, a *slice* of NCCL's Simple buffer; `CommConfig.chunk_bytes` is the chunk on the wire. In a
subspace of protocol Simple whose chunks all fit that buffer (2 MiB) the rungs are computed in slices on a 2 KB grid and
converted; elsewhere (gloo, LL, LL128) the allowed chunk sizes themselves are climbed. Slices are rounded to the nearest
chunk of the lattice, other sizes up. Source: spec, Lagom sections 1.4 and 2.1b, table rows 2, 3, 15.
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
    stays at its maximum. Without shares each rung is the next value of both knobs.
    """

    name: str
    chunk_shares: tuple[float, ...]
    from_zero: bool

    def chunk_target(self, rung: int, low: int, high: int) -> float:
        """The wanted chunk (or slice) bytes of a rung between the least and the most allowed."""
        share = self.chunk_shares[min(rung, len(self.chunk_shares) - 1)]
        return max(float(low), share * high) if self.from_zero else low + share * (high - low)


UNIT: Final = Ladder(name="unit", chunk_shares=(), from_zero=False)
THIRDS: Final = Ladder(name="thirds", chunk_shares=(0.0, 1 / 3, 2 / 3, 1.0), from_zero=False)
PROPORTIONAL: Final = Ladder(name="proportional", chunk_shares=(1 / 6, 1 / 3, 2 / 3, 1.0), from_zero=True)
LADDERS: Final = {ladder.name: ladder for ladder in (UNIT, THIRDS, PROPORTIONAL)}


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


def _not_below(before: int, chunks: tuple[int | None, ...], wanted: int) -> int:
    """The place of the chunk nearest to the wanted one; that of the rung before where it would fall.

    Rounded up, 688 KB, two of which make a chunk, can become the whole buffer, and the next rung a smaller chunk. The
    paper's own pairs fall by one step of the grid, 1368 to 1366 KB: that is let through.
    """
    values = [value or 0 for value in chunks]
    nearest = min(range(len(values)), key=lambda place: (abs(values[place] - wanted), place))
    return nearest if values[nearest] >= values[before] - SLICE_GRID_BYTES else before


def rungs(subspace: Subspace, ladder: Ladder) -> tuple[tuple[int, int], ...]:
    """The climb as (channel position, chunk position) on the lattice, from the minimum to the maximum.

    The first rung is the corner of minimal resources whatever the ladder says; rungs that fall on the one before are
    left out.
    """
    channels, chunks = subspace.num_channels, subspace.chunk_bytes
    climb = [(0, 0)]
    top = (len(channels) - 1, len(chunks) - 1)
    if not ladder.chunk_shares:
        return tuple((min(rung, top[0]), min(rung, top[1])) for rung in range(max(top) + 1))
    for rung in count(1):
        if climb[-1] == top:
            break
        channel = round_up(channels, (channels[0] or 1) * 2.0**rung)
        low, high = chunks[0] or 0, chunks[-1] or 0
        if rung >= len(ladder.chunk_shares) - 1:
            chunk = top[1]
        elif counts_slices(subspace):
            least, most = _slice_bounds(chunks)
            slice_bytes = _on_grid(ladder.chunk_target(rung, least, most), least, most)
            chunk = _not_below(climb[-1][1], chunks, chunk_bytes_of_slice(slice_bytes))
        else:
            chunk = round_up(chunks, ladder.chunk_target(rung, low, high))
        place = (channel, chunk)
        if place != climb[-1]:
            climb.append(place)
    return tuple(climb)
