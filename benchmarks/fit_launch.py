"""Fits the two numbers of the framework `megatron_deepspeed` on the rows that `iteration_time` marks as fitted.

    python benchmarks/fit_launch.py vtrain_single_node_a100.csv

They are the host's time per kernel and the share of the GPU's memory bandwidth that memory-bound kernels reach.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import iteration_time
import numpy as np
from scipy.optimize import minimize

from lagom_overlap.cost.operators import load_framework
from lagom_overlap.units import US


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the fitted numbers and the mean error on the rows they were fitted on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE.csv")
    arguments = parser.parse_args(argv)
    columns, rows = iteration_time.read_rows(arguments.file)
    cases = [c for c in iteration_time.cases_of(columns, rows) if isinstance(c, iteration_time.Case) and c.fitted]
    if not cases:
        sys.stderr.write("fit_launch: the file has no row that is marked as fitted\n")
        return 2
    base = load_framework("megatron_deepspeed")

    def error(point: np.ndarray) -> float:
        launch_us, efficiency = np.exp(point)
        framework = replace(base, launch_s=launch_us * US, memory_efficiency=min(1.0, efficiency))
        ratios = [iteration_time.predict(case, framework) / case.measured_s for case in cases]
        return float(np.mean(np.abs(np.array(ratios) - 1.0)))

    best = minimize(error, np.log([60.0, 0.8]), method="Nelder-Mead", options={"maxfev": 60, "xatol": 1e-3})
    launch_us, efficiency = np.exp(best.x)
    print(f"{len(cases)} rows: launch_s = {launch_us:.1f} us, memory_efficiency = {efficiency:.3f}, "
          f"mean error {100 * best.fun:.2f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
