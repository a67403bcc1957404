"""AutoCCL's step, order and stop rules on curves worked by hand."""

from math import inf

import pytest
from toy_overlap import TableOverlap, channels, channels_only, drive, measured, problem

from lagom_overlap.collective import Algorithm, CommConfig, ConfigSpace, Subspace
from lagom_overlap.errors import SpaceError
from lagom_overlap.tuners.autoccl import AutoCcl, learning_rate, next_neighbour
from lagom_overlap.tuners.problem import Assignment, Measurement
from lagom_overlap.tuners.registry import search_measurements


def test_the_learning_rate_is_four_fifths_of_the_relative_improvement() -> None:
    assert learning_rate(10, 5) == pytest.approx(0.4)
    assert learning_rate(10, 10) == learning_rate(10, 11) == -1
    assert learning_rate(inf, 3) == 0.8


def test_the_step_is_the_farthest_of_the_three_nearest_and_grows_with_the_learning_rate() -> None:
    place = (10, 0, 0)
    assert next_neighbour(place, 0, 1, length=40, visited=set(), lr=-1) == (13, 0, 0)
    assert next_neighbour(place, 0, -1, length=40, visited=set(), lr=-1) == (7, 0, 0)
    # 29 neighbours ahead, ceil(0.4 x 29) = 12.
    assert next_neighbour(place, 0, 1, length=40, visited=set(), lr=0.4) == (22, 0, 0)
    # Visited ones do not count: the three nearest are now 11, 12, 14.
    assert next_neighbour(place, 0, 1, length=40, visited={(13, 0, 0)}, lr=-1) == (14, 0, 0)


def test_a_step_stays_on_the_lattice() -> None:
    assert next_neighbour((2, 1, 0), 1, 1, length=3, visited=set(), lr=-1) == (2, 2, 0)
    assert next_neighbour((2, 2, 0), 1, 1, length=3, visited=set(), lr=-1) is None
    assert next_neighbour((0, 0, 0), 0, -1, length=3, visited=set(), lr=-1) is None


@pytest.mark.parametrize("num_subspaces", [1, 3, 6])
def test_its_own_budget_is_never_cut(num_subspaces: int) -> None:
    """1 + 20 samples + 50 steps, whatever the subspaces: more than a job's usual 40, less than what it is given."""
    algorithms = (None, Algorithm.RING, Algorithm.TREE, Algorithm.NVLS, Algorithm.NVLS_TREE, Algorithm.PAT)
    spaces = tuple(
        Subspace(algorithm=algorithm, num_channels=tuple(range(1, 65)), num_threads=(128, 256, 512))
        for algorithm in algorithms[:num_subspaces]
    )
    tuner = AutoCcl((problem(ConfigSpace(spaces), num_comms=2),))
    num = len(drive(tuner, lambda _, assignment: measured(1.0, *(abs(c.num_channels or 1) / 64 for c in assignment))))
    assert num <= AutoCcl.own_measurements
    assert search_measurements(None, "autoccl") == AutoCcl.own_measurements
    assert search_measurements(None, "lagom") == 40
    assert search_measurements(12, "autoccl") == 12


def descent_of(times: dict[int, float], default: int, **options: int) -> list[int | None]:
    """The channels asked, without samples and restarts, so that nothing is random."""
    space = channels_only(*sorted(times))
    one = problem(space, default=CommConfig(num_channels=default))
    tuner = AutoCcl((one,), num_pretrain=0, num_restarts=0, **options)
    trials = drive(tuner, lambda name, assignment: measured(1, times[assignment[0].num_channels or 0]))
    return [trial.assignments["g"][0].num_channels for trial in trials]


def test_a_descent_on_one_knob_as_worked_by_hand() -> None:
    # 1..20 channels, fastest at 10. Default 4 takes 60; native, then the start of the descent.
    # + : k = 3 -> 7, 30: lr = 0.8 x 0.5 = 0.4; 13 ahead, ceil(5.2) = 6 -> 13: also 30, no improvement.
    # - : 6, 5, 4, 3, 2, 1 ahead, 4 visited: the third nearest is 3: 70, worse.
    # threads and chunk have no neighbours: four more failures make six, converged.
    times = {value: 10.0 * abs(value - 10) for value in range(1, 21)} | {10: 1.0}
    assert descent_of(times, default=4) == [4, 4, 7, 13, 3]


def test_six_failures_in_a_row_end_the_descent() -> None:
    # From 10 in the middle of a valley: +13 and -7 are worse, the other knobs have no neighbour.
    times = {value: 1.0 + abs(value - 10) for value in range(1, 21)}
    assert descent_of(times, default=10) == [10, 10, 13, 7]


def test_both_directions_of_a_knob_come_before_the_next_and_an_improvement_starts_the_count_anew() -> None:
    # Three values each; (1, 1) is the middle. Slower in channels and threads - ; faster in threads +.
    space = ConfigSpace((Subspace(num_channels=(1, 2, 3), num_threads=(1, 2, 3), chunk_bytes=(1, 2, 3)),))
    default = CommConfig(num_channels=2, num_threads=2, chunk_bytes=2)
    tuner = AutoCcl((problem(space, default=default),), num_pretrain=0, num_restarts=0)

    def run(name: str, assignment: Assignment) -> Measurement:
        config = assignment[0]
        return measured(1, 10.0 if config.num_threads == 3 else 20.0 + abs((config.num_channels or 0) - 2))

    asked = [
        (
            trial.assignments["g"][0].num_channels,
            trial.assignments["g"][0].num_threads,
            trial.assignments["g"][0].chunk_bytes,
        )
        for trial in drive(tuner, run)
    ]
    start = [(2, 2, 2), (2, 2, 2)]
    # Channels + and - fail; threads + succeeds; above it nothing, so threads - (2 visited): 1, slower.
    first = [(3, 2, 2), (1, 2, 2), (2, 3, 2), (2, 1, 2)]
    # Five more failures are allowed: chunk + and -, channels + and - from the new place; the sixth is channels -.
    assert asked == [*start, *first, (2, 3, 3), (2, 3, 1), (3, 3, 2), (1, 3, 2)]


def test_the_budget_ends_the_descent() -> None:
    times = {value: 100.0 - value for value in range(1, 41)}
    assert len(descent_of(times, default=1, num_train=3)) == 1 + 3


def test_only_the_collective_s_own_time_counts_and_the_group_can_end_slower() -> None:
    # More channels: faster collective, much slower computation.
    overlap = TableOverlap(comm_s=({1: 4, 2: 3, 4: 2, 8: 1},), extra_s=({1: 0, 2: 1, 4: 5, 8: 20},), alone_s=5)
    one = problem(channels_only(1, 2, 4, 8), default=CommConfig(num_channels=2))
    tuner = AutoCcl((one,))
    drive(tuner, overlap)
    assert channels(tuner.recommend()["g"]) == (8,)
    assert overlap("g", tuner.recommend()["g"]).makespan_s > overlap("g", one.default).makespan_s


def test_all_collectives_of_a_group_move_in_the_same_trial() -> None:
    overlap = TableOverlap(
        comm_s=({1: 9, 2: 5, 4: 7}, {1: 3, 2: 4, 4: 5}), extra_s=({1: 0, 2: 0, 4: 0},) * 2, alone_s=1
    )
    tuner = AutoCcl((problem(channels_only(1, 2, 4), num_comms=2),))
    trials = drive(tuner, overlap)
    assert len(trials) == 1 + 3  # the native setting, then three places of each at once
    assert channels(tuner.recommend()["g"]) == (2, 1)


RING = Subspace(algorithm=Algorithm.RING, num_channels=tuple(range(1, 33)))
TREE = Subspace(algorithm=Algorithm.TREE, num_channels=tuple(range(1, 33)))


@pytest.mark.parametrize(("factor", "num_tree"), [(1.0, 35), (2.0, 13), (4.0, 5)])
def test_a_hopeless_subspace_is_given_up(factor: float, num_tree: int) -> None:
    """Twice as slow: after a tenth of the descent (10 samples, 3 of 25 steps). Four times: after 5 probes."""

    def run(name: str, assignment: Assignment) -> Measurement:
        config = assignment[0]
        slow = factor if config.algorithm is Algorithm.TREE else 1.0
        return measured(0.1, slow * (2.0 - 0.001 * (config.num_channels or 0)))

    default = CommConfig(algorithm=Algorithm.RING, num_channels=8)
    trials = drive(AutoCcl((problem(ConfigSpace((RING, TREE)), default=default),), num_restarts=99), run)
    asked = [trial.assignments["g"][0].algorithm for trial in trials]
    assert asked.count(Algorithm.TREE) == min(num_tree, 32)
    assert asked.index(Algorithm.TREE) == asked.count(Algorithm.RING)  # one subspace after the other


def test_another_seed_samples_elsewhere() -> None:
    def asked(seed: int) -> list[Assignment]:
        tuner = AutoCcl((problem(ConfigSpace((RING,))),), seed=seed)
        run = lambda name, assignment: measured(1, float(assignment[0].num_channels or 9))  # noqa: E731
        return [trial.assignments["g"] for trial in drive(tuner, run)]

    assert asked(0) == asked(0)
    assert asked(0) != asked(1)


@pytest.mark.parametrize("options", [{"num_pretrain": -1}, {"num_train": 0}, {"num_restarts": -1}])
def test_a_number_out_of_range_is_refused(options: dict[str, int]) -> None:
    (name, value) = next(iter(options.items()))
    with pytest.raises(SpaceError, match=f"{name} is {value}, must be at least"):
        AutoCcl((problem(channels_only(1, 2)),), **options)
