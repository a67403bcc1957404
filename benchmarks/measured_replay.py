"""Tuners on other people's surfaces: choices among settings that somebody measured, under that somebody's noise.

    python benchmarks/recorded_search.py overlap_surface_nvidia_shown.csv noise_iterations_shown.csv [--searches 50]

Per topology, size and run of the file one choice: NCCL's own against every algorithm and protocol that was forced, or
against every channel count that was swept. The truth of a setting is its steady part where the file has it, else its
median, else its mean. One measurement of a search is the median of `PER_MEASUREMENT` successive iterations: the truth
times the raw ratios of one of the eight lists, from a random place on, in their order, so that clock ramps, steps
and tails come as they came. A search lets the machine run on: the next measurement takes the next iterations.

Arms: `default` as it is; Lagom, AutoCCL, `descent` and `model_based` as `lagom compare` runs them, unguarded; `bandit`
as its authors publish it (five rounds over its four arms, one iteration each, then the arm with the best mean), `ucb1`
their first version (five arms with NCCL's own, fifteen iterations). *worse* is a true time beyond the default's by more
than the null test of the topology: 8 % on 1x8, 50 % between nodes (there only 12 of 33 pairs of equal settings lie
within 5 %). Sweeps of channels have no default in the same run and are left out.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, log, sqrt
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Final

from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, CommConfig, ConfigSpace, Protocol, Subspace
from lagom_overlap.errors import LagomError
from lagom_overlap.jobfile.registry import make_tuner
from lagom_overlap.tuners.problem import GroupProblem, Measurement
from lagom_overlap.units import MS
from lagom_overlap.workload import CommOp, CompOp, Kernel, OverlapGroup
from measured_rows import BadFileError, BadRowError, Named, NotModelledError, Row, read

CHOICE_COLUMNS: Final = ("run", "nodes", "gpus", "collective", "bytes", "algorithm", "protocol", "mode")
NOISE_COLUMNS: Final = ("steady_median_ms", "iterations_ms")
FEWEST_SETTINGS: Final = 3
PER_MEASUREMENT: Final = 10
"""Iterations of one measurement of a tuner of ours: their median."""
MAX_MEASUREMENTS: Final = 40
NULL: Final = {True: 0.08, False: 0.5}
"""By whether all GPUs are in one node: how far two measurements of the same setting lie apart there."""
TUNERS: Final = ("default", "lagom", "autoccl", "descent", "model_based")
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


def read_noise(path: Path) -> tuple[list[list[float]], list[Named]]:
    """Every raw list over its own steady median, and the lines that hold none.

    Raises:
        BadFileError: if the file is no such table, or none of its lists can be used.
    """
    _, rows, bad = read(path, NOISE_COLUMNS)
    lists = []
    for row in rows:
        try:
            steady = row.needed("steady_median_ms")
            ratios = [float(text) / steady for text in row.text("iterations_ms").split()]
            if not ratios or not all(0 < ratio < inf for ratio in ratios):
                raise BadRowError("iterations_ms must hold positive, finite numbers")
        except (BadRowError, ValueError) as error:
            bad.append(Named(row.line, str(error)))
            continue
        lists.append(ratios)
    if not lists:
        raise BadFileError(f"{str(path)!r} has no raw list that can be used")
    return lists, bad


def read_choices(path: Path) -> tuple[list[Choice], list[Named]]:
    """Every choice of at least three settings with NCCL's own among them, and the lines that belong to none.

    Raises:
        BadFileError: if the file is no such table, or holds no choice.
    """
    held: dict[tuple[str | int, ...], dict[CommConfig, list[tuple[float, int]]]]
    held = defaultdict(lambda: defaultdict(list))
    _, rows, named = read(path, CHOICE_COLUMNS)
    for row in rows:
        try:
            key, config, time_s = _told(row)
        except (BadRowError, NotModelledError, LagomError) as error:
            named.append(Named(row.line, str(error)))
            continue
        held[key][config].append((time_s, row.line))
    choices = []
    for key, found in held.items():
        run, nodes, gpus, num_bytes, kernel, mode = key
        if CommConfig() not in found or len(found) < FEWEST_SETTINGS:
            why = (
                f"no choice: {len(found)} settings{'' if CommConfig() in found else ' without the default'} in its run"
            )
            named += [Named(line, why) for times in found.values() for _, line in times]
            continue
        choices.append(
            Choice(
                name=" ".join(
                    (str(run), f"{nodes}x{int(gpus) // int(nodes)}", str(num_bytes), str(kernel)[-14:], str(mode))
                ),
                one_node=nodes == 1,
                num_ranks=int(gpus),
                num_bytes=int(num_bytes),
                true_s={config: median(time for time, _ in times) for config, times in found.items()},
            )
        )
    if not choices:
        raise BadFileError(f"{str(path)!r} has no choice between {FEWEST_SETTINGS} settings, NCCL's own among them")
    return choices, sorted(named, key=lambda one: one.line)


def _told(row: Row) -> tuple[tuple[str | int, ...], CommConfig, float]:
    """The choice that a row belongs to, its setting, its seconds.

    Raises:
        BadRowError: if the row is wrong.
        NotModelledError: if nothing is chosen there.
    """
    mode, kind = row.text("mode"), row.text("collective")
    if mode not in ("overlap", "sequential"):
        raise NotModelledError(f"mode is {mode[:40]!r}: choices are made in overlap and sequential")
    if kind != CollectiveKind.ALL_REDUCE:
        raise NotModelledError(f"collective is {kind[:40]!r}: its halves come from different clusters")
    nodes, gpus = row.needed_count("nodes"), row.needed_count("gpus")
    if gpus % nodes or gpus < 2:
        raise BadRowError(f"{gpus} GPUs on {nodes} nodes, must be at least 2 and the same number on each")
    key = (row.text("run"), nodes, gpus, row.needed_count("bytes"), row.text("compute_kernel"), mode)
    return key, _config(row), _time_s(row)


def _config(row: Row) -> CommConfig:
    algorithm, protocol, channels = (row.text(name) for name in ("algorithm", "protocol", "channels"))
    swept = None if channels in ("", "default") else row.needed_count("channels")
    if algorithm in ("", "auto"):
        return CommConfig(num_channels=swept)
    if swept is not None:
        raise NotModelledError("channels swept under a forced algorithm")
    try:
        return CommConfig(algorithm=Algorithm(algorithm), protocol=Protocol(protocol))
    except ValueError:  # CollNet, and what is none of NCCL's
        raise NotModelledError(f"{algorithm[:20]} with {protocol[:20]} is none of NCCL's here") from None


def _time_s(row: Row) -> float:
    for name in ("steady_ms", "median_ms", "mean_ms"):
        if row.text(name):
            if row.text(name).strip("0.") == "":
                raise NotModelledError("the run failed: its time is 0")
            return row.needed(name) * MS
    raise BadRowError("steady_ms, median_ms and mean_ms are empty")


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
