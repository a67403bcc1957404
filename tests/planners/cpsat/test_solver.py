"""Ctrl-C while CP-SAT runs: what was found is kept, and the handler is still Python's afterwards."""

import os
import random
import signal
import threading

import pytest
from ortools.sat.python import cp_model

from lagom_overlap.planners.cpsat.solver import new_solver, solve
from lagom_overlap.planners.deadline import Deadline, ended_by_ctrl_c


def long_model():
    """Four machines with 60 jobs each and random precedences: no proof within minutes, a solution at once."""
    dice, model = random.Random(1), cp_model.CpModel()
    starts, ends, machines = [], [], [[] for _ in range(4)]
    for job in range(240):
        ticks = dice.randint(1, 50)
        start = model.new_int_var(0, 20_000, "")
        machines[job % 4].append(model.new_fixed_size_interval_var(start, ticks, ""))
        starts.append(start)
        ends.append(start + ticks)
    for machine in machines:
        model.add_no_overlap(machine)
    for _ in range(300):
        first, second = sorted(dice.sample(range(240), 2))
        model.add(starts[second] >= ends[first])
    makespan = model.new_int_var(0, 20_000, "")
    for end in ends:
        model.add(makespan >= end)
    model.minimize(makespan)
    return model


def easy_model():
    model = cp_model.CpModel()
    model.maximize(model.new_int_var(0, 10, ""))
    return model


def test_ctrl_c_ends_a_solve_at_once_and_keeps_its_solution():
    solver, has_solution = new_solver(Deadline(120.0)), threading.Event()
    solver.parameters.log_search_progress, solver.parameters.log_to_stdout = True, False
    solver.log_callback = lambda line: has_solution.set() if line.startswith("#1 ") else None

    def interrupt():
        has_solution.wait(100.0)
        os.kill(os.getpid(), signal.SIGINT)

    with ended_by_ctrl_c() as interrupted:
        beside = threading.Thread(target=interrupt)
        beside.start()
        assert solve(solver, long_model(), Deadline(120.0))
        beside.join()
        assert has_solution.is_set()
        assert interrupted.is_set()
    assert solver.wall_time < 60.0


def test_a_solve_leaves_ctrl_c_to_python():
    with ended_by_ctrl_c() as interrupted:
        assert solve(new_solver(Deadline(3000.0)), easy_model(), Deadline(3000.0))
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted.wait(5.0)
        with pytest.raises(KeyboardInterrupt):  # the second one interrupts
            signal.raise_signal(signal.SIGINT)


def test_a_solve_in_another_thread_finds_the_same():
    found = []
    solver = new_solver(Deadline(5.0))
    ends = Deadline(5.0)
    beside = threading.Thread(target=lambda: found.append((solve(solver, easy_model(), ends), solver.objective_value)))
    beside.start()
    beside.join()
    assert found == [(True, 10.0)]
