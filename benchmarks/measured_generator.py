"""A second examination paper: overlap groups after other people's measurements, not after any tuner's model. FROZEN.

Written from the measured sets (MI300X products against compute units and RCCL channels, all-reduces of 8 A100 and of
A10G by channels, algorithm and protocol, eight raw lists of iterations) before any tuner was changed for it. It shares
no formula with `overlap_generator.py`, `lagom_overlap.cost` or a tuner's model, and no field that a tuner reads carries
what is hidden: kernels are given as a trace gives them, by grid and time alone, with the share of the memory bandwidth
that `analyze` assumes of every product.

**Computation.** What a kernel loses to n channels is a drawn staircase: up to `LOSS` of its time at 32 channels, in
three to eight jumps at drawn counts (the measured curves are flat, then jump where a round of tiles no longer fits;
where, depends on the kernel and not on its grid alone). On top, 1 + a / (1 + exp((u0 - u) / w)) in the share u of the
fastest rate (memory: nothing, then much), and 1 + p sqrt(n / 32) (power: clocks fall while links work).

**Bandwidth.** Drawn at 1, 2, 4, 8, 16 and 32 channels, each doubling by a smaller factor, the last at times below 1,
linear in log2 n between (the A100's steps). A chunk costs 1 + (log2(C / C*) / d)^2, with C* falling as channels rise.
Latency grows with the square root of the channels.

**Launch order.** In half of the groups a collective is enqueued behind the kernel that runs and has no SM until that
ends (the A100 set: compute first; sequential and overlapped differ by 0.1 to 0.4 ms); in the others it starts at once.

**Noise** (`measure`, where `noise` > 0). A log-normal core of that sigma; with probability 0.06 a factor of 1.2 to 1.9
(raw lists: 13.3 among 8.3 ms); in half of the groups a clock ramp: the first 1 to 4 measurements of a search are 1.24
to 1.41 times as long, then never again (raw lists: 9 to 25 slow iterations at the start).
"""

from dataclasses import dataclass
from math import ceil, exp, log2, sqrt
from random import Random
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig, Protocol
from lagom_overlap.tuners.problem import Assignment, GroupProblem, Measurement
from lagom_overlap.workload import CommOp, CompOp, Kernel, OverlapGroup
from overlap_generator import CHANNELS, CONFIGS, DEFAULT, PLACE, SPACE, Draw, oracle_of

FROZEN = "measured-1"
"""Version of the draws and the physics."""
LOSS = (0.05, 0.6)
"""Of a kernel's time at 32 channels: MI300X 512-CU-rounds lose 0.05 to 0.55 to 32 channels."""
PRODUCT_SHARE = 0.3
"""Of the memory bandwidth, what `analyze` assumes of a product: the same for every kernel, so it tells nothing."""
BYTES_PER_S = 1.5e12
TAIL = 0.06
Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Steps:
    """A monotone staircase over channels, from 0 to 1 at 32."""

    at: tuple[int, ...]
    height: tuple[float, ...]

    def of(self, channels: int) -> float:
        """Its height at that many channels."""
        return sum(height for at, height in zip(self.at, self.height, strict=True) if channels >= at)


@dataclass(frozen=True, slots=True)
class DrawnKernel:
    """One kernel: its time alone, its grid as a trace shows it, and what is hidden."""

    alone_s: float
    grid: int
    loss: float
    steps: Steps
    memory: float
    knee: float
    power: float
    slows_comm: float

    def seconds(self, channels: int, use: float) -> float:
        """Its time while a collective of that many channels moves at that share of the fastest rate."""
        lost = 1.0 + self.loss * self.steps.of(channels)
        memory = 1.0 + self.memory / (1.0 + exp((self.knee - use) / 0.12))
        return self.alone_s * lost * memory * (1.0 + self.power * sqrt(channels / 32))


@dataclass(frozen=True, slots=True)
class DrawnWire:
    """One group's bandwidth law."""

    rates: tuple[float, ...]
    best_chunk: float
    width: float
    latency_s: float
    ll128_rate: float
    ll128_latency: float

    def rate(self, config: CommConfig) -> float:
        """Bytes per second on the wire."""
        channels, chunk = config.num_channels or 1, config.chunk_bytes or 1
        low = min(len(self.rates) - 2, int(log2(channels)))
        part = log2(channels) - low
        reached = self.rates[low] * (1 - part) + self.rates[low + 1] * part
        best = self.best_chunk / sqrt(channels)
        if config.protocol is Protocol.LL128:
            reached, best = reached * self.ll128_rate, best / 4
        return reached / (1.0 + (log2(chunk / best) / self.width) ** 2)

    def alone_s(self, config: CommConfig, wire_bytes: float) -> float:
        """A collective with nothing else running."""
        scale = self.ll128_latency if config.protocol is Protocol.LL128 else 1.0
        return self.latency_s * scale * (1.0 + 0.2 * sqrt(config.num_channels or 1)) + wire_bytes / self.rate(config)


class MeasuredGroup:
    """A drawn group: the problem that a tuner gets, and its true times. The same interface as `SimulatedGroup`."""

    form = "measured"
    times_waits = True
    """Whether the time x_j of a collective begins when it is enqueued, and not when it begins to move."""

    def __init__(
        self,
        problem: GroupProblem,
        wire: DrawnWire,
        kernels: tuple[DrawnKernel, ...],
        behind: bool,
        ramp: tuple[int, float],
    ) -> None:
        self.problem, self._behind, self._ramp = problem, behind, ramp
        self.num_comms = len(problem.group.comms)
        rates = [wire.rate(config) for config in CONFIGS]
        use = [rate / max(rates) for rate in rates]
        none = len(CONFIGS)
        self._kernel_s = np.full((len(kernels) + 1, none + 1), np.inf)
        self._comm_s = np.full((self.num_comms + 1, none + 1), np.inf)
        for i, kernel in enumerate(kernels):
            row = [kernel.seconds(config.num_channels or 1, use[place]) for place, config in enumerate(CONFIGS)]
            self._kernel_s[i] = [*row, kernel.alone_s]
        for j, comm in enumerate(problem.group.comms):
            self._comm_s[j, :none] = [wire.alone_s(config, comm.collective.wire_bytes) for config in CONFIGS]
        self._slow = np.array([1.0 + kernel.slows_comm for kernel in kernels] + [1.0])
        self._told: WeakKeyDictionary[Random, int] = WeakKeyDictionary()

    def _run(self, places: Places) -> tuple[Floats, Floats, Floats]:
        """(x_j, Y, Z) of many assignments, (assignments, collectives) into `CONFIGS`."""
        count, none = len(places), len(CONFIGS)
        num_kernels, num_comms = len(self._kernel_s) - 1, self.num_comms
        padded = np.concatenate([places, np.full((count, 1), none)], axis=1)
        rows = np.arange(count)
        i, j = np.zeros(count, dtype=np.intp), np.zeros(count, dtype=np.intp)
        kernel_left, comm_left = np.ones(count), np.ones(count)
        now, comp_s, comm_s = np.zeros(count), np.zeros(count), np.zeros((count, num_comms + 1))
        waits = self._waits(i, j, np.zeros(count, dtype=bool), np.zeros(count, dtype=bool), np.ones(count, dtype=bool))
        for _ in range(num_kernels + num_comms):
            place = np.where(waits, none, padded[rows, j])
            kernel_s = self._kernel_s[i, place]
            moving_s = np.where(waits, np.inf, self._comm_s[j, padded[rows, j]] * self._slow[i])
            to_kernel_end, to_comm_end = kernel_left * kernel_s, comm_left * moving_s
            step = np.minimum(to_kernel_end, to_comm_end)
            ended = np.isinf(step)
            kernel_ends, comm_ends = (to_kernel_end <= step) & ~ended, (to_comm_end <= step) & ~ended
            step[ended] = 0.0
            now += step
            comm_s[rows, j] += step if self.times_waits else np.where(waits, 0.0, step)
            kernel_left = np.where(kernel_ends, 1.0, kernel_left - step / kernel_s)
            comm_left = np.where(comm_ends, 1.0, comm_left - step / moving_s)
            i, j = i + kernel_ends, j + comm_ends
            comp_s = np.where(kernel_ends, now, comp_s)
            waits = self._waits(i, j, waits, kernel_ends, comm_ends)
        return comm_s[:, :num_comms], comp_s, now

    def _waits(self, i: Places, j: Places, waits: Mask, kernel_ends: Mask, comm_ends: Mask) -> Mask:
        """Whether collective j waits while kernel i runs, after what has just ended.

        One whose turn comes while a kernel runs is behind it; kernels do not pause between each other.
        """
        runs = i < len(self._kernel_s) - 1
        return np.where(comm_ends, self._behind & runs, waits & ~kernel_ends) & runs

    def exact(self, assignment: Assignment) -> Measurement:
        """The times without noise."""
        comm_s, comp_s, now = self._run(np.array([[PLACE[config] for config in assignment]]))
        return Measurement(
            makespan_s=float(now[0]), comp_s=float(comp_s[0]), comm_s=tuple(float(value) for value in comm_s[0])
        )

    def measure(self, assignment: Assignment, rng: Random, noise: float) -> Measurement:
        """The times as the next measurement of a search gives them; a search is one `rng`."""
        true = self.exact(assignment)
        if not noise:
            return true
        told = self._told.get(rng, 0)
        self._told[rng] = told + 1
        slow = self._ramp[1] if told < self._ramp[0] else 1.0
        slow *= rng.uniform(1.2, 1.9) if rng.random() < TAIL else 1.0
        comp_s = true.comp_s * slow * exp(rng.gauss(0.0, noise))
        comm_s = tuple(x * slow * exp(rng.gauss(0.0, noise)) for x in true.comm_s)
        makespan_s = true.makespan_s * slow * exp(rng.gauss(0.0, noise))
        return Measurement(makespan_s=max(makespan_s, comp_s), comp_s=comp_s, comm_s=comm_s)

    def oracle(self, num_starts: int = 4) -> tuple[Assignment, float]:
        """The best assignment known and its makespan: see `oracle_of`."""
        return oracle_of(self.problem.group.name, self.num_comms, lambda places: self._run(places)[2], num_starts)


def _draw_kernel(draw: Draw) -> DrawnKernel:
    at = tuple(draw.whole(1, CHANNELS[-1]) for _ in range(draw.whole(3, 8)))
    weights = [draw.between(0.2, 1.0) for _ in at]
    return DrawnKernel(
        alone_s=draw.between(100e-6, 1500e-6),
        grid=draw.whole(60, 2500),
        loss=draw.between(*LOSS),
        steps=Steps(at, tuple(weight / sum(weights) for weight in weights)),
        memory=draw.between(0.0, 0.35),
        knee=draw.between(0.3, 0.9),
        power=draw.between(0.0, 0.08),
        slows_comm=draw.between(0.0, 0.3),
    )


def _draw_wire(draw: Draw) -> DrawnWire:
    rates = [1.0]
    gain = draw.between(1.6, 2.0)
    for _ in range(5):
        rates.append(rates[-1] * gain)
        gain = max(0.93, 1.0 + (gain - 1.0) * draw.between(0.3, 0.95) - draw.between(0.0, 0.08))
    link = draw.between(10e9, 200e9)
    return DrawnWire(
        rates=tuple(link * rate / max(rates) for rate in rates),
        best_chunk=2.0 ** draw.between(18.0, 22.0),
        width=draw.between(3.0, 8.0),
        latency_s=draw.between(10e-6, 60e-6),
        ll128_rate=draw.between(0.6, 1.1),
        ll128_latency=draw.between(0.3, 0.9),
    )


def draw_group(seed: int, index: int, num_comms: int) -> MeasuredGroup:
    """The `index`-th group of a seed with that many collectives.

    Raises:
        ValueError: if there is no collective.
    """
    if num_comms < 1:
        raise ValueError(f"num_comms is {num_comms}, must be at least 1")
    draw = Draw(f"{FROZEN}/{seed}/{index}/{num_comms}")
    num_sms, wire = draw.one_of((80, 108, 132)), _draw_wire(draw)
    kernels = tuple(_draw_kernel(draw) for _ in range(draw.whole(4, 11)))
    comp_s = sum(kernel.alone_s for kernel in kernels)
    ratio = draw.one_of((0.15, 0.3, 0.5, 0.8, 1.2)) * draw.between(0.8, 1.25)
    kinds = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)
    weights = [draw.between(1.0, 3.0) for _ in range(num_comms)]
    comms = []
    for j, weight in enumerate(weights):
        unit = Collective(draw.one_of(kinds), 10**9, 8)
        num_bytes = ratio * comp_s * weight / sum(weights) * max(wire.rates) / unit.wire_bytes * unit.num_bytes
        comms.append(CommOp(name=f"comm{j}", collective=Collective(unit.kind, max(1, round(num_bytes)), 8)))
    behind = draw.whole(0, 1) == 1
    ramp = (draw.whole(1, 4) if draw.whole(0, 1) else 0, draw.between(1.24, 1.41))
    group = OverlapGroup(
        name=f"group-{FROZEN}-{seed}-{index}-{num_comms}",
        computations=tuple(
            CompOp(name=f"kernel{i}", work=_as_traced(kernel, num_sms)) for i, kernel in enumerate(kernels)
        ),
        comms=tuple(comms),
    )
    problem = GroupProblem(group=group, spaces=(SPACE,) * num_comms, default=(DEFAULT,) * num_comms)
    return MeasuredGroup(problem, wire, kernels, behind, ramp)


def _as_traced(kernel: DrawnKernel, num_sms: int) -> Kernel:
    """What a trace tells, grid and time, with one block per SM and the assumed traffic, as `analyze` takes it."""
    return Kernel(
        num_blocks=kernel.grid,
        blocks_per_sm=1,
        wave_s=kernel.alone_s / ceil(kernel.grid / num_sms),
        block_bytes=PRODUCT_SHARE * BYTES_PER_S * kernel.alone_s / kernel.grid,
    )
