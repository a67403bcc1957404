"""Compare a measured surface with the predictions written before any measurement, as a Markdown table.

On one H100 (November 2026) whole waves held; fluid waves, 2x for any persistent GEMM and the memory-bound victim were
falsified (results/gpu_h100_contention_2026-11-22.md). The predictions stay as they were written.

Predictions (design notes of the contention model, 2026): a GEMM of one block per tile slows by 132 / (132 - NC); with
whole waves 128 tiles take 2.0x and 256 tiles 1.5x once fewer than 128 SMs are left; a persistent GEMM takes 2x at any
NC >= 1; a memory-bound victim slows by 1.06, 1.13, 1.29, 1.81 at NC 2, 4, 8, 16 under 40 GB/s of wire per channel.
A dry run is refused: it holds no measurement.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lagom_overlap.cost.measured_surface import ContentionSurface, Point, Provenance

FLUID = {2: 132 / 130, 4: 132 / 128, 8: 132 / 124, 16: 132 / 116, 32: 132 / 100, 64: 132 / 68}
PERSISTENT = dict.fromkeys((1, 2, 4, 8, 16, 32, 64), 2.0)
ONE_WAVE = {4: 1.0, 8: 2.0, 16: 2.0, 32: 2.0}  # 128 tiles
TWO_WAVES = {4: 1.0, 8: 1.5, 16: 1.5, 32: 1.5}  # 256 tiles
MEMORY = {2: 1.06, 4: 1.13, 8: 1.29, 16: 1.81}
TOLERANCE = 0.05  # of the slowdown


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A claimed slowdown by number of blocks, for one victim during one injector."""

    claim: str
    victim: str
    injector: str
    slowdown: dict[int, float]


PREDICTIONS = (
    Prediction(
        claim="non-persistent GEMM, fluid", victim="gemm_triton_4096x4096x4096", injector="spin", slowdown=FLUID
    ),
    Prediction(claim="128 tiles, whole waves", victim="gemm_triton_2048x2048x4096", injector="spin", slowdown=ONE_WAVE),
    Prediction(
        claim="256 tiles, whole waves", victim="gemm_triton_2048x4096x4096", injector="spin", slowdown=TWO_WAVES
    ),
    Prediction(
        claim="persistent cuBLAS GEMM", victim="gemm_cublas_4096x4096x4096", injector="spin", slowdown=PERSISTENT
    ),
    Prediction(claim="memory-bound victim", victim="add_256mib", injector="unpaced", slowdown=MEMORY),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A prediction against the range that was measured over the other knobs."""

    claim: str
    num_blocks: int
    predicted: float
    measured_min: float | None
    measured_max: float | None
    verdict: str


def compare(points: Sequence[Point]) -> list[Comparison]:
    """All predictions against the covered points of their victim, injector and number of blocks."""
    rows = []
    for prediction in PREDICTIONS:
        for num_blocks, predicted in prediction.slowdown.items():
            found = [
                point.slowdown
                for point in points
                if point.victim == prediction.victim
                and point.injector == prediction.injector
                and point.num_blocks == num_blocks
                and point.covered
                and point.slowdown is not None
            ]
            low, high = (min(found), max(found)) if found else (None, None)
            rows.append(
                Comparison(
                    claim=prediction.claim,
                    num_blocks=num_blocks,
                    predicted=predicted,
                    measured_min=low,
                    measured_max=high,
                    verdict=judge(predicted, low, high),
                )
            )
    return rows


def judge(predicted: float, low: float | None, high: float | None) -> str:
    """`holds` if the prediction lies in the measured range, give or take the tolerance."""
    if low is None or high is None:
        return "not measured"
    return "holds" if low * (1 - TOLERANCE) <= predicted <= high * (1 + TOLERANCE) else "falsified"


def markdown(rows: Sequence[Comparison]) -> str:
    """The table."""
    lines = ["| prediction | blocks | predicted | measured | verdict |", "|---|---|---|---|---|"]
    for row in rows:
        measured = "-" if row.measured_min is None else f"{row.measured_min:.3f} to {row.measured_max:.3f}"
        lines.append(f"| {row.claim} | {row.num_blocks} | {row.predicted:.3f} | {measured} | {row.verdict} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("surface", type=Path, help="surface.json of contention_surface.py")
    parser.add_argument("--out", type=Path, help="write the table here as well")
    parser.add_argument("--json", action="store_true", help="rows as JSON on stdout")
    options = parser.parse_args(arguments)
    surface = ContentionSurface.read(options.surface)
    if surface.provenance is not Provenance.MEASURED:
        parser.error(f"{options.surface} is a {surface.provenance}: it holds no measurement to judge by")
    rows = compare(surface.points)
    table = markdown(rows)
    if options.out:
        options.out.write_text(table)
    print(json.dumps([asdict(row) for row in rows]) if options.json else table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
