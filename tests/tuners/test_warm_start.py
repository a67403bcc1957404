"""Warm starts: what they save where they are right, and that wrong ones cost next to nothing, on closed forms."""

from dataclasses import replace
from math import exp
from random import Random
from statistics import fmean

import numpy as np
import pytest
from toy_overlap import Run, drive, measured, problem

from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, CommConfig, ConfigSpace, Protocol, Subspace
from lagom_overlap.tuners.machine.group_model import ModelFit, Prior
from lagom_overlap.tuners.ours import OurSearch
from lagom_overlap.tuners.problem import Assignment, GroupProblem, Measurement
from lagom_overlap.tuners.warm_start import Earlier, WarmStart, nearest_allowed
from lagom_overlap.workload import CommOp

CHANNELS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CHUNKS = tuple(2**k for k in range(15, 22))
RING = Algorithm.RING
SPACE = ConfigSpace((Subspace(algorithm=RING, num_channels=CHANNELS, chunk_bytes=CHUNKS),))
DEFAULT = CommConfig(algorithm=RING, num_channels=8, chunk_bytes=2**21)
GOOD = CommConfig(algorithm=RING, num_channels=3, chunk_bytes=2**19)


def overlap(seed: int, noise: float = 0.02, comm: float = 1.0) -> Run:
    """Communication falls as a power of the channels; each channel costs the computation."""
    rng = Random(seed)

    def run(name: str, assignment: Assignment) -> Measurement:
        comm_s = [
            comm * 1e-3 * (0.2 + 2 * (c.num_channels or 8) ** -0.8 + exp(-(c.chunk_bytes or 2**21) / 2**17))
            for c in assignment
        ]
        extra_s = sum(1e-3 * (0.06 * (c.num_channels or 8)) / len(assignment) for c in assignment)
        return measured((2e-3 + extra_s) * exp(rng.gauss(0, noise)), *(x * exp(rng.gauss(0, noise)) for x in comm_s))

    return run


def exact_s(assignment: Assignment) -> float:
    return overlap(0, noise=0.0)("g", assignment).makespan_s  # type: ignore[union-attr]


def earlier_run(seed: int, held: GroupProblem, run: Run) -> Earlier:
    tuner = OurSearch((held,), seed=seed)
    runs: dict[Assignment, list[Measurement]] = {}
    while (trial := tuner.ask()) is not None:
        outcome = run("g", trial.assignments["g"])
        assert isinstance(outcome, Measurement)
        runs.setdefault(trial.assignments["g"], []).append(outcome)
        tuner.tell(trial, {"g": outcome})
    return Earlier(problem=held, runs={a: tuple(done) for a, done in runs.items()}, best=tuner.recommend()["g"])


def test_the_earlier_best_is_measured_right_after_the_default() -> None:
    held = problem(SPACE, num_comms=2, default=DEFAULT)
    warm = WarmStart(source="test", earlier=(Earlier(problem=held, best=(GOOD, GOOD)),))
    tuner = OurSearch((held,), warm=warm)
    trials = drive(tuner, overlap(1))
    assert trials[0].assignments["g"] == (DEFAULT, DEFAULT)
    assert trials[1].assignments["g"] == (GOOD, GOOD)
    assert "warm start" in trials[1].reasons["g"]


@pytest.mark.parametrize("num_seeds", [3, pytest.param(12, marks=pytest.mark.long)])
def test_an_earlier_run_of_the_same_groups_saves_measurements_and_finds_no_less(num_seeds: int) -> None:
    held = problem(SPACE, num_comms=3, default=DEFAULT)
    counts, makespans = {"cold": [], "warm": []}, {"cold": [], "warm": []}  # type: ignore[var-annotated]
    for seed in range(num_seeds):
        warm = WarmStart(source="test", earlier=(earlier_run(seed, held, overlap(100 + seed)),))
        for name, begin in (("cold", None), ("warm", warm)):
            tuner = OurSearch((held,), seed=seed, warm=begin)
            counts[name].append(len(drive(tuner, overlap(200 + seed))))
            makespans[name].append(exact_s(tuner.recommend()["g"]))
    assert fmean(counts["warm"]) < fmean(counts["cold"])
    assert fmean(makespans["warm"]) <= 1.005 * fmean(makespans["cold"])


@pytest.mark.parametrize("num_seeds", [3, pytest.param(12, marks=pytest.mark.long)])
def test_a_misleading_start_is_dropped_and_never_ends_behind_the_default(num_seeds: int) -> None:
    held = problem(SPACE, num_comms=3, default=DEFAULT)
    worst = (CommConfig(algorithm=RING, num_channels=32, chunk_bytes=2**15),) * 3
    cold_s, misled_s, counts = [], [], []
    for seed in range(num_seeds):
        wrong = replace(earlier_run(seed, held, overlap(100 + seed, comm=4.0)), best=worst)
        tuner = OurSearch((held,), seed=seed)
        cold = len(drive(tuner, overlap(200 + seed)))
        cold_s.append(exact_s(tuner.recommend()["g"]))
        tuner = OurSearch((held,), seed=seed, warm=WarmStart(source="test", earlier=(wrong,)))
        counts.append(len(drive(tuner, overlap(200 + seed))) - cold)
        misled_s.append(exact_s(tuner.recommend()["g"]))
    assert max(misled_s) <= 1.005 * exact_s((DEFAULT,) * 3)
    assert fmean(misled_s) <= 1.01 * fmean(cold_s)
    assert fmean(counts) <= 3


def test_evidence_is_the_probability_of_the_data_for_a_linear_model() -> None:
    """y_i = a + noise, a normal: both known in closed form; Laplace is exact there, but for a constant of the data."""
    data, noise = np.array([1.2, 0.8, 1.1]), 0.3

    def fitted(prior: Prior) -> ModelFit:
        precision = len(data) / noise**2 + prior.sd[0] ** -2
        best = (data.sum() / noise**2 + prior.mean[0] * prior.sd[0] ** -2) / precision
        cost = 0.5 * (((data - best) / noise) ** 2).sum() + 0.5 * ((best - prior.mean[0]) / prior.sd[0]) ** 2
        return ModelFit(params=np.array([[best]]), covariance=np.array([[[1 / precision]]]), cost=np.array([cost]))

    def log_probability(prior: Prior) -> float:
        covariance = noise**2 * np.eye(3) + prior.sd[0] ** 2 * np.ones((3, 3))
        off = data - prior.mean[0]
        return float(-0.5 * off @ np.linalg.solve(covariance, off) - 0.5 * np.linalg.slogdet(covariance)[1])

    near, wide = Prior(np.array([1.0]), np.array([0.2])), Prior(np.array([0.0]), np.array([2.0]))
    far = Prior(np.array([3.0]), np.array([0.2]))
    for prior in (wide, far):
        found = fitted(near).log_evidence(near) - fitted(prior).log_evidence(prior)
        assert found == pytest.approx(log_probability(near) - log_probability(prior))
    assert fitted(near).log_evidence(near) > fitted(wide).log_evidence(wide) > fitted(far).log_evidence(far)


def test_groups_are_matched_by_their_collectives_those_of_the_same_name_first() -> None:
    held = problem(SPACE, num_comms=1, default=DEFAULT)
    other, same = (CommConfig(algorithm=RING, num_channels=n, chunk_bytes=2**19) for n in (2, 4))
    namesake = Earlier(problem=held, best=(same,))
    renamed = Earlier(problem=problem(SPACE, name="elsewhere", default=DEFAULT), best=(other,))
    assert WarmStart(source="", earlier=(renamed, namesake)).first(held) == (same,)
    assert WarmStart(source="", earlier=(renamed,)).first(held) == (other,)
    assert WarmStart(source="", earlier=(replace(namesake, best=None),)).first(held) is None

    def sized(num_bytes: int, kind: CollectiveKind = CollectiveKind.ALL_GATHER) -> GroupProblem:
        comm = CommOp(name="c0", collective=Collective(kind, num_bytes, 4))
        return replace(held, group=replace(held.group, comms=(comm,)))

    assert namesake.is_like(sized(2**20 + 2**17))
    assert not namesake.is_like(sized(2**21))
    assert not namesake.is_like(sized(2**20, CollectiveKind.ALL_REDUCE))
    assert not namesake.is_like(problem(SPACE, num_comms=2, default=DEFAULT))


def test_settings_that_are_not_allowed_here_become_the_nearest_that_are() -> None:
    held = problem(ConfigSpace((Subspace(num_channels=(1, 4, 16), chunk_bytes=(2**19, 2**21)),)), default=DEFAULT)
    wanted = (CommConfig(num_channels=5, chunk_bytes=2**19 + 5),)
    assert nearest_allowed(held, wanted) == (CommConfig(num_channels=4, chunk_bytes=2**19),)
    assert nearest_allowed(held, (DEFAULT,)) == (DEFAULT,)
    ring = Subspace(algorithm=Algorithm.RING, protocol=Protocol.SIMPLE, num_channels=(1, 4))
    tree = (CommConfig(algorithm=Algorithm.TREE, num_channels=4),)
    assert nearest_allowed(problem(ConfigSpace((ring,))), tree) is None
    warm = WarmStart(source="", earlier=(Earlier(problem=held, best=(DEFAULT,)),))
    assert warm.first_probe(held) is None  # the default is measured anyhow
