"""What planners are compared with: the step as it is."""

from lagom_overlap.errors import JobError
from lagom_overlap.plan.base import Plan, PlanProblem
from lagom_overlap.plan.predict import predict
from lagom_overlap.plan.schedule import lower_bound


class ProgramOrder:
    """Leaves the step as the program issues it."""

    def plan(self, problem: PlanProblem) -> Plan:
        """The plan without a rewrite.

        Raises:
            JobError: if the step does not fit the memory limit as it is; says by how much.
        """
        predicted = predict(problem)
        limit = problem.memory_limit_bytes
        if limit is not None and predicted.peak_bytes > limit:
            raise JobError(
                f"memory_limit is {limit} bytes, but program order needs {predicted.peak_bytes}:"
                f" {predicted.peak_bytes - limit} bytes too many"
            )
        bound = lower_bound(predicted.graph)
        return Plan(
            planner="program_order",
            rewrites=(),
            iteration=problem.iteration,
            lower_bound_s=predicted.graph.seconds(bound),
            is_optimal=predicted.schedule.makespan == bound,
        )
