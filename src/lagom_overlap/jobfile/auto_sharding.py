"""A job's `[parallel] auto`, or ZeRO-1 and -2: the plain training step of its model, and a sharding found for it.

The step is traced on one rank with the whole batch; the search needs the job's cluster for its times and bounds memory
by `plan.memory_limit`, or by what a GPU has. Torch and OR-Tools are imported when a search is asked for.
"""

from importlib import import_module
from math import prod
from typing import Any, Final

from lagom_overlap.errors import JobError, MissingDependencyError
from lagom_overlap.hardware import Cluster
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.spec import JobSpec
from lagom_overlap.jobfile.step import filled_cluster
from lagom_overlap.planners.times import ModelTimes
from lagom_overlap.toml_tables import size_bytes
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.parallel import ParallelTable

SEARCH_S: Final = 60.0
"""Seconds that a search may take; programs of one mesh dimension are solved in a few."""


def searched_step(job: Job) -> tuple[IssuedStep, Cluster]:
    """One rank's step under the sharding found over `parallel.auto`, and the cluster that it was found for.

    Raises:
        LagomError: if an extra is missing, the model is unknown, or no sharding fits the memory.
    """
    parallel = _parallel(job.spec)
    if parallel.auto is None:
        raise JobError("missing key 'parallel.auto': a search for a sharding needs a mesh")
    return _found(job, tuple(parallel.auto), None)


def zero_step(job: Job) -> tuple[IssuedStep, Cluster]:
    """One rank's step of data parallelism with ZeRO stage 1 or 2: parameters whole, the optimizer shared out.

    Raises:
        LagomError: as `searched_step`, or if other degrees are asked for besides `data`.
    """
    parallel = _parallel(job.spec)
    for name in ("tensor", "expert", "pipeline"):
        if getattr(parallel, name) != 1:
            raise JobError(
                f"parallel.zero_stage is {parallel.zero_stage}: captured with data alone, parallel.{name} must be 1"
            )
    return _found(job, (parallel.data or 1,), parallel.zero_stage)


def _parallel(spec: JobSpec) -> ParallelTable:
    assert spec.parallel is not None, spec.job.name  # checked when the file was read
    return spec.parallel


def _found(job: Job, mesh_shape: tuple[int, ...], zero_stage: int | None) -> tuple[IssuedStep, Cluster]:
    spec, parallel = job.spec, _parallel(job.spec)
    if spec.model is None or spec.model.name is None or spec.model.seq_len is None or spec.cluster is None:
        raise JobError("a search for a sharding needs [model] with name and seq_len, and [cluster]")
    num_ranks = prod(mesh_shape)
    cluster = filled_cluster(spec.cluster, num_ranks)
    cluster.num_nodes_of(num_ranks)
    search, named, programs = (
        _part(f"lagom_overlap.{module}")
        for module in ("planners.sharding_search.search", "capturing.models.named", "capturing.tensor_program")
    )
    batch = parallel.global_batch or parallel.micro_batch * num_ranks
    build = named.named_step(spec.model.name, named.Degrees(), micro_batch=batch, seq_len=spec.model.seq_len)
    method = "auto" if zero_stage is None else f"zero{zero_stage}-"
    title = f"{spec.model.name}-{method}{'x'.join(map(str, mesh_shape))}"
    limit = spec.plan.memory_limit
    sharding = search.search_sharding(
        programs.capture_program(build, name=title).program.with_updates(),
        mesh_shape=mesh_shape,
        cluster=cluster,
        times=ModelTimes(job.price_on(cluster)),
        memory_limit_bytes=cluster.gpu.memory_bytes if limit is None else size_bytes(limit, "plan.memory_limit"),
        zero_stage=zero_stage,
        limit_s=SEARCH_S,
        seed=spec.plan.seed,
    )
    capture: IssuedStep = search.emit(sharding, name=title)
    return capture.placed_on(cluster), cluster


def _part(module: str) -> Any:
    """A module of ours that needs an extra."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers", "ortools"):
            raise
        raise MissingDependencyError(
            f"a search for a sharding needs the package {error.name!r}: pip install {error.name}"
        ) from None
