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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent))
from lagom_overlap.cost import Profile, load_profile
from measured_overlap import one_gpu
from measured_rows import NotModelledError, Row, exit_code_of, read

NORMS: Final = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SHARES: Final = (0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75)
GPU: Final = "H100"

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
    own = replace(profile.gpus[GPU], overlap_norm=norm, product_share=share)
    return replace(profile, gpus={**profile.gpus, GPU: own})


def errors_of(rows: Sequence[Row], profile: Profile) -> list[Errors]:
    """The errors of all rows that count."""
    profiles = {pair: with_pair(profile, pair) for pair in itertools.product(NORMS, SHARES)}
    found: list[Errors] = []
    for row in rows:
        try:
            judged = {pair: one_gpu.judge(row, own)[0] for pair, own in profiles.items()}
        except NotModelledError:
            continue
        one = next(iter(judged.values()))
        by_pair = {pair: abs(value.error) for pair, value in judged.items()}
        found.append(Errors((one.series, one.kind), one.family, row.text("injector"), by_pair))
    return found


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
    _, rows, _ = read(parser.parse_args(arguments).file)
    found = errors_of(rows, load_profile("plausible"))
    chosen = best(found)
    print(f"norm and share: {chosen}, loss {100 * loss(found, chosen):.2f} %")
    print(f"shown: {100 * mean(row.by_pair[chosen] for row in found):.2f} % of {len(found)} rows")
    for name in ("victim", "injector"):
        values = sorted({getattr(row, name) for row in found})
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
