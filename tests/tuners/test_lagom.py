"""Lagom against cases worked by hand and the rungs that the paper reports."""

import pytest
from toy_overlap import TableOverlap, channels, channels_only, drive, failing, measured, problem

from lagom_overlap.collective import Algorithm, CommConfig, ConfigSpace, Protocol, Subspace, chunk_bytes_of_slice
from lagom_overlap.errors import SpaceError, UnknownNameError
from lagom_overlap.tuners.lagom import Lagom
from lagom_overlap.tuners.problem import Assignment, Failure, Measurement, Outcome
from lagom_overlap.units import KIB

# By hand, computation 5 s alone; (channels of c0, channels of c1): X, Y.
#   (1,1) 20, 5    c0 not probed   -> (2,1) 18, 6    H0 = (6-5)/(10-8) = 0.5
#   c1 not probed                  -> (2,2) 13, 7    H1 = (7-6)/(10-5) = 0.2
#   H1 < H0                        -> (2,4) 12, 8    H1 = (8-7)/(5-4)  = 1
#   H0 < H1                        -> (4,4) 11, 10   H0 = (10-8)/(8-7) = 2
#   H1 < H0                        -> (4,8) 10, 17   hidden, but Z = 17 > 11: (4,4) stays
HAND = TableOverlap(
    comm_s=({1: 10, 2: 8, 4: 7, 8: 7.5}, {1: 10, 2: 5, 4: 4, 8: 3}),
    extra_s=({1: 0, 2: 1, 4: 3, 8: 6}, {1: 0, 2: 1, 4: 2, 8: 9}),
    alone_s=5,
)
TWO = problem(channels_only(1, 2, 4, 8), num_comms=2)


def test_the_cheapest_gain_comes_first_as_worked_by_hand() -> None:
    tuner = Lagom((TWO,))
    trials = drive(tuner, HAND)
    asked = [channels(trial.assignments["g"]) for trial in trials]
    assert asked == [(None, None), (1, 1), (2, 1), (2, 2), (2, 4), (4, 4), (4, 8)]
    assert [dict(trial.priorities.get("g", {})) for trial in trials] == [
        {},
        {},
        {},
        {"c0": 0.5},
        {"c0": 0.5, "c1": 0.2},
        {"c0": 0.5, "c1": 1.0},
        {"c0": 2.0, "c1": 1.0},
    ]
    assert channels(tuner.recommend()["g"]) == (4, 4)


def test_the_better_of_both_is_kept_where_communication_becomes_hidden() -> None:
    # (1) X 10 Y 5 -> (2) X 6 Y 7: hidden and Z falls from 10 to 7.
    overlap = TableOverlap(comm_s=({1: 10, 2: 6, 4: 5},), extra_s=({1: 0, 2: 2, 4: 3},), alone_s=5)
    tuner = Lagom((problem(channels_only(1, 2, 4)),))
    assert len(drive(tuner, overlap)) == 3
    assert channels(tuner.recommend()["g"]) == (2,)


def test_minimal_resources_stay_where_they_already_hide_communication() -> None:
    overlap = TableOverlap(comm_s=({1: 4, 2: 3},), extra_s=({1: 0, 2: 1},), alone_s=5)
    tuner = Lagom((problem(channels_only(1, 2)),))
    assert [channels(trial.assignments["g"]) for trial in drive(tuner, overlap)] == [(None,), (1,)]
    assert channels(tuner.recommend()["g"]) == (1,)


def test_sums_do_not_end_the_climb_where_the_makespan_shows_exposed_communication() -> None:
    """One of several alike windows has nothing to hide behind: a quarter of the communication is always exposed."""

    def run(name: str, assignment: Assignment) -> Measurement:
        num_channels = assignment[0].num_channels or 8
        comm_s, comp_s = 8 / num_channels, 10 + 0.05 * num_channels
        return Measurement(makespan_s=comp_s + comm_s / 4, comp_s=comp_s, comm_s=(comm_s,))

    tuner = Lagom((problem(channels_only(1, 2, 4, 8)),))
    asked = [channels(trial.assignments["g"]) for trial in drive(tuner, run)]
    # Z: 12.05, 11.1, 10.7, 10.65; hidden by its sum from the first on.
    assert asked == [(None,), (1,), (2,), (4,), (8,)]
    assert channels(tuner.recommend()["g"]) == (8,)


def test_a_step_that_lengthens_the_makespan_where_sums_say_hidden_is_undone() -> None:
    def run(name: str, assignment: Assignment) -> Measurement:
        num_channels = assignment[0].num_channels or 8
        comm_s, comp_s = 8 / num_channels, 10 + 0.4 * num_channels
        return Measurement(makespan_s=comp_s + comm_s / 4, comp_s=comp_s, comm_s=(comm_s,))

    tuner = Lagom((problem(channels_only(1, 2, 4, 8)),))
    # Z: 12.4, 11.8, 12.1.
    assert [channels(trial.assignments["g"]) for trial in drive(tuner, run)] == [(None,), (1,), (2,), (4,)]
    assert channels(tuner.recommend()["g"]) == (2,)


def test_the_paper_s_mode_ends_by_sums_whatever_the_makespan_shows() -> None:
    """The overlap of two tests before: X < Y at one channel already, and Z there is 12.05 where 10.65 is to be had."""

    def run(name: str, assignment: Assignment) -> Measurement:
        num_channels = assignment[0].num_channels or 8
        comm_s, comp_s = 8 / num_channels, 10 + 0.05 * num_channels
        return Measurement(makespan_s=comp_s + comm_s / 4, comp_s=comp_s, comm_s=(comm_s,))

    tuner = Lagom((problem(channels_only(1, 2, 4, 8)),), mode="paper")
    assert [channels(trial.assignments["g"]) for trial in drive(tuner, run)] == [(None,), (1,)]
    assert channels(tuner.recommend()["g"]) == (1,)


@pytest.mark.parametrize(("mode", "second"), [("paper", (2, 1)), ("repaired", (2, 2))])
def test_the_paper_s_climb_goes_on_from_a_corner_that_was_given_up_and_ours_skips_it(
    mode: str, second: tuple[int, int]
) -> None:
    """Both corners take 20 of the default's 10.5: abandoned. What was read of them is all that the paper needs."""

    def run(name: str, assignment: Assignment) -> Outcome:
        measured = HAND(name, assignment)
        return Failure("abandoned after one step", measured) if measured.makespan_s > 19 else measured

    tuner = Lagom((TWO,), mode=mode)
    asked = [channels(trial.assignments["g"]) for trial in drive(tuner, run)]
    assert asked[:3] == [(None, None), (1, 1), second]
    if mode == "paper":  # the rest is HAND's own way
        assert asked == [(None, None), (1, 1), (2, 1), (2, 2), (2, 4), (4, 4), (4, 8)]
    assert channels(tuner.recommend()["g"]) == (4, 4)


def test_what_was_given_up_is_not_recommended_though_the_paper_s_climb_ends_there() -> None:
    """One channel hides communication by its sum, so the climb ends there at once."""

    def run(name: str, assignment: Assignment) -> Outcome:
        slow = Measurement(makespan_s=30, comp_s=10, comm_s=(9,))
        fast = Measurement(makespan_s=10, comp_s=10, comm_s=(2,))
        return Failure("abandoned after one step", slow) if assignment[0].num_channels == 1 else fast

    given = problem(channels_only(1, 2, 4, 8))
    tuner = Lagom((given,), mode="paper")
    assert [channels(trial.assignments["g"]) for trial in drive(tuner, run)] == [(None,), (1,)]
    assert tuner.recommend()["g"] == given.default


def test_a_step_that_slows_its_collective_is_undone_and_ends_only_that_collective() -> None:
    overlap = TableOverlap(
        comm_s=({1: 10, 2: 11, 4: 1}, {1: 10, 2: 9, 4: 8}), extra_s=({1: 0, 2: 0, 4: 0},) * 2, alone_s=1
    )
    tuner = Lagom((problem(channels_only(1, 2, 4), num_comms=2),))
    asked = [channels(trial.assignments["g"]) for trial in drive(tuner, overlap)]
    assert asked == [(None, None), (1, 1), (2, 1), (1, 2), (1, 4)]
    assert channels(tuner.recommend()["g"]) == (1, 4)


def test_equal_priorities_go_by_index() -> None:
    overlap = TableOverlap(comm_s=({1: 10, 2: 8, 4: 6},) * 3, extra_s=({1: 0, 2: 0, 4: 0},) * 3, alone_s=1)
    asked = [
        channels(trial.assignments["g"])
        for trial in drive(Lagom((problem(channels_only(1, 2, 4), num_comms=3),)), overlap)
    ]
    assert asked[2:] == [(2, 1, 1), (2, 2, 1), (2, 2, 2), (4, 2, 2), (4, 4, 2), (4, 4, 4)]


def test_a_slower_step_within_the_spread_of_the_repeats_is_no_regression() -> None:
    def run(name: str, assignment: Assignment) -> Measurement:
        time_s = {None: 10.0, 1: 10.0, 2: 10.2, 4: 9.0}[assignment[0].num_channels]
        return Measurement(makespan_s=time_s, comp_s=1.0, comm_s=(time_s,), num_repeats=4, makespan_iqr_s=spread_s)

    answers = {}
    for spread_s in (0.0, 0.5):  # 2 x 0.5 / 1.349 / sqrt(4) / 10 = 3.7 %, and 2 % is within that
        tuner = Lagom((problem(channels_only(1, 2, 4)),))
        drive(tuner, run)
        answers[spread_s] = channels(tuner.recommend()["g"])
    assert answers == {0.0: (1,), 0.5: (4,)}


def test_it_runs_unguarded_and_can_end_worse_than_the_default() -> None:
    # Channels 1 and 2 leave X above Y; 4 slows the collective, so the climb ends at 2 although 8, the default, is best.
    overlap = TableOverlap(comm_s=({1: 10, 2: 9, 4: 9.5, 8: 3},), extra_s=({1: 0, 2: 0, 4: 0, 8: 0},), alone_s=1)
    tuner = Lagom((problem(channels_only(1, 2, 4, 8)),))
    drive(tuner, overlap)
    assert channels(tuner.recommend()["g"]) == (2,)


NCCL = Subspace(
    algorithm=Algorithm.RING,
    protocol=Protocol.SIMPLE,
    num_channels=tuple(range(1, 33)),
    num_threads=(128, 256, 512),
    chunk_bytes=(8 * KIB, 512 * KIB, 1024 * KIB, 1366 * KIB, 1368 * KIB, 2048 * KIB),
)


@pytest.mark.parametrize("ladder", ["thirds", "proportional"])
@pytest.mark.parametrize(
    ("num_channels", "slice_kib", "chunk_kib"),
    [(2, 684, 1368), (4, 1366, 1366), (8, 2048, 2048)],
)
def test_the_rungs_that_the_paper_reports_are_climbed(
    ladder: str, num_channels: int, slice_kib: int, chunk_kib: int
) -> None:
    """Fig. 8: AllGather (2, 684 KB), ReduceScatter (4, 1366 KB), NCCL's default (8, 2 MB); C is a slice."""
    assert chunk_bytes_of_slice(slice_kib * KIB) == chunk_kib * KIB
    wanted = CommConfig(
        algorithm=Algorithm.RING,
        protocol=Protocol.SIMPLE,
        num_channels=num_channels,
        num_threads=128,
        chunk_bytes=chunk_kib * KIB,
    )

    def run(name: str, assignment: Assignment) -> Measurement:
        return measured(0.1, 100.0 / (assignment[0].num_channels or 1))

    asked = [trial.assignments["g"][0] for trial in drive(Lagom((problem(ConfigSpace((NCCL,))),), ladder=ladder), run)]
    assert wanted in asked
    assert asked[1].num_channels == 1
    assert asked[1].chunk_bytes == 8 * KIB
    assert asked[-1].num_channels == 32
    assert asked[-1].chunk_bytes == 2048 * KIB


def test_the_paper_result_is_found_where_it_is_the_balance() -> None:
    """A compute-bound overlap that is hidden from (2, 684 KB) on ends there, as Pattern 1 of Fig. 8 does."""

    def run(name: str, assignment: Assignment) -> Measurement:
        num_channels = assignment[0].num_channels or 8
        return measured(5 + 0.5 * num_channels, {1: 12.0, 2: 4.0}.get(num_channels, 3.0))

    default = CommConfig(algorithm=Algorithm.RING, protocol=Protocol.SIMPLE, num_channels=8, chunk_bytes=2048 * KIB)
    tuner = Lagom((problem(ConfigSpace((NCCL,)), default=default),), ladder="thirds")
    drive(tuner, run)
    found = tuner.recommend()["g"][0]
    assert (found.num_channels, found.chunk_bytes) == (2, 1368 * KIB)


def test_the_default_step_is_one_more_channel_and_the_next_chunk() -> None:
    asked = [
        (trial.assignments["g"][0].num_channels, (trial.assignments["g"][0].chunk_bytes or 0) // KIB)
        for trial in drive(
            Lagom((problem(ConfigSpace((NCCL,))),)),
            lambda name, assignment: measured(0.1, 100.0 / (assignment[0].num_channels or 1)),
        )
    ]
    climb = [(1, 8), (2, 512), (3, 1024), (4, 1366), (5, 1368), (6, 2048)]
    assert asked[1:] == [*climb, *((channels, 2048) for channels in range(7, 33))]


def test_threads_stay_at_the_option_the_default_or_the_paper_s_128() -> None:
    def threads_of(default: CommConfig, num_threads: int | None) -> set[int | None]:
        tuner = Lagom((problem(ConfigSpace((NCCL,)), default=default),), num_threads=num_threads)
        trials = drive(tuner, lambda name, assignment: measured(1, 100.0 / (assignment[0].num_channels or 8)))
        return {trial.assignments["g"][0].num_threads for trial in trials[1:]}

    assert threads_of(CommConfig(), None) == {128}
    assert threads_of(CommConfig(num_threads=256), None) == {256}
    assert threads_of(CommConfig(num_threads=256), 512) == {512}


def test_threads_climb_with_the_other_two_from_the_least_on_if_asked() -> None:
    tuner = Lagom((problem(ConfigSpace((NCCL,))),), climbs_threads=True)
    trials = drive(tuner, lambda name, assignment: measured(0.1, 100.0 / (assignment[0].num_channels or 1)))
    asked = [(one.num_channels, one.num_threads) for one in (trial.assignments["g"][0] for trial in trials[1:])]
    assert asked == [(1, 128), (2, 256), (3, 512), *((channels, 512) for channels in range(4, 33))]


def test_the_step_lr_follows_the_relative_improvement_on_normalised_axes() -> None:
    # log2 of 1..256 in eighths. First step: one rung, 1 -> 2. Then x 100 -> 75: step 0.25 = two eighths, 2 -> 8.
    # Then 75 -> 30: step 0.6 = 4.8 eighths, rounded up to 5: 8 -> 256.
    space = channels_only(1, 2, 4, 8, 16, 32, 64, 128, 256)
    times = {None: 50.0, 1: 100.0, 2: 75.0, 8: 30.0, 256: 20.0}
    trials = drive(
        Lagom((problem(space),), step="lr"), lambda name, assignment: measured(1, times[assignment[0].num_channels])
    )
    assert [channels(trial.assignments["g"]) for trial in trials] == [(None,), (1,), (2,), (8,), (256,)]


def test_the_step_lr_moves_at_least_one_position_even_without_improvement() -> None:
    trials = drive(Lagom((problem(channels_only(1, 2, 3, 4)),), step="lr"), lambda name, assignment: measured(1, 10))
    assert [channels(trial.assignments["g"]) for trial in trials] == [(None,), (1,), (2,), (3,), (4,)]


RING = Subspace(algorithm=Algorithm.RING, protocol=Protocol.SIMPLE, num_channels=(1, 2, 8))
TREE = Subspace(algorithm=Algorithm.TREE, protocol=Protocol.SIMPLE, num_channels=(1, 2, 8))
RING_DEFAULT = CommConfig(algorithm=Algorithm.RING, protocol=Protocol.SIMPLE, num_channels=8)


@pytest.mark.parametrize(
    ("tree_at_two_s", "algorithm"), [(7.0, Algorithm.TREE), (6.5, Algorithm.TREE), (9.0, Algorithm.RING)]
)
def test_subspaces_compete_by_makespan_and_the_second_is_checked_at_the_end(
    tree_at_two_s: float, algorithm: Algorithm
) -> None:
    times = {
        (Algorithm.RING, 8): 9.0,
        (Algorithm.TREE, 8): 10.0,
        (Algorithm.RING, 1): 20.0,
        (Algorithm.RING, 2): 8.0,
        (Algorithm.TREE, 2): tree_at_two_s,
    }

    def run(name: str, assignment: Assignment) -> Measurement:
        config = assignment[0]
        assert config.algorithm is not None
        return measured(0.5, times[config.algorithm, config.num_channels or 0])

    tuner = Lagom((problem(ConfigSpace((RING, TREE)), default=RING_DEFAULT),))
    trials = drive(tuner, run)
    asked = [(trial.assignments["g"][0].algorithm, trial.assignments["g"][0].num_channels) for trial in trials]
    # The default is its own subspace's representative: not measured twice. The climb ends where 8 channels slow down.
    assert asked == [
        (Algorithm.RING, 8),
        (Algorithm.TREE, 8),
        (Algorithm.RING, 1),
        (Algorithm.RING, 2),
        (Algorithm.RING, 8),
        (Algorithm.TREE, 2),
    ]
    assert tuner.recommend()["g"][0].algorithm is algorithm


def test_the_climb_runs_in_the_subspace_that_is_fastest_at_the_default_s_resources() -> None:
    def run(name: str, assignment: Assignment) -> Outcome:
        config = assignment[0]
        if config.algorithm is Algorithm.PAT:
            return Failure("not on this machine")
        return measured(0.5, (10.0 if config.algorithm is Algorithm.RING else 5.0) + (config.num_channels or 0) / 10)

    pat = Subspace(algorithm=Algorithm.PAT, protocol=Protocol.SIMPLE, num_channels=(1, 2, 8))
    tuner = Lagom((problem(ConfigSpace((RING, pat, TREE)), default=RING_DEFAULT),))
    trials = drive(tuner, run)
    asked = [(trial.assignments["g"][0].algorithm, trial.assignments["g"][0].num_channels) for trial in trials]
    ring, tree = Algorithm.RING, Algorithm.TREE
    # More channels slow the tree at once; one channel is then tried in the ring, the second best.
    assert asked == [(ring, 8), (Algorithm.PAT, 8), (tree, 8), (tree, 1), (tree, 2), (ring, 1)]
    assert tuner.recommend()["g"][0] == CommConfig(algorithm=tree, protocol=Protocol.SIMPLE, num_channels=1)


def test_all_subspaces_are_climbed_where_that_is_asked_for_and_the_best_makespan_stays() -> None:
    """The tree, second at the default's resources, has the best setting of all behind a climb of its own."""
    times = {
        (Algorithm.RING, 8): 9.0,
        (Algorithm.TREE, 8): 10.0,
        (Algorithm.RING, 1): 20.0,
        (Algorithm.RING, 2): 9.5,
        (Algorithm.TREE, 1): 7.0,
        (Algorithm.TREE, 2): 6.0,
    }

    def run(name: str, assignment: Assignment) -> Measurement:
        (config,) = assignment
        assert config.algorithm is not None
        return measured(0.5, times[config.algorithm, config.num_channels or 0])

    best = min(times.items(), key=lambda one: one[1])[0]
    tuner = Lagom((problem(ConfigSpace((RING, TREE)), default=RING_DEFAULT),), num_subspaces=0)
    trials = drive(tuner, run)
    asked = [(trial.assignments["g"][0].algorithm, trial.assignments["g"][0].num_channels) for trial in trials]
    ring, tree = Algorithm.RING, Algorithm.TREE
    assert asked == [(ring, 8), (tree, 8), (ring, 1), (ring, 2), (ring, 8), (tree, 1), (tree, 2), (tree, 8)]
    found = tuner.recommend()["g"][0]
    assert (found.algorithm, found.num_channels) == best
    with pytest.raises(SpaceError, match="num_subspaces is -1"):
        Lagom((TWO,), num_subspaces=-1)


def test_a_budget_that_ends_a_later_climb_keeps_what_an_earlier_one_found() -> None:
    def run(name: str, assignment: Assignment) -> Measurement:
        (config,) = assignment
        return measured(0.5, (1.0 if config.algorithm is Algorithm.RING else 50.0) + 9.0 / (config.num_channels or 8))

    tuner = Lagom((problem(ConfigSpace((RING, TREE)), default=RING_DEFAULT),), num_subspaces=0)
    for _ in range(6):
        trial = tuner.ask()
        assert trial is not None
        tuner.tell(trial, {"g": run("g", trial.assignments["g"])})
    last = tuner.ask()
    assert last is not None
    assert last.assignments["g"][0].algorithm is Algorithm.TREE
    assert tuner.recommend()["g"][0].algorithm is Algorithm.RING


def at(*values: int) -> Assignment:
    return tuple(CommConfig(num_channels=value) for value in values)


def test_a_failing_corner_raises_all_collectives_together_until_one_runs() -> None:
    run = failing(at(1, 1), otherwise=HAND)
    tuner = Lagom((TWO,))
    asked = [channels(trial.assignments["g"]) for trial in drive(tuner, run)]
    assert asked[:4] == [(None, None), (1, 1), (2, 2), (4, 2)]


def test_a_step_that_cannot_run_ends_its_collective_and_is_not_recommended() -> None:
    tuner = Lagom((TWO,))
    asked = [channels(trial.assignments["g"]) for trial in drive(tuner, failing(at(2, 1), otherwise=HAND))]
    assert asked == [(None, None), (1, 1), (2, 1), (1, 2), (1, 4), (1, 8)]
    # (1,4): X 14, Y 7; (1,8): X 13, Y 14, hidden. Z is 14 in both, and as printed the step taken stays.
    assert channels(tuner.recommend()["g"]) == (1, 8)


def test_nothing_that_runs_leaves_the_default() -> None:
    tuner = Lagom((TWO,))

    def run(name: str, assignment: Assignment) -> Outcome:
        return Failure("no")

    drive(tuner, run)
    assert tuner.recommend()["g"] == TWO.default


def test_before_it_knows_anything_it_recommends_the_default() -> None:
    tuner = Lagom((TWO,))
    assert tuner.recommend() == {"g": TWO.default}
    tuner.ask()
    assert tuner.recommend() == {"g": TWO.default}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"step": "laddr"}, UnknownNameError, "did you mean 'ladder'"),
        ({"ladder": "fifths"}, UnknownNameError, "fifths"),
        ({"min_step": 0.0}, SpaceError, "min_step is 0.0"),
        ({"num_threads": 0}, SpaceError, "num_threads is 0"),
        ({"climbs_threads": True, "step": "lr"}, SpaceError, "it is 'lr'"),
        ({"climbs_threads": True, "num_threads": 256}, SpaceError, "no num_threads"),
    ],
)
def test_a_bad_option_is_refused_with_its_value(options: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Lagom((TWO,), **options)  # type: ignore[arg-type]  # wrong on purpose
