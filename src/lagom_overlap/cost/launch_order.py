"""How long a collective waits for its SMs behind a kernel that was launched before it.

Blocks are dispatched kernel by kernel, and a block that runs is never taken off its SM. With mu blocks on lambda SMs of
TB each, alone, a kernel runs g = ceil(mu / (lambda TB)) waves; only the last one may leave SMs free. A collective of NC
channels that comes behind it gets them

    at once                          if one wave leaves NC SMs free (a persistent kernel with a carve-out of NC)
    after the first wave             on a stream of high priority: freed SMs go to it before the kernel's next blocks
    when the last wave is dispatched on one of normal priority, if that wave leaves NC SMs free, else at the end

so behind a persistent kernel without a carve-out (g = 1) it waits for the whole kernel. Source: Amert et al., "GPU
Scheduling on the NVIDIA TX2: Hidden Details Revealed" (RTSS 2017): a kernel keeps its place in the queue until all its
blocks are dispatched, and higher priorities go first. That is observed behaviour of one GPU, promised by nobody.

Departure: waves are as long as each other, so a share of the waves is a share of the kernel.
"""

from math import ceil, floor

from lagom_overlap.collective import StreamPriority
from lagom_overlap.workload import Kernel


def share_before_collective(kernel: Kernel, num_channels: int, *, num_sms: int, priority: StreamPriority) -> float:
    """The share of a kernel that passes before a collective launched behind it holds all its SMs."""
    capacity = num_sms * kernel.blocks_per_sm
    num_blocks = kernel.num_blocks if kernel.grid is None else kernel.grid
    num_full = floor(num_blocks / capacity)
    rest = num_blocks - num_full * capacity
    free_at_last = num_sms - ceil(rest / kernel.blocks_per_sm) if rest else 0
    num_waves = num_full + (rest > 0)
    if num_full == 0 and free_at_last >= num_channels:
        return 0.0
    if priority is StreamPriority.HIGH:
        return 1.0 / num_waves
    return num_full / num_waves if free_at_last >= num_channels else 1.0
