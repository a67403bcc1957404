"""Tuners on other people's surfaces: choices among settings that somebody measured, under that somebody's noise.

    python benchmarks/recorded_search.py overlap_surface_nvidia_shown.csv noise_iterations_shown.csv [--searches 50]

Per topology, size and run of the file one choice: NCCL's own against every algorithm and protocol that was forced, or
against every channel count that was swept. The truth of a setting is its steady part where the file has it, else its
median, else its mean. One measurement of a search is the median of `PER_MEASUREMENT` successive iterations: the truth
times the raw ratios of one of the eight lists, from a random place on, in their order, so that clock ramps, steps
and tails come as they came. A search lets the machine run on: the next measurement takes the next iterations.

Arms: `default` as it is; Lagom, AutoCCL and ours as `lagom compare` runs them; `bandit` as its authors publish
it (five rounds over its four arms, one iteration each, then the arm with the best mean), `ucb1` their first version
(five arms with NCCL's own, fifteen iterations). *worse* is a true time beyond the default's by more than the null test
of the topology: 8 % on 1x8, 50 % between nodes (there only 12 of 33 pairs of equal settings lie within 5 %). Sweeps of
channels have no default in the same run and are left out.
"""

import csv
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log, sqrt
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Final

from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, CommConfig, ConfigSpace, Protocol, Subspace
from lagom_overlap.errors import LagomError
from lagom_overlap.jobfile.registry import make_tuner
from lagom_overlap.tuners.problem import GroupProblem, Measurement
from lagom_overlap.workload import CommOp, CompOp, Kernel, OverlapGroup

PER_MEASUREMENT: Final = 10
"""Iterations of one measurement of a tuner of ours: their median."""
MAX_MEASUREMENTS: Final = 40
NULL: Final = {True: 0.08, False: 0.5}
"""By whether all GPUs are in one node: how far two measurements of the same setting lie apart there."""
TUNERS: Final = ("default", "lagom", "autoccl", "model_based")
BANDITS: Final = ("bandit", "ucb1")
_BANDIT_ARMS: Final = (
    (Algorithm.RING, Protocol.LL), (Algorithm.RING, Protocol.SIMPLE), (Algorithm.TREE, Protocol.LL),
    (Algorithm.TREE, Protocol.SIMPLE),
)  # fmt: skip
"""Four arms of which the published code explores each five times; which four, its files do not say: assumed."""
_BANDIT_ROUNDS: Final = 5
_UCB_ITERATIONS: Final = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One choice: its settings and their true seconds; the default is `CommConfig()`."""

    name: str
    one_node: bool
    num_ranks: int
    num_bytes: int
    true_s: Mapping[CommConfig, float]

    @property
    def best_s(self) -> float:
        """The shortest of all settings."""
        return min(self.true_s.values())

    def problem(self) -> GroupProblem:
        """What a tuner is told: a product and an all-reduce, and the settings."""
        spaces = []
        swept = sorted(config.num_channels for config in self.true_s if config.num_channels is not None)
        if swept:
            spaces.append(_subspace(CommConfig(), tuple(swept)))
        kinds = dict.fromkeys((c.algorithm, c.protocol) for c in self.true_s if c.algorithm is not None)
        spaces += [_subspace(CommConfig(algorithm=algo, protocol=proto), (None,)) for algo, proto in kinds]
        spaces.append(_subspace(CommConfig(), (None,)))
        kernel = Kernel(num_blocks=1024, blocks_per_sm=1, wave_s=7e-3 / 10, block_bytes=1e6)
        group = OverlapGroup(
            name=self.name,
            computations=(CompOp(name="product", work=kernel),),
            comms=(
                CommOp(name="comm", collective=Collective(CollectiveKind.ALL_REDUCE, self.num_bytes, self.num_ranks)),
            ),
        )
        return GroupProblem(group=group, spaces=(ConfigSpace(tuple(spaces)),), default=(CommConfig(),))


def _subspace(config: CommConfig, channels: tuple[int | None, ...]) -> Subspace:
    return Subspace(
        algorithm=config.algorithm,
        protocol=config.protocol,
        num_channels=channels,
        num_threads=(None,),
        chunk_bytes=(None,),
    )


class Machine:
    """Successive iterations of somebody's machine: a raw list of ratios to its steady part, from a random place on."""

    def __init__(self, lists: Sequence[Sequence[float]], rng: Random) -> None:
        self._list = lists[rng.randrange(len(lists))]
        self._at = rng.randrange(len(self._list))

    def times(self, true_s: float, num: int) -> list[float]:
        """The next iterations of a setting."""
        found = []
        for _ in range(num):
            found.append(true_s * self._list[self._at % len(self._list)])
            self._at += 1
        return found


def read_noise(path: Path) -> list[list[float]]:
    """Every raw list over its own steady median."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    return [[float(text) / float(row["steady_median_ms"]) for text in row["iterations_ms"].split()] for row in rows]


def read_choices(path: Path) -> list[Choice]:
    """Every choice of at least three settings with NCCL's own among them."""
    held: dict[tuple[str, ...], dict[CommConfig, list[float]]] = defaultdict(lambda: defaultdict(list))
    with path.open(encoding="utf-8-sig", newline="") as file:
        for row in csv.DictReader(file):
            config, time_s = _config(row), _time_s(row)
            if config is None or time_s is None or row["mode"] not in ("overlap", "sequential"):
                continue
            key: tuple[str, ...] = (
                row["run"],
                row["nodes"],
                row["gpus"],
                row["collective"],
                row["bytes"],
                row["compute_kernel"],
                row["mode"],
            )
            held[key][config].append(time_s)
    choices = []
    for key, times in held.items():
        if CommConfig() not in times or len(times) < 3 or key[3] != "all_reduce":
            continue
        choices.append(
            Choice(
                name=" ".join((key[0], f"{key[1]}x{int(key[2]) // int(key[1])}", key[4], key[5][-14:], key[6])),
                one_node=key[1] == "1",
                num_ranks=int(key[2]),
                num_bytes=int(key[4]),
                true_s={config: median(found) for config, found in times.items()},
            )
        )
    return choices


def _config(row: Mapping[str, str]) -> CommConfig | None:
    try:
        channels = None if row["channels"] == "default" else int(row["channels"])
        if row["algorithm"] == "auto":
            return CommConfig(num_channels=channels)
        if channels is not None:
            return None
        return CommConfig(algorithm=Algorithm(row["algorithm"]), protocol=Protocol(row["protocol"]))
    except (ValueError, LagomError):  # an algorithm that is none of NCCL's, 0 channels
        return None


def _time_s(row: Mapping[str, str]) -> float | None:
    text = next((row[name] for name in ("steady_ms", "median_ms", "mean_ms") if row.get(name)), "")
    return float(text) / 1e3 if text and float(text) > 0 else None  # 0: it failed


def searched(choice: Choice, name: str, machine: Machine, number: int) -> tuple[CommConfig, int]:
    """What one of the package's tuners ends with, and its iterations."""
    problem = choice.problem()
    tuner = make_tuner(name, (problem,), seed=number, options={}, guarded=False)
    told = 0
    while told < MAX_MEASUREMENTS and (trial := tuner.ask()) is not None:
        (config,) = trial.assignments[choice.name]
        time_s = median(machine.times(choice.true_s[config], PER_MEASUREMENT))
        measured = Measurement(makespan_s=time_s, comp_s=time_s / 2, comm_s=(time_s,))
        tuner.tell(trial, {choice.name: measured})
        told += 1
    (found,) = tuner.recommend()[choice.name]
    return found, told * PER_MEASUREMENT


def bandit(choice: Choice, machine: Machine) -> tuple[CommConfig, int]:
    """The published one: rounds over its arms, then the best mean."""
    arms = [arm for algo, proto in _BANDIT_ARMS if (arm := CommConfig(algorithm=algo, protocol=proto)) in choice.true_s]
    if not arms:
        return CommConfig(), 0
    seen: dict[CommConfig, list[float]] = defaultdict(list)
    for _ in range(_BANDIT_ROUNDS):
        for arm in arms:
            seen[arm] += machine.times(choice.true_s[arm], 1)
    return min(arms, key=lambda arm: fmean(seen[arm])), _BANDIT_ROUNDS * len(arms)


def ucb1(choice: Choice, machine: Machine) -> tuple[CommConfig, int]:
    """Their first version: upper confidence bounds on minus the time over the default's first; NCCL's own is an arm."""
    arms = [CommConfig()]
    arms += [
        arm for algo, proto in _BANDIT_ARMS if (arm := CommConfig(algorithm=algo, protocol=proto)) in choice.true_s
    ]
    seen: dict[CommConfig, list[float]] = {arm: machine.times(choice.true_s[arm], 1) for arm in arms}
    scale = seen[arms[0]][0]
    for told in range(len(arms), _UCB_ITERATIONS):

        def bound(arm: CommConfig, told: int = told) -> float:
            return -fmean(seen[arm]) / scale + sqrt(2 * log(told) / len(seen[arm]))

        arm = max(arms, key=bound)
        seen[arm] += machine.times(choice.true_s[arm], 1)
    return max(arms, key=lambda arm: (len(seen[arm]), -fmean(seen[arm]))), _UCB_ITERATIONS


def replay(choices: Sequence[Choice], noise: Sequence[Sequence[float]], num_searches: int) -> list[dict[str, object]]:
    """One row per kind of choice and arm."""
    rows: list[dict[str, object]] = []
    kinds: dict[str, list[Choice]] = defaultdict(list)
    for choice in choices:
        swept = any(config.num_channels is not None for config in choice.true_s)
        kinds[f"{'one node' if choice.one_node else 'several nodes'}, {'channels' if swept else 'algorithms'}"].append(
            choice
        )
    arms: dict[str, Callable[[Choice, Machine, int], tuple[CommConfig, int]]] = {
        name: lambda choice, machine, number, name=name: searched(choice, name, machine, number)  # type: ignore[misc]
        for name in TUNERS
    }
    arms |= {
        "bandit": lambda choice, machine, _: bandit(choice, machine),
        "ucb1": lambda choice, machine, _: ucb1(choice, machine),
    }
    for kind, held in sorted(kinds.items()):
        for name, arm in arms.items():
            if name in BANDITS and kind.endswith("channels"):
                continue
            regrets, nums, worse = [], [], []
            for choice in held:
                for number in range(num_searches):
                    machine = Machine(noise, Random(f"{choice.name}/{number}"))
                    found, num = arm(choice, machine, number)
                    default_s = choice.true_s[CommConfig()]
                    regrets.append(choice.true_s[found] / choice.best_s - 1)
                    worse.append(choice.true_s[found] > default_s * (1 + NULL[choice.one_node]))
                    nums.append(num)
            rows.append(
                {
                    "kind": kind,
                    "num_choices": len(held),
                    "tuner": name,
                    "mean_regret": fmean(regrets),
                    "mean_iterations": fmean(nums),
                    "worse_beyond_null_share": fmean(worse),
                }
            )
    return rows


def print_rows(rows: Sequence[dict[str, object]]) -> None:
    """The rows for people, in percent."""
    for row in rows:
        regret, nums, worse = (
            float(str(row[k])) for k in ("mean_regret", "mean_iterations", "worse_beyond_null_share")
        )
        print(
            f"{row['kind']:<26} {row['num_choices']:>3} choices  {row['tuner']:<12} regret {100 * regret:5.1f} %  "
            f"{nums:6.1f} iterations  worse beyond the null test {100 * worse:4.1f} %"
        )
