"""The range of sizes that a tuned size covers: a table of exact sizes would miss a call of 64 MiB and 256 B.

A size covers its neighbours up to half an octave away, a factor of sqrt(2) in either direction; between two sizes that
the job calls, up to their geometric mean. Where both have the same settings there is no gap between them, because both
ends were measured. Calls below `LEAST_BYTES` are left alone unless exactly their size was tuned: there, one size says
nothing about another.
"""

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping
from itertools import pairwise
from math import isqrt
from typing import TypeAlias

from lagom_overlap.collective import CollectiveKind, CommunicatorId
from lagom_overlap.collective.size_class import LEAST_BYTES
from lagom_overlap.nccl_plugin.table_layout import MAX_BYTES

CallSite: TypeAlias = tuple[CommunicatorId, CollectiveKind, int]
"""A communicator, a kind and a size: the calls that occurrences number."""


def size_ranges(settings: Mapping[int, Hashable], known: Collection[int] = ()) -> dict[int, tuple[int, int]]:
    """The first and last bytes that each size of `settings` stands for; they do not overlap, and hold the size itself.

    `known` sizes are called, too, and have no settings: they end their neighbours' ranges.
    """
    ranges = {size: [size, size] for size in (*settings, *known)}
    for size, bounds in ranges.items():
        if size >= LEAST_BYTES:
            bounds[0] = max(LEAST_BYTES, isqrt(size * size // 2) + 1)
            bounds[1] = max(size, min(MAX_BYTES, isqrt(2 * size * size)))
    for small, large in pairwise(sorted(ranges)):
        middle = isqrt(small * large)
        below, above = ranges[small], ranges[large]
        if small >= LEAST_BYTES and settings.get(small) == settings.get(large):
            below[1], above[0] = middle, middle + 1
        else:
            below[1], above[0] = min(below[1], max(small, middle)), max(above[0], middle + 1)
    return {size: (ranges[size][0], ranges[size][1]) for size in settings}


def site_ranges(settings: Mapping[CallSite, Hashable], known: Collection[CallSite]) -> dict[CallSite, tuple[int, int]]:
    """The same for the sizes of each communicator and kind."""
    tuned: dict[tuple[CommunicatorId, CollectiveKind], dict[int, Hashable]] = defaultdict(dict)
    others: dict[tuple[CommunicatorId, CollectiveKind], set[int]] = defaultdict(set)
    for (communicator, kind, num_bytes), setting in settings.items():
        tuned[communicator, kind][num_bytes] = setting
    for communicator, kind, num_bytes in known:
        others[communicator, kind].add(num_bytes)
    return {
        (*pair, num_bytes): ranges
        for pair, by_size in tuned.items()
        for num_bytes, ranges in size_ranges(by_size, others[pair]).items()
    }
