"""Megatron's step under contention, with what registered buffers change: fewer SMs, copy engines, no FIFO.

`--use-nccl-ub` (Megatron-FSDP): gathers and scatters of parameters and gradients take the SMs of `userbuffer_sms`. What
`--tp-comm-overlap` pipelines runs on Transformer Engine's userbuffers: gathers inside a node by copy engine, the rest
on the table's SMs. Everything else runs as NCCL chooses.

Assumed, not measured: from registered buffers a collective is as fast as NCCL's default and touches memory only where
it reads and writes the user's buffers; userbuffers put pieces where the whole is read, so that nothing joins them.
SHARP is off unless said.

Source of the SM counts: Megatron-LM at d98e8a6 (Megatron-FSDP's documentation of `nccl_ub`), as the specification reads
it (planners, section 3, point 7). The notes print 4 -> 1 and 16 -> 6 as without and with userbuffers; they are without
and with SHARP, both with registered buffers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig, Transport
from lagom_overlap.cost import CollectiveCost, ContentionModel
from lagom_overlap.cost.communication import COPY_TOUCHES
from lagom_overlap.errors import JobError, SpaceError
from lagom_overlap.hardware import Cluster
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.megatron.flags import MegatronFlags, TensorOverlap
from lagom_overlap.planners.megatron.planner import Megatron
from lagom_overlap.planners.megatron.roles import MegatronRole, Roles
from lagom_overlap.planners.simulated import one_at_a_time
from lagom_overlap.planners.step_index import StepIndex
from lagom_overlap.planners.times import origin_name
from lagom_overlap.sim.framework import FrameworkModel
from lagom_overlap.timeline import Timeline
from lagom_overlap.workload import CommOp, Iteration, Op
from lagom_overlap.workload.rewrite.pieces import JOIN_SUFFIX


class Fabric(StrEnum):
    """The links of a group."""

    NVLINK = "nvlink"
    NVLINK_AND_NETWORK = "nvlink_and_network"
    NETWORK = "network"


@dataclass(frozen=True, slots=True)
class _Counts:
    all_gather: int
    reduce_scatter: int


_USERBUFFERS = {
    (Fabric.NVLINK, False): _Counts(4, 5),
    (Fabric.NVLINK_AND_NETWORK, False): _Counts(16, 16),
    (Fabric.NVLINK_AND_NETWORK, True): _Counts(6, 6),
    (Fabric.NETWORK, False): _Counts(1, 4),
    (Fabric.NETWORK, True): _Counts(1, 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchedStep:
    """A step that Megatron's switches mean, who runs when in it, and the settings of its collectives."""

    iteration: Iteration
    configs: Mapping[str, CommConfig]
    timeline: Timeline


def userbuffer_sms(kind: CollectiveKind, fabric: Fabric, *, sharp: bool) -> int:
    """SMs of a gather or scatter from registered buffers.

    Raises:
        JobError: if the collective is neither, or SHARP is asked of NVLink alone.
    """
    if not kind.traits.is_in_parts:
        raise JobError(f"userbuffers: {kind} has no table, only all_gather and reduce_scatter have")
    counts = _USERBUFFERS.get((fabric, sharp))
    if counts is None:
        raise JobError(f"userbuffers: SHARP reduces in the network's switches, {fabric} has none")
    return counts.all_gather if kind.traits.takes_part else counts.reduce_scatter


_SHARDED = (MegatronRole.PARAMETER, MegatronRole.GRADIENT)
_TENSOR = (MegatronRole.ACTIVATION, MegatronRole.SAVED_INPUT, MegatronRole.INPUT_GRADIENT)


@dataclass(frozen=True, slots=True)
class RegisteredBuffers(ContentionModel):
    """A contention model: a collective that names its channels runs from registered buffers on that many SMs."""

    def collective(self, collective: Collective, config: CommConfig) -> CollectiveCost:
        """See `ContentionModel.collective`."""
        if config.num_channels is None:
            return ContentionModel.collective(self, collective, config)
        usual = ContentionModel.collective(self, collective, replace(config, num_channels=None))
        each = usual.num_channels / config.num_channels  # what one SM carries now
        return replace(
            usual,
            num_channels=config.num_channels,
            chunk_bytes=each * usual.chunk_bytes,
            channel_bytes_per_s=each * usual.channel_bytes_per_s,
            fifo_bytes=0.0,
            touches=COPY_TOUCHES,
        )


def contended(problem: PlanProblem, flags: MegatronFlags, price: FrameworkModel) -> SwitchedStep:
    """The step that the switches mean, as every step is simulated: computations and collectives slow each other.

    A communicator runs one collective at a time, and the framework's launches are in it.
    """
    planned = _joined_in_place(Megatron(flags).step(problem))
    model = price.model
    registered = RegisteredBuffers(*(getattr(model, field.name) for field in fields(model) if field.init))
    settings = _settings(problem, planned, flags, registered)
    simulator = FrameworkModel(registered, price.constants).simulator(one_at_a_time(planned))
    return SwitchedStep(iteration=planned, configs=settings, timeline=simulator.timeline(settings))


def contended_s(problem: PlanProblem, flags: MegatronFlags, price: FrameworkModel) -> float:
    """Seconds of that step."""
    return contended(problem, flags, price).timeline.makespan_s


def _settings(
    problem: PlanProblem, planned: Iteration, flags: MegatronFlags, model: ContentionModel
) -> Mapping[str, CommConfig]:
    """What runs from registered buffers: how many SMs each takes, or that a copy engine carries it."""
    roles = Roles.find(StepIndex(problem.iteration)).of
    pipelined = flags.tensor_overlap is TensorOverlap.PIPELINED
    found = {}
    for comm in planned.comms:
        role = roles.get(origin_name(comm.name, roles))
        if not comm.collective.kind.traits.is_in_parts:
            continue
        if flags.nccl_userbuffers and role in _SHARDED:
            found[comm.name] = CommConfig(num_channels=_sms(comm, model))
        elif pipelined and role in _TENSOR:
            copied = CommConfig(transport=Transport.COPY_ENGINE)
            can_copy = comm.collective.kind is CollectiveKind.ALL_GATHER and _runs(model, comm, copied)
            found[comm.name] = copied if can_copy else CommConfig(num_channels=_sms(comm, model))
    return found


def _joined_in_place(iteration: Iteration) -> Iteration:
    """The same without the copies that join pieces: who waits for a copy waits for the pieces."""
    pieces: dict[str, tuple[str, ...]] = {}
    kept: list[Op] = []
    for op in iteration.ops:
        deps = tuple(dict.fromkeys(name for dep in op.deps for name in pieces.get(dep, (dep,))))
        if op.name.endswith(JOIN_SUFFIX):
            pieces[op.name] = deps
        else:
            kept.append(op if deps == op.deps else replace(op, deps=deps))
    return Iteration(iteration.name, tuple(kept), is_dataflow=iteration.is_dataflow) if pieces else iteration


def _runs(model: ContentionModel, comm: CommOp, config: CommConfig) -> bool:
    try:
        model.collective(comm.collective, config)
    except SpaceError:
        return False
    return True


def _sms(comm: CommOp, model: ContentionModel) -> int:
    """Of a gather or scatter, without SHARP."""
    fabric = fabric_of(comm.collective, model.cluster)
    return userbuffer_sms(comm.collective.kind, fabric, sharp=False)


def fabric_of(collective: Collective, cluster: Cluster) -> Fabric:
    """The links that a collective runs over."""
    num_nodes = cluster.num_nodes_of(collective.num_ranks, collective.num_nodes)
    if num_nodes == 1:
        return Fabric.NVLINK
    return Fabric.NETWORK if num_nodes == collective.num_ranks else Fabric.NVLINK_AND_NETWORK
