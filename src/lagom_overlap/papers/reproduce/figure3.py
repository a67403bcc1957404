"""Fig. 3 (section 3.2): an FFN during a 32 MB all-reduce on 8 A40 with PCIe, by channels, chunk and threads.

Departures: the paper does not say which FFN; here Phi-2's at 2048 and 4096 tokens and three of hidden size 4096, and
the figure shows Phi-2's at 4096. All-reduces follow each other until the FFN is covered, for one that ends early
dilutes the slowdown. The paper's C is a slice; it is converted to the chunk on the wire.
"""

from collections.abc import Sequence
from functools import cache, partial
from statistics import median
from typing import Final

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig, chunk_bytes_of_slice
from lagom_overlap.papers.reproduce.ground import ASSUMED, Assumed, model_of, work_of
from lagom_overlap.papers.reproduce.judge import as_built_in, judge_cases, judge_number, spread
from lagom_overlap.papers.reproduce.result import Curve, Line, ReproducedSurface, ReproducedVerdict
from lagom_overlap.sim import GroupSimulator
from lagom_overlap.units import KIB, MIB, MS
from lagom_overlap.workload import CommOp, CompOp, Gemm, MemoryBound, OverlapGroup, Work

CHANNELS: Final = (1, 2, 4, 8, 12, 16, 24, 32)
"""To the 32 that the text compares with 16, and past the 8 beyond which it sees computation prolonged. Chosen."""
SLICES: Final = (4 * KIB, 8 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 512 * KIB, 1024 * KIB, 2 * MIB)
"""To the paper's default, 2 MiB, with the 16 KiB of its sweep of channels. Chosen."""
THREADS: Final = 128
"""The paper's."""
PUBLISHED_RATIO: Final = 1.302
"""Computation at 32 channels over that at 16: "differs 30.2 %"."""
SHAPES: Final = (
    (2048, 2560, 10240),
    (4096, 2560, 10240),
    (2048, 4096, 14336),
    (4096, 4096, 14336),
    (4096, 4096, 16384),
)
"""(tokens, hidden, inner): Phi-2's and three of hidden size 4096 (see above)."""
SHOWN: Final = 1
"""Of `SHAPES`: Phi-2's at 4096 tokens."""
_TAKEN: Final = "sizes of the all-reduce, channels, chunks and threads; Eq. 5's form: each channel takes an SM"
_MAX_COMMS: Final = 64
"""All-reduces in a row that cover every FFN of `SHAPES` at every setting; fewer would be an assertion."""
SIGNIFICANT: Final = 0.1
"""What "significantly" is taken to mean: the text gives no value."""


def ffn_works(shape: tuple[int, int, int]) -> tuple[Work, ...]:
    """Up, activation, down of an FFN (tokens, hidden, inner)."""
    m, hidden, inner = shape
    return (Gemm(m, inner, hidden), MemoryBound(m * inner * 4), Gemm(m, hidden, inner))


def _ffn(shape: tuple[int, int, int], num_comms: int, assumed: Assumed) -> OverlapGroup:
    works = [work_of(work, assumed) for work in ffn_works(shape)]
    collective = Collective(CollectiveKind.ALL_REDUCE, 32 * MIB, 8)
    return OverlapGroup(
        name="ffn",
        computations=tuple(CompOp(name=f"ffn{i}", work=work) for i, work in enumerate(works)),
        comms=tuple(CommOp(name=f"ar{j}", collective=collective) for j in range(num_comms)),
    )


class _Point:
    """Mean x (s) of the all-reduces that run wholly during the FFN, and its Y over that alone."""

    def __init__(self, shape: tuple[int, int, int], profile: str, assumed: Assumed) -> None:
        model = model_of("a40_pcie", profile, 1, assumed)
        self._simulators = {n: GroupSimulator(_ffn(shape, n, assumed), model) for n in (1, 2, 4, 8, 16, _MAX_COMMS)}

    def at(self, channels: int, slice_bytes: int, threads: int = THREADS) -> tuple[float, float]:
        config = CommConfig(num_channels=channels, chunk_bytes=chunk_bytes_of_slice(slice_bytes), num_threads=threads)
        for num_comms, simulator in self._simulators.items():
            times = simulator.evaluate((config,) * num_comms)
            if sum(times.comm_s) >= times.comp_s:
                return times.comm_s[0], times.comp_s / simulator.comp_alone_s
        raise AssertionError("the FFN outlasts 64 all-reduces")


@cache
def _points(shape: tuple[int, int, int], profile: str, assumed: Assumed = ASSUMED) -> _Point:
    return _Point(shape, profile, assumed)


def _sweeps(profile: str) -> tuple[ReproducedSurface, list[Curve]]:
    point = _points(SHAPES[SHOWN], profile)
    surface = ReproducedSurface(
        profile=profile,
        channels=CHANNELS,
        chunks_bytes=SLICES,
        values=tuple(tuple(point.at(n, size)[1] for n in CHANNELS) for size in SLICES),
    )
    by_channels = [point.at(n, 16 * KIB) for n in CHANNELS]
    by_slice = [point.at(4, size) for size in SLICES]
    curves = []
    for kind, places, points in (
        ("3b", tuple(float(n) for n in CHANNELS), by_channels),
        ("3c", tuple(size / KIB for size in SLICES), by_slice),
    ):
        curves += [
            Curve(
                name="communication (ms)",
                profile=profile,
                kind=kind,
                x=places,
                y=tuple(x / MS for x, _ in points),
            ),
            Curve(name="computation / alone", profile=profile, kind=kind, x=places, y=tuple(y for _, y in points)),
        ]
    return surface, curves


def _saturates(x_s: Sequence[float]) -> bool:
    """Whether times by `CHANNELS` at least halve up to 8 and stay within 3 % from 16 to 32."""
    eight, sixteen = CHANNELS.index(8), CHANNELS.index(16)
    return x_s[eight] < 0.5 * x_s[0] and all(abs(x / x_s[sixteen] - 1) < 0.03 for x in x_s[sixteen:])


def _lines_of_3a(profile: str, points: Sequence[_Point]) -> list[Line]:
    pairs = [(point.at(16, 128 * KIB), point.at(32, 128 * KIB)) for point in points]
    x_ratios = [many[0] / few[0] for few, many in pairs]
    y_ratios = [many[1] / few[1] for few, many in pairs]
    slowest = [point.at(32, 2 * MIB)[1] for point in points]
    threads = [point.at(4, 64 * KIB, 512)[1] / point.at(4, 64 * KIB, 64)[1] for point in points]
    line = partial(Line, figure="fig3", profile=profile, taken=_TAKEN)
    return [
        line(
            what="NC 16 -> 32: communication",
            published="nearly identical",
            ours=f"x changes by a factor {spread(x_ratios)}",
            verdict=judge_cases([abs(ratio - 1) < 0.03 for ratio in x_ratios]),
            why="Both saturate the PCIe link, so more channels add nothing.",
        ),
        line(
            what="NC 16 -> 32: computation",
            published="30.2 % longer",
            ours=f"{100 * (median(y_ratios) - 1):.1f} % longer ({spread(y_ratios)} by FFN)",
            verdict=judge_number(median(y_ratios), PUBLISHED_RATIO),
            why="SMs lost alone give (84-16)/(84-32) = 1.308; the model adds transfers that SMs do not speed up (p = 1)"
            " and counts whole waves, so the FFN's shape decides. The paper does not give it.",
        ),
        line(
            what="Contention slows computation by up to 35 % (section 1)",
            published="up to 35 %",
            ours=f"{100 * (min(slowest) - 1):.0f} to {100 * (max(slowest) - 1):.0f} % at NC = 32, C = 2 MB",
            verdict=judge_number(max(slowest), 1.35),
            why="The paper's figure is an upper end over settings that it does not list; ours is the far corner.",
        ),
        line(
            what="Threads have a negligible effect on computation",
            published="negligible",
            ours=f"Y changes by a factor {spread(threads)} from 64 to 512 threads",
            verdict=as_built_in(judge_cases([abs(ratio - 1) < 0.02 for ratio in threads])),
            why="A block takes its SM whatever its threads; they only raise a channel's rate.",
            taken="the statement itself: the model has no threads in what a channel takes (section 3.2)",
        ),
    ]


def _lines_of_3b_3c(profile: str, points: Sequence[_Point]) -> list[Line]:
    knee = [(point.at(32, 16 * KIB)[1] - 1) / max(1e-9, point.at(8, 16 * KIB)[1] - 1) for point in points]
    chunk = [point.at(4, 2 * MIB)[1] / point.at(4, 8 * KIB)[1] for point in points]
    x_s = [[point.at(n, 16 * KIB)[0] for n in CHANNELS] for point in points]
    shown = ", ".join(f"{x_s[SHOWN][CHANNELS.index(n)] / x_s[SHOWN][0]:.2f}" for n in (2, 4, 8, 16, 32))
    rises = median(chunk) - 1
    chunk_verdict = ReproducedVerdict.DIRECTION if rises > SIGNIFICANT / 2 else ReproducedVerdict.NOT
    line = partial(Line, figure="fig3", profile=profile, taken=_TAKEN)
    return [
        line(
            what="3b: more channels, faster communication with diminishing returns",
            published="falls, then flat or slightly up",
            ours=f"x / x(1) at NC 2, 4, 8, 16, 32: {shown}",
            verdict=judge_cases([_saturates(times) for times in x_s]),
            why="Channels saturate the link; a rise of at most 1 % at large values comes from the pipeline's fill.",
        ),
        line(
            what="3b: NC > 8 drastically prolongs computation",
            published="drastic",
            ours=f"the loss at NC = 32 is {spread(knee, 'x')} that at NC = 8",
            verdict=as_built_in(judge_cases([ratio > 1.5 for ratio in knee])),
            why="It follows from Eq. 5, which is built in: every channel takes an SM, and with whole waves the loss"
            " comes in steps.",
        ),
        line(
            what="3c: a larger chunk significantly prolongs computation (NC = 4)",
            published="significant",
            ours=f"Y grows by a factor {spread(chunk)} from 8 KB to 2 MB",
            verdict=ReproducedVerdict.REPRODUCED if rises > SIGNIFICANT else chunk_verdict,
            why="A larger chunk moves faster and misses the L2 more. Where work is conserved the bytes are the same and"
            " little is left to slow down; paper_scale counts them three times and pollutes the L2.",
        ),
    ]


def lines(profile: str, assumed: Assumed = ASSUMED) -> list[Line]:
    """The paper's sentences about Fig. 3; an assumed sequence is what each FFN computes at once."""
    shapes = [(assumed.seq_len or tokens, hidden, inner) for tokens, hidden, inner in SHAPES]
    points = [_points(shape, profile, assumed) for shape in shapes]
    return [*_lines_of_3a(profile, points), *_lines_of_3b_3c(profile, points)]


def figure3(profile: str) -> tuple[ReproducedSurface, list[Curve], list[Line]]:
    """The sweeps and lines of Fig. 3 under one profile."""
    surface, curves = _sweeps(profile)
    return surface, curves, lines(profile)
