"""Fits the rate of kernels of flash attention, and the length at which half of it is reached, on their benchmarks.

    python benchmarks/fit_attention.py FILE.csv

One row per kernel, GPU, pass and causal sequence: `gpu`, `kernel`, `pass` (forward, backward, both), `seq`, `tflops`;
heads have 128 columns. Time over flops is 1 / rate * (1 + half / seq); the two numbers are those of the least squared
relative errors. Prints the lines of a GPU file (`gpus/NAME.toml`) and how far the published times are off.

Such tables: Dao-AILab/flash-attention, `assets`; NVIDIA/cudnn-frontend, `benchmark`.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from lagom_overlap.units import TFLOPS
from measured_rows import BadRowError, Named, Row, exit_code_of, read, report_named, tried

COLUMNS: Final = ("gpu", "kernel", "pass", "seq", "tflops")
_PASSES: Final = ("forward", "backward", "both")
_FEWEST: Final = 3
"""Lengths below which two numbers say nothing."""

Points = Mapping[int, float]
"""Flops per second by length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFit:
    """The fitted numbers, and by how much the law's times are off, in percent, by length."""

    flops: float
    half: float
    errors_pct: tuple[float, ...]


def fit(points: Points) -> AttentionFit:
    """The law with the least squared relative errors of times."""
    lengths, flops = (np.array(list(column), dtype=float) for column in (points.keys(), points.values()))
    first, second = np.linalg.lstsq(np.stack([flops, flops / lengths], 1), np.ones_like(flops), rcond=None)[0]
    errors = 100.0 * ((first + second / lengths) * flops - 1.0)
    return AttentionFit(flops=float(1 / first), half=float(second / first), errors_pct=tuple(map(float, errors)))


def _point(row: Row) -> tuple[tuple[str, str, str], int, float]:
    if row.text("pass") not in _PASSES:
        raise BadRowError(f"pass is {row.text('pass')[:20]!r}; known: {', '.join(_PASSES)}")
    where = row.text("gpu"), row.text("kernel"), row.text("pass")
    return where, row.needed_count("seq"), row.needed("tflops") * TFLOPS


def main(argv: Sequence[str] | None = None) -> int:
    """Prints each table's two numbers and how well they say it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE.csv")
    arguments = parser.parse_args(argv)
    _, rows, bad = read(arguments.file, COLUMNS)
    found = [tried(row, _point) for row in rows]
    points = [one for one in found if not isinstance(one, Named)]
    report_named(arguments.file, [*bad, *(one for one in found if isinstance(one, Named))], num_judged=len(points))
    tables: dict[tuple[str, str, str], dict[int, float]] = defaultdict(dict)
    for where, length, flops in points:
        tables[where][length] = flops
    for (gpu, kernel, which), table in tables.items():
        if len(table) < _FEWEST:
            print(f"{gpu}, {kernel}, {which}: {len(table)} lengths, {_FEWEST} are needed")
            continue
        law = fit(table)
        shown = ", ".join(f"{error:+.1f}" for error in law.errors_pct)
        print(f"{gpu}, {kernel}, {which}: flops = {law.flops:.4g}, half = {law.half:.0f}; times {shown} %")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of("fit_attention", main))
