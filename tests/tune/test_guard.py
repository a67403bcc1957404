"""The guard's promise: noise-free, no group ends slower than with its default."""

from collections.abc import Callable
from zlib import crc32

from hypothesis import given, settings
from hypothesis import strategies as st
from toy_overlap import Run, TableOverlap, channels, channels_only, drive, failing, measured, problem

from lagom_overlap.backends.base import Assignment, Failure, Measurement, Outcome
from lagom_overlap.collective import CommConfig, ConfigSpace, Subspace
from lagom_overlap.tune import Guarded, Problems, Trial, Tuner
from lagom_overlap.tune.autoccl import AutoCcl
from lagom_overlap.tune.fixed import Default, FixedMax, FixedMin
from lagom_overlap.tune.lagom import Lagom
from lagom_overlap.tune.static_cap import StaticCap
from lagom_overlap.tune.threads_only import ThreadsOnly

ONE = channels_only(1, 2, 4)
PROBLEM = problem(ONE)
TABLE = TableOverlap(comm_s=({1: 9, 2: 5, 4: 6},), extra_s=({1: 0, 2: 0, 4: 0},), alone_s=1)
"""The untouched default takes 6 s."""


class Scripted:
    """Asks a list of channels, then stands by one."""

    def __init__(self, asks: list[int], stand: int) -> None:
        self._asks = [(CommConfig(num_channels=value),) for value in asks]
        self._stand = (CommConfig(num_channels=stand),)
        self.told: list[Outcome] = []

    def ask(self) -> Trial | None:
        if len(self.told) == len(self._asks):
            return None
        return Trial(number=len(self.told), assignments={"g": self._asks[len(self.told)]})

    def tell(self, trial: Trial, outcomes: dict[str, Outcome]) -> None:  # type: ignore[override]
        self.told.append(outcomes["g"])

    def recommend(self) -> dict[str, Assignment]:
        return {"g": self._stand}


def asked(trials: list[Trial]) -> list[tuple[int | None, ...]]:
    return [channels(trial.assignments["g"]) for trial in trials]


def test_the_default_is_measured_first_and_stays_against_something_slower() -> None:
    guarded = Guarded(Scripted([2, 1], stand=1), (PROBLEM,))
    assert asked(drive(guarded, TABLE)) == [(None,), (2,), (1,)]
    assert guarded.recommend() == {"g": PROBLEM.default}


def test_something_measured_faster_replaces_the_default() -> None:
    guarded = Guarded(Scripted([2], stand=2), (PROBLEM,))
    drive(guarded, TABLE)
    assert channels(guarded.recommend()["g"]) == (2,)


def test_a_recommendation_that_was_never_measured_is_measured_once() -> None:
    guarded = Guarded(Scripted([1], stand=2), (PROBLEM,))
    trials = drive(guarded, TABLE)
    assert asked(trials) == [(None,), (1,), (2,)]
    assert "never measured" in trials[-1].reasons["g"]
    assert channels(guarded.recommend()["g"]) == (2,)


def test_stopped_before_that_it_stands_by_the_fastest_measured_so_far() -> None:
    for asks, found in (([1, 4, 2], (2,)), ([1, 4], (None,))):
        guarded = Guarded(Scripted([*asks, 8], stand=16), (PROBLEM,))
        for _ in range(len(asks) + 1):
            trial = guarded.ask()
            assert trial is not None
            guarded.tell(trial, {"g": TABLE("g", trial.assignments["g"])})
        assert channels(guarded.recommend()["g"]) == found


def test_a_recommendation_that_fails_when_measured_is_dropped() -> None:
    guarded = Guarded(Scripted([1], stand=2), (PROBLEM,))
    drive(guarded, failing((CommConfig(num_channels=2),), otherwise=TABLE))
    assert guarded.recommend() == {"g": PROBLEM.default}


def test_what_failed_once_is_not_trusted_when_it_runs_later() -> None:
    answers = iter([measured(1, 6.0), Failure("once"), measured(1, 2.0)])
    guarded = Guarded(Scripted([2, 2], stand=2), (PROBLEM,))
    drive(guarded, lambda name, assignment: next(answers))
    assert guarded.recommend() == {"g": PROBLEM.default}


def test_equal_times_keep_the_default() -> None:
    guarded = Guarded(Scripted([4], stand=4), (PROBLEM,))
    drive(guarded, TABLE)
    assert guarded.recommend() == {"g": PROBLEM.default}


def test_a_default_that_cannot_run_gives_way_to_anything_that_ran() -> None:
    guarded = Guarded(Scripted([1], stand=1), (PROBLEM,))
    drive(guarded, failing(PROBLEM.default, otherwise=TABLE))
    assert channels(guarded.recommend()["g"]) == (1,)


def test_a_tuner_that_begins_with_the_default_costs_nothing_more_when_guarded() -> None:
    assert asked(drive(Guarded(Default((PROBLEM,)), (PROBLEM,)), TABLE)) == [(None,)]
    alone = asked(drive(Lagom((PROBLEM,)), TABLE))
    assert asked(drive(Guarded(Lagom((PROBLEM,)), (PROBLEM,)), TABLE)) == alone


def test_groups_are_guarded_one_by_one() -> None:
    other = problem(ONE, name="h")

    def run(name: str, assignment: Assignment) -> Measurement:
        # Minimal resources: fast in g, slow in h.
        minimal = assignment[0].num_channels == 1
        return measured(1, {("g", True): 2.0, ("h", True): 9.0}.get((name, minimal), 5.0))

    guarded = Guarded(FixedMin((PROBLEM, other)), (PROBLEM, other))
    drive(guarded, run)
    assert channels(guarded.recommend()["g"]) == (1,)
    assert guarded.recommend()["h"] == other.default


TUNERS: list[Callable[[Problems], Tuner]] = [
    Lagom,
    lambda problems: Lagom(problems, step="lr"),
    AutoCcl,
    FixedMin,
    FixedMax,
    StaticCap,
    ThreadsOnly,
]


def any_response(seed: int, failures: int) -> Run:
    """Times without any structure, and `failures` of 10 assignments that cannot run."""

    def run(name: str, assignment: Assignment) -> Outcome:
        draw = crc32(f"{seed}{name}{assignment}".encode())
        untouched = all(config == CommConfig() for config in assignment)
        if not untouched and draw % 10 < failures:
            return Failure("drawn")
        times = [1 + crc32(f"{draw}{j}".encode()) % 1000 / 100 for j in range(len(assignment) + 1)]
        return measured(*times)

    return run


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    failures=st.integers(0, 9),
    num_comms=st.integers(1, 4),
    make=st.sampled_from(TUNERS),
    budget=st.integers(0, 40),
)
def test_no_group_ends_slower_than_its_default(
    seed: int, failures: int, num_comms: int, make: Callable[[Problems], Tuner], budget: int
) -> None:
    space = ConfigSpace(
        (Subspace(num_channels=(1, 2, 4, 8), num_threads=(64, 128), chunk_bytes=(2**16, 2**18, 2**20)),)
    )
    problems = (problem(space, num_comms=num_comms), problem(space, name="h", num_comms=1))
    run = any_response(seed, failures)
    guarded = Guarded(make(problems), problems)
    for _ in range(budget):  # stopped at any time
        trial = guarded.ask()
        if trial is None:
            break
        guarded.tell(trial, {name: run(name, assignment) for name, assignment in trial.assignments.items()})
    for one in problems:
        name = one.group.name
        ended, default = run(name, guarded.recommend()[name]), run(name, one.default)
        assert isinstance(ended, Measurement)
        assert isinstance(default, Measurement)
        assert ended.makespan_s <= default.makespan_s


def test_the_unguarded_tuners_do_end_slower_somewhere() -> None:
    """Else the test above would prove nothing."""
    space = ConfigSpace((Subspace(num_channels=(1, 2, 4, 8), chunk_bytes=(2**16, 2**18, 2**20)),))
    problems = (problem(space, num_comms=2),)

    def is_slower(make: Callable[[Problems], Tuner], seed: int) -> bool:
        run, tuner = any_response(seed, 0), make(problems)
        drive(tuner, run)
        ended, default = run("g", tuner.recommend()["g"]), run("g", problems[0].default)
        assert isinstance(ended, Measurement)
        assert isinstance(default, Measurement)
        return ended.makespan_s > default.makespan_s

    for make in (Lagom, AutoCcl, FixedMin, FixedMax):
        assert any(is_slower(make, seed) for seed in range(40))
