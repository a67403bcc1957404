"""Fig. 3 measured on this machine: an FFN during a 32 MB all-reduce on worker threads, by channels and chunk.

Its FFN and GPUs are not here: eight small FFNs on one core per rank stand for the one, two ranks for the eight GPUs.
What is looked at is the shape: more channels speed the all-reduce and slow the FFN, and so does a larger chunk. One
surface per way of waiting; settings are measured in shuffled rounds, each figure is the median over rounds.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Final

from lagom_overlap.backends import Backend, BackendRequest
from lagom_overlap.collective import Collective, CollectiveKind, CommConfig, Protocol
from lagom_overlap.errors import BackendError
from lagom_overlap.jobfile.registry import backend_factory
from lagom_overlap.papers.lab.space import CHANNELS
from lagom_overlap.papers.reproduce.judge import judge_cases, judge_direction, spread
from lagom_overlap.papers.reproduce.result import Curve, Line, ReproducedSurface, ReproducedVerdict, ReproduceReport
from lagom_overlap.record import utc_now
from lagom_overlap.tuners.problem import Failure, Measurement
from lagom_overlap.units import GBIT_PER_S, KIB, MIB, MS
from lagom_overlap.workload import CommOp, CompOp, Gemm, MemoryBound, OverlapGroup, Work

CHUNKS: Final = (256 * KIB, 1 * MIB, 4 * MIB)
"""Three of those that it offers, a factor of four apart. Chosen, for the time of a sweep."""
WAITS: Final[Mapping[Protocol, str]] = {Protocol.LL: "spin", Protocol.LL128: "yield", Protocol.SIMPLE: "block"}
ROUNDS: Final = 7
"""Of which every figure is the median. Chosen."""
LINK_BYTES_PER_S: Final = 3 * GBIT_PER_S
"""An emulated link, as in the project's other measurements on gloo. Chosen."""
_TOKENS, _HIDDEN, _NUM_FFNS = 256, 512, 8
"""Small enough for a core of a CPU. Chosen."""

Setting = tuple[Protocol, int, int]
"""Way of waiting, channels, chunk (bytes)."""


@dataclass(frozen=True, slots=True)
class _Point:
    """Medians of one setting: the all-reduce's x and the computation's Y, in seconds."""

    comm_s: float
    comp_s: float


def _group(num_comms: int) -> OverlapGroup:
    inner = 4 * _HIDDEN
    works: tuple[Work, ...] = (
        Gemm(_TOKENS, inner, _HIDDEN, 4),
        MemoryBound(8 * _TOKENS * inner),
        Gemm(_TOKENS, _HIDDEN, inner, 4),
    )
    collective = Collective(CollectiveKind.ALL_REDUCE, 32 * MIB, 2)
    return OverlapGroup(
        name="ffn",
        computations=tuple(
            CompOp(name=f"ffn{number}.{place}", work=work)
            for number in range(_NUM_FFNS)
            for place, work in enumerate(works)
        ),
        comms=tuple(CommOp(name=f"ar{number}", collective=collective) for number in range(num_comms)),
    )


@contextmanager
def _opened(seed: int, link_bytes_per_s: float | None) -> Iterator[Backend]:
    request = BackendRequest(
        job_fingerprint="fig3", seed=seed, link_bytes_per_s=link_bytes_per_s, num_ranks=2, timeout_s=120.0
    )
    backend = backend_factory("workers")(request)
    try:
        yield backend
    finally:
        backend.close()


def _measured(backend: Backend, setting: Setting) -> Measurement:
    protocol, channels, chunk_bytes = setting
    config = CommConfig(protocol=protocol, num_channels=channels, chunk_bytes=chunk_bytes)
    outcome = backend.measure(_group(1), (config,))
    if isinstance(outcome, Failure):
        raise BackendError(f"workers: {outcome.reason}")
    return outcome


def _sweep(backend: Backend, seed: int, note: Callable[[str], None]) -> dict[Setting, _Point]:
    settings = [(wait, n, chunk) for wait in WAITS for n in CHANNELS for chunk in CHUNKS]
    measurements: dict[Setting, list[Measurement]] = {setting: [] for setting in settings}
    for number in range(ROUNDS):
        note(f"fig3 on workers: round {number + 1} of {ROUNDS}, {len(settings)} settings")
        order = list(settings)
        Random(f"{seed}/fig3/{number}").shuffle(order)
        for setting in order:
            measurements[setting].append(_measured(backend, setting))
    return {
        setting: _Point(median(m.comm_s[0] for m in runs), median(m.comp_s for m in runs))
        for setting, runs in measurements.items()
    }


def _pictures(wait: Protocol, points: Mapping[Setting, _Point]) -> tuple[ReproducedSurface, list[Curve]]:
    name = f"workers, {WAITS[wait]}"
    least = min(point.comp_s for point in points.values())
    surface = ReproducedSurface(
        profile=name,
        channels=CHANNELS,
        chunks_bytes=CHUNKS,
        values=tuple(tuple(points[wait, n, chunk].comp_s / least for n in CHANNELS) for chunk in CHUNKS),
    )
    curves = []
    for kind, places, measurements in (
        ("3b", tuple(float(n) for n in CHANNELS), [points[wait, n, CHUNKS[0]] for n in CHANNELS]),
        ("3c", tuple(chunk / KIB for chunk in CHUNKS), [points[wait, 1, chunk] for chunk in CHUNKS]),
    ):
        curves += [
            Curve(
                name="communication (ms)",
                profile=name,
                kind=kind,
                x=places,
                y=tuple(p.comm_s / MS for p in measurements),
            ),
            Curve(
                name="computation / least",
                profile=name,
                kind=kind,
                x=places,
                y=tuple(p.comp_s / least for p in measurements),
            ),
        ]
    return surface, curves


def _lines(wait: Protocol, points: Mapping[Setting, _Point]) -> list[Line]:
    last = CHANNELS[-1]
    x_by_channels = [points[wait, last, chunk].comm_s / points[wait, 1, chunk].comm_s for chunk in CHUNKS]
    y_by_channels = [points[wait, last, chunk].comp_s / points[wait, 1, chunk].comp_s for chunk in CHUNKS]
    x_by_chunk = [points[wait, n, CHUNKS[-1]].comm_s / points[wait, n, CHUNKS[0]].comm_s for n in CHANNELS]
    y_by_chunk = points[wait, 1, CHUNKS[-1]].comp_s / points[wait, 1, CHUNKS[0]].comp_s
    name = f"workers, {WAITS[wait]}"

    def line(what: str, published: str, ours: str, verdict: ReproducedVerdict, why: str) -> Line:
        return Line(
            figure="fig3",
            profile=name,
            what=what,
            published=published,
            ours=ours,
            verdict=verdict,
            why=why,
            taken="the size of the all-reduce",
        )

    return [
        line(
            f"3b: NC 1 -> {last}: communication",
            "falls",
            f"x changes by a factor {spread(x_by_channels)}",
            judge_direction([ratio < 1 for ratio in x_by_channels]),
            "Threads share one core: waiting overlaps, work does not.",
        ),
        line(
            f"3b: NC 1 -> {last}: computation",
            "drastically longer",
            f"Y changes by a factor {spread(y_by_channels)}",
            judge_direction([ratio > 1 for ratio in y_by_channels]),
            "Each thread that does not block is a claim on the core; a thread that blocks gives it up.",
        ),
        line(
            "3c: a larger chunk: communication",
            "falls",
            f"x changes by a factor {spread(x_by_chunk)} from 256 KiB to 4 MiB",
            judge_cases([ratio < 1 for ratio in x_by_chunk]),
            "Fewer waits for the other rank.",
        ),
        line(
            "3c: a larger chunk significantly prolongs computation (one channel)",
            "significant",
            f"Y changes by a factor {y_by_chunk:.2f} from 256 KiB to 4 MiB",
            judge_direction([y_by_chunk > 1]),
            "A spinning thread takes its share of the core whatever the chunk; only a thread that yields shows it.",
        ),
    ]


def figure3_on_workers(
    *, seed: int = 1, link_bytes_per_s: float | None = LINK_BYTES_PER_S, note: Callable[[str], None] = lambda _: None
) -> ReproduceReport:
    """Measures Fig. 3 on two ranks of this machine; takes about a minute on a quiet one.

    `link_bytes_per_s` emulates a link of that rate between the ranks (bandwidth only, one direction); None for the
    plain loopback.

    Raises:
        BackendError: if the ranks cannot start, or the machine cannot emulate a link.
    """
    with _opened(seed, link_bytes_per_s) as backend:
        points = _sweep(backend, seed, note)
    pictures = [_pictures(wait, points) for wait in WAITS]
    return ReproduceReport(
        chapters=("fig3",),
        date=utc_now(),
        seed=seed,
        lines=tuple(line for wait in WAITS for line in _lines(wait, points)),
        surfaces=tuple(surface for surface, _ in pictures),
        ground="worker threads on this machine",
        curves=tuple(curve for _, curves in pictures for curve in curves),
        profile_labels={
            f"workers, {word}": f"measured on this machine: worker threads that {word} while they wait"
            for word in WAITS.values()
        },
    )
