"""Tuners on other people's surfaces: what a search ends with under that somebody's noise, alone and judged.

    python benchmarks/recorded_search.py overlap_surface_nvidia_shown.csv noise_iterations_shown.csv [--searches 50]

The choices and raw lists are those of `measured_choices.py`. One measurement of a search is the median of
`PER_MEASUREMENT` successive iterations: the truth times the raw ratios of one of the lists, from a random place on, in
their order, so that clock ramps, steps and tails come as they came. A search lets the machine run on: the next
measurement takes the next iterations. Where a list ends it begins again, so its ramp comes back, which is worse than
what was seen.

Searches: Lagom, AutoCCL, and `ours` as `lagom compare` runs them, unguarded; `bandit` as its authors
publish it (five rounds over its four arms, one iteration each, then the arm with the best mean), `ucb1` their first
version (five arms with NCCL's own, fifteen iterations).

What a user gets is a search and then the verdict, `NAME, judged`: `tuners/study.py`, the same code, seed and budget of
pairs as online, whose windows are the next `WINDOW` iterations each, the first and the last not counted. Where the
sequential test does not let a setting pass, the default stays. *Worse* is a true time beyond the default's by more than
the null test of the topology: 8 % on 1x8, 50 % between nodes (there only 12 of 33 pairs of equal settings lie within
5 %).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import log, sqrt
from multiprocessing import get_context
from random import Random
from statistics import fmean, median
from typing import Final

from lagom_overlap.collective import Algorithm, CommConfig, Protocol
from lagom_overlap.online.options import OnlineOptions
from lagom_overlap.tuners.base import Trial
from lagom_overlap.tuners.guard import make_tuner
from lagom_overlap.tuners.problem import Assignment, Failure, Measurement, Outcome
from lagom_overlap.tuners.study import Study
from measured_choices import Choice, Noise

PER_MEASUREMENT: Final = 10
"""Iterations of one measurement of a tuner of ours: their median."""
MAX_MEASUREMENTS: Final = 40
ONLINE: Final = OnlineOptions()
WINDOW: Final = ONLINE.window_steps
"""Iterations of a window of the verdict; the first one settles, the last one is not reported."""
NULL: Final = {True: 0.08, False: 0.5}
"""By whether all GPUs are in one node: how far two measurements of the same setting lie apart there."""
TUNERS: Final = ("default", "lagom", "autoccl", "random_12", "ours", "ours_anytime")
OPTIONS: Final[Mapping[str, tuple[str, dict[str, object]]]] = {
    "random_12": ("random", {"num_measurements": 12}),
    "ours_anytime": ("ours", {"job_measurements": 5000}),
}
"""Variants: name here -> (tuner, options), as in `search_quality.py`."""
BANDITS: Final = ("bandit", "ucb1")
JUDGED: Final = ", judged"
_BANDIT_ARMS: Final = (
    (Algorithm.RING, Protocol.LL), (Algorithm.RING, Protocol.SIMPLE), (Algorithm.TREE, Protocol.LL),
    (Algorithm.TREE, Protocol.SIMPLE),
)  # fmt: skip
"""Four arms of which the published code explores each five times; which four, its files do not say: assumed."""
_BANDIT_ROUNDS: Final = 5
_UCB_ITERATIONS: Final = 15


class Machine:
    """Successive iterations of somebody's machine: a raw list of ratios to its steady part, from a random place on."""

    def __init__(self, lists: Sequence[Sequence[float]], rng: Random) -> None:
        self._list = lists[rng.randrange(len(lists))]
        self._at = rng.randrange(len(self._list))
        self.num_run = 0

    def times(self, true_s: float, num: int) -> list[float]:
        """The next iterations of a setting."""
        ratios = [self._list[(self._at + number) % len(self._list)] for number in range(num)]
        self._at += num
        self.num_run += num
        return [true_s * ratio for ratio in ratios]


def searched(choice: Choice, name: str, machine: Machine, number: int) -> CommConfig:
    """What one of the package's tuners ends with."""
    problem = choice.problem()
    base, options = OPTIONS.get(name, (name, {}))
    tuner = make_tuner(base, (problem,), seed=number, options=options, guarded=False)
    told = 0
    while told < MAX_MEASUREMENTS and (trial := tuner.ask()) is not None:
        (config,) = trial.assignments[choice.name]
        outcome: Outcome = Failure("the file does not hold this setting")
        if config in choice.true_s:
            time_s = median(machine.times(choice.true_s[config], PER_MEASUREMENT))
            outcome = Measurement(makespan_s=time_s, comp_s=time_s / 2, comm_s=(time_s,))
        tuner.tell(trial, {choice.name: outcome})
        told += 1
    (found,) = tuner.recommend()[choice.name]
    return found


class _Ended:
    """A search that is over: it asks for nothing more."""

    def __init__(self, name: str, found: CommConfig) -> None:
        self._found: dict[str, Assignment] = {name: (found,)}

    def ask(self) -> Trial | None:
        """Nothing."""
        return None

    def tell(self, trial: Trial, outcomes: Mapping[str, Outcome]) -> None:
        """Is never called."""
        raise AssertionError("told a search that is over")

    def recommend(self) -> Mapping[str, Assignment]:
        """What it ended with."""
        return self._found


def judged(choice: Choice, found: CommConfig, machine: Machine, number: int) -> CommConfig:
    """What runs after the verdict that online tuning gives: what was found where it was adopted, else the default."""
    study = Study((choice.problem(),), _Ended(choice.name, found), seed=number, num_pairs=ONLINE.num_pairs)
    while (step := study.next()) is not None:
        (config,) = step.assignments[choice.name]
        study.report(step, {}, step_s=fmean(machine.times(choice.true_s[config], WINDOW)[1:-1]))
    (chosen,) = study.chosen[choice.name]
    return chosen


def bandit(choice: Choice, machine: Machine) -> CommConfig:
    """The published one: rounds over its arms, then the best mean."""
    arms = [arm for algo, proto in _BANDIT_ARMS if (arm := CommConfig(algorithm=algo, protocol=proto)) in choice.true_s]
    if not arms:
        return choice.default
    seen: dict[CommConfig, list[float]] = defaultdict(list)
    for _ in range(_BANDIT_ROUNDS):
        for arm in arms:
            seen[arm] += machine.times(choice.true_s[arm], 1)
    return min(arms, key=lambda arm: fmean(seen[arm]))


def ucb1(choice: Choice, machine: Machine) -> CommConfig:
    """Their first version: upper confidence bounds on minus the time over the default's first; NCCL's own is an arm."""
    arms = [choice.default]
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
    return max(arms, key=lambda arm: (len(seen[arm]), -fmean(seen[arm])))


def ended(choice: Choice, name: str, machine: Machine, number: int) -> CommConfig:
    """What a search of that name ends with."""
    if name == "default":
        return choice.default
    if name in BANDITS:
        return bandit(choice, machine) if name == "bandit" else ucb1(choice, machine)
    return searched(choice, name, machine, number)


def replay(
    choices: Sequence[Choice], noise: Noise, num_searches: int, *, num_workers: int = 1
) -> list[dict[str, object]]:
    """Per kind of choice, one row for the default, one for each search, and one for each search that is judged."""
    kinds: dict[str, list[Choice]] = defaultdict(list)
    for choice in choices:
        kinds[choice.kind].append(choice)
    tasks = [
        (held, noise, name, num_searches)
        for _, held in sorted(kinds.items())
        for name in (*TUNERS, *BANDITS)
        if not (name in BANDITS and held[0].default.num_channels)  # their arms set no channels
    ]
    if num_workers == 1:
        return [row for task in tasks for row in _rows_of(*task)]
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(_rows_of, *task) for task in tasks]
        return [row for done in waiting for row in done.result()]


def _rows_of(held: Sequence[Choice], noise: Noise, name: str, num_searches: int) -> list[dict[str, object]]:
    """One search over choices of a kind, alone and judged."""
    as_found, as_judged = [], []
    for choice in held:
        for number in range(num_searches):
            machine = Machine(noise.of(choice.num_nodes), Random(f"{choice.name}/{number}"))
            found = ended(choice, name, machine, number)
            as_found.append(_Ending(choice, found, machine.num_run))
            if name != "default":
                found = judged(choice, found, machine, number)
                as_judged.append(_Ending(choice, found, machine.num_run))
    rows = [_row(held[0].kind, len(held), name, as_found)]
    if as_judged:
        rows.append(_row(held[0].kind, len(held), f"{name}{JUDGED}", as_judged))
    return rows


@dataclass(frozen=True, slots=True)
class _Ending:
    """One search: what runs after it, and the iterations until then."""

    choice: Choice
    config: CommConfig
    num_iterations: int


def _row(kind: str, num_choices: int, name: str, endings: Sequence[_Ending]) -> dict[str, object]:
    true = [(end.choice, end.choice.true_s[end.config], end.choice.true_s[end.choice.default]) for end in endings]
    return {
        "kind": kind,
        "num_choices": num_choices,
        "tuner": name,
        "mean_regret": fmean(true_s / choice.best_s - 1 for choice, true_s, _ in true),
        "mean_iterations": fmean(end.num_iterations for end in endings),
        "worse_beyond_null_share": fmean(true_s > default_s * (1 + NULL[c.one_node]) for c, true_s, default_s in true),
        "worse_share": fmean(true_s > default_s for _, true_s, default_s in true),
        "adopted_share": fmean(end.config != end.choice.default for end in endings),
    }


SHARES: Final = ("mean_regret", "worse_beyond_null_share", "worse_share", "adopted_share")


def print_rows(rows: Sequence[dict[str, object]]) -> None:
    """The rows for people, in percent."""
    for row in rows:
        regret, beyond, worse, adopted = (100 * float(str(row[name])) for name in SHARES)
        print(
            f"{row['kind']:<34} {row['num_choices']:>3} choices  {row['tuner']:<20} regret {regret:5.1f} %  "
            f"{float(str(row['mean_iterations'])):6.1f} iterations  worse beyond the null test {beyond:4.1f} %, "
            f"at all {worse:4.1f} %  other than the default {adopted:5.1f} %"
        )
