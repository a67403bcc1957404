"""Successive halving over implementations: the rule by hand-made outlooks, the search on closed forms."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp, inf
from random import Random

import numpy as np
import pytest
from model_based_reference import comm_times
from toy_overlap import Run, drive, measured, problem

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
from lagom_overlap.tuners.model_based import ModelBased
from lagom_overlap.tuners.model_based.model import wire_prior
from lagom_overlap.tuners.model_based.search_space import SearchSpace, Surfaces, lattice_of, search_space_of
from lagom_overlap.tuners.model_based.subspaces import Contender, Halving, Outlook
from lagom_overlap.tuners.problem import Assignment, Failure, GroupProblem, Measurement
from lagom_overlap.units import MIB
from lagom_overlap.workload import CommOp, CompOp, Gemm, OverlapGroup

CHANNELS = (1, 2, 4, 8, 16)
CHUNKS = (2**17, 2**19, 2**21)
KINDS = [(algorithm, protocol) for algorithm in Algorithm for protocol in Protocol][:9]


def space(num_kinds: int) -> ConfigSpace:
    return ConfigSpace(
        tuple(
            Subspace(algorithm=algorithm, protocol=protocol, num_channels=CHANNELS, chunk_bytes=CHUNKS)
            for algorithm, protocol in KINDS[:num_kinds]
        )
    )


def default(kind: int = 0) -> CommConfig:
    algorithm, protocol = KINDS[kind]
    return CommConfig(algorithm=algorithm, protocol=protocol, num_channels=8, chunk_bytes=2**21)


def search_space(num_kinds: int, num_comms: int = 1) -> SearchSpace:
    return search_space_of(problem(space(num_kinds), num_comms=num_comms, default=default()), Surfaces())


def outlooks(*makespans_s: float, log_sd: float = 0.0) -> dict[Contender, Outlook]:
    """One surface, its kinds in order."""
    return {(0, kind): Outlook(place=kind, makespan_s=s, log_sd=log_sd) for kind, s in enumerate(makespans_s)}


def measured_kinds(*kinds: int) -> set[Contender]:
    return {(0, kind) for kind in kinds}


@pytest.mark.parametrize(("num_kinds", "most"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (9, 4)])
def test_there_are_at_most_log2_of_the_kinds_looks(num_kinds: int, most: int) -> None:
    halving = Halving(search_space(num_kinds))
    looks = 0
    while halving.next(outlooks(*[1.0] * num_kinds), 1.0, measured_kinds(0)) is not None:
        looks += 1
    assert looks == most


def test_one_look_deals_as_many_kinds_as_there_are_collectives_the_most_promising_first() -> None:
    halving = Halving(search_space(6, num_comms=3))
    found = outlooks(1.0, 1.05, 1.04, 1.03, 1.02, 1.01)
    first = halving.next(found, 1.0, measured_kinds(0))
    assert first is not None
    assert first.is_first_rung
    assert first.contenders == ((0, 5), (0, 4), (0, 3))
    second = halving.next(found, 1.0, measured_kinds(0, 3, 4, 5))
    assert second is not None
    assert second.contenders == ((0, 2), (0, 1))


def test_what_is_uncertain_is_looked_at_before_what_is_surely_worse() -> None:
    found = outlooks(1.0, 1.1, 1.1)
    found[0, 2] = replace(found[0, 2], log_sd=0.2)
    look = Halving(search_space(3)).next(found, 1.0, measured_kinds(0))
    assert look is not None
    assert look.contenders == ((0, 2),)


def test_a_hopeless_kind_is_never_looked_at_but_one_without_knobs_is_once() -> None:
    found = outlooks(1.0, 1.5, 1.5)
    found[0, 0] = replace(found[0, 0], is_settled=True)
    assert Halving(search_space(3)).next(found, 1.0, measured_kinds(0)) is None
    found[0, 2] = replace(found[0, 2], is_only_place=True)
    halving = Halving(search_space(3))
    look = halving.next(found, 1.0, measured_kinds(0))
    assert look is not None
    assert look.contenders == ((0, 2),)
    assert halving.next(found, 1.0, measured_kinds(0, 2)) is None


def test_the_worse_half_is_dropped_only_on_evidence() -> None:
    # All were measured; kinds 2 and 3 are the worse half, of which 3 may still be the best.
    found = outlooks(1.0, 1.01, 1.03, 1.04)
    found[0, 0] = replace(found[0, 0], is_settled=True)
    found[0, 3] = replace(found[0, 3], log_sd=0.1)
    halving = Halving(search_space(4))
    asked = [halving.next(found, 1.0, measured_kinds(0, 1, 2, 3)) for _ in range(2)]
    assert [look.contenders for look in asked if look] == [((0, 3),), ((0, 3),)]
    # Even where the surrogate changes, what was dropped stays dropped.
    halving = Halving(search_space(4))
    halving.next(found, 1.0, measured_kinds(0, 1, 2, 3))
    changed = outlooks(1.0, 1.1, 0.5, 1.1)
    changed[0, 0] = replace(changed[0, 0], is_settled=True)
    assert halving.next(changed, 1.0, measured_kinds(0, 1, 2, 3)) is None


def test_of_two_kinds_there_is_no_second_rung() -> None:
    halving = Halving(search_space(2))
    assert halving.next(outlooks(1.0, 0.9), 1.0, measured_kinds(0, 1)) is None
    assert halving.num_draws == 0


def test_who_failed_alone_is_dropped_and_of_several_each_is_tried_alone() -> None:
    halving = Halving(search_space(4, num_comms=2))
    found = outlooks(1.0, 1.01, 1.02, 1.03)
    first = halving.next(found, 1.0, measured_kinds(0))
    assert first is not None
    assert halving.fail(set(first.contenders)) == {}
    second = halving.next(found, 1.0, measured_kinds(0))
    assert second is not None
    assert second.contenders == ((0, 1),)
    bars = halving.fail({(0, 1)})
    assert set(bars) == {0, 1}
    assert all(len(places) == len(CHANNELS) * len(CHUNKS) for places in bars.values())
    halving = Halving(search_space(3))
    halving.fail({(0, 1)})  # a surrogate had favoured it
    look = halving.next(outlooks(1.0, 1.01, 1.02), 1.0, measured_kinds(0))
    assert look is not None
    assert look.contenders == ((0, 2),)


# The search.


def machine(speed: Sequence[float], harm: Sequence[float], *, comp_s: float, noise: float = 0.0, seed: int = 0) -> Run:
    """Kind k takes x / speed[k] and costs the computation harm[k] per channel: neither is in the tuner's model."""
    rng = Random(seed)

    def run(name: str, assignment: Assignment) -> Measurement:
        comm_s, extra_s = [], 0.0
        for config in assignment:
            assert config.algorithm is not None
            assert config.protocol is not None
            kind, channels = KINDS.index((config.algorithm, config.protocol)), config.num_channels or 1
            alone_s = 1e-3 * (0.2 + 2 * channels**-0.8 + exp(-(config.chunk_bytes or 1) / 2**18))
            comm_s.append(alone_s / speed[kind] * exp(rng.gauss(0, noise)))
            extra_s += 1e-3 * harm[kind] * channels
        return measured((comp_s + extra_s) * exp(rng.gauss(0, noise)), *comm_s)

    return run


def kinds_of(assignment: Assignment) -> set[tuple[Algorithm | None, Protocol | None]]:
    return {(config.algorithm, config.protocol) for config in assignment}


def shortest_s(asked: GroupProblem, run: Run) -> float:
    """Brute force over assignments that are equal for all collectives."""
    outcomes = (run("g", (config,) * len(asked.default)) for config in asked.spaces[0])
    return min(outcome.makespan_s for outcome in outcomes if isinstance(outcome, Measurement))


SPEED, HARM = (1.0, 1.6, 0.9, 0.5, 0.6, 1.1, 0.7, 0.8), (0.1, 0.15, 0.03, 0.1, 0.12, 0.13, 0.12, 0.1)
"""Kind 1 is the fastest alone, kind 2 the gentlest; 5 lies between."""


@pytest.mark.parametrize(("num_kinds", "num_comms"), [(4, 1), (8, 4)])
def test_the_gentle_kind_is_found_where_the_fastest_alone_is_not_the_best(num_kinds: int, num_comms: int) -> None:
    asked = problem(space(num_kinds), num_comms=num_comms, default=default())
    run = machine(SPEED, HARM, comp_s=3e-3 * num_comms)
    tuner = ModelBased((asked,))
    trials = drive(tuner, run)
    found = tuner.recommend()["g"]
    assert KINDS[2] in kinds_of(found)
    assert KINDS[1] not in kinds_of(found)
    outcome = run("g", found)
    assert isinstance(outcome, Measurement)
    assert outcome.makespan_s <= 1.02 * shortest_s(asked, run)
    assert len(trials) <= 16
    looks = [trial for trial in trials if "subspaces" in trial.reasons["g"]]
    assert 1 <= len(looks) <= 3


def test_several_kinds_are_measured_at_once_where_there_are_several_collectives() -> None:
    asked = problem(space(8), num_comms=4, default=default())
    trials = drive(ModelBased((asked,)), machine(SPEED, HARM, comp_s=12e-3))
    assert max(len(kinds_of(trial.assignments["g"])) for trial in trials) >= 3


def test_the_same_seed_asks_the_same() -> None:
    asked = problem(space(6), num_comms=2, default=default())
    runs = [drive(ModelBased((asked,), seed=3), machine(SPEED, HARM, comp_s=3e-3, noise=0.02)) for _ in range(2)]
    assert [trial.assignments for trial in runs[0]] == [trial.assignments for trial in runs[1]]


def test_a_kind_that_cannot_run_is_tried_once_and_never_again() -> None:
    asked = problem(space(4), num_comms=2, default=default())
    everything, tried = machine((1.0, 1.3, 1.2, 1.1), (0.1, 0.02, 0.1, 0.1), comp_s=3e-3), []

    def run(name: str, assignment: Assignment) -> Measurement | Failure:
        if KINDS[1] in kinds_of(assignment):
            tried.append(kinds_of(assignment))
            return Failure("this machine has no such thing")
        return everything(name, assignment)  # type: ignore[return-value]

    tuner = ModelBased((asked,))
    drive(tuner, run)
    assert KINDS[1] not in kinds_of(tuner.recommend()["g"])
    alone = [kinds for kinds in tried if not kinds - {KINDS[0], KINDS[1]}]
    assert len(tried) - len(alone) <= 1  # with another new kind with it nobody knows whose fault it was
    assert len(alone) <= 1


def test_collectives_of_different_spaces_have_their_own_contenders() -> None:
    spaces = space(2), ConfigSpace(space(5).subspaces[:1] + space(5).subspaces[3:])
    asked = replace(problem(space(2), num_comms=2, default=default()), spaces=spaces)
    # The second collective's third kind is the best by far, and no surrogate knows.
    run = machine((1.0, 0.5, 1.0, 0.7, 2.0), (0.1, 0.1, 0.1, 0.1, 0.01), comp_s=1e-3)
    tuner = ModelBased((asked,))
    drive(tuner, run)
    first, second = tuner.recommend()["g"]
    assert (first.algorithm, first.protocol) == KINDS[0]
    assert (second.algorithm, second.protocol) == KINDS[4]


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


def test_what_has_no_knobs_is_one_place_that_nearly_fills_the_link() -> None:
    channels = Subspace(num_channels=CHANNELS, chunk_bytes=CHUNKS)
    offered = ConfigSpace((channels, Subspace(transport=Transport.COPY_ENGINE)))
    kinds = [(None, None, None), (None, None, Transport.COPY_ENGINE)]
    lattice = lattice_of(offered, CommConfig(num_channels=8, chunk_bytes=2**21), kinds)
    assert (lattice.channels[-1], lattice.chunk_bytes[-1]) == (1, CHUNKS[-1])
    wire_bytes = np.array([2.0**28])
    prior = wire_prior(lattice, wire_bytes, np.array([1e-3]))
    times_s = comm_times(prior.mean, wire_bytes, lattice.channels, lattice.chunk_bytes, lattice.kind)
    assert times_s[-1] < 1.2 * times_s.min()


def test_copy_engines_are_tried_beside_channels_where_they_carry_the_collective() -> None:
    plain, makespan_s, run = simulated(None)
    without = ModelBased((plain,))
    drive(without, run)
    both, _, run = simulated((Transport.P2P, Transport.COPY_ENGINE))
    tuner = ModelBased((both,))
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
