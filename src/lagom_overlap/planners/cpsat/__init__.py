"""Scheduling by constraint programming (OR-Tools' CP-SAT); needs the extra `plan`.

Whole graphs of 1,000 tasks are out of its reach in seconds (spec, planners section 5.1); blocks and windows of 50 to
150 tasks are not.
"""

from lagom_overlap.planners.cpsat.blocks import BlockMode, odd_even
from lagom_overlap.planners.cpsat.no_overlap import Block, Solved, solve_block, solve_graph
from lagom_overlap.planners.cpsat.windows import improve_by_windows

__all__ = ["Block", "BlockMode", "Solved", "improve_by_windows", "odd_even", "solve_block", "solve_graph"]
