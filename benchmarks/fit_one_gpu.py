"""Fits the two contention constants of the H100 on our own surface, and leaves every victim and injector out once.

    python benchmarks/fit_one_gpu.py results/h100_2026-11-22/surface.csv

Every pair of the grid is judged on every row, and the pair with the least error is taken: the mean over the kinds of
victim and stages, each with its mean absolute error, so that 200 rows of one kind do not outvote 10 of another. For the
cross-validation the rows of one victim, or of one injector, get the pair that was best without them.
"""

import argparse
import itertools
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent))
from lagom_overlap.cost import Profile, load_profile
from lagom_overlap.hardware import load_gpu
from measured_overlap import one_gpu
from measured_rows import Named, Row, exit_code_of, interrupted, read, report_named, tried

NORMS: Final = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SHARES: Final = (0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75)
GPU: Final = "h100"

Pair = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Errors:
    """Absolute errors of a row under every pair, and what the row is left out by."""

    group: tuple[str, str]
    victim: str
    injector: str
    by_pair: dict[Pair, float]


def with_pair(profile: Profile, pair: Pair) -> Profile:
    """The profile with those constants for the GPU."""
    norm, share = pair
    gpu = load_gpu(GPU)
    own = replace(profile.for_gpu(gpu), overlap_norm=norm, product_share=share)
    return replace(profile, fitted={gpu.name: own})


def errors_of(row: Row, profiles: Mapping[Pair, Profile]) -> Errors:
    """The errors of a row.

    Raises:
        BadRowError: if the row is wrong.
        NotModelledError: if it does not count.
    """
    judged = {pair: one_gpu.judge(row, own)[0] for pair, own in profiles.items()}
    one = next(iter(judged.values()))
    by_pair = {pair: abs(value.error) for pair, value in judged.items()}
    return Errors((one.series, one.kind), one.family, row.text("injector"), by_pair)


def loss(rows: Sequence[Errors], pair: Pair) -> float:
    """Mean over stages and kinds of their mean absolute errors."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row.by_pair[pair])
    return mean(map(mean, groups.values()))


def best(rows: Sequence[Errors]) -> Pair:
    """The pair with the least loss."""
    return min(rows[0].by_pair, key=lambda pair: loss(rows, pair))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the best pair, and the errors shown and by what is left out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    file = parser.parse_args(arguments).file
    _, rows, named = read(file, one_gpu.COLUMNS)
    profile, found = load_profile("plausible"), []
    profiles = {pair: with_pair(profile, pair) for pair in itertools.product(NORMS, SHARES)}
    try:
        for row in rows:
            errors = tried(row, lambda row: errors_of(row, profiles))
            if isinstance(errors, Named):
                named.append(errors)
            else:
                found.append(errors)
    except KeyboardInterrupt:
        known = f"{best(found)}, loss {100 * loss(found, best(found)):.2f} %" if found else "nothing"
        return interrupted("fit_one_gpu", f"so far, {len(found)} of {len(rows)} rows, norm and share: {known}")
    report_named(file, named, num_judged=len(found))
    chosen = best(found)
    print(f"norm and share: {chosen}, loss {100 * loss(found, chosen):.2f} %")
    print(f"shown: {100 * mean(row.by_pair[chosen] for row in found):.2f} % of {len(found)} rows")
    for name in ("victim", "injector"):
        values = sorted({getattr(row, name) for row in found})
        if len(values) < 2:
            continue  # nothing is left to fit on
        picks = {value: best([row for row in found if getattr(row, name) != value]) for value in values}
        errors = {
            value: [row.by_pair[picks[value]] for row in found if getattr(row, name) == value] for value in values
        }
        print(f"by left-out {name}: {100 * mean(e for part in errors.values() for e in part):.2f} %")
        for value in values:
            print(f"  {value:32} {picks[value]}  {100 * mean(errors[value]):5.2f} % of {len(errors[value])}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of("fit_one_gpu", main))
