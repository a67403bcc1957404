"""CP-SAT under Ctrl-C: the first one ends a solve and keeps what it found.

OR-Tools catches SIGINT itself: it would end its own solve without telling anybody, and leave behind the system's
default, by which the next Ctrl-C kills the process with everything found. Python, in turn, calls its handlers only
between two steps of the main thread. Here the solver leaves the signal alone and runs in a thread of its own.

Where work counts, not the clock, one thread solves and CP-SAT's own count of its work, its deterministic time, ends it:
the same result however fast the machine is.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Final

from ortools.sat.python import cp_model

from lagom_overlap.planners.deadline import STEPS_PER_S, Deadline, is_interrupted

NUM_WORKERS: Final = 2
"""Threads of a solve."""
_DETERMINISTIC_S: Final = 1.0
"""Seconds of planning that stand for one of CP-SAT's deterministic time."""
_CALL_STEPS: Final = 4_000
"""Steps of making a model and starting a solve, on top of that."""
_LOOK_S: Final = 0.05
"""Seconds between two looks at whether the solve is to end."""


def new_solver(deadline: Deadline, *, num_workers: int = NUM_WORKERS, seed: int = 0) -> cp_model.CpSolver:
    """A solver that ends at the deadline and leaves Ctrl-C to Python."""
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(deadline.clock_s, 0.01)
    solver.parameters.num_workers = num_workers
    solver.parameters.random_seed = seed
    solver.parameters.catch_sigint_signal = False
    if deadline.counts_work:
        solver.parameters.num_workers = 1
        solver.parameters.max_deterministic_time = max(deadline.left_s / _DETERMINISTIC_S, 0.001)
    return solver


def solve(solver: cp_model.CpSolver, model: cp_model.CpModel, deadline: Deadline) -> bool:
    """Whether a solution was found; tells the deadline of the work. In the main thread Ctrl-C ends the solve early."""
    status = _status(solver, model)
    deadline.spend(_CALL_STEPS + STEPS_PER_S * _DETERMINISTIC_S * solver.deterministic_time)
    return status in (cp_model.OPTIMAL, cp_model.FEASIBLE)


def _status(solver: cp_model.CpSolver, model: cp_model.CpModel) -> cp_model.CpSolverStatus:
    if threading.current_thread() is not threading.main_thread():
        return solver.solve(model)
    with ThreadPoolExecutor(max_workers=1) as executor:
        running = executor.submit(solver.solve, model)
        try:
            while wait_for([running], timeout=_LOOK_S).not_done:
                if is_interrupted():
                    solver.stop_search()
        finally:
            while not running.done():  # the solver forgets a stop that comes before it has begun
                solver.stop_search()
                wait_for([running], timeout=_LOOK_S)
        return running.result()
