"""The guard's promise: noise-free, no group ends slower than with its default; under noise, evidence decides."""

from collections.abc import Callable
from itertools import chain, repeat
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_overlap import Run, TableOverlap, channels, channels_only, drive, failing, measured, problem

from lagom_overlap.collective import CommConfig, ConfigSpace, Subspace
from lagom_overlap.tuners.autoccl import AutoCcl
from lagom_overlap.tuners.base import Problems, Trial, Tuner
from lagom_overlap.tuners.fixed import Default, FixedMax, FixedMin, StaticCap
from lagom_overlap.tuners.guard import Guarded
from lagom_overlap.tuners.lagom import Lagom
from lagom_overlap.tuners.problem import Assignment, Failure, Measurement, Outcome
from lagom_overlap.tuners.threads_only import ThreadsOnly

ONE = channels_only(1, 2, 4)
PROBLEM = problem(ONE)
TABLE = TableOverlap(comm_s=({1: 9, 2: 5, 4: 6},), extra_s=({1: 0, 2: 0, 4: 0},), alone_s=1)
"""The untouched default takes 6 s."""


class Scripted:
    """Asks a list of channels, then stands by one."""

    def __init__(self, asks: list[int], incumbent: int) -> None:
        self._asks = [(CommConfig(num_channels=value),) for value in asks]
        self._incumbent = (CommConfig(num_channels=incumbent),)
        self.told: list[Outcome] = []

    def ask(self) -> Trial | None:
        if len(self.told) == len(self._asks):
            return None
        return Trial(number=len(self.told), assignments={"g": self._asks[len(self.told)]})

    def tell(self, trial: Trial, outcomes: dict[str, Outcome]) -> None:  # type: ignore[override]
        self.told.append(outcomes["g"])

    def recommend(self) -> dict[str, Assignment]:
        return {"g": self._incumbent}


def asked(trials: list[Trial]) -> list[tuple[int | None, ...]]:
    return [channels(trial.assignments["g"]) for trial in trials]


def test_the_default_is_measured_first_and_stays_against_something_slower() -> None:
    guarded = Guarded(Scripted([2, 1], incumbent=1), (PROBLEM,))
    assert asked(drive(guarded, TABLE)) == [(None,), (2,), (1,)]  # 9 s are clearly more than 6 s: no race
    assert guarded.recommend() == {"g": PROBLEM.default}


def test_something_measured_faster_replaces_the_default() -> None:
    guarded = Guarded(Scripted([2], incumbent=2), (PROBLEM,))
    drive(guarded, TABLE)
    assert channels(guarded.recommend()["g"]) == (2,)


def test_a_recommendation_that_was_never_measured_is_measured_once() -> None:
    guarded = Guarded(Scripted([1], incumbent=2), (PROBLEM,))
    trials = drive(guarded, TABLE)
    assert asked(trials)[:3] == [(None,), (1,), (2,)]
    assert "not measured yet" in trials[2].reasons["g"]
    assert asked(trials)[3:] == [(None,)]  # 5 s against 6 s: one repetition shows that there is no noise
    assert channels(guarded.recommend()["g"]) == (2,)


def test_stopped_before_that_it_stands_by_the_fastest_measured_so_far() -> None:
    for asks, found in (([1, 4, 2], (2,)), ([1, 4], (None,))):
        guarded = Guarded(Scripted([*asks, 8], incumbent=16), (PROBLEM,))
        for _ in range(len(asks) + 1):
            trial = guarded.ask()
            assert trial is not None
            guarded.tell(trial, {"g": TABLE("g", trial.assignments["g"])})
        assert channels(guarded.recommend()["g"]) == found


def test_a_recommendation_that_fails_when_measured_is_dropped() -> None:
    guarded = Guarded(Scripted([1], incumbent=2), (PROBLEM,))
    drive(guarded, failing((CommConfig(num_channels=2),), otherwise=TABLE))
    assert guarded.recommend() == {"g": PROBLEM.default}


def test_what_failed_once_is_not_trusted_when_it_runs_later() -> None:
    answers = iter([measured(1, 6.0), Failure("once"), measured(1, 2.0)])
    guarded = Guarded(Scripted([2, 2], incumbent=2), (PROBLEM,))
    drive(guarded, lambda name, assignment: next(answers))
    assert guarded.recommend() == {"g": PROBLEM.default}


def test_equal_times_keep_the_default() -> None:
    guarded = Guarded(Scripted([4], incumbent=4), (PROBLEM,))
    drive(guarded, TABLE)
    assert guarded.recommend() == {"g": PROBLEM.default}


def test_a_default_that_cannot_run_gives_way_to_anything_that_ran() -> None:
    guarded = Guarded(Scripted([1], incumbent=1), (PROBLEM,))
    drive(guarded, failing(PROBLEM.default, otherwise=TABLE))
    assert channels(guarded.recommend()["g"]) == (1,)


def test_a_tuner_that_begins_with_the_default_costs_nothing_more_when_guarded() -> None:
    assert asked(drive(Guarded(Default((PROBLEM,)), (PROBLEM,)), TABLE)) == [(None,)]
    alone = asked(drive(Lagom((PROBLEM,)), TABLE))
    guarded = Guarded(Lagom((PROBLEM,)), (PROBLEM,), num_confirmations=0)
    assert asked(drive(guarded, TABLE)) == alone


class Sequence:
    """Group g's makespans in the order they are asked for: the default's and another's. Beyond the end it fails."""

    def __init__(self, default_s: list[float], other_s: list[float]) -> None:
        self._times = {True: iter(default_s), False: iter(other_s)}

    def __call__(self, name: str, assignment: Assignment) -> Outcome:
        time_s = next(self._times[assignment == PROBLEM.default], None)
        return Failure("not in the sequence") if time_s is None else measured(1, time_s)


def race(default_s: list[float], other_s: list[float], **options: int) -> tuple[str, str]:
    """Who was measured in the race (d or c), and who won it; the first of each list is the search's."""
    guarded = Guarded(Scripted([2], incumbent=2), (PROBLEM,), **options)
    trials = drive(guarded, Sequence(default_s, other_s))

    def letter(assignment: Assignment) -> str:
        return "d" if assignment == PROBLEM.default else "c"

    return "".join(letter(trial.assignments["g"]) for trial in trials[2:]), letter(guarded.recommend()["g"])


@pytest.mark.parametrize(
    ("default_s", "other_s", "run", "won"),
    [
        # A lucky sample: ratios 0.9, then 1.04 twice; two lost pairs of four cannot be made up for.
        ([10, 10.1, 10.5], [9, 10.5, 10.9], "dccd", "d"),
        # An unlucky sample: ratios 1.1, then 0.8, 0.81, 0.79; the samples overlap, so all pairs are run.
        # Upper quartile: 0.81 + (1.1 - 0.81) / 4 < 1.
        ([10, 12, 13, 12.5], [11, 9.6, 10.53, 9.875], "dccddc", "c"),
        # Three won, the fourth lost by more: ratios 0.99, 0.98, 0.99, 1.4; 0.99 + 0.41 / 4 > 1.
        ([10, 10.5, 9.5, 10], [9.9, 10.29, 9.405, 14], "dccddc", "d"),
        # The same with the fourth lost by little: ratios 0.99, 0.98, 0.99, 1.02; 0.99 + 0.03 / 4 < 1.
        ([10, 10.5, 9.5, 10], [9.9, 10.29, 9.405, 10.2], "dccddc", "c"),
        # Apart: ranges 0.5 and 0.4 wide, the gap is 0.8.
        ([10, 10.5], [9.2, 8.8], "dc", "c"),
        # Never overlapping, but the gap of at most 0.2 is narrower than the ranges of 0.5 and 0.4.
        ([10, 10.5, 10.2, 10.1], [9.8, 9.4, 9.5, 9.7], "dccddc", "c"),
        # One side repeats exactly, the other does not: that is noise all the same.
        ([10, 10.5, 10.2, 10.1], [9.9, 9.9, 9.9, 9.9], "dccddc", "c"),
        # Lost in the search and again: one repetition is enough.
        ([10, 10.3], [11, 10.5], "dc", "d"),
        # More than 1.5 apart, either way: no race.
        ([15.1], [10], "", "c"),
        ([10], [15.1], "", "d"),
        # Equal to the last bit: no noise, and the candidate need not be repeated.
        ([10, 10], [9.999], "d", "c"),
        ([10, 10], [10], "d", "d"),
        ([10, 10], [10.001], "d", "d"),
    ],
)
def test_close_to_the_default_the_pairs_decide(
    default_s: list[float], other_s: list[float], run: str, won: str
) -> None:
    assert race(default_s, other_s) == (run, won)


def test_a_failure_in_the_race_ends_it() -> None:
    assert race([10, 10.5], [9]) == ("dc", "d")
    assert race([10], [9]) == ("d", "c")


@pytest.mark.parametrize(("num_confirmations", "run"), [(0, ""), (1, "dc"), (2, "dccd"), (5, "dccddccddc")])
def test_there_are_at_most_as_many_pairs_as_asked_for(num_confirmations: int, run: str) -> None:
    # Each pair is won by a little while the machine drifts a lot.
    default_s = [10.0, 11, 12, 13, 14, 15]
    other_s = [0.99 * time_s for time_s in default_s]
    assert race(default_s, other_s, num_confirmations=num_confirmations) == (run, "c")


def test_a_negative_number_of_pairs_is_refused() -> None:
    with pytest.raises(ValueError, match="num_confirmations is -1, must not be negative"):
        Guarded(Scripted([], incumbent=1), (PROBLEM,), num_confirmations=-1)


def test_stopped_in_the_race_the_whole_pairs_so_far_decide() -> None:
    # Ratios 0.9, then 1.6: lost after the first whole pair, not before it.
    guarded, run = Guarded(Scripted([2], incumbent=2), (PROBLEM,)), Sequence([10, 8], [9, 12.8])
    stands = []
    for _ in range(4):
        trial = guarded.ask()
        assert trial is not None
        guarded.tell(trial, {"g": run("g", trial.assignments["g"])})
        stands.append(channels(guarded.recommend()["g"]))
    assert stands[1:] == [(2,), (2,), (None,)]


def test_repetitions_in_the_search_show_that_there_is_no_noise() -> None:
    assert asked(drive(Guarded(Scripted([2, 2], incumbent=2), (PROBLEM,)), TABLE)) == [(None,), (2,), (2,)]


def test_what_failed_twice_does_not_show_that_there_is_no_noise() -> None:
    guarded = Guarded(Scripted([1, 1, 2], incumbent=2), (PROBLEM,))
    trials = drive(guarded, failing((CommConfig(num_channels=1),), otherwise=TABLE))
    assert asked(trials)[3:] == [(2,), (None,)]


def test_equal_makespans_of_different_parts_are_noise() -> None:
    # Communication hides behind 6 s of computation: the makespan repeats, the parts do not.
    noise = chain([1.0, 2.0], repeat(3.0))

    def run(name: str, assignment: Assignment) -> Measurement:
        return measured(6 if assignment == PROBLEM.default else 5, next(noise))

    assert asked(drive(Guarded(Scripted([2], incumbent=2), (PROBLEM,)), run)) == [(None,), (2,), (None,), (2,)]


def test_only_the_groups_that_differ_and_are_close_race_and_each_ends_by_itself() -> None:
    problems = tuple(problem(ONE, name=name) for name in ("same", "far", "apart", "long"))
    minimal = (CommConfig(num_channels=1),)
    times = {
        ("far", True): iter([10]),
        ("far", False): iter([2]),
        ("apart", True): iter([10, 10.1]),
        ("apart", False): iter([9, 9.1]),
        ("long", True): iter([10, 11, 12, 13]),
        ("long", False): iter([9.9, 10.9, 11.9, 12.9]),
        ("same", True): iter([10]),
    }

    class Mixed(FixedMin):
        def recommend(self) -> dict[str, Assignment]:
            return dict.fromkeys(("far", "apart", "long"), minimal) | {"same": PROBLEM.default}

    def run(name: str, assignment: Assignment) -> Measurement:
        if name == "same" and assignment == minimal:
            return measured(1, 20)
        return measured(1, next(times[name, assignment == PROBLEM.default]))

    guarded = Guarded(Mixed(problems), problems)
    races = drive(guarded, run)[2:]
    assert [sorted(trial.assignments) for trial in races] == [["apart", "long"]] * 2 + [["long"]] * 4
    assert [channels(trial.assignments["long"]) for trial in races] == [(None,), (1,), (1,), (None,), (None,), (1,)]
    assert guarded.recommend() == dict.fromkeys(("far", "apart", "long"), minimal) | {"same": PROBLEM.default}


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
