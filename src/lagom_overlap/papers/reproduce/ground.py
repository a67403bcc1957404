"""The ground on which every figure stands: models by profile, the space that is searched, the unguarded tuners.

NCCL's default is what 2.18.3's real host code takes on the paper's clusters (`cost.model.PAPER_CHANNELS`): 8 channels
and 2 MiB on a node of cluster A, as section 4.3 says. The space is ring and Simple, 1 to 64 channels, slices of 2 KiB
to 2 MiB with those that the paper reports; threads are left alone, since the paper finds them negligible. Tuners search
as published, without the guard, on times without noise, each to the end of its own budget.

Departure: AutoCCL's key is (communicator, collective, bytes), so its fork gives equal calls of different patterns one
configuration; here every overlap group gets its own, in AutoCCL's favour. Collectives that overlap nothing keep the
default under both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from lagom_overlap.backends.base import BackendRequest
from lagom_overlap.backends.simulated import SimulatedBackend
from lagom_overlap.collective import Algorithm, Collective, CommConfig, Protocol, SpaceLimits, chunk_bytes_of_slice
from lagom_overlap.cost import Collectives, ContentionModel, LinkSource, load_profile
from lagom_overlap.cost.operators import OperatorConstants, load_operators
from lagom_overlap.hardware import Gpu, load_preset
from lagom_overlap.papers.workloads import PaperStep, PaperWorkload, paper_step
from lagom_overlap.sim import GroupSimulator
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.guard import make_tuner
from lagom_overlap.tuners.problem import Assignment, Measurement
from lagom_overlap.units import KIB, MIB
from lagom_overlap.workload import CommOp, Gemm, Iteration, MemoryBound, Op, OverlapGroup, Work
from lagom_overlap.workload.precision import DType

PROFILES: Final = ("plausible", "paper_scale")
DEFAULT: Final = CommConfig(num_channels=8, chunk_bytes=2 * MIB)
"""The paper's default where a figure sets configurations by hand."""
_SLICES: Final = (*(2 * KIB << i for i in (0, 2, 3, 4, 5, 6, 7, 8)), 684 * KIB, 1024 * KIB, 1366 * KIB, 2 * MIB)
LIMITS: Final = SpaceLimits(
    algorithms=(Algorithm.RING,),
    protocols=(Protocol.SIMPLE,),
    num_channels=tuple(range(1, 65)),
    chunk_bytes=tuple(sorted({chunk_bytes_of_slice(size) for size in _SLICES})),
)
_COARSE_CHANNELS: Final = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
"""Of the 64 numbers of channels those that a descent looks at. Chosen, for its time."""
_MAX_STEPS: Final = 2000
"""Bounds a search that does not end by itself. Chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What the paper does not say; the default is what every figure assumes (`seq_len` None: Table 2's 4096 tokens).

    `kernels` is the share of the achieved rate at which products run, `links` the share of the stated bandwidth that a
    wire has. `precision`: bf16, or fp32 with products in TF32. `release`: what NCCL 2.18.3 took by default on the
    paper's clusters, or what 2.30.7 would. `persistent`: products are persistent kernels on every SM, which lose a
    whole pass to the first channel (cuBLAS on the H100 that we measured); else blocks go wherever there is room.
    """

    seq_len: int | None = None
    precision: DType = DType.BF16
    kernels: float = 1.0
    links: float = 1.0
    release: Collectives = Collectives.PAPER
    persistent: bool = False


ASSUMED: Final = Assumed()
_FP32: Final = Assumed(precision=DType.FP32)


@cache
def model_of(cluster: str, profile: str, num_nodes: int | None = None, assumed: Assumed = ASSUMED) -> ContentionModel:
    """The contention model of a preset under a profile, with the paper's default and wires under both."""
    adjusted = replace(load_profile(profile), collectives=assumed.release, links=LinkSource.STATED)
    preset = load_preset(cluster, num_nodes=num_nodes)
    if assumed != ASSUMED:
        preset = replace(
            preset,
            intra=replace(preset.intra, bytes_per_s=preset.intra.bytes_per_s * assumed.links),
            inter=replace(preset.inter, bytes_per_s=preset.inter.bytes_per_s * assumed.links),
        )
    operators = _operators(preset.gpu, assumed.kernels)
    return ContentionModel(
        preset, adjusted, operators=operators, persistent_carve_out_sms=0 if assumed.persistent else None
    )


def _operators(gpu: Gpu, rate: float) -> OperatorConstants | None:
    """The GPU's constants with products and attention at a share of their rates; None: as they are."""
    if rate == 1:
        return None
    own = load_operators(gpu)
    first, second, third = own.gemm.tile_flops
    return replace(
        own,
        gemm=replace(own.gemm, tile_flops=(rate * first, rate * second, rate * third)),
        attention_flops=rate * own.attention_flops,
        attention=tuple(each.scaled(rate) for each in own.attention),
    )


def step_of(workload: PaperWorkload, assumed: Assumed = ASSUMED) -> PaperStep:
    """A row of Table 2 as a step."""
    if assumed.seq_len is not None:
        workload = replace(workload, seq_len=assumed.seq_len)
    step = paper_step(workload)
    if assumed.precision is DType.BF16:
        return step
    ops = tuple(_in_fp32(op) for op in step.iteration.ops)
    gradients = None if step.gradients is None else _twice(step.gradients)
    return replace(step, iteration=replace(step.iteration, ops=ops), gradients=gradients)


def _twice(collective: Collective) -> Collective:
    return replace(collective, num_bytes=2 * collective.num_bytes)


def _in_fp32(op: Op) -> Op:
    if isinstance(op, CommOp):
        return replace(op, collective=_twice(op.collective))
    return replace(op, work=work_of(op.work, _FP32))


def work_of(work: Work, assumed: Assumed) -> Work:
    """A kernel's work; in fp32 with four bytes an element for two, but an attention keeps its time."""
    if assumed.precision is DType.BF16:
        return work
    match work:
        case MemoryBound():
            return replace(work, num_bytes=2 * work.num_bytes)
        case Gemm():
            return replace(work, element_bytes=2 * work.element_bytes)
        case _:
            return work


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What a tuner ended with, after how many measurements, and the best summed makespan (s) after each."""

    assignments: Mapping[str, Assignment]
    num_measurements: int
    best_s: tuple[float, ...]


def problems_of(groups: tuple[OverlapGroup, ...], model: ContentionModel) -> tuple[SimulatedBackend, Problems]:
    """A simulated backend and the groups' problems on it."""
    request = BackendRequest(
        job_fingerprint="reproduce", cluster=model.cluster, profile=model.profile.name, limits=LIMITS
    )
    backend = SimulatedBackend(model, request)
    return backend, tuple(backend.problem(group) for group in groups)


def search(tuner_name: str, groups: tuple[OverlapGroup, ...], model: ContentionModel, seed: int) -> Searched:
    """Runs a tuner to its end."""
    backend, problems = problems_of(groups, model)
    by_name = {problem.group.name: problem.group for problem in problems}
    tuner = make_tuner(tuner_name, problems, seed=seed, options={}, guarded=False)
    best = {problem.group.name: float("inf") for problem in problems}
    curve: list[float] = []
    while (trial := tuner.ask()) is not None and len(curve) < _MAX_STEPS:
        outcomes = {name: backend.measure(by_name[name], wanted) for name, wanted in trial.assignments.items()}
        tuner.tell(trial, outcomes)
        for name, outcome in outcomes.items():
            if isinstance(outcome, Measurement):
                best[name] = min(best[name], outcome.makespan_s)
        curve.append(sum(by_name[name].count * time_s for name, time_s in best.items()))
    return Searched(assignments=tuner.recommend(), num_measurements=len(curve), best_s=tuple(curve))


def best_assignment(group: OverlapGroup, model: ContentionModel) -> Assignment:
    """The best makespan that a coordinate search on a coarse lattice finds from the default: a yardstick, no proof."""
    simulator = GroupSimulator(group, model)
    _, (problem,) = problems_of((group,), model)
    best = problem.default
    best_s = simulator.evaluate(best).makespan_s
    improved = True
    while improved:
        improved = False
        for place, space in enumerate(problem.spaces):
            for config in space:
                if config.num_channels not in _COARSE_CHANNELS:
                    continue
                tried = (*best[:place], config, *best[place + 1 :])
                tried_s = simulator.evaluate(tried).makespan_s
                if tried_s < best_s * (1 - 1e-9):
                    best, best_s, improved = tried, tried_s, True
    return best


def configs_by_name(
    iteration: Iteration, groups: tuple[OverlapGroup, ...], assignments: Mapping[str, Assignment]
) -> dict[str, CommConfig]:
    """Each collective of the iteration that belongs to a group, with its configuration, at every place it occurs."""
    sites: dict[tuple[str, object, int], str] = {}
    seen: dict[tuple[str, object], int] = {}
    for comm in iteration.comms:
        key = (comm.communicator, (comm.collective.kind, comm.collective.num_bytes))
        place = seen[key] = seen.get(key, -1) + 1
        sites[(*key, place)] = comm.name
    configs = {}
    for group in groups:
        for op, occurrences, config in zip(group.comms, group.occurrences, assignments[group.name], strict=True):
            for place in occurrences:
                name = sites[op.communicator, (op.collective.kind, op.collective.num_bytes), place]
                configs[name] = config
    return configs
