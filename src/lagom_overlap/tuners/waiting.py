"""A stream whose collectives wait for kernels: each starts when the kernel that runs at its turn has ended.

A kernel that was launched first and fills the GPU leaves no SM to a collective before its blocks end (8 A100:
sequential and overlapped runs differ by less than half a millisecond). A collective's time then contains its wait, and
the makespan jumps when one more collective fits in front of a kernel. Kernels run one after the other, at `1 - lost` of
their speed next to a moving collective; a collective takes `nearby` times as long next to a kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt
from typing import Final

import numpy as np
import numpy.typing as npt

from lagom_overlap.tuners.machine.library import address, call
from lagom_overlap.workload import Kernel, OverlapGroup

SM_COUNTS: Final = (56, 68, 72, 78, 80, 84, 108, 114, 128, 132, 142, 148, 160)
"""SM counts of GPUs that run collectives, P100 to B200; a group does not say which GPU it runs on."""
END_ERROR: Final = 0.06
"""Standard deviation of a kernel's end, over the geometric mean of that time and the kernel's own. Chosen, not
fitted."""
MOST_KERNELS: Final = 64
"""Larger groups are not replayed kernel by kernel. Bounds the computation, as `MOST_COMMS` does."""
MOST_COMMS: Final = 16
"""Larger groups are not replayed kernel by kernel, either."""
LEAST_LIKELY: Final = 20.0
"""Ways to start whose log likelihood is this far below the best are dropped for good."""
MOST_LAUNCHES: Final = 4
"""Ways to start that are kept after a fit. Bounds the computation."""
LEAST_MOVED: Final = 0.05
"""The share of a collective's measured time that is never counted as waiting; keeps logarithms finite."""
NUM_PARTICLES: Final = 2048
"""Starts that are drawn before the measurements choose among them. Bounds the computation."""
START_ERROR: Final = 0.01
"""How far a makespan from measured times and starts is off, as a share: losses are not spread evenly. Chosen."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Stream:
    """A group's two streams before anything is measured.

    `shares` are the collectives' shares of the bytes on the wire. `launches` are the ways in which they may start: at
    once (None), or behind kernels, given by the kernels' shares of the computation for one SM count. `told` are shares
    of the computation before which the collectives do not start, for each SM count, where the group says so.
    """

    shares: tuple[float, ...]
    launches: tuple[Floats | None, ...]
    told: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def of(cls, group: OverlapGroup) -> "Stream | None":
        """The streams of a group; None if a kernel is unknown, or there are too many kernels or collectives."""
        kernels = [op.work for op in group.computations if isinstance(op.work, Kernel)]
        is_known = len(kernels) == len(group.computations)
        if not is_known or not 1 < len(kernels) <= MOST_KERNELS or len(group.comms) > MOST_COMMS:
            return None
        times = {
            tuple(ceil(kernel.num_blocks / (kernel.blocks_per_sm * count)) * kernel.wave_s for kernel in kernels)
            for count in SM_COUNTS
        }
        sizes = [comm.collective.wire_bytes for comm in group.comms]
        shares = tuple(size / sum(sizes) for size in sizes)
        by_count = [np.array(each) / sum(each) for each in sorted(times)]
        if not any(group.starts_after):
            return cls(shares, (None, *by_count))
        # Who waits for a producer is known; that it also waits behind a kernel is not looked at then.
        ends = [np.concatenate([[0.0], np.cumsum(each)]) for each in by_count]
        return cls(shares, (None,), tuple(tuple(end[list(group.starts_after)].tolist()) for end in ends))

    def narrowed(self, likely: Sequence[float]) -> "Stream":
        """The stream with the likeliest ways to start only, given the logarithms of their likelihoods."""
        least = max(max(likely) - LEAST_LIKELY, sorted(likely)[-MOST_LAUNCHES:][0])
        return replace(
            self, launches=tuple(each for each, one in zip(self.launches, likely, strict=True) if one >= least)
        )


@dataclass(frozen=True, slots=True)
class Replayed:
    """Seconds by (measurement, collective): total time, time moving, and the part of that next to a kernel.

    `error` is the standard deviation of its wait.
    """

    took: Floats
    moved: Floats
    beside: Floats
    error: Floats

    def times(self, factors: Floats) -> "Replayed":
        """The same in measurements that are longer by these factors."""
        by = factors[:, None]
        return Replayed(self.took * by, self.moved * by, self.beside * by, self.error * by)


def replay(kernels: Floats, lost: Floats, took: Floats) -> Replayed:
    """Where measured collectives waited, given what kernels lose next to them; (measurements, collectives).

    A wait that began close to a kernel's end may be one kernel shorter or longer. A collective that ended before the
    kernel it should have waited for is taken not to have waited.
    """
    last = len(kernels) - 1
    moved, beside, error = took.copy(), np.zeros_like(took), np.zeros_like(took)
    for row, times in enumerate(took):
        i, left, now, end = 0, float(kernels[0]), 0.0, 0.0
        for j, took_s in enumerate(times):
            end += took_s
            if i <= last:
                sd = END_ERROR * sqrt((now + left) * kernels[i])
                is_close = (left < 2 * sd and i < last) or (kernels[i] - left < 2 * sd and i > 0)
                wait = min(left, max(0.0, end - LEAST_MOVED * took_s - now))
                if wait < left:
                    error[row, j] = kernels[i]
                    left -= wait
                else:
                    error[row, j] = kernels[min(i + 1, last)] if is_close else sd
                    i += 1
                    left = float(kernels[i]) if i <= last else 0.0
                now += wait
            moved[row, j] = end - now
            rate = 1 - lost[row, j]
            while i <= last and now < end:
                step = min(left / rate, end - now)
                beside[row, j] += step
                now, left = now + step, left - step * rate
                if left <= 1e-12:
                    i += 1
                    left = float(kernels[i]) if i <= last else 0.0
            now = end
    return Replayed(took, moved, beside, error)


def makespans(kernels: Floats, lost: Floats, alone: Floats, nearby: Floats) -> Floats:
    """(assignments, draws): when all has ended.

    `kernels` are their times alone (kernels, draws), `lost` what they lose next to each collective, `alone` its time
    (both: assignments, collectives, draws), `nearby` by how much that is longer next to a kernel (draws).
    """
    ended = np.empty((alone.shape[0], alone.shape[2]))
    arrays = [np.ascontiguousarray(each, dtype=np.float64) for each in (kernels, lost, alone, nearby)]
    at = [address(each) for each in arrays]
    call("ls_waiting", at[0], len(kernels), *at[1:], *alone.shape, address(ended))
    return ended


@dataclass(frozen=True, slots=True)
class Starts:
    """When collectives may begin, as draws: shares of the computation (collectives, draws), and gaps (draws,).

    The first draw is the likeliest. A gap is what an exposed stream takes beyond its collectives.
    """

    shares: Floats
    gaps: Floats

    def end(self, comm: Floats, comp: float) -> float:
        """When an in-order stream of measured times has ended, by the likeliest draw."""
        tails = np.cumsum(comm[::-1])[::-1]
        return float((self.shares[:, 0] * comp + tails).max() + self.gaps[0])


def drawn_starts(
    comm: Floats, comp: Floats, makespan: Floats, *, sigma: float, gap: float, told: Floats | None, num: int
) -> Starts:
    """Draws from what the measurements leave open of when collectives begin.

    Measured times are (measurements, collectives) and (measurements,), their noise `sigma` as a share. Collective k
    begins at s_k of the computation Y at the earliest, so the stream ends at the latest of s_k Y + x_k + ... + x_N.
    `told` holds candidates (candidates, collectives) where the group says who waits for whom. Else a candidate waits
    for nobody and has the gap, or has each collective wait or not, and both sorts are as likely beforehand.
    """
    random, num_comms = np.random.default_rng(len(comm)), comm.shape[1]
    if told is None:
        shape = NUM_PARTICLES, num_comms
        waiting = random.random(shape) * (random.random(shape) < 0.5)
        shares, gaps = np.concatenate([np.zeros((1, num_comms)), waiting]), np.append(gap, np.zeros(NUM_PARTICLES))
        prior = np.append(NUM_PARTICLES, np.ones(NUM_PARTICLES))
    else:
        shares, gaps, prior = told, np.zeros(len(told)), np.ones(len(told))
    tails = np.cumsum(comm[:, ::-1], axis=1)[:, ::-1]
    ends = (shares[:, None, :] * comp[None, :, None] + tails[None]).max(axis=2) + gaps[:, None]
    off = np.log(np.maximum(ends, comp[None]) / makespan[None])
    likely = -0.5 * (off**2).sum(axis=1) / (2 * sigma**2 + START_ERROR**2)
    weights = prior * np.exp(likely - likely.max())
    chosen = random.choice(len(weights), size=num, p=weights / weights.sum())
    waits_for_nobody = told is None and weights[0] > weights.sum() / 2
    chosen[0] = 0 if waits_for_nobody else int(np.argmax(likely))
    return Starts(shares[chosen].T, gaps[chosen])
