"""What the search of ours ends with, judged by brute force and closed forms that are not its own models."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import exp, inf
from random import Random

import pytest
from foreign_overlap import CHANNELS, CHUNKS, DEFAULT, SPACE, overlap
from toy_overlap import Run, drive, failing, measured, problem

from lagom_overlap.backends.base import BackendRequest
from lagom_overlap.backends.simulated import SimulatedBackend
from lagom_overlap.collective import (
    Algorithm,
    Collective,
    CollectiveKind,
    CommConfig,
    ConfigSpace,
    Protocol,
    SpaceLimits,
    Subspace,
    Transport,
)
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.hardware import load_preset
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.guard import Guarded
from lagom_overlap.tuners.machine.posterior import Machine, Pool
from lagom_overlap.tuners.machine.search_space import Surfaces
from lagom_overlap.tuners.ours import MOST_ANYTIME, MOST_MEASURED, GroupSearch, OurSearch
from lagom_overlap.tuners.problem import Assignment, Failure, GroupProblem, Measurement, Outcome
from lagom_overlap.units import MIB
from lagom_overlap.workload import CommOp, CompOp, Gemm, OverlapGroup

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
    tuner = OurSearch(problems)
    trials = drive(tuner, run)
    assert len(trials) <= 18
    assert makespan_s(run, tuner.recommend()["g"]) <= 1.03 * shortest_s(problems, run)


def test_more_collectives_do_not_need_more_measurements() -> None:
    counts = []
    for num_comms in (1, 8):
        problems = (problem(SPACE, num_comms=num_comms, default=DEFAULT),)
        counts.append(len(drive(OurSearch(problems), overlap(num_comms, comp_s=1e-3 * num_comms))))
    assert max(counts) <= 16


def test_sixty_four_collectives_are_tuned_together() -> None:
    problems = (problem(SPACE, num_comms=64, default=DEFAULT),)
    run = overlap(64, comp_s=0.02)
    tuner = OurSearch(problems)
    assert len(drive(tuner, run)) <= 12
    assert makespan_s(run, tuner.recommend()["g"]) < 0.9 * makespan_s(run, problems[0].default)


@pytest.mark.parametrize("seed", range(8))
def test_without_noise_it_never_ends_slower_than_the_default(seed: int) -> None:
    # A machine without any structure: no model fits.
    rng = Random(seed)
    times: dict[CommConfig, tuple[float, float]] = {}

    def run(name: str, assignment: Assignment) -> Measurement:
        for config in assignment:
            times.setdefault(config, (rng.uniform(1, 2), rng.uniform(1, 4)))
        comm_s = [times[config][0] for config in assignment]
        return measured(sum(times[config][1] for config in assignment), *comm_s)

    for default in (DEFAULT, CommConfig()):
        tuner = OurSearch((problem(SPACE, num_comms=2, default=default),))
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

        problems = (problem(SPACE, default=DEFAULT),)
        tuner = Guarded(OurSearch(problems, seed=seed), problems)
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

    tuner = OurSearch(problems)
    drive(tuner, run)
    assert tuner.recommend()["g"] == problems[0].default
    tuner = OurSearch(problems)
    drive(tuner, slow)
    assert makespan_s(slow, tuner.recommend()["g"]) <= 1.02 * shortest_s(problems, slow)


def test_what_failed_is_not_asked_again_and_not_recommended() -> None:
    problems = (problem(SPACE, num_comms=1, default=DEFAULT),)
    everything = overlap(1)
    first = drive(OurSearch(problems), everything)[1].assignments["g"]
    tuner = OurSearch(problems)
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

    drive(OurSearch(problems), run)
    assert len(failed) > 1
    bad = [{(j, config) for j, config in enumerate(arm) if config.num_channels != 8} for arm in failed]
    assert all(not one & other for index, one in enumerate(bad) for other in bad[:index])


def test_where_the_default_cannot_run_anything_that_does_replaces_it() -> None:
    problems = (problem(SPACE, num_comms=1, default=DEFAULT),)
    tuner = OurSearch(problems)
    run = failing((DEFAULT,), otherwise=overlap(1))
    drive(tuner, run)
    assert not isinstance(run("g", tuner.recommend()["g"]), Failure)


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

    tuner = OurSearch((problem(space, num_comms=2, default=default),))
    drive(tuner, run)
    assert Protocol.LL128 in {config.protocol for config in tuner.recommend()["g"]}


# Transport, simulated.


def gathers(count: int) -> OverlapGroup:
    """Gathers and one scatter during products on eight H100s."""
    kinds = [CollectiveKind.ALL_GATHER] * count + [CollectiveKind.REDUCE_SCATTER]
    return OverlapGroup(
        name="layer",
        computations=tuple(CompOp(name=f"mm{i}", work=Gemm(8192, 8192, 2048)) for i in range(4)),
        comms=tuple(CommOp(name=f"c{j}", collective=Collective(kind, 256 * MIB, 8)) for j, kind in enumerate(kinds)),
    )


def simulated(transports: tuple[Transport, ...] | None) -> tuple[GroupProblem, Callable[[Assignment], float], Run]:
    model = ContentionModel(load_preset("h100_dgx"), load_profile("plausible"))
    request = BackendRequest(
        job_fingerprint="test", cluster=model.cluster, limits=SpaceLimits(transports=transports), seed=1
    )
    backend, group = SimulatedBackend(model, request), gathers(2)

    def makespan_s(assignment: Assignment) -> float:
        outcome = backend.measure(group, assignment)
        return outcome.makespan_s if isinstance(outcome, Measurement) else inf

    return backend.problem(group), makespan_s, lambda name, assignment: backend.measure(group, assignment)


def test_copy_engines_are_tried_beside_channels_where_they_carry_the_collective() -> None:
    plain, makespan_s, run = simulated(None)
    without = OurSearch((plain,))
    drive(without, run)
    both, _, run = simulated((Transport.P2P, Transport.COPY_ENGINE))
    tuner = OurSearch((both,))
    trials = drive(tuner, run)
    found = tuner.recommend()["layer"]
    copied = CommConfig(transport=Transport.COPY_ENGINE)
    assert any(copied in trial.assignments["layer"] for trial in trials)
    assert all(trial.assignments["layer"][-1] != copied for trial in trials)  # nothing reduces on a copy engine
    assert makespan_s(found) <= 1.005 * makespan_s(without.recommend()["layer"])
    by_hand = min(
        makespan_s((first, second, other))
        for first in (copied, found[0])
        for second in (copied, found[1])
        for other in (found[2], both.default[2])
    )
    assert makespan_s(found) <= 1.01 * by_hand


def test_a_short_job_stops_at_twelve_and_a_long_one_goes_on_while_that_pays() -> None:
    problems, exact = (problem(SPACE, num_comms=2, default=DEFAULT),), overlap(2)
    short, long = OurSearch(problems), OurSearch(problems, job_measurements=5000)
    num_short, num_long = (len(drive(tuner, overlap(2, noise=0.03))) for tuner in (short, long))
    assert num_short <= MOST_MEASURED < num_long <= MOST_ANYTIME
    least_s = shortest_s(problems, exact)
    assert makespan_s(exact, long.recommend()["g"]) <= 1.02 * least_s
    with pytest.raises(ValueError, match="job_measurements is -1, must be at least 0"):
        OurSearch(problems, job_measurements=-1)


@pytest.mark.parametrize("is_formula", [True, False])
def test_the_family_that_foretells_better_is_heard_more(is_formula: bool) -> None:
    """A link that channels fill, x = L + W (1 / (NC C / (C + C0)) + 1 / B), against settings that share nothing."""
    rng = Random(5)
    odd = {config: 10 ** rng.uniform(0, 0.5) for config in SPACE}

    def run(name: str, assignment: Assignment) -> Measurement:
        comm_s = []
        for config in assignment:
            channels, chunk = config.num_channels or 8, config.chunk_bytes or 2**21
            per_byte = (chunk + 2**18) / (channels * chunk) + 1 / 8
            comm_s.append(0.05 + 3 * per_byte if is_formula else odd[config])
        return measured(0.5, *comm_s)

    made = problem(SPACE, num_comms=2, default=DEFAULT)
    machine = Machine(made, seed=0, pool=Pool(), surfaces=Surfaces())
    search = GroupSearch(made, machine, None, 0)
    probes = search.run()
    probe = next(probes)
    with suppress(StopIteration):
        while True:
            probe = probes.send(run("g", probe.assignment))
    weight = search._fit(search._allowed()).weight
    assert weight > 0.5 if is_formula else weight < 0.5
