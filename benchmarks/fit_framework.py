"""Fits the constants of training frameworks on the rows that `iteration_time` marks as fitted; the others are held out.

python benchmarks/fit_framework.py vtrain_single_node_a100.csv     launch_s, memory_efficiency (megatron_deepspeed)
python benchmarks/fit_framework.py megatron_sc21_table2_a100.csv   data_bytes_per_s (deepspeed)
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from lagom_overlap.cost.operators import FrameworkConstants, load_framework
from lagom_overlap.errors import LagomError
from lagom_overlap.units import GB_PER_S, US
from measured_rows import exit_code_of, interrupted, read, report_named, tried
from training_steps.tables import Case, builders_of, checked, columns_of, predict, renamed

Point = NDArray[np.float64]


def _launch(base: FrameworkConstants, point: Point) -> FrameworkConstants:
    return replace(base, launch_s=float(point[0]) * US, memory_efficiency=min(1.0, float(point[1])))


def _wire(base: FrameworkConstants, point: Point) -> FrameworkConstants:
    return replace(base, data_bytes_per_s=float(point[0]) * GB_PER_S)


_FITS: dict[
    str, tuple[tuple[str, ...], tuple[float, ...], Callable[[FrameworkConstants, Point], FrameworkConstants]]
] = {
    "megatron_deepspeed": (("launch_s in us", "memory_efficiency"), (60.0, 0.8), _launch),
    "deepspeed": (("data_bytes_per_s in GB/s",), (20.0,), _wire),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the fitted numbers and the mean error on the rows they were fitted on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE.csv")
    arguments = parser.parse_args(argv)
    header, table, bad = read(arguments.file)
    columns, named = columns_of(arguments.file, header), list(bad)
    found: list[Case] = []
    for row in map(renamed, table):
        for _, build in builders_of(columns, row):
            case = tried(row, lambda row, build=build: checked(build(row)))
            if isinstance(case, Case):
                found.append(case)
            else:
                named.append(case)
    report_named(arguments.file, named, num_judged=len(found))
    cases = [case for case in found if case.fitted]
    if not cases:
        sys.stderr.write("fit_framework: the file has no row that is marked as fitted\n")
        return 2
    (name,) = {case.framework for case in cases}
    base = load_framework(name)
    words, start, constants = _FITS[name]
    best: tuple[float, Point] | None = None

    def error(point: Point) -> float:
        nonlocal best
        framework = constants(base, np.exp(point))
        ratios = [predict(case, framework) / case.measured_s for case in cases]
        value = float(np.mean(np.abs(np.array(ratios) - 1.0)))
        if best is None or value < best[0]:
            best = value, point.copy()
        return value

    def so_far() -> str:
        if best is None:
            return f"{name}, {len(cases)} rows: nothing is known yet"
        numbers = ", ".join(f"{word} = {value:.4g}" for word, value in zip(words, np.exp(best[1]), strict=True))
        return f"{name}, {len(cases)} rows: {numbers}; mean error {100 * best[0]:.2f} %"

    try:
        minimize(error, np.log(start), method="Nelder-Mead", options={"maxfev": 60, "xatol": 1e-3})
    except KeyboardInterrupt:
        return interrupted("fit_framework", f"so far, {so_far()}")
    print(so_far())
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of("fit_framework", main, LagomError))
