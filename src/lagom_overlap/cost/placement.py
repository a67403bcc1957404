"""Where thread-block clusters still fit once the blocks of a collective hold SMs.

A cluster runs inside one GPC, on any of its free SMs: a GPC with s free SMs holds floor(s / c) clusters of c blocks. So
channels that are spread over the GPCs cost a product more clusters than their SMs would make up.

The order in which blocks of a whole SM each take the SMs was read off one H100 (resident_clusters.csv of
benchmarks/results/h100_2026-11-22; all 90 counts agree): first those of each GPC that the preset calls `gpc_first_sms`,
then one SM of every GPC in turn, each in a TPC of its own as long as the GPC has an empty one, then what is left.
NVIDIA promises none of it, and other dies have other SMs switched off.

Departure: where the GPCs of a GPU are not known, the free SMs count as one GPC.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from lagom_overlap.hardware import Gpu

SMS_PER_TPC: Final = 2


def resident_clusters(gpu: Gpu, num_held_sms: int, cluster: int) -> int:
    """Clusters of so many blocks, a whole SM each, that run at once while others hold SMs."""
    return _resident(gpu.num_sms, gpu.gpc_sms, gpu.gpc_first_sms, num_held_sms, cluster)


@lru_cache(maxsize=65_536)
def _resident(num_sms: int, gpcs: tuple[int, ...], first: tuple[int, ...], num_held_sms: int, cluster: int) -> int:
    free = _free_sms(gpcs, first, num_held_sms) if gpcs else [num_sms - num_held_sms]
    return sum(sms // cluster for sms in free)


def _free_sms(gpcs: Sequence[int], first: Sequence[int], num_held_sms: int) -> list[int]:
    """The free SMs of each GPC."""
    rest = [sms - own for sms, own in zip(gpcs, first, strict=True)]
    apart = [sms // SMS_PER_TPC for sms in rest]
    second = [sms - own for sms, own in zip(rest, apart, strict=True)]
    free = list(gpcs)
    left = num_held_sms
    for room in (list(first), apart, second):
        while left and any(room):
            for place, sms in enumerate(room):
                if sms and left:
                    room[place] -= 1
                    free[place] -= 1
                    left -= 1
    return free
