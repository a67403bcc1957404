"""The model-guided tuner, judged by brute force and closed forms that are not its own model."""

from dataclasses import replace
from itertools import product
from math import exp, inf
from random import Random

import numpy as np
import pytest
from foreign_overlap import CHANNELS, CHUNKS, DEFAULT, SPACE, overlap
from toy_overlap import Run, drive, failing, measured, problem

from lagom_overlap.collective import Algorithm, CommConfig, ConfigSpace, Protocol, Subspace
from lagom_overlap.errors import SpaceError, UnknownNameError
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.model_based import ModelBased
from lagom_overlap.tuners.model_based.effort import EFFORTS, MOST_EFFORT, Drift
from lagom_overlap.tuners.model_based.evidence import LEAST_SIGMA, PRIOR_SIGMA, Arms
from lagom_overlap.tuners.model_based.model import Prior
from lagom_overlap.tuners.model_based.posterior import Lesson, Pool
from lagom_overlap.tuners.model_based.search_space import lattice_of
from lagom_overlap.tuners.problem import Assignment, Failure, Measurement, Outcome

GLOO = ConfigSpace((Subspace(num_channels=(1, 2, 4, 8), chunk_bytes=(2**19, 2**20, 2**21)),))


def shortest_s(problems: Problems, run: Run) -> float:
    """Brute force over the space of the first group."""
    spaces = [list(space) for space in problems[0].spaces]
    return min(makespan_s(run, assignment) for assignment in product(*spaces))


def makespan_s(run: Run, assignment: Assignment) -> float:
    outcome = run("g", assignment)
    return outcome.makespan_s if isinstance(outcome, Measurement) else inf


@pytest.mark.parametrize("num_comms", [1, 2])
@pytest.mark.parametrize("comp_s", [0.5e-3, 2e-3, 6e-3])
def test_it_finds_nearly_what_brute_force_finds_in_few_measurements(num_comms: int, comp_s: float) -> None:
    problems = (problem(SPACE, num_comms=num_comms, default=DEFAULT),)
    run = overlap(num_comms, comp_s=comp_s)
    tuner = ModelBased(problems)
    trials = drive(tuner, run)
    assert len(trials) <= 18
    assert makespan_s(run, tuner.recommend()["g"]) <= 1.03 * shortest_s(problems, run)


def test_more_collectives_do_not_need_more_measurements() -> None:
    counts = []
    for num_comms in (1, 8):
        problems = (problem(SPACE, num_comms=num_comms, default=DEFAULT),)
        counts.append(len(drive(ModelBased(problems), overlap(num_comms, comp_s=1e-3 * num_comms))))
    assert max(counts) <= 16


def test_sixty_four_collectives_are_tuned_together() -> None:
    problems = (problem(SPACE, num_comms=64, default=DEFAULT),)
    run = overlap(64, comp_s=0.02)
    tuner = ModelBased(problems, effort="quick")
    assert len(drive(tuner, run)) <= 12
    assert makespan_s(run, tuner.recommend()["g"]) < 0.9 * makespan_s(run, problems[0].default)


@pytest.mark.parametrize("seed", range(8))
def test_without_noise_it_never_ends_slower_than_the_default(seed: int) -> None:
    # A machine without any structure: no model fits.
    rng = Random(seed)
    times = {config: (rng.uniform(1, 2), rng.uniform(1, 4)) for config in (*SPACE, CommConfig())}

    def run(name: str, assignment: Assignment) -> Measurement:
        comm_s = [times[config][0] for config in assignment]
        return measured(sum(times[config][1] for config in assignment), *comm_s)

    for default in (DEFAULT, CommConfig()):
        tuner = ModelBased((problem(SPACE, num_comms=2, default=default),))
        drive(tuner, run)
        assert makespan_s(run, tuner.recommend()["g"]) <= makespan_s(run, (default,) * 2)


def test_a_default_that_is_best_is_kept_under_noise() -> None:
    # All settings are equal: whatever looks better is noise, and adopting it would be harmless but unfounded.
    kept = 0
    for seed in range(12):
        rng = Random(seed)

        def run(name: str, assignment: Assignment, rng: Random = rng) -> Measurement:
            penalty = 1.0 if assignment == (DEFAULT,) else 1.03
            return measured(2e-3 * penalty * exp(rng.gauss(0, 0.02)), 1e-3 * exp(rng.gauss(0, 0.02)))

        tuner = ModelBased((problem(SPACE, default=DEFAULT),), seed=seed)
        drive(tuner, run)
        kept += tuner.recommend()["g"] == (DEFAULT,)
    assert kept >= 11


def test_an_untouched_default_outside_the_space_is_an_arm_like_any_other() -> None:
    problems = (problem(GLOO, num_comms=2),)
    slow = overlap(2)

    def run(name: str, assignment: Assignment) -> Measurement:
        if assignment == problems[0].default:
            return measured(1e-3, 0.5e-3, 0.4e-3)
        outcome = slow(name, assignment)
        assert isinstance(outcome, Measurement)
        return outcome

    tuner = ModelBased(problems)
    drive(tuner, run)
    assert tuner.recommend()["g"] == problems[0].default
    tuner = ModelBased(problems)
    drive(tuner, slow)
    assert makespan_s(slow, tuner.recommend()["g"]) <= 1.02 * shortest_s(problems, slow)


def test_what_failed_is_not_asked_again_and_not_recommended() -> None:
    problems = (problem(SPACE, num_comms=1, default=DEFAULT),)
    everything = overlap(1)
    first = drive(ModelBased(problems), everything)[1].assignments["g"]
    tuner = ModelBased(problems)
    trials = drive(tuner, failing(first, otherwise=everything))
    assert [trial.assignments["g"] for trial in trials].count(first) == 1
    assert tuner.recommend()["g"] not in {first, (DEFAULT,)}


def test_configurations_of_a_failed_assignment_are_left_out_of_others() -> None:
    # Nothing but the default's 8 channels can run, which no surrogate knows.
    problems = (problem(SPACE, num_comms=4, default=DEFAULT),)
    everything = overlap(4, comp_s=1e-2)
    failed: list[Assignment] = []

    def run(name: str, assignment: Assignment) -> Outcome:
        if any(config.num_channels != 8 for config in assignment):
            failed.append(assignment)
            return Failure("not 8 channels")
        return everything(name, assignment)

    drive(ModelBased(problems), run)
    assert len(failed) > 1
    bad = [{(j, config) for j, config in enumerate(arm) if config.num_channels != 8} for arm in failed]
    assert all(not one & other for index, one in enumerate(bad) for other in bad[:index])


def test_what_ran_once_and_fails_later_is_forgotten() -> None:
    arms = Arms()
    arms.add((DEFAULT,), measured(1.0, 0.5))
    arms.add((DEFAULT,), Failure("out of memory"))
    assert arms.failed((DEFAULT,))
    assert arms.num((DEFAULT,)) == 0
    assert arms.mean_s((DEFAULT,)) == inf
    arms.add((DEFAULT,), measured(1.0, 0.5))
    assert arms.failed((DEFAULT,))


def test_where_the_default_cannot_run_anything_that_does_replaces_it() -> None:
    problems = (problem(SPACE, num_comms=1, default=DEFAULT),)
    tuner = ModelBased(problems)
    run = failing((DEFAULT,), otherwise=overlap(1))
    drive(tuner, run)
    assert not isinstance(run("g", tuner.recommend()["g"]), Failure)


def test_a_model_that_keeps_missing_is_not_asked_any_more() -> None:
    # Communication jumps by a factor of up to five from place to place.
    rng = Random(4)
    times = {config: 10 ** rng.uniform(0, 0.7) for config in SPACE}

    def run(name: str, assignment: Assignment) -> Measurement:
        return measured(0.5, *(times[config] for config in assignment))

    trials = drive(ModelBased((problem(SPACE, num_comms=2, default=DEFAULT),), effort="thorough"), run)
    steps = [index for index, trial in enumerate(trials) if "the model does not fit here" in trial.reasons["g"]]
    assert steps
    # From the fastest so far, all collectives by the same factor of one knob; 1.5 channels become 1 or 2.
    fastest = min((trial.assignments["g"] for trial in trials[: steps[0]]), key=lambda arm: makespan_s(run, arm))
    factors = {
        ((new.num_channels or 0) / (old.num_channels or 1), (new.chunk_bytes or 0) / (old.chunk_bytes or 1))
        for new, old in zip(trials[steps[0]].assignments["g"], fastest, strict=True)
    }
    assert factors <= {(1, 0.5), (1, 2), (2, 1), (0.5, 1), (1 / 3, 1), (2 / 3, 1)}
    assert len(factors) == 1


def test_a_huge_space_is_thinned_and_keeps_its_ends_and_the_default() -> None:
    default = CommConfig(num_channels=37, num_threads=320, chunk_bytes=2048 * 77)
    space = ConfigSpace(
        (
            Subspace(
                num_channels=tuple(range(1, 129)),
                num_threads=tuple(range(96, 641, 32)),
                chunk_bytes=tuple(2048 * k for k in range(1, 1025)),
            ),
        )
    )
    lattice = lattice_of(space, default, [(None, None, None)])
    assert len(lattice) < 600
    assert default in lattice.place
    assert {config.num_channels for config in lattice.configs} >= {1, 128, 37}
    assert {config.num_threads for config in lattice.configs} == {320}
    assert all(config in space for config in lattice.configs)


def test_a_second_implementation_that_is_faster_is_found() -> None:
    space = ConfigSpace(
        tuple(
            Subspace(algorithm=Algorithm.RING, protocol=protocol, num_channels=CHANNELS, chunk_bytes=CHUNKS)
            for protocol in (Protocol.SIMPLE, Protocol.LL128)
        )
    )
    default = replace(DEFAULT, algorithm=Algorithm.RING, protocol=Protocol.SIMPLE)
    base = overlap(2, comp_s=2e-3)

    def run(name: str, assignment: Assignment) -> Measurement:
        outcome = base(name, assignment)
        assert isinstance(outcome, Measurement)
        factors = [0.8 if config.protocol is Protocol.LL128 else 1.0 for config in assignment]
        return measured(outcome.comp_s, *(x * factor for x, factor in zip(outcome.comm_s, factors, strict=True)))

    tuner = ModelBased((problem(space, num_comms=2, default=default),))
    drive(tuner, run)
    assert Protocol.LL128 in {config.protocol for config in tuner.recommend()["g"]}


@pytest.mark.parametrize("effort", ["quick", "normal", "thorough"])
def test_an_effort_bounds_the_measurements(effort: str) -> None:
    run = overlap(2, noise=0.1)
    num_trials = len(drive(ModelBased((problem(SPACE, num_comms=2, default=DEFAULT),), effort=effort), run))
    assert num_trials <= MOST_EFFORT * EFFORTS[effort].max_measurements


def test_bad_options_are_refused() -> None:
    problems = (problem(SPACE, default=DEFAULT),)
    with pytest.raises(UnknownNameError, match="thorough"):
        ModelBased(problems, effort="throrough")
    with pytest.raises(SpaceError, match="confidence is -1"):
        ModelBased(problems, confidence=-1)


# The parts


def test_what_a_group_learns_moves_the_prior_of_another_but_not_its_own() -> None:
    prior = Prior(np.zeros(2), np.ones(2))
    pool = Pool()
    pool.learn("wire", "a", Lesson(precision=np.array([100.0, 1e-9]), mean=np.array([0.5, 9.0]), prior_sd=np.ones(2)))
    assert pool.prior("wire", "a", prior) is None
    assert pool.prior("another wire", "b", prior) is None
    taught = pool.prior("wire", "b", prior)
    assert taught is not None
    # Weight 1 / (1/100 + 1/16) against the prior's 1.
    weight = 1 / (0.01 + 0.0625)
    assert taught.mean[0] == pytest.approx(0.5 * weight / (1 + weight))
    assert taught.mean[1] == pytest.approx(0.0, abs=1e-6)
    assert taught.sd[0] < 0.4
    assert taught.sd[1] == pytest.approx(1.0)


def test_a_groups_prior_holds_what_the_others_know_now_and_nothing_of_its_own() -> None:
    prior, rng = Prior(np.zeros(2), np.ones(2)), np.random.default_rng(1)

    def lesson() -> Lesson:
        return Lesson(precision=rng.uniform(1, 50, 2), mean=rng.normal(size=2), prior_sd=np.ones(2))

    last = {name: lesson() for name in "abc"}
    pool, others = Pool(), Pool()
    for name in "abcabc":
        pool.learn("wire", name, lesson())
    for name, each in last.items():
        pool.learn("wire", name, each)
    for name in "bc":
        others.learn("wire", name, last[name])
    found, expected = pool.prior("wire", "a", prior), others.prior("wire", "new", prior)
    assert found is not None
    assert expected is not None
    assert found.mean == pytest.approx(expected.mean, rel=1e-9)
    assert found.sd == pytest.approx(expected.sd, rel=1e-9)


def test_noise_is_believed_until_repeats_tell_it() -> None:
    arms = Arms()
    arms.add((DEFAULT,), measured(1.0, 0.5))
    assert arms.sigma == PRIOR_SIGMA
    arms.add((DEFAULT,), measured(1.0, 0.5))
    assert arms.sigma == LEAST_SIGMA
    rng = Random(2)
    noisy = Arms()
    for _ in range(200):
        noisy.add((DEFAULT,), measured(exp(rng.gauss(0, 0.05)), exp(rng.gauss(0, 0.05))))
    assert noisy.sigma == pytest.approx(0.05, rel=0.1)


def test_all_work_is_spread_over_steps_that_do_not_grow_with_the_groups() -> None:
    # What one step may cost bounds the groups planned in it; the others are measured once more, and all get there.
    problems = tuple(problem(SPACE, name=f"g{index}", num_comms=2, default=DEFAULT) for index in range(12))
    run = overlap(2)
    tuner = ModelBased(problems, step_work=60_000)
    trials = drive(tuner, run)
    waited = [sum(reason.startswith("repeated") for reason in trial.reasons.values()) for trial in trials]
    assert max(len(trial.assignments) - num for trial, num in zip(trials[1:], waited[1:], strict=True)) <= 6
    for made in problems:
        assert makespan_s(run, tuner.recommend()[made.group.name]) <= 1.05 * shortest_s(problems[:1], run)


def test_a_group_that_waits_is_not_asked_what_failed() -> None:
    problems = tuple(problem(SPACE, name=f"g{index}", num_comms=1, default=DEFAULT) for index in range(6))
    everything, failed = overlap(1), set[tuple[str, Assignment]]()

    def run(name: str, assignment: Assignment) -> Outcome:
        assert (name, assignment) not in failed
        if assignment != (DEFAULT,):
            failed.add((name, assignment))
            return Failure("only the default runs")
        return everything(name, assignment)

    tuner = ModelBased(problems, step_work=1)
    drive(tuner, run)
    assert failed
    assert set(tuner.recommend().values()) == {(DEFAULT,)}


# Another job, in the middle of a search


def changing(at: int, factor: float, first: Run) -> tuple[Run, Run]:
    """A run whose computations take `factor` times as long from the `at`-th measurement on; and what it is then."""

    def later(name: str, assignment: Assignment) -> Outcome:
        outcome = first(name, assignment)
        assert isinstance(outcome, Measurement)
        return measured(factor * outcome.comp_s, *outcome.comm_s)

    told = [0]

    def run(name: str, assignment: Assignment) -> Outcome:
        told[0] += 1
        return (later if told[0] > at else first)(name, assignment)

    return run, later


@pytest.mark.parametrize("factor", [0.5, 1.6, 3.0])
def test_where_computations_change_in_the_middle_it_begins_anew(factor: float) -> None:
    problems = (problem(SPACE, num_comms=2, default=DEFAULT),)
    run, later = changing(3, factor, overlap(2, comp_s=3e-3))
    tuner = ModelBased(problems)
    trials = drive(tuner, run)
    assert len(trials) <= 24
    assert sum("has the default's changed" in trial.reasons["g"] for trial in trials) == 1
    found_s = makespan_s(later, tuner.recommend()["g"])
    assert found_s <= makespan_s(later, problems[0].default)
    assert factor < 1 or found_s <= 1.1 * shortest_s(problems, later)


def test_one_late_rank_costs_one_look_at_the_default_and_is_forgotten() -> None:
    drift = Drift((DEFAULT,))
    other = (CommConfig(num_channels=2, chunk_bytes=2**20),)
    assert not drift.see((DEFAULT,), measured(1.0, 0.5), None)
    assert not drift.see(other, measured(0.9, 0.6), None)
    assert not drift.see(other, measured(1.4, 0.9), None)
    assert drift.is_suspicious
    assert not drift.see((DEFAULT,), measured(1.01, 0.5), None)
    assert not drift.is_suspicious
    assert drift.arms.num(other) == 1
    assert drift.arms.num((DEFAULT,)) == 2


def test_when_the_default_has_changed_likewise_all_before_is_forgotten() -> None:
    drift = Drift((DEFAULT,))
    other = (CommConfig(num_channels=2, chunk_bytes=2**20),)
    drift.see((DEFAULT,), measured(1.0, 0.5), None)
    drift.see(other, measured(0.9, 0.6), None)
    third = (CommConfig(num_channels=4, chunk_bytes=2**20),)
    drift.see(third, measured(1.5, 0.6), 1.0)
    assert drift.is_suspicious, "far from a trusted surrogate"
    assert drift.see((DEFAULT,), measured(1.6, 0.5), None)
    assert dict(drift.arms.runs) == {third: [measured(1.5, 0.6)], (DEFAULT,): [measured(1.6, 0.5)]}
    assert not drift.see(other, measured(1.4, 0.6), None)
    assert not drift.is_suspicious


def test_the_other_direction_is_no_confirmation_and_a_failure_none_either() -> None:
    for answer in (measured(0.6, 0.5), Failure("out of memory")):
        drift = Drift((DEFAULT,))
        other = (CommConfig(num_channels=2, chunk_bytes=2**20),)
        drift.see((DEFAULT,), measured(1.0, 0.5), None)
        drift.see(other, measured(1.0, 0.6), None)
        drift.see(other, measured(1.6, 0.6), None)
        assert not drift.see((DEFAULT,), answer, None)
        assert not drift.is_suspicious
        assert drift.arms.num(other) == 1
