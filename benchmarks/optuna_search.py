"""General-purpose optimisers (Optuna's) as tuners, to compare with: they know nothing of communication.

Each collective's algorithm-and-protocol pair, channels, threads and chunk are parameters of one Optuna study; the
makespan is its objective, the default its first trial. Not part of the package: `pip install optuna` first.
"""

from collections.abc import Callable
from math import inf

import optuna

from lagom_overlap.collective import CommConfig, ConfigSpace
from lagom_overlap.collective.space import RESOURCE_KNOBS
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.groupwise import GroupwiseTuner, Probe, Search, group_random
from lagom_overlap.tuners.problem import GroupProblem, Measurement

optuna.logging.set_verbosity(optuna.logging.ERROR)


def _suggested(trial: optuna.Trial, j: int, space: ConfigSpace) -> CommConfig:
    number = trial.suggest_int(f"{j}/subspace", 0, len(space.subspaces) - 1) if len(space.subspaces) > 1 else 0
    subspace = space.subspaces[number]
    places = []
    for knob, axis in zip(RESOURCE_KNOBS, subspace.axes, strict=True):
        # positions on a common scale, so that one parameter serves subspaces with axes of different lengths
        most = max(len(getattr(other, knob)) for other in space.subspaces) - 1
        place = trial.suggest_int(f"{j}/{knob}", 0, most) if most else 0
        places.append(min(place, len(axis) - 1))
    return subspace.at((places[0], places[1], places[2]))


def _search(
    problem: GroupProblem, num_measurements: int, seed: int, sampler: Callable[[int], optuna.samplers.BaseSampler]
) -> Search:
    study = optuna.create_study(sampler=sampler(group_random(seed, problem).getrandbits(31)))
    best, best_s = problem.default, inf
    outcome = yield Probe(assignment=problem.default, reason="the default, as the incumbent")
    if isinstance(outcome, Measurement):
        best_s = outcome.makespan_s
    for _ in range(num_measurements - 1):
        trial = study.ask()
        assignment = tuple(_suggested(trial, j, space) for j, space in enumerate(problem.spaces))
        outcome = yield Probe(assignment=assignment, reason="suggested by Optuna", incumbent=best)
        if isinstance(outcome, Measurement):
            study.tell(trial, outcome.makespan_s)
            if outcome.makespan_s < best_s:
                best, best_s = assignment, outcome.makespan_s
        else:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
    return best


class OptunaSearch(GroupwiseTuner):
    """The smallest measured makespan of an Optuna study; `method` is `gp` (Gaussian process) or `tpe`."""

    def __init__(self, problems: Problems, *, seed: int = 0, method: str = "gp", num_measurements: int = 10) -> None:
        samplers: dict[str, Callable[[int], optuna.samplers.BaseSampler]] = {
            "gp": lambda seed: optuna.samplers.GPSampler(seed=seed, n_startup_trials=4, deterministic_objective=False),
            "tpe": lambda seed: optuna.samplers.TPESampler(seed=seed, n_startup_trials=4, multivariate=True),
        }
        sampler = samplers[method]
        super().__init__(problems, lambda problem: _search(problem, num_measurements, seed, sampler))
