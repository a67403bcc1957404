"""What a training framework adds to the operators of a step, in one place: launch gaps and what its kernels reach.

The host needs time to launch every kernel. Within one part of a step (a layer's forward or backward in one micro-batch)
the host's time for all launches and the GPU's for all kernels blend by a p-norm: a short part takes as long as its
launches. What that adds is spread over the part's kernels by their launches, as time in which their stream waits.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from lagom_overlap.cost import CollectiveCost, ContentionModel
from lagom_overlap.cost.operators import FrameworkConstants, OperatorConstants
from lagom_overlap.cost.profile import Profile
from lagom_overlap.hardware import Cluster
from lagom_overlap.sim.iteration import IterationSimulator
from lagom_overlap.workload import CommOp, CompOp, Gemm, Iteration, MemoryBound, Op, Phase, Work
from lagom_overlap.workload.step.groups import DATA
from lagom_overlap.workload.step.rolled import RolledStep
from lagom_overlap.workload.streams import COMPUTE

_FORWARD = (Phase.FORWARD, Phase.LOSS)


BARE: Final = FrameworkConstants(
    name="none", fitted_on="nothing", launch_s=0.0, launch_norm=1.0, memory_efficiency=1.0, data_bytes_per_s=0.0
)
"""No framework: operators follow each other as fast as the GPU takes them."""


@dataclass(frozen=True, slots=True)
class FrameworkModel:
    """The contention model of a cluster with what a framework adds: one price for every verb."""

    model: ContentionModel
    constants: FrameworkConstants = BARE
    _alone: dict[int, tuple[Work, float]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Works by identity, held so that no other takes the place, and their seconds alone."""

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        profile: Profile,
        operators: OperatorConstants,
        constants: FrameworkConstants,
        sm_carveout: int | None = None,
        *,
        rank_skew_s: float = 0.0,
    ) -> "FrameworkModel":
        """The GPU's operators as the framework's kernels run them."""
        efficiency = constants.memory_efficiency
        return cls(ContentionModel(cluster, profile, sm_carveout, operators, efficiency, rank_skew_s), constants)

    def simulator(
        self,
        iteration: Iteration | RolledStep,
        *,
        waits: Mapping[str, Sequence[str]] = MappingProxyType({}),
        host_s: Sequence[float] | None = None,
    ) -> IterationSimulator:
        """Simulates a step with the framework's waits beyond its data flow; `host_s` is the model's own, if at hand."""
        limit = self._limited if self.constants.data_bytes_per_s else None
        waited = self.host_s(iteration) if host_s is None else host_s
        return IterationSimulator(iteration, self.model, waits=waits, host_s=waited, limit=limit)

    def _limited(self, op: CommOp, cost: CollectiveCost) -> CollectiveCost:
        """Data parallelism between nodes does not reach more than the framework's own rate."""
        spans = self.model.cluster.num_nodes_of(op.collective.num_ranks, op.collective.num_nodes) > 1
        if op.communicator not in DATA or not spans:
            return cost
        flags = cost.wire_bytes / op.collective.wire_bytes  # a protocol's own bytes, which the limit leaves out
        limit = self.constants.data_bytes_per_s * flags
        return replace(cost, ceiling_bytes_per_s=min(cost.ceiling_bytes_per_s, limit))

    def alone_s(self, op: CompOp) -> float:
        """A computation running alone, launch gaps left out."""
        known = self._alone.get(id(op.work))
        if known is None:
            known = self._alone[id(op.work)] = (op.work, self.model.kernel_seconds(self.model.kernel(op.work)))
        return known[1]

    def host_s(self, iteration: Iteration | RolledStep) -> Sequence[float]:
        """Seconds that each operator's stream waits for the host."""
        waits = [0.0] * len(iteration.ops)
        if not self.constants.launch_s:
            return waits
        part_of: dict[int, str] = {}
        parts: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
        for number, (op, batch, layer) in enumerate(
            zip(iteration.ops, iteration.batches, iteration.layers, strict=True)
        ):
            part = part_of.get(id(op))
            if part is None:
                part = part_of[id(op)] = _part(op)
            if part:
                parts[batch, layer, part].append(number)
        known: dict[tuple[int, ...], Sequence[float]] = {}
        for numbers in parts.values():
            ops = [iteration.ops[number] for number in numbers]
            key = tuple([id(op) for op in ops])
            if key not in known:
                known[key] = self._waits_of([op for op in ops if isinstance(op, CompOp)])
            for number, wait_s in zip(numbers, known[key], strict=True):
                waits[number] = wait_s
        return waits

    def _waits_of(self, ops: Sequence[CompOp]) -> Sequence[float]:
        """What the computations of one part wait for the host."""
        compute_s = 0.0
        for op in ops:
            compute_s += self.alone_s(op)
        launches = [_num_launches(op) for op in ops]
        each_s = self._added_s(compute_s, sum(launches)) / max(1, sum(launches))
        return [each_s * count for count in launches]

    def _added_s(self, compute_s: float, num_launches: int) -> float:
        host_s, norm = self.constants.launch_s * num_launches, self.constants.launch_norm
        longer, shorter = max(compute_s, host_s), min(compute_s, host_s)
        return float(longer * (1.0 + (shorter / longer) ** norm) ** (1.0 / norm)) - compute_s if longer else 0.0


def _part(op: Op) -> str:
    """The part of a layer that an operator is launched in, "" where its launch is not waited for."""
    phase = op.origin.phase
    if isinstance(op, CommOp) or op.stream != COMPUTE or phase is None or phase is Phase.OPTIMIZER:
        return ""
    if phase in _FORWARD:
        return "forward"
    return "recompute" if phase is Phase.RECOMPUTE else "backward"


def _num_launches(op: CompOp) -> int:
    return op.work.num_launches if isinstance(op.work, (Gemm, MemoryBound)) else 1
