"""What planners are compared with: the step as it is."""

from lagom_overlap.plan.base import Plan, PlanProblem
from lagom_overlap.plan.memory import refuse_beyond
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
        refuse_beyond("program order", predicted.peak_bytes, problem.memory_limit_bytes)
        bound = lower_bound(predicted.graph)
        return Plan(
            planner="program_order",
            rewrites=(),
            iteration=problem.iteration,
            lower_bound_s=predicted.graph.seconds(bound),
            is_optimal=predicted.schedule.makespan == bound,
        )
