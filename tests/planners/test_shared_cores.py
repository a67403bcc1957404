"""Steps whose collectives share the cores that compute, against closed forms and the simulation without contention."""

from random import Random

import pytest
from random_graphs import fsdp_problem

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.hardware import load_preset
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.simulated import Simulation, simulated
from lagom_overlap.workload import CommOp, CompOp, Gemm, Iteration

SECONDS = {"g": 2e-3, "h": 2e-3, "x": 3e-3, "y": 1e-3, "end": 1e-7}


class Times:
    def seconds(self, op):
        return SECONDS[op.name]


def gather(name, *deps):
    return CommOp(name=name, collective=Collective(CollectiveKind.ALL_GATHER, 1 << 20, 2), deps=deps, stream="comm")


def product(name, *deps):
    return CompOp(name=name, work=Gemm(64, 64, 64), deps=deps)


def step_of(*ops, together):
    problem = PlanProblem(
        iteration=Iteration("step", ops, is_dataflow=True),
        cluster=load_preset("a40_nvlink"),
        times=Times(),
        together=together,
    )
    return simulated(problem, problem.iteration)


@pytest.mark.parametrize(
    ("rate", "makespan_s"),
    [
        (1.0, 3e-3),  # as on separate units
        (0.8, 2e-3 / 0.8 + 1e-3),  # the collective ends, the rest of the product runs alone
        (0.5, 5e-3),  # one after the other
        (0.4, 6e-3),  # together is worse than that
    ],
)
def test_both_run_at_the_rate_until_one_has_ended(rate: float, makespan_s: float):
    step = step_of(gather("g"), product("x"), product("end", "g", "x"), together={"g": rate})
    assert step.makespan_s == pytest.approx(makespan_s, abs=1e-6)
    assert step.simulation is Simulation.MEASURED


def test_what_waits_for_the_other_runs_at_its_own_speed():
    step = step_of(gather("g"), product("x", "g"), gather("h", "x"), product("y", "h"), together={"g": 0.3})
    assert step.makespan_s == pytest.approx(8e-3)


def test_a_collective_that_was_not_measured_has_the_mean_rate():
    step = step_of(gather("g"), product("x", "g"), gather("h", "g"), together={"g": 0.9, "other": 0.7})
    assert step.makespan_s == pytest.approx(2e-3 + 2e-3 / 0.8 + 1e-3, abs=1e-6)


def test_at_full_rate_a_step_takes_what_it_takes_without_contention():
    for seed in range(5):
        alone = fsdp_problem(6, seed)
        together = dict.fromkeys((op.name for op in alone.iteration.comms), 1.0)
        shared = fsdp_problem(6, seed, together=together)
        without, rated = simulated(alone, alone.iteration), simulated(shared, shared.iteration)
        assert rated.makespan_s == pytest.approx(without.makespan_s)
        assert rated.peak_bytes == without.peak_bytes


def test_a_rate_is_read_off_what_both_take_together():
    pytest.importorskip("torch")
    from lagom_overlap.engines.fx.side_by_side import SideBySideTimes

    for rate in (0.3, 0.5, 0.75, 1.0):
        together_s = step_of(gather("g"), product("x"), product("end", "g", "x"), together={"g": rate}).makespan_s
        measured = SideBySideTimes(
            collective_s=(SECONDS["g"],), computations_s=(SECONDS["x"],), together_s=(together_s,)
        )
        assert measured.rate() == pytest.approx(rate, abs=1e-4)


def test_noise_of_what_runs_on_separate_units_is_no_contention():
    """The mean of the longer of two noisy times exceeds the longer mean; the rate must not take that for sharing."""
    pytest.importorskip("torch")
    from lagom_overlap.engines.fx.side_by_side import SideBySideTimes

    random = Random(1)
    draw = lambda: [random.expovariate(1.0) for _ in range(400)]  # noqa: E731
    apart = SideBySideTimes(
        collective_s=draw(), computations_s=draw(), together_s=[max(pair) for pair in zip(draw(), draw(), strict=True)]
    )
    assert apart.rate() > 0.85
    shared = SideBySideTimes(
        collective_s=draw(), computations_s=draw(), together_s=[sum(pair) for pair in zip(draw(), draw(), strict=True)]
    )
    assert shared.rate() == pytest.approx(0.5, abs=0.06)
