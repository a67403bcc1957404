"""Fig. 5 (section 3.3): two all-reduces overlapping seven products; channels of one of them go from 1 to 16.

Departure: the paper gives neither sizes nor values. Here A has 16 MB and B 64 MB, during products of Phi-2's layer on
PCIe, at 2048 tokens, where communication is the longer part, and at 4096 (`benchmarks/batch_fit.py`), where it is
not. The figure shows 2048. The lines check only what the text says, at both.
"""

from dataclasses import dataclass
from functools import partial
from typing import Final

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig
from lagom_overlap.papers.reproduce.ground import ASSUMED, Assumed, model_of, work_of
from lagom_overlap.papers.reproduce.judge import judge_direction
from lagom_overlap.papers.reproduce.result import Curve, Line
from lagom_overlap.sim import GroupSimulator, GroupTimes
from lagom_overlap.units import KIB, MIB, MS
from lagom_overlap.workload import CommOp, CompOp, Gemm, OverlapGroup

TOKENS: Final = (2048, 4096)
"""Where communication is longer, and where it is not (see above)."""
_PRODUCTS = ((7680, 2560), (2560, 2560), (10240, 2560), (2560, 10240), (7680, 2560), (2560, 2560), (10240, 2560))
"""(n, k) of one and three quarters of Phi-2's layers: the text has seven products."""
_CHUNK_BYTES = 512 * KIB
"""Chosen: the text gives none."""


def group_of_products(tokens: int, assumed: Assumed = ASSUMED) -> OverlapGroup:
    """The overlap at that many tokens."""
    works = [work_of(Gemm(tokens, n, k), assumed) for n, k in _PRODUCTS]
    return OverlapGroup(
        name="figure5",
        computations=tuple(CompOp(name=f"matmul{i}", work=work) for i, work in enumerate(works)),
        comms=tuple(
            CommOp(name=name, collective=Collective(CollectiveKind.ALL_REDUCE, size, 8))
            for name, size in (("A", 16 * MIB), ("B", 64 * MIB))
        ),
    )


@dataclass(frozen=True, slots=True)
class _Trade:
    """Both at one channel, and one of them at 16."""

    start: GroupTimes
    ends: dict[str, GroupTimes]

    def gain_s(self, name: str) -> float:
        """Seconds that the collective's own time falls by."""
        place = tuple(self.ends).index(name)
        return self.start.comm_s[place] - self.ends[name].comm_s[place]

    def cost_s(self, name: str) -> float:
        """Seconds that computation gets longer by."""
        return self.ends[name].comp_s - self.start.comp_s

    def metric(self, name: str) -> float:
        """H, cost per gain."""
        return max(0.0, self.cost_s(name)) / self.gain_s(name)


def _trade(tokens: int, profile: str, assumed: Assumed) -> _Trade:
    model = model_of("a40_pcie", profile, 1, assumed)
    simulator = GroupSimulator(group_of_products(tokens, assumed), model)

    def times(a: int, b: int) -> GroupTimes:
        return simulator.evaluate(
            tuple(CommConfig(num_channels=n, chunk_bytes=_CHUNK_BYTES, num_threads=256) for n in (a, b))
        )

    return _Trade(times(1, 1), {"A": times(16, 1), "B": times(1, 16)})


def figure5(profile: str, assumed: Assumed = ASSUMED) -> tuple[list[Curve], list[Line]]:
    """The two arrows and what they say."""
    lengths = TOKENS if assumed.seq_len is None else (assumed.seq_len,)
    trades = {tokens: _trade(tokens, profile, assumed) for tokens in lengths}
    shown = trades[lengths[0]]
    curves = [
        Curve(
            name=f"communication {name}: NC 1 to 16",
            profile=profile,
            kind="5",
            x=(sum(shown.start.comm_s) / MS, sum(end.comm_s) / MS),
            y=(shown.start.comp_s / MS, end.comp_s / MS),
        )
        for name, end in shown.ends.items()
    ]
    slopes = "; ".join(
        f"{tokens} tokens: "
        + ", ".join(f"{name} {t.gain_s(name) / MS:.2f} ms for {t.cost_s(name) / MS:.2f}" for name in t.ends)
        + f" (H {t.metric('A'):.2f}, {t.metric('B'):.2f})"
        for tokens, t in trades.items()
    )
    wholes = "; ".join(
        f"{tokens} tokens: {t.start.makespan_s / MS:.2f} ms -> "
        + ", ".join(f"{name} {end.makespan_s / MS:.2f}" for name, end in t.ends.items())
        for tokens, t in trades.items()
    )
    line = partial(
        Line, figure="fig5", profile=profile, taken="the number of operators, channels 1 and 16; Eq. 5's form"
    )
    return curves, [
        line(
            what="The two collectives trade computation for communication at different rates",
            published="different slopes, B better (no values)",
            ours=slopes,
            verdict=judge_direction(
                [t.metric("B") < t.metric("A") and t.gain_s("B") > t.gain_s("A") for t in trades.values()]
            ),
            why="B saves more; which costs less computation per second saved depends on the products that run at the"
            " same time, whose sizes the paper does not give.",
        ),
        line(
            what="Tuning B shortens the whole more than tuning A",
            published="yes (no values)",
            ours=wholes,
            verdict=judge_direction(
                [t.ends["B"].makespan_s < t.ends["A"].makespan_s < t.start.makespan_s * 1.0001 for t in trades.values()]
            ),
            why="True where communication is the bottleneck at one channel, of which B is the larger part. Where"
            " computation is, more channels can only lengthen it.",
        ),
    ]
