"""The job: a job file resolved once, each part when it is first asked for. Every verb takes one."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from lagom_overlap.backends import nccl
from lagom_overlap.backends.base import Backend, BackendRequest
from lagom_overlap.backends.gloo import join_if_launched_by_torchrun
from lagom_overlap.capturing.file import read_capture
from lagom_overlap.collective import LaunchSpace, SpaceLimits, chunk_bytes_of_slice
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.cost.operators import OperatorConstants, load_operators
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import Cluster
from lagom_overlap.jobfile import describe
from lagom_overlap.jobfile.memory import check_memory
from lagom_overlap.jobfile.registry import backend_factory
from lagom_overlap.jobfile.shapes import groups_from_shapes
from lagom_overlap.jobfile.spec import (
    ClusterTable,
    CostTable,
    JobSpec,
    JobTable,
    ModelTable,
    SpaceTable,
    link_bytes_per_s,
)
from lagom_overlap.jobfile.stages import StagedGroup, staged_groups
from lagom_overlap.jobfile.step import (
    JobStep,
    cluster_for,
    filled_cluster,
    job_step,
    stated_cluster,
    step_operators,
)
from lagom_overlap.jobfile.variants import JobVariants
from lagom_overlap.results.tune import PREDICTED, FitErrors, PredictedGain
from lagom_overlap.toml_tables import size_bytes
from lagom_overlap.tuners.base import Tuner
from lagom_overlap.tuners.problem import Assignment, GroupProblem, Measurement
from lagom_overlap.tuners.tied import Tie, Tied
from lagom_overlap.workload import Iteration, OverlapGroup, find_overlap_groups
from lagom_overlap.workload.issued import IssuedStep

_log = logging.getLogger(__name__)

RANK_BACKENDS: Final = ("gloo", "workers")
"""Backends that start rank processes: they run shapes, not models, and no cost model prices them."""
NO_LAUNCH_BACKENDS: Final = (*RANK_BACKENDS, "nccl", "fake_nccl")
"""Backends of ours that cannot set the computation's side of an overlap."""
_MEASURED: Final = ("nccl", "recorded", PREDICTED)
"""Backends whose times were measured, here or once: what ran did fit, whatever is estimated."""


@dataclass(frozen=True, eq=False)
class Job:
    """What a verb works on: a job file and what it means, each part made when it is first asked for, and once.

    `given` is a captured step in place of the file that the job's `[model]` names.
    """

    spec: JobSpec
    given: IssuedStep | None = None

    @classmethod
    def read(cls, path: Path, sets: Sequence[str] = ()) -> "Job":
        """The job of a job file, with what `--set` says.

        Raises:
            LagomError: if it is missing, no TOML, or holds what is not allowed.
        """
        return cls(JobVariants.read(path, sets).one())

    @classmethod
    def of_capture(cls, captured: IssuedStep, preset: str) -> "Job":
        """A captured step on a preset, on as many nodes as its ranks fill."""
        name = captured.iteration.name
        tables = JobTable(name=name), ModelTable(capture=name), ClusterTable(preset=preset)
        return cls(JobSpec(job=tables[0], model=tables[1], cluster=tables[2]), captured)

    @property
    def name(self) -> str:
        """What the job is called."""
        return self.spec.job.name

    @cached_property
    def step(self) -> JobStep | None:
        """The training step of the job's named model; None for groups given by shapes, captures and programs.

        Raises:
            LagomError: if the layout does not fit the model or the cluster, or the framework does not shard so.
        """
        return job_step(self.spec)

    @cached_property
    def captured(self) -> IssuedStep | None:
        """The capture that the job's `[model]` names, on the job's cluster if it has one; None if it names none.

        Raises:
            JobError: if the file cannot be read, or has more ranks than the cluster has GPUs.
        """
        if self._capture is None or self.cluster is None:
            return self._capture
        return self._capture.placed_on(self.cluster)

    @cached_property
    def _capture(self) -> IssuedStep | None:
        """As it was captured."""
        if self.given is not None or self.spec.model is None or self.spec.model.capture is None:
            return self.given
        return read_capture(Path(self.spec.model.capture))

    @cached_property
    def cluster(self) -> Cluster | None:
        """The job's cluster; None if it names none. For a model as many nodes as its layout or its capture fills."""
        spec = self.spec
        if spec.cluster is None:
            return None
        if self._capture is not None:
            return filled_cluster(spec.cluster, self._capture.num_ranks)
        if spec.parallel is None or spec.parallel.auto is not None:
            return stated_cluster(spec.cluster)
        return cluster_for(spec, spec.parallel.layout()) if self.step is None else self.step.cluster

    @cached_property
    def issued(self) -> Iteration | None:
        """One step of the job's model, built or captured, as the framework issues it.

        None for a job that gives groups by their shapes.

        Raises:
            JobError: if the step is one stage of a pipeline, or its layout does not fit the model or the cluster.
        """
        if self.captured is not None:
            return self.captured.issued
        if self.step is None:
            return None
        if not self.step.is_whole:
            raise JobError(
                f"parallel.pipeline is {self.step.layout.pipeline}, must be 1: the ranks of a pipeline run different "
                "steps (`lagom simulate`, `lagom tune` and `lagom compare` take all of them)"
            )
        return self.step.issued.issued

    @cached_property
    def groups(self) -> tuple[OverlapGroup, ...]:
        """The overlap groups of the job, from its model or from its shapes.

        Raises:
            JobError: if names repeat, sizes are impossible or ranks do not fit the cluster.
        """
        if self.spec.program is not None:
            raise JobError("[program] is read by `lagom plan` only; here give [model] or [[group]]")
        if self.spec.model is None:
            groups = groups_from_shapes(self.spec)
        elif self.step is not None and not self.step.is_whole:
            groups = tuple(staged.group for staged in self.staged)
        else:
            assert self.issued is not None, self.name
            groups = find_overlap_groups(self.issued)
        if not groups:
            raise JobError("no communication of this job overlaps a computation: there is nothing to tune")
        return groups

    @cached_property
    def staged(self) -> tuple[StagedGroup, ...]:
        """The overlap groups of a pipeline's stages, with the stages; none for a job without a pipeline.

        Raises:
            LagomError: if the layout does not fit the model or the cluster.
        """
        return () if self.step is None or self.step.is_whole else staged_groups(self.step)

    @cached_property
    def limits(self) -> SpaceLimits:
        """The values that the job allows per knob.

        Raises:
            JobError: if a size is none.
        """
        return limits_of(self.spec.tune.space)

    @cached_property
    def price(self) -> ContentionModel:
        """The cost model of the job's profile, operators and carve-out on its cluster, at the rates of a whole step.

        Raises:
            JobError: if it names no cluster.
        """
        if self.cluster is None:
            raise JobError("the job names no machine: give [cluster] preset = ... in the job file")
        assert self.operators is not None
        return self._price(self.cluster, self.operators)

    def price_on(self, cluster: Cluster) -> ContentionModel:
        """The same on another cluster, such as a trace's or a search's."""
        return self._price(cluster, self._operators_on(cluster))

    def _price(self, cluster: Cluster, operators: OperatorConstants) -> ContentionModel:
        cost = self.spec.cost
        return ContentionModel(
            cluster, load_profile(cost.profile), cost.sm_carveout, operators.in_training(), rank_skew_s=cost.rank_skew_s
        )

    @cached_property
    def operators(self) -> OperatorConstants | None:
        """What operators cost on the job's GPU, None if it names none.

        Those of a model in its whole step, of groups by shapes alone and in nobody's kernels.
        """
        return None if self.cluster is None else self._operators_on(self.cluster)

    def _operators_on(self, cluster: Cluster) -> OperatorConstants:
        if self.spec.parallel is None and self.spec.model is None:
            return load_operators(cluster.gpu)
        return step_operators(cluster.gpu, self.spec.parallel)

    def backend_name(self, asked: str | None) -> str:
        """What runs the job's groups: what was asked for, or the job's own."""
        return asked or self.spec.job.backend

    def check_fits(self, backend: str) -> None:
        """Refuses a job that `lagom simulate` refuses because it does not fit its GPU.

        Raises:
            JobError: as every verb words it.
        """
        if backend not in _MEASURED and self.step is not None:
            check_memory(self.step)

    def request(self, *, seed: int | None = None, bundle: Path | None = None) -> BackendRequest:
        """What the job asks of its backend; `seed` overrides the job's."""
        return self.request_for(self.groups, seed=seed, bundle=bundle)

    def request_for(
        self, groups: tuple[OverlapGroup, ...], *, seed: int | None = None, bundle: Path | None = None
    ) -> BackendRequest:
        """The same for other groups than the job's own."""
        spec = self.spec
        return BackendRequest(
            job_fingerprint=job_fingerprint(spec, groups),
            seed=spec.tune.seed if seed is None else seed,
            repeats=spec.tune.repeats,
            limits=self.limits,
            cluster=self.cluster,
            profile=spec.cost.profile,
            noise=spec.cost.noise,
            sm_carveout=spec.cost.sm_carveout,
            rank_skew_s=spec.cost.rank_skew_s,
            operators=self.operators,
            bundle=bundle,
            num_ranks=spec.job.ranks,
            link_bytes_per_s=link_bytes_per_s(spec.job.link),
            timeout_s=spec.job.timeout_s,
        )

    def open(self, name: str, request: BackendRequest) -> Backend:
        """The backend of that name, opened.

        Raises:
            UnknownNameError: if there is none.
            MissingDependencyError: if it needs a package that is not installed.
            JobError: if the job does not hold what the backend needs.
        """
        spec, factory = self.spec, backend_factory(name)
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

    def notes(self, name: str, backend: Backend) -> tuple[str, ...]:
        """The caveats that belong with every figure of the backend of that name."""
        return describe.notes_of(self.spec, name, backend)

    def arm_words(self, name: str, backend: Backend) -> Mapping[str, str]:
        """What the contenders of a verdict are, in words, by arm name."""
        return describe.arm_words(name, backend)

    @property
    def from_trace(self) -> msgspec.Struct | None:
        """What run.json keeps of the trace that the job's times are predicted from; None if they are not."""
        return None

    def tied(self, tuner: Tuner, problems: tuple[GroupProblem, ...]) -> Tuner:
        """The tuner, with one setting for collectives that a running job cannot tell apart; here it can."""
        return tuner

    def predicted_gain(
        self, problems: Sequence[GroupProblem], recommended: Mapping[str, Assignment]
    ) -> PredictedGain | None:
        """What a recommendation saves of a step, by a trace; None where no trace says it."""
        return None


@dataclass(frozen=True, eq=False, kw_only=True)
class PredictedJob(Job):
    """A job whose groups and times come from a trace or an earlier run; nothing is run."""

    traced: tuple[OverlapGroup, ...]
    backend: Backend
    caveats: tuple[str, ...]
    default_words: str
    trace_record: msgspec.Struct
    fit_errors: FitErrors | None = None
    ties: tuple[Tie, ...] = ()

    def tied(self, tuner: Tuner, problems: tuple[GroupProblem, ...]) -> Tuner:
        """See `Job`; by the model's own times."""
        return Tied(tuner, problems, self.ties, self._makespan_s) if self.ties else tuner

    def _makespan_s(self, problem: GroupProblem, assignment: Assignment) -> float:
        outcome = self.backend.measure(problem.group, assignment)
        return outcome.makespan_s if isinstance(outcome, Measurement) else inf

    def predicted_gain(
        self, problems: Sequence[GroupProblem], recommended: Mapping[str, Assignment]
    ) -> PredictedGain | None:
        """What the recommendation saves of the traced step; None of an earlier run of ours, which has no steps."""
        if self.fit_errors is None:
            return None
        savings_s = {}
        for problem in problems:
            tuned = recommended[problem.group.name]
            if tuned != problem.default:
                before, after = (self._makespan_s(problem, each) for each in (problem.default, tuned))
                savings_s[problem.group.name] = before - after
        return self.fit_errors.gain(savings_s)

    @cached_property
    def groups(self) -> tuple[OverlapGroup, ...]:
        """The trace's."""
        return self.traced

    def backend_name(self, asked: str | None) -> str:
        """Named as what it is."""
        return PREDICTED

    def open(self, name: str, request: BackendRequest) -> Backend:
        """The model that was fitted to the trace."""
        return self.backend

    def notes(self, name: str, backend: Backend) -> tuple[str, ...]:
        """What the trace does not tell."""
        return self.caveats

    def arm_words(self, name: str, backend: Backend) -> Mapping[str, str]:
        """The default as the trace had it."""
        return {"default": self.default_words}

    @property
    def from_trace(self) -> msgspec.Struct | None:
        """What run.json keeps of the trace."""
        return self.trace_record


def _sizes(values: list[int | str] | None, key: str) -> tuple[int, ...] | None:
    if values is None:
        return None
    return _increasing([size_bytes(value, f"tune.space.{key}[{i}]") for i, value in enumerate(values)])


def _increasing(values: list[int]) -> tuple[int, ...]:
    return tuple(sorted(set(values)))


_T = TypeVar("_T")


def _chosen(values: list[_T] | None) -> tuple[_T, ...] | None:
    return None if values is None else tuple(dict.fromkeys(values))


def limits_of(space: SpaceTable) -> SpaceLimits:
    """The values that a job allows per knob, slices converted to chunks.

    Raises:
        JobError: if a size is none.
    """
    chunk_bytes = _sizes(space.chunk_bytes, "chunk_bytes")
    slices = _sizes(space.slice_bytes, "slice_bytes")
    if slices is not None:
        try:
            chunk_bytes = tuple(sorted({chunk_bytes_of_slice(value) for value in slices}))
        except ValueError as error:
            raise JobError(f"tune.space.slice_bytes: {error}") from None
    return SpaceLimits(
        algorithms=_chosen(space.algorithm),
        protocols=_chosen(space.protocol),
        transports=_chosen(space.transport),
        num_channels=None if space.num_channels is None else _increasing(space.num_channels),
        num_threads=None if space.num_threads is None else _increasing(space.num_threads),
        chunk_bytes=chunk_bytes,
        launches=_launches(space),
    )


def _launches(space: SpaceTable) -> LaunchSpace | None:
    """The values of the computation's side; None where the job gives none."""
    if not space.launch_keys:
        return None
    return LaunchSpace(
        sm_carveouts=() if space.sm_carveout is None else _increasing(space.sm_carveout),
        orders=_chosen(space.launch_order) or (),
        priorities=_chosen(space.stream_priority) or (),
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


def join_launched(backend: str) -> int | None:
    """The exit code of this process if a launcher started it as a rank other than 0; it lives through its rank here.

    A command calls it before it writes or prints anything, and ends with the code if there is one.
    """
    join = {"gloo": join_if_launched_by_torchrun, "nccl": nccl.join_if_launched}.get(backend)
    return None if join is None else join()


def unused_keys(spec: JobSpec, backend: str) -> tuple[str, ...]:
    """Keys that the job sets and this backend has no use for; a recording takes the place of all of them."""
    default = JobTable(name=spec.job.name)
    unused = []
    if backend == "simulated":
        unused += ["job.link"] if spec.job.link != default.link else []
        unused += ["job.timeout_s"] if spec.job.timeout_s != default.timeout_s else []
        unused += ["job.ranks"] if spec.model is not None and spec.job.ranks != default.ranks else []
    if backend in RANK_BACKENDS:
        unused += ["cost"] if spec.cost != CostTable() else []
    return tuple(unused)
