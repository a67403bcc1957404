"""Fits the contention constants of a GPU family on a measured file, and leaves every shape out once.

    python benchmarks/fit_contention.py overlap_points_amd.csv [--draws 160] [--seed 0]

Draws sets of constants in their ranges, judges every row under each, and takes the set with the least mean absolute
error, the quantities weighted by `WEIGHTS`. For the cross-validation the same draws are judged without one shape at a
time, and that shape's rows get the set that was best without them. Nothing is fitted by row.
"""

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent))
from lagom_overlap.cost import Profile, load_profile
from lagom_overlap.hardware import load_gpu
from measured_overlap import amd
from measured_overlap.judged import Judged
from measured_rows import Named, Row, exit_code_of, interrupted, read, report_named, tried

RANGES: Final = {
    "amplification": (1.0, 3.5),
    "load_sensitivity": (1.3, 1.8),
    "overlap_factor": (1.0, 1.07),
    "spill": (0.012, 0.018),
    "sm_flops": (2.6e12, 4.2e12),
}
"""Physical ranges of the constants."""
FAMILY: Final = ("mi300x", "mi350x", "mi355x")
WEIGHTS: Final = {"computation_slowdown": 1.0, "makespan": 0.7, "communication_slowdown": 0.3}

Errors = Mapping[tuple[str, str], Sequence[float]]
"""Absolute errors by quantity and shape."""


def with_constants(profile: Profile, values: Mapping[str, float]) -> Profile:
    """The profile with those constants for the family; a rate of one compute unit is the MI300X's alone."""
    fitted = {}
    for gpu in map(load_gpu, FAMILY):
        own = {key: value for key, value in values.items() if key != "sm_flops" or gpu.name == "MI300X"}
        fitted[gpu.name] = replace(profile.for_gpu(gpu), **own)
    return replace(profile, fitted=fitted)


def judged(rows: Sequence[Row], profile: Profile) -> list[Judged]:
    """Every row that can be judged."""
    found = (tried(row, lambda row: amd.judge(row, profile)) for row in rows)
    return [one for part in found if not isinstance(part, Named) for one in part]


def errors_of(found: Sequence[Judged]) -> Errors:
    """Absolute errors by quantity and shape."""
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    for one in found:
        errors[one.quantity, one.family].append(abs(one.error))
    return errors


def loss(errors: Errors, without: str = "") -> float:
    """Weighted mean absolute error of the quantities, one shape left out."""
    total = 0.0
    for quantity, weight in WEIGHTS.items():
        rest = [part for (name, shape), part in errors.items() if name == quantity and shape != without]
        total += weight * mean(error for part in rest for error in part) if rest else 0.0
    return total


def _words(values: Mapping[str, float]) -> str:
    return str({name: float(f"{value:.3g}") for name, value in values.items()} or "the profile's own")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the best constants, and the errors shown and by left-out shapes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--draws", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.draws < 0:
        parser.error(f"--draws is {options.draws}, must be at least 0")
    _, rows, named = read(options.file, amd.COLUMNS)
    profile, rng = load_profile("plausible"), random.Random(options.seed)
    tries = [tried(row, lambda row: amd.judge(row, profile)) for row in rows]
    named += [one for one in tries if isinstance(one, Named)]
    report_named(options.file, named, num_judged=sum(not isinstance(one, Named) for one in tries))
    draws: list[dict[str, float]] = [{}]
    draws += [{name: rng.uniform(*ends) for name, ends in RANGES.items()} for _ in range(options.draws)]
    tables: list[Errors] = []
    try:
        for place, values in enumerate(draws):
            tables.append(errors_of(judged(rows, with_constants(profile, values))))
            if sys.stderr.isatty():
                print(f"\r{place + 1} of {len(draws)} draws", end="", file=sys.stderr)
    except KeyboardInterrupt:
        if not tables:
            return interrupted("fit_contention", "so far, no draw is judged")
        best = min(range(len(tables)), key=lambda place: loss(tables[place]))
        known = _words(draws[best])
        return interrupted("fit_contention", f"so far, {len(tables)} of {len(draws)} draws, best: {known}")
    best = min(range(len(draws)), key=lambda place: loss(tables[place]))
    print("best:", _words(draws[best]))
    shapes = sorted({shape for _, shape in tables[0]})
    chosen = {shape: min(range(len(draws)), key=lambda place: loss(tables[place], shape)) for shape in shapes}
    picks = {"profile": dict.fromkeys(shapes, 0), "fitted": dict.fromkeys(shapes, best), "left out": chosen}
    for quantity in WEIGHTS:
        for name, pick in picks.items():
            errors = [tables[pick[shape]][quantity, shape] for shape in shapes if (quantity, shape) in tables[0]]
            values = [error for part in errors for error in part]
            if not values:
                continue
            print(
                f"{quantity:24} {name:9} rows {100 * mean(values):5.2f} % ({len(values)})"
                f"  shapes {100 * mean(map(mean, errors)):5.2f} %"
            )
    for shape in shapes:
        parts = [
            f"{quantity.split('_')[0]} {100 * mean(tables[chosen[shape]][quantity, shape]):.1f} %"
            for quantity in WEIGHTS
            if (quantity, shape) in tables[0]
        ]
        print(f"  {shape:18} left out: {', '.join(parts)}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of("fit_contention", main))
