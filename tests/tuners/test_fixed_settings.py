"""The tuners that measure one setting or all of them: fixed, static cap, threads only, exhaustive."""

from itertools import product

import pytest
from toy_overlap import TableOverlap, channels, channels_only, drive, failing, measured, problem

from lagom_overlap.collective import Algorithm, CommConfig, ConfigSpace, Subspace
from lagom_overlap.errors import SpaceError
from lagom_overlap.tuners.exhaustive import Exhaustive
from lagom_overlap.tuners.fixed import Default, FixedMax, FixedMin, StaticCap
from lagom_overlap.tuners.problem import Assignment, Failure, Measurement
from lagom_overlap.tuners.threads_only import NO_KNOB, ThreadsOnly

TREE = Subspace(algorithm=Algorithm.TREE, num_channels=(1, 2), num_threads=(64, 128), chunk_bytes=(10, 20))
RING = Subspace(algorithm=Algorithm.RING, num_channels=(2, 4, 8), num_threads=(96, 128, 256, 512), chunk_bytes=(30, 40))
BOTH = ConfigSpace((TREE, RING))
RING_DEFAULT = CommConfig(algorithm=Algorithm.RING, num_channels=8, num_threads=256, chunk_bytes=40)


def flat(name: str, assignment: Assignment) -> Measurement:
    return measured(1, *(1.0 for _ in assignment))


def test_the_default_is_the_engine_untouched_measured_once() -> None:
    tuner = Default((problem(BOTH),))
    (trial,) = drive(tuner, flat)
    assert trial.assignments == {"g": (CommConfig(),)}
    assert tuner.recommend() == {"g": (CommConfig(),)}


def test_fixed_settings_lie_in_the_default_s_subspace() -> None:
    one = problem(BOTH, default=RING_DEFAULT, num_comms=2)
    small, large = FixedMin((one,)), FixedMax((one,))
    drive(small, flat)
    drive(large, flat)
    assert small.recommend()["g"] == (RING.minimum,) * 2
    assert large.recommend()["g"] == (RING.maximum,) * 2


def test_a_fixed_setting_that_cannot_run_leaves_the_default() -> None:
    one = problem(BOTH, default=RING_DEFAULT)
    tuner = FixedMax((one,))
    drive(tuner, failing((RING.maximum,), otherwise=flat))
    assert tuner.recommend() == {"g": one.default}


@pytest.mark.parametrize(("cap", "num_channels"), [(3, 2), (4, 4), (99, 8), (1, 2)])
def test_a_static_cap_takes_the_most_channels_below_it_and_leaves_the_rest(cap: int, num_channels: int) -> None:
    tuner = StaticCap((problem(BOTH, default=RING_DEFAULT),), cap=cap)
    drive(tuner, flat)
    (config,) = tuner.recommend()["g"]
    assert config == CommConfig(algorithm=Algorithm.RING, num_channels=num_channels, num_threads=256, chunk_bytes=40)


def test_liger_s_cap_of_three_is_three_channels_where_the_space_has_three() -> None:
    """NCCL_MAX_NCHANNELS=3 (PPoPP'24)."""
    tuner = StaticCap((problem(channels_only(1, 2, 3, 4, 8), default=CommConfig(num_channels=8)),))
    (trial,) = drive(tuner, lambda *_: measured(1.0, 1.0))
    assert [config.num_channels for config in trial.assignments["g"]] == [3]


def test_a_static_cap_never_raises_the_channels() -> None:
    default = CommConfig(algorithm=Algorithm.RING, num_channels=4, num_threads=256, chunk_bytes=40)
    tuner = StaticCap((problem(BOTH, default=default),), cap=8)
    drive(tuner, flat)
    assert tuner.recommend()["g"] == (default,)


def test_a_static_cap_without_a_channel_knob_is_the_default() -> None:
    tuner = StaticCap((problem(ConfigSpace((Subspace(chunk_bytes=(10, 20)),))),))
    (trial,) = drive(tuner, flat)
    assert trial.assignments["g"] == (CommConfig(),)
    assert "changes nothing" in trial.reasons["g"]


def test_a_cap_below_one_is_refused() -> None:
    with pytest.raises(SpaceError, match="cap is 0, must be at least 1"):
        StaticCap((problem(BOTH),), cap=0)


def test_only_threads_move_and_the_fastest_group_wins() -> None:
    # Z by threads: 96 -> 9, 128 -> 6, 256 (default) -> 8, 512 -> 7. Down to 128 and 96, then up to 512.
    times = {96: 9.0, 128: 6.0, 256: 8.0, 512: 7.0}
    tuner = ThreadsOnly((problem(BOTH, default=RING_DEFAULT),))
    trials = drive(tuner, lambda name, assignment: measured(1, times[assignment[0].num_threads or 0]))
    configs = [trial.assignments["g"][0] for trial in trials]
    assert [config.num_threads for config in configs] == [256, 128, 96, 512]
    assert {(config.algorithm, config.num_channels, config.chunk_bytes) for config in configs} == {
        (Algorithm.RING, 8, 40)
    }
    assert tuner.recommend()["g"][0].num_threads == 128


def test_a_direction_that_is_slower_is_not_followed() -> None:
    times = {96: 1.0, 128: 9.0, 256: 8.0, 512: 9.0}
    tuner = ThreadsOnly((problem(BOTH, default=RING_DEFAULT),))
    trials = drive(tuner, lambda name, assignment: measured(1, times[assignment[0].num_threads or 0]))
    assert [trial.assignments["g"][0].num_threads for trial in trials] == [256, 128, 512]
    assert tuner.recommend()["g"] == (RING_DEFAULT,)


def test_threads_of_one_collective_after_the_other() -> None:
    one = problem(BOTH, default=RING_DEFAULT, num_comms=2)
    wanted = (512, 96)

    def run(name: str, assignment: Assignment) -> Measurement:
        pairs = zip(assignment, wanted, strict=True)
        return measured(1, *(1 + abs((config.num_threads or 0) - best) / 100 for config, best in pairs))

    tuner = ThreadsOnly((one,))
    drive(tuner, run)
    assert tuple(config.num_threads for config in tuner.recommend()["g"]) == wanted


def test_without_a_thread_knob_the_default_is_measured_and_the_search_says_so() -> None:
    tuner = ThreadsOnly((problem(channels_only(1, 2)),))
    (trial,) = drive(tuner, flat)
    assert trial.assignments["g"] == (CommConfig(),)
    assert trial.reasons["g"] == NO_KNOB
    assert tuner.recommend()["g"] == (CommConfig(),)


def test_exhaustive_search_tries_the_default_and_every_assignment_once() -> None:
    one = problem(BOTH, num_comms=2)
    trials = drive(Exhaustive((one,)), flat)
    asked = [trial.assignments["g"] for trial in trials]
    assert asked == [one.default, *product(BOTH, BOTH)]


def test_exhaustive_search_finds_the_smallest_makespan() -> None:
    overlap = TableOverlap(
        comm_s=({1: 9, 2: 4, 4: 3}, {1: 9, 2: 5, 4: 1}), extra_s=({1: 0, 2: 1, 4: 9}, {1: 0, 2: 2, 4: 3}), alone_s=2
    )
    tuner = Exhaustive((problem(channels_only(1, 2, 4), num_comms=2),))
    drive(tuner, overlap)
    # (2, 4): X 5, Y 6.
    assert channels(tuner.recommend()["g"]) == (2, 4)


def test_exhaustive_search_keeps_the_first_of_equals() -> None:
    tuner = Exhaustive((problem(channels_only(1, 2), default=CommConfig(num_channels=2)),))
    trials = drive(tuner, flat)
    assert [channels(trial.assignments["g"]) for trial in trials] == [(2,), (1,)]
    assert channels(tuner.recommend()["g"]) == (2,)


def test_exhaustive_search_keeps_to_what_runs() -> None:
    tuner = Exhaustive((problem(channels_only(1, 2)),))
    drive(tuner, lambda name, assignment: Failure("no"))
    assert tuner.recommend()["g"] == (CommConfig(),)


def test_exhaustive_search_refuses_a_large_space() -> None:
    with pytest.raises(SpaceError, match="group 'g' has 32768 assignments, exhaustive search tries at most 4096"):
        Exhaustive((problem(BOTH, num_comms=3),))
    assert Exhaustive((problem(BOTH, num_comms=3),), limit=40_000).ask() is not None
