"""CP-SAT under Ctrl-C: the first one ends a solve and keeps what it found.

OR-Tools catches SIGINT itself: it would end its own solve without telling anybody, and leave behind the system's
default, by which the next Ctrl-C kills the process with everything found. Python, in turn, calls its handlers only
between two steps of the main thread. Here the solver leaves the signal alone and runs beside the main thread.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Final

from ortools.sat.python import cp_model

from lagom_overlap.plan.deadline import is_interrupted

NUM_WORKERS: Final = 2
"""Threads of a solve."""
_LOOK_S: Final = 0.05
"""Seconds between two looks at whether the solve is to end."""


def new_solver(*, limit_s: float, num_workers: int = NUM_WORKERS, seed: int = 0) -> cp_model.CpSolver:
    """A solver that ends after `limit_s` seconds and leaves Ctrl-C to Python."""
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(limit_s, 0.01)
    solver.parameters.num_workers = num_workers
    solver.parameters.random_seed = seed
    solver.parameters.catch_sigint_signal = False
    return solver


def solve(solver: cp_model.CpSolver, model: cp_model.CpModel) -> bool:
    """Whether a solution was found; in the main thread Ctrl-C ends the solve early."""
    if threading.current_thread() is not threading.main_thread():
        return _has_solution(solver.solve(model))
    with ThreadPoolExecutor(max_workers=1) as beside:
        running = beside.submit(solver.solve, model)
        try:
            while wait_for([running], timeout=_LOOK_S).not_done:
                if is_interrupted():
                    solver.stop_search()
        finally:
            while not running.done():  # the solver forgets a stop that comes before it has begun
                solver.stop_search()
                wait_for([running], timeout=_LOOK_S)
        return _has_solution(running.result())


def _has_solution(status: cp_model.CpSolverStatus) -> bool:
    return status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
