"""AutoCCL's search against an independent reading of its public sources, and on curves worked by hand."""

from collections.abc import Callable
from itertools import pairwise
from math import ceil
from random import Random

import pytest
from autoccl_oracle import Candidate, oracle
from toy_overlap import TableOverlap, channels, channels_only, drive, measured, problem

from lagom_overlap.collective import Algorithm, CommConfig, ConfigSpace, Protocol, Subspace
from lagom_overlap.errors import SpaceError
from lagom_overlap.tuners.autoccl import AutoCcl
from lagom_overlap.tuners.groupwise import group_random
from lagom_overlap.tuners.problem import GroupProblem
from lagom_overlap.tuners.registry import search_measurements

NATIVE = CommConfig()


def candidates(subspace: Subspace) -> list[Candidate]:
    """In order, with the two numbers that follow from the knobs: toys gather 2**20 bytes over 4 ranks."""
    rows = []
    for config in subspace:
        channels_, threads, chunk = config.num_channels or 0, config.num_threads or 0, config.chunk_bytes or 0
        ends = (ceil(2**18 / (channels_ * chunk)), 2**18 % (channels_ * chunk) // channels_) if chunk else (0, 0)
        rows.append((channels_, threads, chunk, *ends))
    return rows


def asked_of(one: GroupProblem, time_of: Callable[[CommConfig], float], **options: int) -> list[CommConfig]:
    """What is measured after the engine's own setting, of the only collective."""
    trials = drive(AutoCcl((one,), **options), lambda _, assignment: measured(1, time_of(assignment[0])))
    assert trials[0].assignments["g"] == one.default
    return [trial.assignments["g"][0] for trial in trials[1:]]


def drawn_space(rng: Random) -> ConfigSpace:
    def axis(most: int, unit: int) -> tuple[int, ...]:
        return tuple(sorted(unit * value for value in rng.sample(range(1, 3 * most), rng.randint(1, most))))

    ways = [(a, p) for a in (Algorithm.TREE, Algorithm.RING) for p in (Protocol.LL, Protocol.LL128, Protocol.SIMPLE)]
    return ConfigSpace(
        tuple(
            Subspace(
                algorithm=algorithm,
                protocol=protocol,
                num_channels=axis(12, 1),
                num_threads=axis(4, 32),
                chunk_bytes=axis(8, 2048),
            )
            for algorithm, protocol in sorted(rng.sample(ways, rng.randint(1, 6)), key=ways.index)
        )
    )


@pytest.mark.parametrize("number", range(60))
def test_every_measurement_is_the_one_that_the_sources_make(number: int) -> None:
    """On random spaces, budgets and times: with a valley, with ties, with a subspace several times slower."""
    rng = Random(number)
    space = drawn_space(rng)
    options = {
        "num_pretrain": rng.choice([1, 5, 20, 40]),
        "num_train": rng.choice([1, 10, 50, 120, 400]),
        "num_retries": rng.choice([1, 2, 5]),
    }
    best, levels, slow = rng.randint(1, 30), rng.choice([0, 3, 50]), [rng.choice([1, 1, 2, 4]) for _ in range(6)]

    def time_of(subspace: int, config: CommConfig) -> float:
        away = abs((config.num_channels or 0) - best) + abs((config.chunk_bytes or 0) / 4096 - best)
        away += Random(f"{number} {subspace} {config}").random()
        return slow[subspace] * (1 + (round(away / 10 * levels) / levels if levels else away))

    def known(config: CommConfig) -> float:
        return native_s if config == NATIVE else time_of(place_of(config), config)

    def place_of(config: CommConfig) -> int:
        return next(place for place, subspace in enumerate(space.subspaces) if config in subspace)

    native_s = rng.choice([0.5, 2.0, 8.0])
    one = problem(space)
    own = Random(group_random(0, one).random())
    wanted = oracle(
        [candidates(subspace) for subspace in space.subspaces],
        native_s,
        lambda place, candidate: time_of(place, space.subspaces[place].at_number(candidate)),
        own.randrange,
        **options,
    )
    asked = asked_of(one, known, **options)
    assert asked == [space.subspaces[place].at_number(candidate) for place, candidate in wanted]


def test_samples_are_a_stride_apart_and_a_round_measures_the_three_next() -> None:
    """40 channels, 4 samples: every tenth. More channels are faster, so the descent goes up from the best sample."""
    asked = [config.num_channels or 0 for config in asked_of(problem(channels_only(*range(1, 41))), falling, **SHORT)]
    assert {(b - a) % 40 for a, b in pairwise(asked[:4])} == {10}
    best = max(asked[:4])
    assert asked[4:7] == [best + 3, best + 2, best + 1]  # the farthest first


SHORT = {"num_pretrain": 4, "num_train": 3}


def falling(config: CommConfig) -> float:
    return 100.0 - (config.num_channels or 0)


@pytest.mark.parametrize("num_subspaces", [1, 3, 6])
def test_its_own_budget_is_never_cut(num_subspaces: int) -> None:
    """1 + 20 samples + 50 steps, or less: more than a job's usual 40 where jumps go on finding something better."""
    algorithms = (None, Algorithm.RING, Algorithm.TREE, Algorithm.NVLS, Algorithm.NVLS_TREE, Algorithm.PAT)
    spaces = tuple(
        Subspace(algorithm=algorithm, num_channels=tuple(range(1, 65)), num_threads=(128, 256, 512))
        for algorithm in algorithms[:num_subspaces]
    )
    tuner = AutoCcl((problem(ConfigSpace(spaces), num_comms=2),))
    num = len(drive(tuner, lambda _, assignment: measured(1.0, *(abs(c.num_channels or 1) / 64 for c in assignment))))
    assert num <= 71 <= AutoCcl.own_measurements == 81
    assert search_measurements(None, "autoccl") == AutoCcl.own_measurements
    assert search_measurements(None, "lagom") == 40
    assert search_measurements(12, "autoccl") == 12


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
    assert len(trials) < 1 + 2 * 20  # each collective's samples, side by side
    assert channels(tuner.recommend()["g"]) == (2, 1)


def test_what_is_kept_is_the_engines_own_setting_where_nothing_was_faster() -> None:
    one = problem(channels_only(1, 2, 4))
    tuner = AutoCcl((one,))
    drive(tuner, lambda _, assignment: measured(1, 1.0 if assignment == one.default else 2.0))
    assert tuner.recommend()["g"] == one.default


def test_another_seed_samples_elsewhere() -> None:
    one = problem(channels_only(*range(1, 33)))

    def asked(seed: int) -> list[CommConfig]:
        return asked_of(one, falling, seed=seed)

    assert asked(0) == asked(0)
    assert asked(0) != asked(1)


@pytest.mark.parametrize("options", [{"num_pretrain": 0}, {"num_train": 0}, {"num_retries": 0}])
def test_a_number_out_of_range_is_refused(options: dict[str, int]) -> None:
    (name, value) = next(iter(options.items()))
    with pytest.raises(SpaceError, match=f"{name} is {value}, must be at least 1"):
        AutoCcl((problem(channels_only(1, 2)),), **options)
