"""The resource-constrained project scheduling problem, single mode: what scheduling of operators is a case of.

Stands on its own: `read_sm` reads PSPLIB's files, `solve.solve` solves them (needs the extra `plan`), `check_solution`
checks.
"""

from lagom_overlap.plan.rcpsp.project import Project, Solution, check_solution, read_sm

__all__ = ["Project", "Solution", "check_solution", "read_sm"]
