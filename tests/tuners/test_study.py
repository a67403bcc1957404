"""The study's phases, counts, verdict and resumption, with a scripted tuner and measured times that are made up."""

from collections.abc import Mapping
from random import Random

import pytest
from toy_overlap import TableOverlap, channels, channels_only, measured, problem

from lagom_overlap.collective import CommConfig
from lagom_overlap.errors import BackendError, BundleError
from lagom_overlap.tuners.exhaustive import Exhaustive
from lagom_overlap.tuners.fixed import Default, FixedMin
from lagom_overlap.tuners.guard import Guarded
from lagom_overlap.tuners.journal import Step, StepKind, entries_from_json, entry_to_json
from lagom_overlap.tuners.lagom import Lagom
from lagom_overlap.tuners.problem import Assignment, Failure, Measurement, Outcome
from lagom_overlap.tuners.study import Study, StudyPhase

SPACE = channels_only(1, 2, 4)
FIXED_MAX = (CommConfig(num_channels=4),)
PROBLEM = problem(SPACE, count=3, baselines={"fixed_max": FIXED_MAX, "engine_default": (CommConfig(num_channels=2),)})
OTHER = problem(SPACE, name="h", count=2, baselines={"fixed_min": (CommConfig(num_channels=1),)})
TABLE = TableOverlap(comm_s=({1: 4, 2: 5, 4: 6},), extra_s=({1: 0, 2: 0, 4: 0},), alone_s=1)
"""The untouched default is as slow as 4 channels."""


def run_step(step: Step, run=TABLE) -> dict[str, Outcome]:  # type: ignore[no-untyped-def]
    return {name: run(name, assignment) for name, assignment in step.assignments.items()}


def finish(study: Study, run=TABLE) -> list[Step]:  # type: ignore[no-untyped-def]
    steps = []
    while (step := study.next()) is not None:
        steps.append(step)
        study.report(step, run_step(step, run))
    return steps


def test_a_study_searches_then_judges_in_rounds_of_every_contender() -> None:
    study = Study((PROBLEM, OTHER), FixedMin((PROBLEM, OTHER)), num_pairs=5)
    steps = finish(study)
    # Made-up times repeat to the last bit: one pair of the default, and three rounds.
    assert [step.kind for step in steps] == [StepKind.SEARCH] + [StepKind.VERDICT] * (2 + 3 * 5)
    assert [step.number for step in steps] == list(range(18))
    assert [(step.arm, step.round) for step in steps[1:3]] == [("default against itself", None)] * 2
    arms = ["default", "engine_default", "fixed_max", "fixed_min", "tuned"]
    for number in range(3):
        assert sorted(step.arm or "" for step in steps if step.round == number) == arms
    assert len({tuple(step.arm for step in steps if step.round == number) for number in range(3)}) > 1
    assert study.phase is StudyPhase.DONE
    assert study.num_measurements == 1
    assert study.num_verdict_steps == 2 * 3 + 5 * 5, "at most"
    assert study.num_rounds == 3
    assert len(study.entries) == 18


def noisy(seed: int, faster: float):  # type: ignore[no-untyped-def]
    """Times with 2 % of noise; one channel is faster by a factor."""
    random = Random(seed)

    def run(name: str, assignment: Assignment) -> Outcome:
        time_s = random.lognormvariate(0, 0.02) / (faster if channels(assignment) == (1,) else 1.0)
        return measured(1, 100 * time_s)

    return run


def test_the_default_runs_against_itself_first_and_rounds_end_when_the_test_has_decided() -> None:
    one = problem(SPACE)
    study = Study((one,), FixedMin((one,)), num_pairs=60)
    steps = finish(study, noisy(1, 1.2))
    assert [step.arm for step in steps[1:7]] == ["default against itself"] * 6
    assert study.verdict is not None
    assert study.verdict.judgement is not None
    assert study.verdict.adopted
    assert 7 <= study.num_rounds <= 10
    assert 0.005 < (study.verdict.judgement.noise or 0) < 0.08


@pytest.mark.parametrize(("num", "most"), [(12, 0), pytest.param(100, 4, marks=pytest.mark.long)])
def test_equal_arms_are_adopted_at_most_once_in_a_hundred_whenever_the_study_ends(num: int, most: int) -> None:
    """Of 100 draws 1 % are 1; 5 and more are 0.3 % of draws of an honest test."""
    one = problem(SPACE)
    adopted = 0
    for seed in range(num):
        study = Study((one,), FixedMin((one,)), seed=seed, num_pairs=25)
        finish(study, noisy(1000 + seed, 1.0))
        assert study.verdict is not None
        adopted += study.verdict.adopted
    assert adopted <= most


def test_a_step_timed_as_a_whole_needs_no_groups() -> None:
    one = problem(SPACE)
    study = Study((one,), FixedMin((one,)), num_pairs=5)
    study.stop_search()
    while (step := study.next()) is not None:
        time_s = 1.0 if channels(step.assignments["g"]) == (1,) else 1.5
        study.report(step, {}, step_s=time_s)
    assert study.verdict is not None
    assert study.verdict.makespans_s["default"] == (1.5,) * 3
    lines = [entry_to_json(entry, (one,)) for entry in study.entries]
    assert entries_from_json(lines, (one,)) == study.entries
    resumed = Study((one,), FixedMin((one,)), num_pairs=5)
    resumed.replay(entries_from_json(lines, (one,)))
    assert resumed.verdict == study.verdict


def test_only_a_verdict_is_told_by_whole_steps() -> None:
    study = Study((PROBLEM,), FixedMin((PROBLEM,)))
    step = study.next()
    assert step is not None
    with pytest.raises(ValueError, match="outcomes are of groups"):
        study.report(step, {}, step_s=1.0)


def test_the_iteration_counts_each_group_as_often_as_it_occurs() -> None:
    study = Study((PROBLEM, OTHER), FixedMin((PROBLEM, OTHER)), num_pairs=3)
    finish(study)
    verdict = study.verdict
    assert verdict is not None
    assert verdict.makespans_s["tuned"] == (3 * 4 + 2 * 4,) * 3
    assert verdict.makespans_s["default"] == (3 * 6 + 2 * 6,) * 3
    # A group without that baseline runs its default in it.
    assert verdict.makespans_s["engine_default"] == (3 * 5 + 2 * 6,) * 3
    assert verdict.makespans_s["fixed_min"] == (3 * 6 + 2 * 4,) * 3
    assert verdict.over_default.median_ratio == 30 / 20
    assert verdict.over_baselines["engine_default"].q25 == 27 / 20
    assert verdict.best_fixed == "fixed_min"
    assert verdict.adopted
    assert study.chosen == study.recommended


def test_the_order_inside_the_rounds_depends_on_the_seed_alone() -> None:
    def order(seed: int) -> list[str | None]:
        return [step.arm for step in finish(Study((PROBLEM,), Default((PROBLEM,)), seed=seed))]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_a_tuned_assignment_equal_to_the_default_is_not_adopted() -> None:
    study = Study((PROBLEM,), Default((PROBLEM,)), num_pairs=3)
    times = iter(range(1000, 0, -1))
    finish(study, lambda name, assignment: measured(1, float(next(times))))
    assert study.verdict is not None
    assert not study.verdict.adopted


def test_where_nothing_was_found_nine_pairs_are_run_whatever_is_allowed_and_no_more() -> None:
    random = Random(3)
    study = Study((PROBLEM,), Default((PROBLEM,)), num_pairs=101)
    finish(study, lambda name, assignment: measured(1, random.uniform(0.9, 1.1)))
    assert study.num_rounds == 9


def test_the_default_is_chosen_where_the_verdict_does_not_adopt() -> None:
    slower = TableOverlap(comm_s=({1: 9, 2: 5, 4: 6},), extra_s=({1: 0, 2: 0, 4: 0},), alone_s=1)
    study = Study((PROBLEM,), FixedMin((PROBLEM,)), num_pairs=3)
    finish(study, slower)
    assert study.verdict is not None
    assert not study.verdict.adopted
    assert channels(study.recommended["g"]) == (1,)
    assert study.chosen == {"g": PROBLEM.default}


def test_the_budget_ends_the_search_and_the_verdict_is_not_counted() -> None:
    study = Study((PROBLEM,), Exhaustive((PROBLEM,)), num_pairs=3, max_measurements=2)
    steps = finish(study)
    assert [step.kind for step in steps].count(StepKind.SEARCH) == study.num_measurements == 2
    assert channels(study.recommended["g"]) == (1,)  # the default and one channel were seen


def test_stopping_the_search_voids_the_step_in_flight_and_goes_on_with_the_best_so_far() -> None:
    study = Study((PROBLEM,), Exhaustive((PROBLEM,)), num_pairs=3)
    for _ in range(2):
        step = study.next()
        assert step is not None
        study.report(step, run_step(step))
    lost = study.next()
    assert lost is not None
    study.stop_search()
    assert study.phase is StudyPhase.VERDICT
    with pytest.raises(ValueError, match="not the one just given"):
        study.report(lost, run_step(lost))
    finish(study)
    assert study.num_measurements == 2
    assert study.verdict is not None
    assert channels(study.recommended["g"]) == (1,)


def test_without_a_verdict_the_study_ends_with_the_search() -> None:
    study = Study((PROBLEM,), FixedMin((PROBLEM,)))
    study.skip_verdict()
    assert [step.kind for step in finish(study)] == [StepKind.SEARCH]
    assert (study.phase, study.verdict) == (StudyPhase.DONE, None)
    assert study.chosen == study.recommended


def test_a_verdict_that_is_cut_short_says_nothing() -> None:
    study = Study((PROBLEM,), Default((PROBLEM,)))
    for _ in range(10):
        step = study.next()
        assert step is not None
        study.report(step, run_step(step))
    study.skip_verdict()
    assert (study.next(), study.phase, study.verdict) == (None, StudyPhase.DONE, None)
    assert len(study.entries) == 10


def test_a_baseline_that_fails_is_out_for_good() -> None:
    study = Study((PROBLEM,), FixedMin((PROBLEM,)), num_pairs=4)

    def run(name: str, assignment: Assignment) -> Outcome:
        return Failure("too many") if assignment == FIXED_MAX else TABLE(name, assignment)

    steps = finish(study, run)
    assert [step.arm for step in steps].count("fixed_max") == 1
    assert study.verdict is not None
    assert set(study.verdict.over_baselines) == {"engine_default"}
    assert study.verdict.failures == {"fixed_max": "too many"}
    assert study.verdict.best_fixed is None
    assert study.verdict.adopted


def test_a_tuned_assignment_that_fails_ends_the_verdict_unadopted() -> None:
    study = Study((PROBLEM,), FixedMin((PROBLEM,)), num_pairs=4)
    step = study.next()
    assert step is not None
    study.report(step, run_step(step))

    def run(name: str, assignment: Assignment) -> Outcome:
        return Failure("gone") if channels(assignment) == (1,) else TABLE(name, assignment)

    steps = finish(study, run)
    assert steps[-1].arm == "tuned"
    assert study.verdict is not None
    assert (study.verdict.adopted, study.verdict.failures) == (False, {"tuned": "gone"})
    assert study.chosen == {"g": PROBLEM.default}


def test_a_default_that_fails_in_the_verdict_is_an_error() -> None:
    study = Study((PROBLEM,), FixedMin((PROBLEM,)), num_pairs=4)
    step = study.next()
    assert step is not None
    study.report(step, run_step(step))

    def run(name: str, assignment: Assignment) -> Outcome:
        return Failure("gone") if assignment == PROBLEM.default else TABLE(name, assignment)

    with pytest.raises(BackendError, match="default cannot run in the verdict: gone"):
        finish(study, run)
    assert study.phase is StudyPhase.DONE


def test_a_step_is_the_same_until_it_is_reported_and_no_other_is_taken() -> None:
    study = Study((PROBLEM,), Exhaustive((PROBLEM,)))
    first = study.next()
    assert first is not None
    assert study.next() == first
    study.report(first, run_step(first))
    with pytest.raises(ValueError, match="not the one just given"):
        study.report(first, run_step(first))
    second = study.next()
    assert second is not None
    bad: list[Mapping[str, Outcome]] = [{}, {"h": measured(1, 1)}, {"g": measured(1, 1, 1)}]
    for outcomes in bad:
        with pytest.raises(ValueError, match=r"outcomes are of|communication times"):
            study.report(second, outcomes)
    study.report(second, run_step(second))


@pytest.mark.parametrize("stop_at", [0, 1, 3, 5, 9, 30])
def test_a_study_resumes_from_its_journal(stop_at: int) -> None:
    def fresh() -> Study:
        return Study((PROBLEM, OTHER), Guarded(Lagom((PROBLEM, OTHER)), (PROBLEM, OTHER)), seed=4, num_pairs=5)

    whole = fresh()
    finish(whole)
    lines = [entry_to_json(entry, (PROBLEM, OTHER)) for entry in whole.entries[:stop_at]]
    resumed = fresh()
    resumed.replay(entries_from_json(lines, (PROBLEM, OTHER)))
    assert len(resumed.entries) == min(stop_at, len(whole.entries))
    finish(resumed)
    assert resumed.entries == whole.entries
    assert resumed.verdict == whole.verdict
    assert resumed.num_measurements == whole.num_measurements


def test_a_journal_whose_search_was_stopped_resumes_in_the_verdict() -> None:
    first = Study((PROBLEM,), Exhaustive((PROBLEM,)), num_pairs=3)
    step = first.next()
    assert step is not None
    first.report(step, run_step(step))
    first.stop_search()
    finish(first)
    second = Study((PROBLEM,), Exhaustive((PROBLEM,)), num_pairs=3)
    second.replay(first.entries)
    assert second.verdict == first.verdict
    assert second.num_measurements == 1


def test_a_journal_of_another_tuner_is_refused() -> None:
    first = Study((PROBLEM,), FixedMin((PROBLEM,)))
    finish(first)
    with pytest.raises(BundleError, match="step 0 of the journal is not what this study would run"):
        Study((PROBLEM,), Default((PROBLEM,))).replay(first.entries)


@pytest.mark.parametrize("num_pairs", [2, 102, -1])
def test_the_number_of_rounds_is_bounded(num_pairs: int) -> None:
    with pytest.raises(ValueError, match=f"num_pairs is {num_pairs}, must be between 3 and 101"):
        Study((PROBLEM,), Default((PROBLEM,)), num_pairs=num_pairs)


def test_a_budget_of_nothing_and_groups_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="max_measurements is 0"):
        Study((PROBLEM,), Default((PROBLEM,)), max_measurements=0)
    with pytest.raises(ValueError, match="different names"):
        Study((PROBLEM, PROBLEM), Default((PROBLEM,)))
    taken = problem(SPACE, baselines={"tuned": FIXED_MAX})
    with pytest.raises(ValueError, match="tuned"):
        Study((taken,), Default((taken,)))


def test_a_measurement_keeps_its_makespan_in_the_journal() -> None:
    study = Study((PROBLEM,), Default((PROBLEM,)), num_pairs=3)
    step = study.next()
    assert step is not None
    outcome = Measurement(makespan_s=7, comp_s=1, comm_s=(6,))
    study.report(step, {"g": outcome})
    assert study.entries[0].outcomes["g"] == outcome


def test_a_tuner_that_ends_with_its_last_measurement_is_not_cut_short_by_the_budget() -> None:
    one = problem(channels_only(1, 2))
    for budget, finished in ((1, True), (2, True), (None, True)):
        study = Study((one,), FixedMin((one,)), num_pairs=3, max_measurements=budget)
        study.skip_verdict()
        while (step := study.next()) is not None:
            study.report(step, {name: measured(1.0, 1.0) for name in step.assignments})
        assert study.tuner_finished is finished
    cut = Study((one,), Exhaustive((one,)), num_pairs=3, max_measurements=1)
    cut.skip_verdict()
    step = cut.next()
    assert step is not None
    cut.report(step, {name: measured(1.0, 1.0) for name in step.assignments})
    assert cut.next() is None
    assert cut.tuner_finished is False
