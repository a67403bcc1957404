"""A project as a CP-SAT model, solved in a thread beside other search: proofs, and bounds of large projects."""

from collections.abc import Callable, Sequence
from threading import Thread

from ortools.sat.python import cp_model

from lagom_overlap.plan.cpsat.solver import new_solver
from lagom_overlap.plan.deadline import Deadline
from lagom_overlap.plan.rcpsp.bounds import paths
from lagom_overlap.plan.rcpsp.project import Project


class ExactSearch:
    """CP-SAT on a whole project from a known schedule; `bound` and `is_proved` are up to date once it was `stop`ped.

    `on_solution` is called from the solver's thread with starts.
    """

    def __init__(
        self,
        project: Project,
        hint: Sequence[int],
        *,
        makespan: int,
        lower_bound: int,
        limit_s: float,
        num_workers: int,
        seed: int,
        on_solution: Callable[[list[int]], None],
    ) -> None:
        self.bound = lower_bound
        self.is_proved = False
        self._model, self._starts = _model(project, hint, makespan, lower_bound)
        self._solver = new_solver(Deadline(limit_s), num_workers=num_workers, seed=seed)
        self._callback = _OnSolution(self._starts, on_solution)
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """The solver has not ended yet."""
        return self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Waits for the end, at most so long."""
        self._thread.join(seconds)

    def stop(self) -> None:
        """Ends the search."""
        while self._thread.is_alive():  # the solver forgets a stop that comes before it has begun
            self._solver.stop_search()
            self._thread.join(0.05)

    def _run(self) -> None:
        status = self._solver.solve(self._model, self._callback)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
            self.bound = max(self.bound, round(self._solver.best_objective_bound))
        self.is_proved = status == cp_model.OPTIMAL


class _OnSolution(cp_model.CpSolverSolutionCallback):
    def __init__(self, starts: Sequence[cp_model.IntVar], tell: Callable[[list[int]], None]) -> None:
        super().__init__()
        self._starts = starts
        self._tell = tell

    def on_solution_callback(self) -> None:
        self._tell([self.value(start) for start in self._starts])


def _model(
    project: Project, hint: Sequence[int], makespan: int, lower_bound: int
) -> tuple[cp_model.CpModel, list[cp_model.IntVar]]:
    """Intervals between heads and tails, a cumulative constraint per resource, the makespan minimised."""
    model = cp_model.CpModel()
    heads, tails = paths(project)
    starts = [model.new_int_var(head, makespan - tail, "") for head, tail in zip(heads, tails, strict=True)]
    intervals = [
        model.new_fixed_size_interval_var(start, duration, "")
        for start, duration in zip(starts, project.durations, strict=True)
    ]
    end = model.new_int_var(lower_bound, makespan, "")
    for activity, preds in enumerate(project.preds):
        model.add(end >= starts[activity] + project.durations[activity])
        for pred in preds:
            model.add(starts[activity] >= starts[pred] + project.durations[pred])
    for resource, capacity in enumerate(project.capacities):
        users = [activity for activity, demand in enumerate(project.demands) if demand[resource]]
        if users:
            model.add_cumulative(
                [intervals[activity] for activity in users],
                [project.demands[activity][resource] for activity in users],
                capacity,
            )
    for start, value in zip(starts, hint, strict=True):
        model.add_hint(start, value)
    model.add_hint(end, makespan)
    model.minimize(end)
    return model, starts
