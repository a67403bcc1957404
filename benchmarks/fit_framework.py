"""Fits the constants of training frameworks on the rows that `iteration_time` marks as fitted; the others are held out.

python benchmarks/fit_framework.py vtrain_single_node_a100.csv     launch_s, memory_efficiency (megatron_deepspeed)
python benchmarks/fit_framework.py megatron_sc21_table2_a100.csv   data_bytes_per_s (deepspeed_zero3)
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

import iteration_time
from lagom_overlap.cost.operators import FrameworkConstants, load_framework
from lagom_overlap.units import GB_PER_S, US

Point = NDArray[np.float64]


def _launch(base: FrameworkConstants, point: Point) -> FrameworkConstants:
    return replace(base, launch_s=float(point[0]) * US, memory_efficiency=min(1.0, float(point[1])))


def _wire(base: FrameworkConstants, point: Point) -> FrameworkConstants:
    return replace(base, data_bytes_per_s=float(point[0]) * GB_PER_S)


_FITS: dict[
    str, tuple[tuple[str, ...], tuple[float, ...], Callable[[FrameworkConstants, Point], FrameworkConstants]]
] = {
    "megatron_deepspeed": (("launch_s in us", "memory_efficiency"), (60.0, 0.8), _launch),
    "deepspeed_zero3": (("data_bytes_per_s in GB/s",), (20.0,), _wire),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the fitted numbers and the mean error on the rows they were fitted on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE.csv")
    arguments = parser.parse_args(argv)
    try:
        columns, rows = iteration_time.read_rows(arguments.file)
    except iteration_time.BadFileError as error:
        sys.stderr.write(f"fit_framework: {' '.join(str(error).split())}\n")
        return 2
    cases = [c for c in iteration_time.cases_of(columns, rows) if isinstance(c, iteration_time.Case) and c.fitted]
    if not cases:
        sys.stderr.write("fit_framework: the file has no row that is marked as fitted\n")
        return 2
    (name,) = {case.framework for case in cases}
    base = load_framework(name)
    words, start, build = _FITS[name]

    def error(point: Point) -> float:
        framework = build(base, np.exp(point))
        ratios = [iteration_time.predict(case, framework) / case.measured_s for case in cases]
        return float(np.mean(np.abs(np.array(ratios) - 1.0)))

    best = minimize(error, np.log(start), method="Nelder-Mead", options={"maxfev": 60, "xatol": 1e-3})
    found = ", ".join(f"{word} = {value:.4g}" for word, value in zip(words, np.exp(best.x), strict=True))
    print(f"{name}, {len(cases)} rows: {found}; mean error {100 * best.fun:.2f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
