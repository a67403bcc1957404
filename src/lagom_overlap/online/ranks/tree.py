"""The reporting tree over the ranks; no rank has more than `MOST_CHILDREN` children.

Rank 0 is the root. A rank that leads the ranks from `rank` to `end` divides the ranks after itself into equal parts,
each led by its first rank. So every subtree is a range of ranks, and neighbouring ranks, which share a node, are close
in the tree. Up to `MOST_CHILDREN` + 1 ranks all report to rank 0 directly; 16,384 need three levels.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

MOST_CHILDREN: Final = 32
"""Bounds the messages that one rank reads per window; chosen, not measured. Three levels reach 33,825 ranks."""


@dataclass(frozen=True, slots=True)
class Post:
    """A rank's place: it leads the ranks from itself to before `end`; `height` levels are below it (0: a leaf).

    `parent` is whom it reports to, -1 for the root.
    """

    rank: int
    parent: int
    end: int
    children: tuple[int, ...]
    height: int


def post_of(rank: int, num_ranks: int) -> Post:
    """Where a rank stands among all of them.

    Raises:
        ValueError: if there is no such rank.
    """
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank is {rank}, must be from 0 to {num_ranks - 1}")
    parent, first, end = -1, 0, num_ranks
    while first != rank:
        bounds = [*_parts(first, end), end]
        parent = first
        first, end = next((a, b) for a, b in pairwise(bounds) if a <= rank < b)
    return Post(rank=rank, parent=parent, end=end, children=_parts(first, end), height=_height(end - first))


def _parts(first: int, end: int) -> tuple[int, ...]:
    """The first ranks of the parts behind a leader."""
    num = end - first - 1
    num_parts = min(num, MOST_CHILDREN)
    return tuple(first + 1 + num * part // num_parts for part in range(num_parts))


def _height(num_ranks: int) -> int:
    """Levels below the leader of that many ranks; the largest part has the most."""
    height = 0
    while num_ranks > 1:
        num_ranks = -(-(num_ranks - 1) // MOST_CHILDREN)
        height += 1
    return height
