"""Searches over single groups, side by side."""

from toy_overlap import channels, channels_only, drive, measured, problem

from lagom_overlap.collective import CommConfig
from lagom_overlap.tuners.groupwise import GroupwiseTuner, Probe, Search, group_random
from lagom_overlap.tuners.problem import Assignment, Failure, Measurement, Outcome

SPACE = channels_only(1, 2, 4)


def at(value: int) -> Assignment:
    return (CommConfig(num_channels=value),)


def scripted(*asks_and_stands: tuple[int, int | None], end: int) -> Search:
    for ask, stand in asks_and_stands:
        yield Probe(assignment=at(ask), reason=f"try {ask}", incumbent=None if stand is None else at(stand))
    return at(end)


def fine(name: str, assignment: Assignment) -> Measurement:
    return measured(1, 1)


def test_groups_advance_together_and_a_finished_one_is_left_out() -> None:
    problems = (problem(SPACE, name="g"), problem(SPACE, name="h"))
    searches = {"g": scripted((1, None), end=1), "h": scripted((2, None), (4, 2), end=4)}
    tuner = GroupwiseTuner(problems, lambda one: searches[one.group.name])
    trials = drive(tuner, fine)
    assert [dict(trial.assignments) for trial in trials] == [{"g": at(1), "h": at(2)}, {"h": at(4)}]
    assert [dict(trial.reasons) for trial in trials] == [{"g": "try 1", "h": "try 2"}, {"h": "try 4"}]
    assert tuner.recommend() == {"g": at(1), "h": at(4)}


def test_the_stand_follows_the_probes_and_a_probe_without_one_keeps_it() -> None:
    tuner = GroupwiseTuner((problem(SPACE),), lambda one: scripted((1, None), (2, 1), (4, None), end=4))
    stands = [channels(tuner.recommend()["g"])]
    while (trial := tuner.ask()) is not None:
        tuner.tell(trial, {"g": measured(1, 1)})
        stands.append(channels(tuner.recommend()["g"]))
    assert stands == [(None,), (1,), (1,), (4,)]


def test_a_stand_that_failed_is_not_taken() -> None:
    def run(name: str, assignment: Assignment) -> Outcome:
        return Failure("no") if assignment == at(2) else measured(1, 1)

    ended = GroupwiseTuner((problem(SPACE),), lambda one: scripted((2, 1), end=2))
    drive(ended, run)
    assert channels(ended.recommend()["g"]) == (1,)
    # It stood by 2 before it was tried: back to the default.
    early = GroupwiseTuner((problem(SPACE),), lambda one: scripted((2, 2), end=2))
    drive(early, run)
    assert channels(early.recommend()["g"]) == (None,)


def test_a_search_without_a_probe_is_over_at_once() -> None:
    tuner = GroupwiseTuner((problem(SPACE),), lambda one: scripted(end=2))
    assert tuner.ask() is None
    assert tuner.recommend() == {"g": at(2)}


def test_each_group_has_its_own_random_numbers() -> None:
    g, h = problem(SPACE, name="g"), problem(SPACE, name="h")
    assert group_random(1, g).random() == group_random(1, g).random()
    assert len({group_random(1, g).random(), group_random(1, h).random(), group_random(2, g).random()}) == 3
