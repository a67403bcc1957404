"""False adoptions and the power of the sequential test that every verdict rests on, by simulation.

    python benchmarks/sequential_test.py --runs 10000 --json

A run is a job: three pairs of the default against itself, then up to `--pairs` pairs of blocks of `BLOCK` steps, in an
order drawn for each pair. Nulls: both arms take their times from one series of steps under a kind of noise; an adoption
is false whenever the test says "faster" at any of its looks. Power: the challenger is faster by a gain, steps vary by
`--noise` one by one. Through `log_wealth` and `scales`, the code of the product, and beside the rule of before: the
lower quartile of seven ratios above 1.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from math import log
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lagom_overlap.tuners.problem import SAME_PAIRS
from lagom_overlap.tuners.sequential import ALPHA, EXACT_PAIRS, MIN_EFFECT, log_wealth, scales

Array = NDArray[np.float64]
BLOCK: Final = 3
"""Steps of a block that count: of a window of five the first one settles, the last one is not reported."""
OLD_PAIRS: Final = 7
BATCH: Final = 500


def _gaussian(rng: np.random.Generator, runs: int, steps: int) -> Array:
    return rng.normal(0, 0.02, (runs, steps))


def _heavy(rng: np.random.Generator, runs: int, steps: int) -> Array:
    return 0.01 * rng.standard_t(1.5, (runs, steps))


def _stragglers(rng: np.random.Generator, runs: int, steps: int) -> Array:
    return rng.normal(0, 0.005, (runs, steps)) + (rng.random((runs, steps)) < 0.05) * rng.exponential(
        0.5, (runs, steps)
    )


def _drift(rng: np.random.Generator, runs: int, steps: int) -> Array:
    slope = rng.normal(0, 0.3, (runs, 1))
    return rng.normal(0, 0.01, (runs, steps)) + slope * np.arange(steps) / steps


def _warming(rng: np.random.Generator, runs: int, steps: int) -> Array:
    return rng.normal(0, 0.01, (runs, steps)) + 0.5 * np.exp(-np.arange(steps) / 40)


def _periodic(rng: np.random.Generator, runs: int, steps: int) -> Array:
    phase, period = rng.random((runs, 1)) * 2 * np.pi, rng.uniform(3, 30, (runs, 1))
    return rng.normal(0, 0.005, (runs, steps)) + 0.05 * np.sin(phase + 2 * np.pi * np.arange(steps) / period)


def _bursts(rng: np.random.Generator, runs: int, steps: int) -> Array:
    starts = rng.random((runs, steps)) < 0.01
    held = np.cumsum(starts, axis=1) - np.concatenate(
        [np.zeros((runs, 20)), np.cumsum(starts, axis=1)[:, :-20]], axis=1
    )
    return rng.normal(0, 0.01, (runs, steps)) + 0.3 * (held > 0)


def _autocorrelated(rng: np.random.Generator, runs: int, steps: int) -> Array:
    noise, found = rng.normal(0, 0.01, (runs, steps)), np.empty((runs, steps))
    found[:, 0] = noise[:, 0] / (1 - 0.95**2) ** 0.5
    for step in range(1, steps):
        found[:, step] = 0.95 * found[:, step - 1] + noise[:, step]
    return found


def _levels(rng: np.random.Generator, runs: int, steps: int) -> Array:
    jumps = (rng.random((runs, steps)) < 0.02) * rng.normal(0, 0.1, (runs, steps))
    return rng.normal(0, 0.005, (runs, steps)) + np.cumsum(jumps, axis=1)


def _coarse_clock(rng: np.random.Generator, runs: int, steps: int) -> Array:
    return np.log(np.round(20 * np.exp(rng.normal(0, 0.02, (runs, steps)))) / 20)


NOISES: Final[dict[str, Callable[[np.random.Generator, int, int], Array]]] = {
    "gaussian 2 %": _gaussian,
    "heavy tails (Student, 1.5 degrees)": _heavy,
    "stragglers, 1 step in 20": _stragglers,
    "linear drift": _drift,
    "warming up": _warming,
    "periodic": _periodic,
    "bursts of 20 steps, 30 %": _bursts,
    "autocorrelated (AR 0.95)": _autocorrelated,
    "levels that jump": _levels,
    "a clock of 5 %": _coarse_clock,
}


def blocks_of(steps: Array) -> Array:
    """Mean times of blocks, in pairs: (run, pair, place)."""
    whole = np.exp(steps).reshape(steps.shape[0], -1, 2, BLOCK)
    means: Array = whole.mean(axis=3)
    return means


def adopted_at(steps: Array, gain: float, rng: np.random.Generator) -> tuple[Array, Array]:
    """(the pair after which each run is adopted, infinity if never; whether the rule of before adopts it)."""
    blocks = np.log(blocks_of(steps))
    same = np.abs(blocks[:, :SAME_PAIRS, 0] - blocks[:, :SAME_PAIRS, 1])
    coin = rng.choice((-1.0, 1.0), size=blocks[:, SAME_PAIRS:, 0].shape)
    x = coin * (blocks[:, SAME_PAIRS:, 0] - blocks[:, SAME_PAIRS:, 1]) + log(1 + gain)
    wealth = log_wealth(x, scales(x, same))
    middles = np.stack([np.median(x[:, : number + 1], axis=1) for number in range(x.shape[1])], axis=1)
    won = (np.maximum.accumulate(wealth, axis=1) >= log(1 / ALPHA)) & (middles >= log(1 + MIN_EFFECT))
    first = np.where(won.any(axis=1), won.argmax(axis=1) + 1.0, np.inf)
    ends = blocks[:, SAME_PAIRS : SAME_PAIRS + EXACT_PAIRS]
    heads = coin[:, :EXACT_PAIRS, None] > 0
    first_s, second_s = np.split(np.where(heads, ends, ends[:, :, ::-1]), 2, axis=2)
    own = np.concatenate([blocks[:, :SAME_PAIRS].reshape(len(blocks), -1), first_s[:, :, 0]], axis=1)
    is_exact = (own == own[:, :1]).all(axis=1) & (second_s == second_s[:, :1]).all(axis=(1, 2))
    first = np.where(is_exact & (x[:, 0] > 0), float(EXACT_PAIRS), first)
    before: Array = np.quantile(np.exp(x[:, :OLD_PAIRS]), 0.25, axis=1) > 1
    return first, before


def in_batches(
    make: Callable[[np.random.Generator, int, int], Array], runs: int, pairs: int, gain: float, seed: int
) -> tuple[Array, Array]:
    """`adopted_at` of so many runs."""
    rng, found = np.random.default_rng(seed), []
    for start in range(0, runs, BATCH):
        steps = make(rng, min(BATCH, runs - start), 2 * BLOCK * (pairs + SAME_PAIRS))
        found.append(adopted_at(steps, gain, rng))
    first, before = zip(*found, strict=True)
    return np.concatenate(first), np.concatenate(before)


def null_rows(runs: int, pairs: int, seed: int) -> list[dict[str, object]]:
    """The share of nulls adopted, by kind of noise."""
    rows: list[dict[str, object]] = []
    for number, (name, make) in enumerate(NOISES.items()):
        first, before = in_batches(make, runs, pairs, 0.0, seed + number)
        rows.append(
            {
                "noise": name,
                "false_adoptions": float(np.isfinite(first).mean()),
                "false_adoptions_of_the_rule_before": float(before.mean()),
            }
        )
    return rows


def power_rows(runs: int, pairs: int, noise: float, gains: Sequence[float], seed: int) -> list[dict[str, object]]:
    """Pairs and counted steps until a gain is adopted."""
    rows: list[dict[str, object]] = []
    for gain in gains:
        first, _ = in_batches(lambda rng, n, steps: rng.normal(0, noise, (n, steps)), runs, pairs, gain, seed)
        median, high = (float(np.quantile(first, q, method="higher")) for q in (0.5, 0.9))
        rows.append(
            {
                "gain": gain,
                "noise": noise,
                "adopted": float(np.isfinite(first).mean()),
                "median_pairs": median,
                "p90_pairs": high,
                "median_steps": median * 2 * BLOCK,
                "p90_steps": high * 2 * BLOCK,
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 1 if a kind of noise is adopted more often than the stated rate allows for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--noise", default="0.02,0.05", help="of a step, for the power; by comma")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args(arguments)
    nulls = null_rows(options.runs, options.pairs, options.seed)
    power = [
        row
        for noise in map(float, options.noise.split(","))
        for row in power_rows(options.runs, options.pairs, noise, (0.01, 0.02, 0.05, 0.10), options.seed)
    ]
    if options.json:
        print(json.dumps({"alpha": ALPHA, "runs": options.runs, "nulls": nulls, "power": power}, indent=1))
    else:
        for row in (*nulls, *power):
            print("  ".join(f"{key} {value}" for key, value in row.items()))
    allowed = ALPHA + 3 * (ALPHA / options.runs) ** 0.5
    return int(any(float(str(row["false_adoptions"])) > allowed for row in nulls))


if __name__ == "__main__":
    sys.exit(main())
