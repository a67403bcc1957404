"""A program, a mesh and a machine in; the cheapest sharding out."""

from dataclasses import replace

from lagom_overlap.hardware import Cluster
from lagom_overlap.plan.base import OpTimes
from lagom_overlap.plan.sharding_search.choice import Sharding, choose_sharding
from lagom_overlap.plan.sharding_search.clusters import sharding_problem
from lagom_overlap.plan.sharding_search.conversions import Conversions
from lagom_overlap.plan.sharding_search.emit import emit
from lagom_overlap.plan.sharding_search.layouts import Mesh
from lagom_overlap.plan.sharding_search.methods import data_parallel, sharing_products
from lagom_overlap.workload.tensor_program import TensorProgram

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

    With `zero_stage` it is data parallelism of that stage (`methods`), else anything. On a mesh of two dimensions no
    rank repeats another's product where both dimensions can share it, as in Alpa, which keeps the program small.

    Raises:
        JobError: if the mesh is none, nothing fits the memory limit, or nothing was found in time.
    """
    mesh = Mesh(mesh_shape)
    problem = sharding_problem(program, mesh, Conversions(mesh, cluster, times), times)
    if zero_stage is not None:
        problem = data_parallel(problem, zero_stage)
    elif len(mesh_shape) > 1:
        problem = replace(problem, nodes=tuple(sharing_products(node) for node in problem.nodes))
    return choose_sharding(problem, memory_limit_bytes=memory_limit_bytes, limit_s=limit_s, seed=seed)
