"""Algorithms 1 and 2 of the Lagom paper as printed, on cases worked by hand."""

import logging

import pytest
from toy_overlap import TableOverlap, channels, channels_only, drive, failing, problem

from lagom_overlap.collective import CommConfig
from lagom_overlap.errors import UnknownNameError
from lagom_overlap.tuners.lagom import Lagom
from lagom_overlap.tuners.problem import Assignment, Failure, GroupProblem, Outcome
from lagom_overlap.workload import CompOp, Gemm, OverlapGroup

EIGHT = CommConfig(num_channels=8)


def overlap_of(num_comms: int, num_computations: int) -> GroupProblem:
    """A group whose default is 8 of 1, 2, 4, 8 channels."""
    one = problem(channels_only(1, 2, 4, 8), num_comms=num_comms, default=EIGHT)
    computations = tuple(CompOp(name=f"m{i}", work=Gemm(8, 8, 8)) for i in range(num_computations))
    group = OverlapGroup(name="g", computations=computations, comms=one.group.comms)
    return GroupProblem(group=group, spaces=one.spaces, default=one.default)


def ended(caplog: pytest.LogCaptureFixture) -> str:
    """What was said of the group on which the algorithms do not end; empty where they do."""
    return " ".join(record.getMessage() for record in caplog.records)


def test_where_less_is_slower_each_collective_is_probed_once_and_the_input_comes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # x' = 10 > x = 3 ends c0, then c1 by the tie of H = 0.01; line 7 appends s_j, which nothing ever changed.
    slower = {1: 10.0, 2: 8.0, 4: 5.0, 8: 3.0}
    overlap = TableOverlap(comm_s=(slower, slower), extra_s=({n: 0.1 * n for n in slower},) * 2, alone_s=5)
    tuner = Lagom((overlap_of(2, 2),), mode="printed")
    assert [channels(trial.assignments["g"]) for trial in drive(tuner, overlap)] == [(8, 8), (1, 8), (8, 1)]
    assert channels(tuner.recommend()["g"]) == (8, 8)
    assert not ended(caplog)


def test_what_hides_communication_is_found_and_thrown_away(caplog: pytest.LogCaptureFixture) -> None:
    """X' < Y' at the minimum: the best setting by condition (1) of section 3.4, and line 7 keeps the other one."""
    overlap = TableOverlap(comm_s=({1: 2.0, 2: 2.0, 8: 2.0, 4: 2.0},), extra_s=({1: 0, 2: 1, 4: 2, 8: 4},), alone_s=5)
    tuner = Lagom((overlap_of(1, 1),), mode="printed")
    assert [channels(trial.assignments["g"]) for trial in drive(tuner, overlap)] == [(8,), (1,)]
    assert channels(tuner.recommend()["g"]) == (8,)
    assert not ended(caplog)
    repaired = Lagom((overlap_of(1, 1),))
    drive(repaired, overlap)
    assert channels(repaired.recommend()["g"]) == (1,)


@pytest.mark.parametrize(
    ("at_least", "num_computations", "words"),
    [
        (6.0, 1, "lr = -0.333 is negative where communication improves"),  # (6 - 8) / 6
        (8.0, 1, "lr is 0 and Eq. 7 divides by 0"),
    ],
)
def test_a_minimum_that_is_not_slower_never_ends(
    at_least: float, num_computations: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    times = {1: at_least, 2: 8.0, 4: 8.0, 8: 8.0}
    overlap = TableOverlap(comm_s=(times,), extra_s=(dict.fromkeys(times, 0),), alone_s=1)
    tuner = Lagom((overlap_of(1, num_computations),), mode="printed")
    with caplog.at_level(logging.WARNING):
        assert len(drive(tuner, overlap)) == 2
    assert words in ended(caplog)
    assert channels(tuner.recommend()["g"]) == (8,)


def test_the_argmin_over_m_leaves_out_collectives_beyond_the_computations(caplog: pytest.LogCaptureFixture) -> None:
    slower = {1: 10.0, 2: 8.0, 4: 5.0, 8: 3.0}
    overlap = TableOverlap(comm_s=(slower, slower), extra_s=(dict.fromkeys(slower, 0),) * 2, alone_s=1)
    tuner = Lagom((overlap_of(2, 1),), mode="printed")
    assert [channels(trial.assignments["g"]) for trial in drive(tuner, overlap)] == [(8, 8), (1, 8)]
    assert "argmin over the M = 1 computations never chooses c1" in ended(caplog)


def test_a_setting_that_cannot_run_and_an_unknown_mode_are_said(caplog: pytest.LogCaptureFixture) -> None:
    slower = {1: 10.0, 2: 8.0, 4: 5.0, 8: 3.0}
    overlap = TableOverlap(comm_s=(slower,), extra_s=(dict.fromkeys(slower, 0),), alone_s=1)
    drive(Lagom((overlap_of(1, 1),), mode="printed"), failing((CommConfig(num_channels=1),), otherwise=overlap))
    assert "no line for a setting that cannot run" in ended(caplog)
    with pytest.raises(UnknownNameError, match="printed"):
        Lagom((overlap_of(1, 1),), mode="pritned")


def test_a_trial_given_up_for_its_slowness_is_judged_by_what_was_read(caplog: pytest.LogCaptureFixture) -> None:
    """One channel takes 10 of the default's 3: line 5 ends c0, then c1, as if both had run to their end."""
    slower = {1: 10.0, 2: 8.0, 4: 5.0, 8: 3.0}
    overlap = TableOverlap(comm_s=(slower, slower), extra_s=(dict.fromkeys(slower, 0),) * 2, alone_s=5)

    def run(name: str, assignment: Assignment) -> Outcome:
        measured = overlap(name, assignment)
        return Failure("abandoned after one step", measured) if measured.makespan_s > 12 else measured

    tuner = Lagom((overlap_of(2, 2),), mode="printed")
    assert [channels(trial.assignments["g"]) for trial in drive(tuner, run)] == [(8, 8), (1, 8), (8, 1)]
    assert not ended(caplog)
