"""Groups whose implementations (algorithm and protocol) each have a wire of their own; see `subspaces.py`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, exp, sqrt
from random import Random

import numpy as np
import numpy.typing as npt

from lagom_overlap.collective import Algorithm, CommConfig, ConfigSpace, Protocol, Subspace
from lagom_overlap.tuners.problem import Assignment, Measurement
from lagom_overlap.tuners.warm_start import ExpectedWay, Ways
from overlap_generator import FORMS, FROZEN, IN_FLIGHT_BYTES, Body, Draw, Wire, _draw_body, _draw_wire, draw_group

VERSION = "1"
"""Of the draws and the physics of the kinds."""
KIB = 1024
CHANNELS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32)
CHUNKS = {
    Protocol.SIMPLE: tuple(size * KIB for size in (64, 128, 256, 512, 1024, 1366, 2048)),
    Protocol.LL128: tuple(size * KIB for size in (32, 64, 128, 256, 512)),
    Protocol.LL: tuple(size * KIB for size in (8, 16, 32)),
}
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]
Kind = tuple[Algorithm | None, Protocol | None]
Span = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """What a kind's constants are drawn from: ratios to ring/simple's."""

    link: Span = (1.0, 1.0)
    channel: Span = (1.0, 1.0)
    latency: Span = (1.0, 1.0)
    half_chunk: Span = (1.0, 1.0)
    sms: Span = (1.0, 1.0)
    pressure: Span = (1.0, 1.0)
    flight: Span = (1.0, 1.0)


ALGORITHMS: Mapping[Algorithm, Spans] = {
    Algorithm.RING: Spans(),
    Algorithm.TREE: Spans(
        link=(0.7, 1.05), channel=(0.6, 1.1), latency=(0.3, 0.9), sms=(0.8, 1.3), pressure=(0.7, 1.3), flight=(0.4, 0.9)
    ),
    Algorithm.NVLS: Spans(
        link=(0.9, 1.5), channel=(1.0, 2.5), latency=(0.5, 1.2), sms=(1.0, 1.8), pressure=(0.8, 2.0), flight=(0.5, 1.5)
    ),
    Algorithm.NVLS_TREE: Spans(
        link=(0.8, 1.4), channel=(0.9, 2.0), latency=(0.6, 1.4), sms=(1.0, 1.8), pressure=(0.7, 1.8), flight=(0.5, 1.5)
    ),
    Algorithm.COLLNET_CHAIN: Spans(
        link=(0.7, 1.3), channel=(0.6, 1.2), latency=(0.6, 1.6), sms=(0.5, 1.1), pressure=(0.5, 1.2), flight=(0.6, 1.6)
    ),
}
PROTOCOLS: Mapping[Protocol, Spans] = {
    Protocol.SIMPLE: Spans(),
    Protocol.LL128: Spans(
        link=(0.75, 0.97), channel=(0.4, 0.9), latency=(0.3, 0.8), half_chunk=(0.25, 0.25), pressure=(0.9, 1.3)
    ),
    Protocol.LL: Spans(
        link=(0.4, 0.6), channel=(0.3, 0.7), latency=(0.15, 0.5), half_chunk=(0.05, 0.1), pressure=(1.2, 2.0)
    ),
}
KINDS: tuple[tuple[Algorithm, Protocol], ...] = (
    (Algorithm.RING, Protocol.SIMPLE),
    *((Algorithm.RING, protocol) for protocol in (Protocol.LL128, Protocol.LL)),
    *((Algorithm.TREE, protocol) for protocol in PROTOCOLS),
    *((algorithm, Protocol.SIMPLE) for algorithm in (Algorithm.NVLS, Algorithm.NVLS_TREE, Algorithm.COLLNET_CHAIN)),
)
"""The default's first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnKind:
    """One implementation: its wire, and what it costs the concurrent computation."""

    algorithm: Algorithm
    protocol: Protocol
    wire: Wire
    sms: float
    pressure: float
    flight: float

    @property
    def name(self) -> Kind:
        """Its algorithm and protocol."""
        return self.algorithm, self.protocol

    @property
    def subspace(self) -> Subspace:
        """What may be tried with it."""
        chunks = CHUNKS[self.protocol]
        return Subspace(
            algorithm=self.algorithm,
            protocol=self.protocol,
            num_channels=CHANNELS,
            num_threads=(512,),
            chunk_bytes=chunks if self.algorithm is Algorithm.RING else tuple(c for c in chunks if c <= 1024 * KIB),
        )


def draw_kind(draw: Draw, wire: Wire, algorithm: Algorithm, protocol: Protocol) -> DrawnKind:
    """A kind next to ring/simple, whose wire is given. A faster link presses more: memory is touched as fast."""

    def ratio(name: str) -> float:
        return draw.between(*getattr(ALGORITHMS[algorithm], name)) * draw.between(*getattr(PROTOCOLS[protocol], name))

    return DrawnKind(
        algorithm=algorithm,
        protocol=protocol,
        wire=replace(
            wire,
            link=wire.link * ratio("link"),
            channel=wire.channel * ratio("channel"),
            latency_s=wire.latency_s * ratio("latency"),
            half_chunk=wire.half_chunk * ratio("half_chunk"),
            ll128_link=1.0,
            ll128_channel=1.0,
            ll128_latency=1.0,
        ),
        sms=ratio("sms"),
        pressure=ratio("pressure"),
        flight=ratio("flight"),
    )


class KindGroup:
    """A drawn group whose collectives may be carried out in many ways: the problem, and its true times."""

    def __init__(self, seed: int, index: int, num_kinds: int, num_comms: int) -> None:
        name = f"kinds {VERSION}/{seed}/{index}/{num_kinds}/{num_comms}"
        base, draw = draw_group(seed, index, num_comms), Draw(name)
        again = Draw(f"{FROZEN}/{seed}/{index}/{num_comms}")
        wire, body = _draw_wire(again, FORMS[index % 2]), _draw_body(again)
        others = list(KINDS[1:])
        chosen = [KINDS[0], *(others.pop(draw.whole(0, len(others) - 1)) for _ in range(num_kinds - 1))]
        self.kinds = [draw_kind(draw, wire, *kind) for kind in chosen]
        space = ConfigSpace(tuple(kind.subspace for kind in self.kinds))
        self.num_comms = num_comms
        self.problem = replace(
            base.problem,
            group=replace(base.problem.group, name=name),
            spaces=(space,) * num_comms,
        )
        self.configs = tuple(space)
        self.place = {config: place for place, config in enumerate(self.configs)}
        self.kind_of = np.repeat(np.arange(num_kinds), [len(kind.subspace) for kind in self.kinds])
        self._tabulate(body)

    def ways(self, error: float) -> Ways:
        """The kinds as a table; `error` is the sigma of each ratio's logarithm."""
        rng = Random(f"table/{self.problem.group.name}")
        return {
            kind.name: ExpectedWay(
                kind.wire.latency_s * exp(rng.gauss(0.0, error)), kind.wire.link * exp(rng.gauss(0.0, error))
            )
            for kind in self.kinds
        }

    # True times

    def _tabulate(self, body: Body) -> None:
        """Times of kernels and collectives at every place; the last column is "no collective", the last row "none"."""
        most = max(self.kinds[0].wire.rate(config) for config in self.kinds[0].subspace)
        kernels = [body.kernel_s(i, None, 0.0) for i in range(len(body.kernels))]
        self._kernel_s = np.full((len(kernels) + 1, len(self.configs) + 1), np.inf)
        self._comm_s = np.full((self.num_comms + 1, len(self.configs) + 1), np.inf)
        self._kernel_s[:-1, -1] = kernels
        self._slow = np.array([1 + body.comm_slowdown * m for m in body.sensitivity] + [1.0])
        for place, config in enumerate(self.configs):
            kind = self.kinds[self.kind_of[place]]
            as_ring = replace(config, protocol=Protocol.SIMPLE)  # the ratios of LL128 are in the wire already
            use = kind.wire.rate(as_ring) / most
            for i in range(len(kernels)):
                self._kernel_s[i, place] = self._beside(body, i, kind, config, use)
            for j, comm in enumerate(self.problem.group.comms):
                self._comm_s[j, place] = kind.wire.alone_s(as_ring, comm.collective.wire_bytes)

    @staticmethod
    def _beside(body: Body, i: int, kind: DrawnKind, config: CommConfig, use: float) -> float:
        """Kernel i during a collective: the generator's law, with the kind's SMs, pressure and bytes in flight."""
        kernel, channels = body.kernels[i], config.num_channels or 0
        waves = ceil(kernel.num_blocks / ((body.num_sms - kind.sms * channels) * kernel.blocks_per_sm))
        flight = kind.flight * channels * (config.chunk_bytes or 1)
        pollution = body.pollution * flight / (flight + IN_FLIGHT_BYTES)
        pressed = body.sensitivity[i] * body.pressure * kind.pressure * use * sqrt(use)
        return waves * kernel.wave_s * (1 + pressed + pollution)

    def run(self, places: Ints) -> tuple[Floats, Floats]:
        """X (A, N) and Y (A,) of many assignments (A, N) at once; progress as in the generator."""
        count, num_kernels = len(places), len(self._kernel_s) - 1
        padded = np.concatenate([places, np.full((count, 1), len(self.configs))], axis=1)
        rows = np.arange(count)
        i, j = np.zeros(count, dtype=np.intp), np.zeros(count, dtype=np.intp)
        kernel_left, comm_left = np.ones(count), np.ones(count)
        comm_s, comp_s = np.zeros((count, self.num_comms + 1)), np.zeros(count)
        for _ in range(num_kernels + self.num_comms):
            place = padded[rows, j]
            kernel_s, alone_s = self._kernel_s[i, place], self._comm_s[j, place] * self._slow[i]
            to_kernel_end, to_comm_end = kernel_left * kernel_s, comm_left * alone_s
            step = np.minimum(to_kernel_end, to_comm_end)
            over = np.isinf(step)
            kernel_ends, comm_ends = (to_kernel_end <= step) & ~over, (to_comm_end <= step) & ~over
            step[over] = 0.0
            comm_s[rows, j] += step
            comp_s += np.where(i < num_kernels, step, 0.0)
            kernel_left = np.where(kernel_ends, 1.0, kernel_left - step / kernel_s)
            comm_left = np.where(comm_ends, 1.0, comm_left - step / alone_s)
            i, j = i + kernel_ends, j + comm_ends
        return comm_s[:, : self.num_comms], comp_s

    def makespans(self, places: Ints) -> Floats:
        """Z of many assignments (A, N)."""
        comm_s, comp_s = self.run(places)
        return np.asarray(np.maximum(comm_s.sum(axis=1), comp_s))

    def makespan_s(self, assignment: Assignment) -> float:
        """Z of one, without noise."""
        return float(self.makespans(self._places(assignment))[0])

    def measure(self, assignment: Assignment, rng: Random, noise: float) -> Measurement:
        """The times as one measurement would give them."""
        comm, comp = self.run(self._places(assignment))
        comm_s = tuple(x * exp(rng.gauss(0.0, noise)) for x in comm[0].tolist())
        comp_s = float(comp[0]) * exp(rng.gauss(0.0, noise))
        return Measurement(makespan_s=max(sum(comm_s), comp_s), comp_s=comp_s, comm_s=comm_s)

    def _places(self, assignment: Assignment) -> Ints:
        return np.array([[self.place[config] for config in assignment]], dtype=np.intp)

    # The truth

    @cached_property
    def best(self) -> tuple[Assignment, float]:
        """The best assignment known, by coordinate search from several starts."""
        everywhere = [np.arange(len(self.configs))] * self.num_comms
        draw = Draw(f"oracle/{self.problem.group.name}")
        starts = [[draw.whole(0, len(self.configs) - 1) for _ in range(self.num_comms)] for _ in range(3)]
        equal = np.repeat(np.arange(len(self.configs))[:, None], self.num_comms, axis=1)
        makespans = self.makespans(equal)
        for kind in range(len(self.kinds)):
            starts.append(equal[np.where(self.kind_of == kind, makespans, np.inf).argmin()].tolist())
        best_s, places = min(self._descend(start, everywhere) for start in starts)
        return tuple(self.configs[place] for place in places), best_s

    def kinds_cost(self, assignment: Assignment) -> float:
        """How far the best assignment with the same kinds is above the best of all, as a share."""
        places = self._places(assignment)[0]
        inside = [np.flatnonzero(self.kind_of == self.kind_of[place]) for place in places]
        best_places = self._places(self.best[0])[0]
        near = [b if b in held else p for b, p, held in zip(best_places.tolist(), places.tolist(), inside, strict=True)]
        found_s = min(self._descend(start, inside)[0] for start in (places.tolist(), near))
        return max(0.0, found_s / self.best[1] - 1)

    @cached_property
    def fastest_alone(self) -> tuple[Kind, ...]:
        """Per collective the kind that is fastest running alone."""
        return tuple(self.kinds[self.kind_of[int(self._comm_s[j, :-1].argmin())]].name for j in range(self.num_comms))

    def _descend(self, start: list[int], candidates: Sequence[Ints]) -> tuple[float, list[int]]:
        places, best_s, since_better, j = list(start), np.inf, 0, 0
        while since_better < self.num_comms:
            tried = np.repeat(np.array([places]), len(candidates[j]), axis=0)
            tried[:, j] = candidates[j]
            makespans = self.makespans(tried)
            found = int(makespans.argmin())
            if makespans[found] < best_s * (1 - 1e-12):
                best_s, places[j], since_better = float(makespans[found]), int(candidates[j][found]), 0
            since_better += 1
            j = (j + 1) % self.num_comms
        return best_s, places


# Ways to search
