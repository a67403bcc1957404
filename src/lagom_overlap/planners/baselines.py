"""What planners are compared with: the step as the framework runs it."""

from lagom_overlap.planners.base import Plan, PlanProblem
from lagom_overlap.planners.memory import refuse_beyond
from lagom_overlap.planners.predict import predict
from lagom_overlap.planners.schedule import lower_bound, task_graph


class ProgramOrder:
    """Keeps the order in which the program issues the step, with the framework's own waits."""

    def plan(self, problem: PlanProblem) -> Plan:
        """The plan without a rewrite.

        Raises:
            JobError: if the step does not fit the memory limit as it is; says by how much.
        """
        predicted = predict(problem, problem.unplanned)
        refuse_beyond("program order", predicted.peak_bytes, problem.memory_limit_bytes)
        graph = task_graph(problem)
        bound = lower_bound(graph)
        return Plan(
            planner="program_order",
            rewrites=(),
            iteration=problem.unplanned,
            lower_bound_s=graph.seconds(bound),
            is_optimal=predicted.schedule.makespan == bound,
        )
