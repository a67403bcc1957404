"""What a job file asks for: a `JobSpec` becomes groups, a backend request and a backend, opened."""

import hashlib
import logging
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec

from lagom_overlap.backends import nccl
from lagom_overlap.backends.base import Backend, BackendRequest
from lagom_overlap.backends.gloo import join_if_launched_by_torchrun
from lagom_overlap.collective import Collective, LaunchSpace, SpaceLimits, chunk_bytes_of_slice
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.cost.operators import OperatorConstants, load_operators
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import Cluster
from lagom_overlap.jobfile.registry import backend_factory
from lagom_overlap.jobfile.spec import (
    BlockTable,
    CommTable,
    CostTable,
    GroupTable,
    JobSpec,
    JobTable,
    SpaceTable,
    link_bytes_per_s,
)
from lagom_overlap.jobfile.step import (
    capture_of,
    cluster_for,
    filled_cluster,
    job_step,
    stated_cluster,
    step_operators,
)
from lagom_overlap.toml_tables import size_bytes
from lagom_overlap.workload import (
    Attention,
    CommOp,
    CompOp,
    Gemm,
    Iteration,
    MemoryBound,
    OverlapGroup,
    Work,
    find_overlap_groups,
)

_log = logging.getLogger(__name__)

RANK_BACKENDS: Final = ("gloo", "workers")
"""Backends that start rank processes: they run shapes, not models, and no cost model prices them."""
NO_LAUNCH_BACKENDS: Final = (*RANK_BACKENDS, "nccl", "fake_nccl")
"""Backends of ours that cannot set the computation's side of an overlap."""


_ELEMENT_BYTES: Final = MappingProxyType({"nccl": 2, "fake_nccl": 2})
"""Of the computations that a job gives by shapes: bf16 on GPUs, fp32 on ranks of this machine's processor."""
_FP32_BYTES: Final = 4


def cluster_of(spec: JobSpec) -> Cluster | None:
    """The job's cluster, or None if it names none; for a model as many nodes as its layout or its capture fills."""
    if spec.cluster is None:
        return None
    captured = capture_of(spec)
    if captured is not None:
        return filled_cluster(spec.cluster, captured.num_ranks)
    if spec.parallel is not None and spec.parallel.auto is None:
        return cluster_for(spec, spec.parallel.layout())
    return stated_cluster(spec.cluster)


def _block_ops(block: BlockTable, element_bytes: int) -> list[CompOp]:
    """The forward pass of a transformer block: qkv, attention, output projection, up, activation, down."""
    tokens, hidden, ffn = block.batch * block.seq_len, block.hidden, block.ffn
    attention = Attention(
        batch=block.batch,
        num_heads=block.heads,
        seq_len=block.seq_len,
        head_dim=hidden // block.heads,
        element_bytes=element_bytes,
    )
    works: dict[str, Work] = {
        "qkv": Gemm(tokens, 3 * hidden, hidden, element_bytes),
        "attention": attention,
        "out": Gemm(tokens, hidden, hidden, element_bytes),
        "up": Gemm(tokens, ffn, hidden, element_bytes),
        "activation": MemoryBound(2 * tokens * ffn * element_bytes),
        "down": Gemm(tokens, hidden, ffn, element_bytes),
    }
    return [CompOp(name=f"{name}.{i}", work=work) for i in range(block.repeat) for name, work in works.items()]


def _listed_ops(group: GroupTable, place: str, element_bytes: int) -> list[CompOp]:
    ops = []
    for number, op in enumerate(group.op):
        work: Gemm | Attention | MemoryBound
        if op.gemm is not None:
            m, n, k = op.gemm
            work = Gemm(m, n, k, element_bytes)
        elif op.attention is not None:
            batch, heads, seq_len, head_dim = op.attention
            work = Attention(
                batch=batch, num_heads=heads, seq_len=seq_len, head_dim=head_dim, element_bytes=element_bytes
            )
        else:
            work = MemoryBound(size_bytes(op.memory or 0, f"{place}.op[{number}].memory"))
        ops.append(CompOp(name=op.name, work=work))
    return ops


def _comm_op(comm: CommTable, num_ranks: int, place: str) -> CommOp:
    collective = Collective(comm.kind, size_bytes(comm.bytes, f"{place}.bytes"), num_ranks)
    return CommOp(name=comm.name, collective=collective, communicator=comm.communicator)


def _groups_from_shapes(spec: JobSpec) -> tuple[OverlapGroup, ...]:
    groups, seen = [], set[str]()
    element_bytes = _ELEMENT_BYTES.get(spec.job.backend, _FP32_BYTES)
    for index, table in enumerate(spec.group):
        place = f"group[{index}]"
        comms = [_comm_op(comm, spec.job.ranks, f"{place}.comm[{i}]") for i, comm in enumerate(table.comm)]
        for name in (table.name, *(comm.name for comm in comms)):
            if name in seen:
                raise JobError(f"{place}: the name {name!r} is used twice; groups and collectives need different names")
            seen.add(name)
        groups.append(
            OverlapGroup(
                name=table.name,
                computations=tuple(
                    _block_ops(table.block, element_bytes) if table.block else _listed_ops(table, place, element_bytes)
                ),
                comms=tuple(comms),
                starts_after=tuple(comm.starts_after for comm in table.comm),
                count=table.count,
            )
        )
    return tuple(groups)


def iteration_of(spec: JobSpec) -> Iteration | None:
    """One step of the job's model, built or captured, as the framework issues it.

    None for a job that gives groups by their shapes.

    Raises:
        JobError: if the step is one stage of a pipeline, or its layout does not fit the model or the cluster.
    """
    captured = capture_of(spec, cluster_of(spec))
    if captured is not None:
        return captured.issued
    built = job_step(spec)
    if built is None:
        return None
    if not built.is_whole:
        raise JobError(
            f"parallel.pipeline is {built.layout.pipeline}, must be 1: the stages of a pipeline wait for each other, "
            "and overlap groups are those of one rank's whole step (see `lagom simulate`)"
        )
    return built.step().issued


def _groups_from_model(spec: JobSpec) -> tuple[OverlapGroup, ...]:
    iteration = iteration_of(spec)
    assert iteration is not None, spec.job.name
    return find_overlap_groups(iteration)


def groups_of(spec: JobSpec) -> tuple[OverlapGroup, ...]:
    """The overlap groups of a job, from its model or from its shapes.

    Raises:
        JobError: if names repeat, sizes are impossible or ranks do not fit the cluster.
    """
    if spec.program is not None:
        raise JobError("[program] is read by `lagom plan` only; here give [model] or [[group]]")
    groups = _groups_from_model(spec) if spec.model is not None else _groups_from_shapes(spec)
    if not groups:
        raise JobError("no communication of this job overlaps a computation: there is nothing to tune")
    return groups


def _sizes(values: list[int | str] | None, key: str) -> tuple[int, ...] | None:
    if values is None:
        return None
    return _increasing([size_bytes(value, f"tune.space.{key}[{i}]") for i, value in enumerate(values)], key)


def _increasing(values: list[int], key: str) -> tuple[int, ...]:
    if not values:
        raise JobError(f"tune.space.{key} is empty, must name at least one value")
    return tuple(sorted(set(values)))


_T = TypeVar("_T")


def _chosen(values: list[_T] | None, key: str) -> tuple[_T, ...] | None:
    if values == []:
        raise JobError(f"tune.space.{key} is empty, must name at least one value")
    return None if values is None else tuple(dict.fromkeys(values))


def limits_of(space: SpaceTable) -> SpaceLimits:
    """The values that a job allows per knob, slices converted to chunks.

    Raises:
        JobError: if a list is empty, or a size is none.
    """
    chunk_bytes = _sizes(space.chunk_bytes, "chunk_bytes")
    slices = _sizes(space.slice_bytes, "slice_bytes")
    if slices is not None:
        try:
            chunk_bytes = tuple(sorted({chunk_bytes_of_slice(value) for value in slices}))
        except ValueError as error:
            raise JobError(f"tune.space.slice_bytes: {error}") from None
    return SpaceLimits(
        algorithms=_chosen(space.algorithm, "algorithm"),
        protocols=_chosen(space.protocol, "protocol"),
        transports=_chosen(space.transport, "transport"),
        num_channels=None if space.num_channels is None else _increasing(space.num_channels, "num_channels"),
        num_threads=None if space.num_threads is None else _increasing(space.num_threads, "num_threads"),
        chunk_bytes=chunk_bytes,
        launches=_launches(space),
    )


def _launches(space: SpaceTable) -> LaunchSpace | None:
    """The values of the computation's side; None where the job gives none."""
    if not space.launch_keys:
        return None
    return LaunchSpace(
        sm_carveouts=() if space.sm_carveout is None else _increasing(space.sm_carveout, "sm_carveout"),
        orders=_chosen(space.launch_order, "launch_order") or (),
        priorities=_chosen(space.stream_priority, "stream_priority") or (),
    )


def job_fingerprint(spec: JobSpec, groups: tuple[OverlapGroup, ...]) -> str:
    """Sixteen hex digits that are equal exactly for equal workloads on equal (modelled) machines.

    The tuner, its space and budget do not count: a bundle may be replayed with others.
    """
    named = spec.cluster
    cluster = named and {"preset": named.preset, "nodes": named.nodes, "gpus_per_node": named.gpus_per_node}
    machine: tuple[object, ...] = (cluster, spec.cost.profile, spec.job.ranks, spec.job.link)
    if named is not None and named.gpu is not None:  # recordings of before there was the key keep their digits
        machine += (f"gpu={named.gpu}",)
    if spec.cost.sm_carveout is not None:
        machine += (spec.cost.sm_carveout,)
    if spec.cost.rank_skew_s:
        machine += (f"rank_skew_s={spec.cost.rank_skew_s!r}",)
    return hashlib.sha256(msgspec.json.encode((_named(groups), machine), order="sorted")).hexdigest()[:16]


_FIRST_FIELDS: Final = frozenset(
    (
        *("deps", "origin", "shards", "stream", "communicator", "starts_after", "count", "occurrences"),
        *("phase", "layer", "microbatch", "module", "kernel"),
        *("element_bytes", "causal", "passes", "grid", "cluster", "own_tiles", "num_nodes"),
    )
)
"""Fields with a default that the first recordings name, whatever they hold."""


def _named(value: Any) -> Any:  # a group, or anything in one
    """Groups as recordings name them: a field that came later is left out where it says nothing."""
    if isinstance(value, list | tuple):
        return [_named(part) for part in value]
    if not is_dataclass(value):
        return value
    parts = ((each, getattr(value, each.name)) for each in fields(value))
    return {each.name: _named(part) for each, part in parts if each.name in _FIRST_FIELDS or part != each.default}


def request_of(
    spec: JobSpec, groups: tuple[OverlapGroup, ...], *, seed: int | None = None, bundle: Path | None = None
) -> BackendRequest:
    """What the job asks of its backend; `seed` overrides the job's."""
    cluster = cluster_of(spec)
    return BackendRequest(
        job_fingerprint=job_fingerprint(spec, groups),
        seed=spec.tune.seed if seed is None else seed,
        repeats=spec.tune.repeats,
        limits=limits_of(spec.tune.space),
        cluster=cluster,
        profile=spec.cost.profile,
        noise=spec.cost.noise,
        sm_carveout=spec.cost.sm_carveout,
        rank_skew_s=spec.cost.rank_skew_s,
        operators=None if cluster is None else _operators(spec, cluster),
        bundle=bundle,
        num_ranks=spec.job.ranks,
        link_bytes_per_s=link_bytes_per_s(spec.job.link),
        timeout_s=spec.job.timeout_s,
    )


def join_launched(backend: str) -> int | None:
    """The exit code of this process if a launcher started it as a rank other than 0; it lives through its rank here.

    A command calls it before it writes or prints anything, and ends with the code if there is one.
    """
    join = {"gloo": join_if_launched_by_torchrun, "nccl": nccl.join_if_launched}.get(backend)
    return None if join is None else join()


def _operators(spec: JobSpec, cluster: Cluster) -> OperatorConstants:
    """What operators cost: those of a model in its whole step, groups by shapes alone and in nobody's kernels."""
    if spec.parallel is None and spec.model is None:
        return load_operators(cluster.gpu)
    return step_operators(cluster.gpu, spec.parallel)


def contention_model_of(spec: JobSpec, cluster: Cluster) -> ContentionModel:
    """The cost model of the job's profile, operators and carve-out on this cluster, at the rates of a whole step."""
    cost, operators = spec.cost, _operators(spec, cluster).in_training()
    return ContentionModel(
        cluster, load_profile(cost.profile), cost.sm_carveout, operators, rank_skew_s=cost.rank_skew_s
    )


def unused_keys(spec: JobSpec, backend: str) -> tuple[str, ...]:
    """Keys that the job sets and this backend has no use for; a recording takes the place of all of them."""
    default = JobTable(name=spec.job.name)
    found = []
    if backend == "simulated":
        found += ["job.link"] if spec.job.link != default.link else []
        found += ["job.timeout_s"] if spec.job.timeout_s != default.timeout_s else []
        found += ["job.ranks"] if spec.model is not None and spec.job.ranks != default.ranks else []
    if backend in RANK_BACKENDS:
        found += ["cost"] if spec.cost != CostTable() else []
    return tuple(found)


def open_backend(spec: JobSpec, name: str, request: BackendRequest) -> Backend:
    """The backend of that name, opened.

    Raises:
        UnknownNameError: if there is none.
        MissingDependencyError: if it needs a package that is not installed.
        JobError: if the job does not hold what the backend needs.
    """
    factory = backend_factory(name)
    if spec.tune.space.launch_keys and name in NO_LAUNCH_BACKENDS:
        raise JobError(
            f"tune.space.{spec.tune.space.launch_keys[0]}: the {name} backend cannot set the computation's side; "
            "allowed with: simulated, recorded"
        )
    for key in unused_keys(spec, name):
        _log.warning("%s has no meaning with the %s backend and is not used", key, name)
    if name == "simulated" and request.cluster is None:
        raise JobError("the simulated backend needs a cluster: give [cluster] preset = ... in the job file")
    if name in RANK_BACKENDS and spec.model is not None:
        raise JobError(f"the {name} backend runs groups given by their shapes: give [[group]] instead of [model]")
    if name == "recorded" and request.bundle is None:
        raise JobError("the recorded backend needs a recording: give --bundle RUN_FOLDER")
    if name != "recorded" and request.bundle is not None:
        raise JobError(f"--bundle has no meaning with the {name} backend; allowed with: recorded")
    return factory(request)
