"""A third examination paper: half of the collectives wait for their producers, as in a backward pass. FROZEN.

Kernels, wires and noise are drawn as in `measured_generator.py`, and differ from it only in who waits: each collective
waits with probability one half for a kernel drawn from all (`OverlapGroup.starts_after`, which a trace shows and a
tuner may read; with `told=False` it may not). A time x_j begins when the collective begins, so it contains no wait.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

import measured_generator
from measured_generator import Floats, MeasuredGroup
from overlap_generator import CONFIGS, Draw

FROZEN = "producers-1"
"""Version of the draws and the physics."""


class ProducerGroup(MeasuredGroup):
    """A drawn group of `measured_generator.py` whose collectives begin when their producers have ended."""

    form = "producers"

    def __init__(self, base: MeasuredGroup, starts_after: tuple[int, ...], *, told: bool) -> None:
        for name in ("num_comms", "_ramp", "_kernel_s", "_comm_s", "_slow", "_told"):
            setattr(self, name, getattr(base, name))
        self._after = np.array([*starts_after, 0])
        group = replace(base.problem.group, name=f"group-{FROZEN}/{base.problem.group.name}")
        self.problem = replace(base.problem, group=replace(group, starts_after=starts_after) if told else group)

    def _run(self, places: npt.NDArray[np.intp]) -> tuple[Floats, Floats, Floats]:
        """(x_j, Y, Z) of many assignments, (assignments, collectives) into `CONFIGS`."""
        count, none = len(places), len(CONFIGS)
        num_kernels, num_comms = len(self._kernel_s) - 1, self.num_comms
        padded = np.concatenate([places, np.full((count, 1), none)], axis=1)
        rows = np.arange(count)
        i, j = np.zeros(count, dtype=np.intp), np.zeros(count, dtype=np.intp)
        kernel_left, comm_left = np.ones(count), np.ones(count)
        now, comp_s, comm_s = np.zeros(count), np.zeros(count), np.zeros((count, num_comms + 1))
        for _ in range(num_kernels + num_comms):
            waits = i < self._after[j]
            place = np.where(waits, none, padded[rows, j])
            kernel_s = self._kernel_s[i, place]
            moving_s = np.where(waits, np.inf, self._comm_s[j, padded[rows, j]] * self._slow[i])
            to_kernel_end, to_comm_end = kernel_left * kernel_s, comm_left * moving_s
            step = np.minimum(to_kernel_end, to_comm_end)
            ended = np.isinf(step)
            kernel_ends, comm_ends = (to_kernel_end <= step) & ~ended, (to_comm_end <= step) & ~ended
            step[ended] = 0.0
            now += step
            comm_s[rows, j] += np.where(waits, 0.0, step)
            kernel_left = np.where(kernel_ends, 1.0, kernel_left - step / kernel_s)
            comm_left = np.where(comm_ends, 1.0, comm_left - step / moving_s)
            i, j = i + kernel_ends, j + comm_ends
            comp_s = np.where(kernel_ends, now, comp_s)
        return comm_s[:, :num_comms], comp_s, now


def draw_group(seed: int, index: int, num_comms: int, *, told: bool = True) -> ProducerGroup:
    """The `index`-th group of a seed with that many collectives.

    Raises:
        ValueError: if there is no collective.
    """
    base = measured_generator.draw_group(seed, index, num_comms)
    draw, num_kernels = Draw(f"{FROZEN}/{seed}/{index}/{num_comms}"), len(base.problem.group.computations)
    starts_after = tuple(draw.whole(0, 1) * draw.whole(1, num_kernels) for _ in range(num_comms))
    return ProducerGroup(base, starts_after, told=told)
