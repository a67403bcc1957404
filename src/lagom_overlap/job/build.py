"""The only place where names become objects: a `JobSpec` becomes groups, a backend request, a backend, a tuner."""

import hashlib
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import msgspec

from lagom_overlap.backends import nccl
from lagom_overlap.backends.base import Backend, BackendRequest, SpaceLimits
from lagom_overlap.backends.gloo import join_if_launched_by_torchrun
from lagom_overlap.collective import Collective, LaunchSpace, chunk_bytes_of_slice
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.cost.operators import operators_of_preset
from lagom_overlap.errors import JobError, MissingDependencyError, UnknownNameError
from lagom_overlap.hardware import Cluster, load_preset
from lagom_overlap.job.capture import capture_of
from lagom_overlap.job.spec import (
    BlockTable,
    CommTable,
    CostTable,
    GroupTable,
    JobSpec,
    JobTable,
    SpaceTable,
    link_bytes_per_s,
    size_bytes,
)
from lagom_overlap.plan.base import Planner
from lagom_overlap.tune.base import Problems, Tuner
from lagom_overlap.tune.guard import Guarded
from lagom_overlap.tune.warm_start import WarmStart
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
from lagom_overlap.workload.fsdp import fsdp_iteration
from lagom_overlap.workload.models import load_model

_log = logging.getLogger(__name__)

TUNERS: Final = "lagom_overlap.tuners"
BACKENDS: Final = "lagom_overlap.backends"
PLANNERS: Final = "lagom_overlap.planners"
RANK_BACKENDS: Final = ("gloo", "workers")
"""Backends that start rank processes: they run shapes, not models, and no cost model prices them."""
NO_LAUNCH_BACKENDS: Final = (*RANK_BACKENDS, "nccl", "fake_nccl")
"""Backends of ours that cannot set the computation's side of an overlap."""

_EXTRA_OF: Final = {"torch": "torch", "ortools": "plan", "transformers": "models"}
"""Package -> our extra that brings it."""

_FP32_BYTES: Final = 4


def entry_point_names(group: str) -> list[str]:
    """The names registered under an entry-point group, sorted."""
    return sorted({entry.name for entry in metadata.entry_points(group=group)})


def _load(group: str, what: str, name: str) -> Callable[..., Any]:
    found = [entry for entry in metadata.entry_points(group=group) if entry.name == name]
    if not found:
        raise UnknownNameError.among(what, name, entry_point_names(group))
    try:
        return cast("Callable[..., Any]", found[0].load())
    except ModuleNotFoundError as error:
        extra = _EXTRA_OF.get(error.name or "")
        if extra is None:
            raise
        raise MissingDependencyError(
            f"{what} {name!r} needs the package {error.name!r}: pip install 'lagom-overlap[{extra}]'"
        ) from None


def cluster_of(spec: JobSpec) -> Cluster | None:
    """The job's cluster, or None if it names none."""
    return None if spec.cluster is None else load_preset(spec.cluster.preset, spec.cluster.nodes)


def _block_ops(block: BlockTable) -> list[CompOp]:
    """The forward pass of a transformer block: qkv, attention, output projection, up, activation, down."""
    tokens, hidden, ffn = block.batch * block.seq_len, block.hidden, block.ffn
    attention = Attention(
        batch=block.batch,
        num_heads=block.heads,
        seq_len=block.seq_len,
        head_dim=hidden // block.heads,
        element_bytes=_FP32_BYTES,
    )
    works: dict[str, Work] = {
        "qkv": Gemm(tokens, 3 * hidden, hidden, _FP32_BYTES),
        "attention": attention,
        "out": Gemm(tokens, hidden, hidden, _FP32_BYTES),
        "up": Gemm(tokens, ffn, hidden, _FP32_BYTES),
        "activation": MemoryBound(2 * tokens * ffn * _FP32_BYTES),
        "down": Gemm(tokens, hidden, ffn, _FP32_BYTES),
    }
    return [CompOp(name=f"{name}.{i}", work=work) for i in range(block.repeat) for name, work in works.items()]


def _listed_ops(group: GroupTable, place: str) -> list[CompOp]:
    ops = []
    for number, op in enumerate(group.op):
        work: Gemm | Attention | MemoryBound
        if op.gemm is not None:
            m, n, k = op.gemm
            work = Gemm(m, n, k, _FP32_BYTES)
        elif op.attention is not None:
            batch, heads, seq_len, head_dim = op.attention
            work = Attention(
                batch=batch, num_heads=heads, seq_len=seq_len, head_dim=head_dim, element_bytes=_FP32_BYTES
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
                computations=tuple(_block_ops(table.block) if table.block else _listed_ops(table, place)),
                comms=tuple(comms),
                starts_after=tuple(comm.starts_after for comm in table.comm),
                count=table.count,
            )
        )
    return tuple(groups)


def iteration_of(spec: JobSpec) -> Iteration | None:
    """One micro-batch's forward and backward of the job's model, or its captured step as the framework issues it.

    None for a job that gives groups by their shapes.

    Raises:
        JobError: if [parallel] names what no overlap groups are built for, or ranks do not fit the cluster.
    """
    captured = capture_of(spec, cluster_of(spec))
    if captured is not None:
        return captured.issued
    if spec.model is None or spec.parallel is None:
        return None
    parallel = spec.parallel
    if parallel.auto is not None:
        raise JobError("parallel.auto: a sharding is searched for by `lagom capture` and `lagom plan` only; give fsdp")
    if beyond := parallel.beyond_fsdp():
        raise JobError(f"parallel.{beyond[0]} is read by `lagom simulate` only; here [parallel] takes fsdp alone")
    if parallel.fsdp is None:
        raise JobError("missing key 'parallel.fsdp': overlap groups are built for fully sharded data parallelism")
    cluster = cluster_of(spec)
    assert cluster is not None
    cluster.num_nodes_of(parallel.fsdp)
    assert spec.model.name is not None and spec.model.seq_len is not None  # noqa: PT018  checked when the file was read
    return fsdp_iteration(
        load_model(spec.model.name),
        num_ranks=parallel.fsdp,
        micro_batch=parallel.micro_batch,
        seq_len=spec.model.seq_len,
        prefetch=parallel.prefetch,
    )


def _groups_from_model(spec: JobSpec) -> tuple[OverlapGroup, ...]:
    iteration, parallel = iteration_of(spec), spec.parallel
    if iteration is not None and parallel is None:
        return find_overlap_groups(iteration)
    assert iteration is not None and parallel is not None and parallel.fsdp is not None  # noqa: PT018  checked above
    per_step = parallel.micro_batch * parallel.fsdp
    global_batch = per_step if parallel.global_batch is None else parallel.global_batch
    if global_batch % per_step:
        raise JobError(
            f"parallel.global_batch is {global_batch}, must be a multiple of micro_batch x fsdp = {per_step}"
        )
    accumulation = global_batch // per_step
    return tuple(replace(group, count=group.count * accumulation) for group in find_overlap_groups(iteration))


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
    machine: tuple[object, ...] = (spec.cluster, spec.cost.profile, spec.job.ranks, spec.job.link)
    if spec.cost.sm_carveout is not None:
        machine += (spec.cost.sm_carveout,)
    return hashlib.sha256(msgspec.json.encode((groups, machine), order="sorted")).hexdigest()[:16]


def request_of(
    spec: JobSpec, groups: tuple[OverlapGroup, ...], *, seed: int | None = None, bundle: Path | None = None
) -> BackendRequest:
    """What the job asks of its backend; `seed` overrides the job's."""
    return BackendRequest(
        job_fingerprint=job_fingerprint(spec, groups),
        seed=spec.tune.seed if seed is None else seed,
        repeats=spec.tune.repeats,
        limits=limits_of(spec.tune.space),
        cluster=cluster_of(spec),
        profile=spec.cost.profile,
        noise=spec.cost.noise,
        sm_carveout=spec.cost.sm_carveout,
        operators=None if spec.cluster is None else operators_of_preset(spec.cluster.preset),
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


def backend_factory(name: str) -> Callable[[BackendRequest], Backend]:
    """What opens the backend of that name.

    Raises:
        UnknownNameError: if there is none.
        MissingDependencyError: if it needs a package that is not installed.
    """
    return _load(BACKENDS, "backend", name)


def contention_model_of(spec: JobSpec, cluster: Cluster) -> ContentionModel:
    """The cost model of the job's profile, operators and carve-out on this cluster."""
    operators = None if spec.cluster is None else operators_of_preset(spec.cluster.preset)
    return ContentionModel(cluster, load_profile(spec.cost.profile), spec.cost.sm_carveout, operators)


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


def check_tuner_name(name: str) -> None:
    """Refuses a tuner that does not exist, before anything is started.

    Raises:
        UnknownNameError: if there is none of that name.
    """
    _load(TUNERS, "tuner", name)


def searches_launches(name: str) -> bool:
    """Whether a tuner searches the computation's side too.

    Raises:
        UnknownNameError: if there is none of that name.
    """
    return bool(getattr(_load(TUNERS, "tuner", name), "searches_launches", False))


_NO_OPTIONS: Final = ("seed", "on_progress", "warm")
"""Keyword arguments of tuners and planners that a job file does not set."""


def _checked_options(
    factory: Callable[..., Any], name: str, options: Mapping[str, object], *, what: str = "tuner", table: str = "tune"
) -> Mapping[str, object]:
    allowed = {
        parameter.name: parameter
        for parameter in inspect.signature(factory).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in _NO_OPTIONS
    }
    for key, value in options.items():
        if key not in allowed:
            offered = f"allowed: {', '.join(sorted(allowed))}" if allowed else "it has none"
            raise JobError(f"{table}.options: {what} {name!r} has no option {key!r}; {offered}")
        default = allowed[key].default
        wanted = (int, float) if isinstance(default, float) else type(default)
        if isinstance(value, bool) != isinstance(default, bool) or not isinstance(value, wanted):
            raise JobError(
                f"{table}.options.{key} is {value!r}: {what} {name!r} expects {type(default).__name__}, "
                f"such as {default!r}"
            )
    return options


def planner_names() -> list[str]:
    """The planners that are registered, sorted."""
    return entry_point_names(PLANNERS)


def check_planner_name(name: str) -> None:
    """Refuses a planner that does not exist, before anything is started.

    Raises:
        UnknownNameError: if there is none of that name.
    """
    _load(PLANNERS, "planner", name)


def make_planner(
    name: str, options: Mapping[str, object], *, on_progress: Callable[[Any], None] | None = None
) -> Planner:
    """The planner of that name; it reports progress if it can.

    Raises:
        UnknownNameError: if there is none.
        MissingDependencyError: if it needs a package that is not installed.
        JobError: if it has no such option, or the option's value is of another type or not allowed.
    """
    factory = _load(PLANNERS, "planner", name)
    given = dict(_checked_options(factory, name, options, what="planner", table="plan"))
    if on_progress is not None and "on_progress" in inspect.signature(factory).parameters:
        given["on_progress"] = on_progress
    try:
        return cast("Planner", factory(**given))
    except ValueError as error:
        raise JobError(f"plan.options of planner {name!r}: {error}") from None


def takes_warm_start(name: str) -> bool:
    """Whether a tuner can begin with what other runs say.

    Raises:
        UnknownNameError: if there is none of that name.
    """
    return "warm" in inspect.signature(_load(TUNERS, "tuner", name)).parameters


def check_takes_warm_start(name: str) -> None:
    """Refuses a tuner that cannot begin with what other runs say.

    Raises:
        UnknownNameError: if there is none of that name.
        JobError: if it takes no warm start.
    """
    if not takes_warm_start(name):
        raise JobError(f"tuner {name!r} takes no warm start; allowed with: just_enough")


def make_tuner(
    name: str,
    problems: Problems,
    *,
    seed: int,
    options: Mapping[str, object],
    guarded: bool,
    warm: WarmStart | None = None,
) -> Tuner:
    """The tuner of that name over these problems, under the guard if asked; `warm` if it takes one.

    Raises:
        UnknownNameError: if there is none.
        JobError: if it has no such option, or the option's value is of another type or not allowed.
    """
    factory = _load(TUNERS, "tuner", name)
    checked = _checked_options(factory, name, options)
    try:
        begin = {} if warm is None else {"warm": warm}
        tuner = cast("Tuner", factory(problems, seed=seed, **checked, **begin))
    except ValueError as error:
        raise JobError(f"tune.options of tuner {name!r}: {error}") from None
    guards_itself = getattr(factory, "guards_itself", False)  # the default was raced already: not a second time
    return Guarded(tuner, problems) if guarded and not guards_itself else tuner
