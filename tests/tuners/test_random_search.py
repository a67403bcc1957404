"""Random search: the default first, then draws from the space, the smallest measured makespan."""

import pytest
from toy_overlap import channels_only, problem

from lagom_overlap.errors import SpaceError
from lagom_overlap.tuners.problem import Measurement
from lagom_overlap.tuners.random_search import RandomSearch

PROBLEM = problem(channels_only(1, 2, 4, 8), count=2)


def test_it_stands_by_the_fastest_of_as_many_as_it_was_given() -> None:
    tuner = RandomSearch((PROBLEM,), seed=1, num_measurements=12)
    seen = []
    while (trial := tuner.ask()) is not None:
        assignment = trial.assignments[PROBLEM.group.name]
        makespan_s = 1.0 + (hash(str(assignment)) % 97) / 100
        seen.append((makespan_s, assignment))
        tuner.tell(trial, {PROBLEM.group.name: Measurement(makespan_s=makespan_s, comp_s=1.0, comm_s=(0.1,))})
    assert len(seen) == 12
    assert seen[0][1] == PROBLEM.default
    assert all(config in space for _, drawn in seen[1:] for config, space in zip(drawn, PROBLEM.spaces, strict=True))
    assert tuner.recommend()[PROBLEM.group.name] == min(seen, key=lambda pair: pair[0])[1]


def test_a_number_of_measurements_below_one_is_refused() -> None:
    with pytest.raises(SpaceError, match="num_measurements is 0"):
        RandomSearch((PROBLEM,), num_measurements=0)
