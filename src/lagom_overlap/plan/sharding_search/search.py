"""A program, a mesh and a machine in; the cheapest sharding out."""

import contextlib
from dataclasses import replace
from functools import partial
from typing import Final

from lagom_overlap.errors import JobError
from lagom_overlap.hardware import Cluster
from lagom_overlap.plan.base import OpTimes
from lagom_overlap.plan.deadline import Deadline
from lagom_overlap.plan.sharding_search.choice import Sharding, choose_sharding
from lagom_overlap.plan.sharding_search.clusters import sharding_problem
from lagom_overlap.plan.sharding_search.conversions import Conversions
from lagom_overlap.plan.sharding_search.emit import emit
from lagom_overlap.plan.sharding_search.layouts import Mesh
from lagom_overlap.plan.sharding_search.methods import data_parallel, sharing_products
from lagom_overlap.plan.sharding_search.problem import ShardingProblem
from lagom_overlap.plan.sharding_search.starts import lines_of, starts_from
from lagom_overlap.workload.tensor_program import TensorProgram

_LINE_SHARE: Final = 0.15
"""Of the time, for each line of a rectangle."""

__all__ = ["emit", "search_sharding"]


def search_sharding(
    program: TensorProgram,
    *,
    mesh_shape: tuple[int, ...],
    cluster: Cluster,
    times: OpTimes,
    memory_limit_bytes: int | None = None,
    zero_stage: int | None = None,
    limit_s: float = 30.0,
    seed: int = 0,
) -> Sharding:
    """The cheapest sharding found in `limit_s` seconds; `emit` makes a step of it.

    A mesh of two dimensions is searched from what was found of its lines (`starts`), which is the answer where nothing
    better is found in time.

    With `zero_stage` it is data parallelism of that stage (`methods`), else anything. On a mesh of two dimensions no
    rank repeats another's product where both dimensions can share it, as in Alpa, which keeps the program small.

    Raises:
        JobError: if the mesh is none, nothing fits the memory limit, or nothing was found in time.
    """
    deadline = Deadline(limit_s)
    search = partial(choose_sharding, memory_limit_bytes=memory_limit_bytes, seed=seed)

    def problem_of(shape: tuple[int, ...]) -> ShardingProblem:
        mesh = Mesh(shape)
        made = sharding_problem(program, mesh, Conversions(mesh, cluster, times), times)
        if zero_stage is not None:
            return data_parallel(made, zero_stage)
        return replace(made, nodes=tuple(map(sharing_products, made.nodes))) if len(mesh_shape) > 1 else made

    problem = problem_of(mesh_shape)
    if len(mesh_shape) == 1:
        return search(problem, deadline=deadline)
    lines: dict[tuple[int, ...], Sharding] = {}
    for line in lines_of(mesh_shape):
        with contextlib.suppress(JobError):  # too little memory on so few ranks, or no time
            lines[line] = search(problem_of(line), deadline=deadline.within(_LINE_SHARE * limit_s))
    return search(problem, deadline=deadline, starts=starts_from(problem, lines))
