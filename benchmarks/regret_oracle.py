"""What twelve measurements are worth to somebody who knows the second family of groups: a bound for searches.

    python benchmarks/regret_oracle.py --seed 1001 --groups 40 [--trained 400] [--num-comms 1,4,8] [--json]

The oracle knows what no tuner may: the mean and the covariance, over all settings, of the logarithms of communication
and computation in groups of the same generator (`--trained` others), and by what factor each measurement was slow as a
whole. It asks for equal settings, those with the largest expected gain, and stands by the setting with the shortest
expected makespan, measured or not. Every measurement tells it communication, computation and makespan with 2 % of noise
each. Percent of regret, beside the best equal setting.
"""

import argparse
import json
from random import Random
from statistics import fmean

import numpy as np
import numpy.typing as npt

from measured_generator import MeasuredGroup, draw_group
from overlap_generator import CONFIGS, DEFAULT, PLACE
from search_quality import count, numbers

NOISE = 0.02
NUM_MEASURED = 12
NUM_DRAWS = 64
OTHER_SEED = 77_000
RIDGE = 1e-4
Floats = npt.NDArray[np.float64]
SIZE = len(CONFIGS)


def truth(group: MeasuredGroup) -> tuple[Floats, Floats, Floats]:
    """Of every equal setting: communication and computation as logarithms, and what noise the sum has, in shares."""
    comm_s, comp_s, _ = group._run(np.repeat(np.arange(SIZE)[:, None], group.num_comms, axis=1))
    total_s = comm_s.sum(axis=1)
    return np.log(total_s), np.log(comp_s), np.sqrt((comm_s**2).sum(axis=1)) / total_s


def family(num_comms: int, num_trained: int) -> tuple[Floats, Floats]:
    """Mean and covariance of both logarithms, over the default's computation; the scale of a group is not known."""
    rows = []
    for index in range(num_trained):
        comm, comp, _ = truth(draw_group(OTHER_SEED, index, num_comms))
        rows.append(np.concatenate([comm, comp]) - comp[PLACE[DEFAULT]])
    values = np.array(rows)
    covariance = np.cov(values.T) + RIDGE * np.eye(2 * SIZE) + 1.0
    return values.mean(axis=0), covariance


def regret(group: MeasuredGroup, mean: Floats, covariance: Floats) -> tuple[float, float]:
    """The oracle's, and the best equal setting's."""
    comm, comp, spread = truth(group)
    true_s, best_s = np.exp(np.maximum(comm, comp)), group.oracle()[1]
    rng = Random(f"oracle/{group.problem.group.name}")
    draws = np.random.default_rng(1)
    mean = mean + comp[PLACE[DEFAULT]]
    place, asked = PLACE[DEFAULT], set[int]()
    while True:
        asked.add(place)
        longer = place if comm[place] > comp[place] else SIZE + place
        for at, value, sigma in (
            (place, comm[place], NOISE * float(spread[place])),
            (SIZE + place, comp[place], NOISE),
            (longer, max(comm[place], comp[place]), NOISE),
        ):
            gain = covariance[:, at] / (covariance[at, at] + sigma**2)
            mean = mean + gain * (value + rng.gauss(0.0, sigma) - mean[at])
            covariance = covariance - np.outer(gain, covariance[at])
        root = np.linalg.cholesky((covariance + covariance.T) / 2 + RIDGE / 10 * np.eye(2 * SIZE))
        drawn = np.exp(mean[:, None] + root @ draws.standard_normal((2 * SIZE, NUM_DRAWS)))
        makespans = np.maximum(drawn[:SIZE], drawn[SIZE:])
        expected = makespans.mean(axis=1)
        best = int(np.argmin(expected))
        if len(asked) >= NUM_MEASURED:
            return float(true_s[best] / best_s - 1), float(true_s.min() / best_s - 1)
        gains = np.maximum(0.0, makespans[best][None] - makespans).mean(axis=1)
        gains[list(asked)] = -1.0
        place = int(np.argmax(gains))


def main() -> None:
    """Prints a row for each number of collectives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1001)
    parser.add_argument("--groups", type=count, default=40)
    parser.add_argument("--trained", type=count, default=400)
    parser.add_argument("--num-comms", type=numbers(int, 1), default=[1, 4, 8])
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    for num_comms in chosen.num_comms:
        known = family(num_comms, chosen.trained)
        rows = [regret(draw_group(chosen.seed, index, num_comms), *known) for index in range(chosen.groups)]
        found, equal = (fmean(column) for column in zip(*rows, strict=True))
        if chosen.json:
            print(json.dumps({"num_comms": num_comms, "oracle": found, "best_equal": equal}), flush=True)
        else:
            print(f"{num_comms} collectives: oracle {100 * found:.2f}, best equal {100 * equal:.2f}", flush=True)


if __name__ == "__main__":
    main()
