"""What every tuner promises, whatever it searches for: a new tuner is one more line in TUNERS.

The outcomes are made up from a checksum of the assignment: no structure to rely on, the same in every run.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from zlib import crc32

import pytest

from lagom_overlap.collective import (
    Algorithm,
    Collective,
    CollectiveKind,
    CommConfig,
    ConfigSpace,
    LaunchOrder,
    LaunchScope,
    LaunchSpace,
    Protocol,
    StreamPriority,
    Subspace,
    launch_of,
)
from lagom_overlap.tuners.autoccl import AutoCcl
from lagom_overlap.tuners.base import Problems, Trial, Tuner
from lagom_overlap.tuners.both_sides import BothSides
from lagom_overlap.tuners.exhaustive import Exhaustive
from lagom_overlap.tuners.fixed import Default, FixedMax, FixedMin, StaticCap
from lagom_overlap.tuners.guard import Guarded
from lagom_overlap.tuners.in_turns import InTurns
from lagom_overlap.tuners.lagom import Lagom
from lagom_overlap.tuners.ours import OurSearch
from lagom_overlap.tuners.problem import Assignment, Failure, GroupProblem, Measurement, Outcome
from lagom_overlap.tuners.random_search import RandomSearch
from lagom_overlap.tuners.threads_only import ThreadsOnly
from lagom_overlap.workload import CommOp, CompOp, Gemm, OverlapGroup

Make = Callable[[Problems], Tuner]

TUNERS: dict[str, Make] = {
    "default": lambda problems: Default(problems, seed=3),
    "fixed_min": lambda problems: FixedMin(problems, seed=3),
    "fixed_max": lambda problems: FixedMax(problems, seed=3),
    "exhaustive": lambda problems: Exhaustive(problems, seed=3),
    "static_cap": lambda problems: StaticCap(problems, seed=3),
    "threads_only": lambda problems: ThreadsOnly(problems, seed=3),
    "autoccl": lambda problems: AutoCcl(problems, seed=3),
    "autoccl in short": lambda problems: AutoCcl(problems, seed=3, num_pretrain=1, num_train=8),
    "lagom": lambda problems: Lagom(problems, seed=3),
    "lagom by lr": lambda problems: Lagom(problems, seed=3, step="lr"),
    "lagom proportional": lambda problems: Lagom(problems, seed=3, ladder="proportional"),
    "random": lambda problems: RandomSearch(problems, seed=3),
    "ours": lambda problems: OurSearch(problems, seed=3),
    "ours in a long job": lambda problems: OurSearch(problems, seed=3, job_measurements=100),
    "in turns": lambda problems: InTurns(problems, {"lagom": Lagom(problems), "max": FixedMax(problems)}, 5),
    "both_sides": lambda problems: BothSides(problems, seed=3),
    "both_sides of lagom": lambda problems: BothSides(problems, seed=3, inner="lagom"),
}
PLAIN = TUNERS.copy()
GUARDED: dict[str, Make] = {
    f"guarded {name}": lambda problems, make=make: Guarded(make(problems), problems) for name, make in PLAIN.items()
}
TUNERS |= GUARDED


def group_problem(name: str, num_comms: int, space: ConfigSpace, default: CommConfig | None = None) -> GroupProblem:
    collective = Collective(CollectiveKind.ALL_REDUCE, 2**20, 2)
    comms = tuple(CommOp(name=f"c{j}", collective=collective) for j in range(num_comms))
    group = OverlapGroup(name=name, computations=(CompOp(name="mm", work=Gemm(8, 8, 8)),), comms=comms)
    return GroupProblem(group=group, spaces=(space,) * num_comms, default=(default or CommConfig(),) * num_comms)


GLOO = ConfigSpace((Subspace(num_channels=(1, 2, 4, 8), chunk_bytes=(2**19, 2**20, 2**21, 2**25)),))
ONE_VALUE = ConfigSpace((Subspace(num_channels=(4,), num_threads=(128,), chunk_bytes=(2**20,)),))
NO_KNOB = ConfigSpace((Subspace(),))
TWO_VALUES = ConfigSpace((Subspace(num_channels=(1, 2)),))
NCCL = ConfigSpace(
    tuple(
        Subspace(
            algorithm=algorithm,
            protocol=protocol,
            num_channels=(1, 2, 8),
            num_threads=(128, 512) if protocol is Protocol.SIMPLE else (512,),
            chunk_bytes=(1366 * 1024, 2**21) if protocol is Protocol.SIMPLE else (2**12,),
        )
        for algorithm in (Algorithm.TREE, Algorithm.RING)
        for protocol in (Protocol.LL, Protocol.SIMPLE)
    )
)
NCCL_DEFAULT = CommConfig(
    algorithm=Algorithm.RING, protocol=Protocol.SIMPLE, num_channels=8, num_threads=512, chunk_bytes=2**21
)
ODD_DEFAULT = CommConfig(algorithm=Algorithm.NVLS, num_channels=24)

LAUNCHES = LaunchSpace(
    sm_carveouts=(0, 4, 8), orders=(LaunchOrder.COMPUTATION_FIRST,), priorities=(StreamPriority.NORMAL,)
)
SHARED = replace(LAUNCHES, scope=LaunchScope.STEP)

JOBS: dict[str, Problems] = {
    "two knobs, default outside": (group_problem("g", 2, GLOO),),
    "one value": (group_problem("g", 1, ONE_VALUE),),
    "no knob": (group_problem("g", 2, NO_KNOB),),
    "four subspaces, default inside": (group_problem("g", 2, NCCL, NCCL_DEFAULT),),
    "four subspaces, default of another kind": (group_problem("g", 2, NCCL, ODD_DEFAULT),),
    "eight collectives": (group_problem("g", 8, TWO_VALUES),),
    "a computation's side": (replace(group_problem("g", 2, NCCL, NCCL_DEFAULT), launches=LAUNCHES),),
    "a computation's side shared by groups": (
        replace(group_problem("g", 2, NCCL, NCCL_DEFAULT), launches=SHARED),
        replace(group_problem("h", 1, TWO_VALUES), launches=SHARED),
        group_problem("i", 1, GLOO),
    ),
    "three groups": (
        group_problem("g", 1, GLOO),
        group_problem("h", 3, TWO_VALUES),
        group_problem("i", 1, NCCL, NCCL_DEFAULT),
    ),
}

EVERY_KIND = ("eight collectives", "a computation's side shared by groups")
"""Jobs that have one and several groups, knobs of each kind, and a side of the computation."""

Fails = Callable[[str, Assignment, Assignment], bool]
"""Whether a group's assignment fails, given its default."""


def _some(name: str, assignment: Assignment, default: Assignment) -> bool:
    return crc32(f"fail {name} {assignment}".encode()) % 3 == 0


FAILURES: dict[str, Fails] = {
    "nothing fails": lambda name, assignment, default: False,
    "a third fails": _some,
    "the default fails": lambda name, assignment, default: assignment == default,
    "all but the default fails": lambda name, assignment, default: assignment != default,
    "everything fails": lambda name, assignment, default: True,
}


def outcome_of(problem: GroupProblem, assignment: Assignment, fails: Fails) -> Outcome:
    name = problem.group.name
    if fails(name, assignment, problem.default):
        return Failure("made up")
    times = [1 + crc32(f"{name} {assignment} {j}".encode()) % 997 / 100 for j in range(len(assignment) + 1)]
    return Measurement(makespan_s=max(times[0], sum(times[1:])), comp_s=times[0], comm_s=tuple(times[1:]))


def outcomes_of(trial: Trial, problems: Problems, fails: Fails) -> dict[str, Outcome]:
    named = {problem.group.name: problem for problem in problems}
    return {name: outcome_of(named[name], assignment, fails) for name, assignment in trial.assignments.items()}


def run(make: Make, problems: Problems, fails: Fails) -> tuple[list[Trial], Mapping[str, Assignment]]:
    tuner, trials = make(problems), []
    while (trial := tuner.ask()) is not None:
        trials.append(trial)
        tuner.tell(trial, outcomes_of(trial, problems, fails))
        assert len(trials) < 6000, "the search does not end"
    return trials, tuner.recommend()


def check_allowed(assignments: Mapping[str, Assignment], problems: Problems) -> None:
    named = {problem.group.name: problem for problem in problems}
    for name, assignment in assignments.items():
        problem = named[name]
        assert len(assignment) == len(problem.spaces)
        for config, space, default in zip(assignment, problem.spaces, problem.default, strict=True):
            assert config == default or _is_allowed(config, space, default), f"{config} lies outside its space"
        assert launch_of(assignment) in problem.launches


def _is_allowed(config: CommConfig, space: ConfigSpace, default: CommConfig) -> bool:
    """In the space, but for knobs that stay as the default has them."""
    return any(
        subspace.has_way_of(config)
        and all(
            value in axis or value == own
            for value, own, axis in zip(_resources(config), _resources(default), subspace.axes, strict=True)
        )
        for subspace in space.subspaces
    )


def _resources(config: CommConfig) -> tuple[int | None, ...]:
    return config.num_channels, config.num_threads, config.chunk_bytes


every_tuner = pytest.mark.parametrize("make", TUNERS.values(), ids=TUNERS)


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("problems", JOBS.values(), ids=JOBS)
def test_it_ends_stays_in_its_space_and_never_stands_by_what_failed(make: Make, problems: Problems) -> None:
    for fails in FAILURES.values():
        _check_search(make, problems, fails)


@pytest.mark.parametrize("make", GUARDED.values(), ids=GUARDED)
@pytest.mark.parametrize(
    "name",
    ["two knobs, default outside", pytest.param("a computation's side shared by groups", marks=pytest.mark.long)],
)
def test_nor_does_a_guarded_one(make: Make, name: str) -> None:
    """One job finds a guard that says whatever the tuner within recommends, the other has every kind of space."""
    for fails in FAILURES.values():
        _check_search(make, JOBS[name], fails)


def _check_search(make: Make, problems: Problems, fails: Fails) -> None:
    tuner, num_trials = make(problems), 0
    named = {problem.group.name: problem for problem in problems}
    failed = set()
    while True:
        incumbent = tuner.recommend()
        assert set(incumbent) == set(named)
        check_allowed(incumbent, problems)
        for name, assignment in incumbent.items():
            assert assignment == named[name].default or (name, assignment) not in failed
        trial = tuner.ask()
        if trial is None:
            break
        num_trials += 1
        assert num_trials < 6000, "the search does not end"
        assert set(trial.assignments) <= set(named)
        assert trial.assignments
        assert set(trial.reasons) == set(trial.assignments)
        check_allowed(trial.assignments, problems)
        outcomes = outcomes_of(trial, problems, fails)
        failed |= {(name, trial.assignments[name]) for name, out in outcomes.items() if isinstance(out, Failure)}
        tuner.tell(trial, outcomes)
    assert tuner.ask() is None
    assert num_trials >= 1


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERY_KIND else pytest.mark.long) for name in JOBS]
)
def test_the_same_tells_give_the_same_asks(make: Make, name: str) -> None:
    _check_repeats(make, JOBS[name])


@pytest.mark.parametrize("make", GUARDED.values(), ids=GUARDED)
def test_so_do_they_within_a_guard(make: Make) -> None:
    """A guard's own choices see the times alone, whatever the space: one job of several groups has them all."""
    _check_repeats(make, JOBS["three groups"])


def _check_repeats(make: Make, problems: Problems) -> None:
    """Two searches of one seed are one; their trials are numbered, and say what is known of their collectives."""
    trials, recommended = run(make, problems, _some)
    groups = {problem.group.name: problem.group for problem in problems}
    assert (trials, recommended) == run(make, problems, _some)
    assert [trial.number for trial in trials] == list(range(len(trials)))
    for trial in trials:
        for name, metrics in trial.priorities.items():
            assert name in trial.assignments
            assert set(metrics) <= {comm.name for comm in groups[name].comms}
            assert all(0 <= metric < float("inf") for metric in metrics.values())


@every_tuner
def test_before_the_first_tell_it_stands_by_the_default(make: Make) -> None:
    for name, problems in JOBS.items():
        tuner = make(problems)
        defaults = {problem.group.name: problem.default for problem in problems}
        assert dict(tuner.recommend()) == defaults, name
        tuner.ask()
        assert dict(tuner.recommend()) == defaults, name


@every_tuner
def test_a_trial_is_the_same_until_it_is_told(make: Make) -> None:
    problems = JOBS["three groups"]
    tuner = make(problems)
    while (trial := tuner.ask()) is not None:
        assert tuner.ask() == trial
        tuner.recommend()
        assert tuner.ask() == trial
        tuner.tell(trial, outcomes_of(trial, problems, _some))


@every_tuner
def test_a_wrong_tell_is_refused_and_changes_nothing(make: Make) -> None:
    problems = JOBS["three groups"]
    nothing_fails = FAILURES["nothing fails"]
    tuner = make(problems)
    foreign = Trial(number=7, assignments={"g": (CommConfig(num_channels=3),)})
    with pytest.raises(ValueError, match="not the one just asked for"):
        tuner.tell(foreign, {"g": Failure("")})
    trial = tuner.ask()
    assert trial is not None
    good = outcomes_of(trial, problems, nothing_fails)
    missing = {name: outcome for name, outcome in good.items() if name != "h"}
    too_many = {"x": Failure("")} | good
    one_time = Measurement(makespan_s=1, comp_s=1, comm_s=(1, 1, 1, 1, 1))
    for outcomes in (missing, too_many, good | {"h": one_time}):
        with pytest.raises(ValueError, match=r"outcomes are of|communication times"):
            tuner.tell(trial, outcomes)
    with pytest.raises(ValueError, match="not the one just asked for"):
        tuner.tell(foreign, {"g": Failure("")})
    assert tuner.ask() == trial
    tuner.tell(trial, good)
    with pytest.raises(ValueError, match="not the one just asked for"):
        tuner.tell(trial, good)


@every_tuner
def test_groups_of_one_name_and_no_group_are_refused(make: Make) -> None:
    one = group_problem("g", 1, TWO_VALUES)
    for problems in ((), (one, one)):
        with pytest.raises(ValueError, match="different names"):
            make(problems)


def test_every_registered_tuner_is_in_this_suite() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    registered = project["project"]["entry-points"]["lagom_overlap.tuners"]
    assert set(registered) <= set(TUNERS)
    for target in registered.values():
        module, name = target.split(":")
        tuner = getattr(import_module(module), name)(JOBS["one value"], seed=1)
        assert tuner.ask() is not None
