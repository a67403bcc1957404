"""A third examination paper: half of the collectives wait for their producers, as in a backward pass. FROZEN.

Kernels, wires and noise are drawn as in `measured_generator.py`, and differ from it only in who waits: each collective
waits with probability one half for a kernel drawn from all (`OverlapGroup.starts_after`, which a trace shows and a
tuner may read; with `told=False` it may not). A time x_j begins when the collective begins, so it contains no wait.
"""

from dataclasses import replace

import numpy as np

import measured_generator
from measured_generator import Mask, MeasuredGroup, Places
from overlap_generator import Draw

FROZEN = "producers-1"
"""Version of the draws and the physics."""


class ProducerGroup(MeasuredGroup):
    """A drawn group of `measured_generator.py` whose collectives begin when their producers have ended."""

    form = "producers"
    times_waits = False

    def __init__(self, base: MeasuredGroup, starts_after: tuple[int, ...], *, told: bool) -> None:
        for name in ("num_comms", "_ramp", "_kernel_s", "_comm_s", "_slow", "_told"):
            setattr(self, name, getattr(base, name))
        self._after = np.array([*starts_after, 0])
        group = replace(base.problem.group, name=f"group-{FROZEN}/{base.problem.group.name}")
        self.problem = replace(base.problem, group=replace(group, starts_after=starts_after) if told else group)

    def _waits(self, i: Places, j: Places, waits: Mask, kernel_ends: Mask, comm_ends: Mask) -> Mask:
        """Until the producer of collective j has ended."""
        return i < self._after[j]


def draw_group(seed: int, index: int, num_comms: int, *, told: bool = True) -> ProducerGroup:
    """The `index`-th group of a seed with that many collectives.

    Raises:
        ValueError: if there is no collective.
    """
    base = measured_generator.draw_group(seed, index, num_comms)
    draw, num_kernels = Draw(f"{FROZEN}/{seed}/{index}/{num_comms}"), len(base.problem.group.computations)
    starts_after = tuple(draw.whole(0, 1) * draw.whole(1, num_kernels) for _ in range(num_comms))
    return ProducerGroup(base, starts_after, told=told)
