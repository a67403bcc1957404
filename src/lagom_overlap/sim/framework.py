"""What a training framework adds to the operators of a step, in one place: launch gaps and what its kernels reach.

The host needs time to launch every kernel. Within one part of a step (a layer's forward or backward in one micro-batch)
the host's time for all launches and the GPU's for all kernels blend by a p-norm: a short part takes as long as its
launches. What that adds is spread over the part's kernels by their launches, as time in which their stream waits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lagom_overlap.cost import CollectiveCost, ContentionModel
from lagom_overlap.cost.operators import FrameworkConstants, OperatorConstants
from lagom_overlap.cost.profile import Profile
from lagom_overlap.hardware import Cluster
from lagom_overlap.sim.columns import Columns
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
        columns: Columns | None = None,
        host_s: NDArray[np.float64] | None = None,
    ) -> IterationSimulator:
        """Simulates a step with the framework's waits beyond its data flow.

        `columns` are the step's and `host_s` is the model's own, if at hand.
        """
        limit = self._limited if self.constants.data_bytes_per_s else None
        columns = Columns(iteration) if columns is None else columns
        waited = self.host_s(columns) if host_s is None else host_s
        return IterationSimulator(iteration, self.model, waits=waits, host_s=waited, limit=limit, columns=columns)

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

    def host_s(self, columns: Columns) -> NDArray[np.float64]:
        """Seconds that each operator's stream waits for the host."""
        waits = np.zeros(len(columns.of))
        if not self.constants.launch_s:
            return waits
        part = columns.numbers(_part)
        launched = np.flatnonzero(part)
        parts = (columns.batches[launched] * (columns.layers.max() + 2) + columns.layers[launched] + 1) * 4 + part[
            launched
        ]
        order = np.argsort(parts, kind="stable")
        known: dict[bytes, list[float]] = {}
        for numbers in np.split(launched[order], np.flatnonzero(np.diff(parts[order])) + 1):
            key = columns.works[numbers].tobytes()
            if key not in known:
                known[key] = self._waits_of([columns.distinct[number] for number in columns.of[numbers].tolist()])
            waits[numbers] = known[key]
        return waits

    def _waits_of(self, ops: Sequence[Op]) -> list[float]:
        """What the computations of one part wait for the host."""
        compute_s, launches = 0.0, []
        for op in ops:
            assert isinstance(op, CompOp)
            compute_s += self.alone_s(op)
            launches.append(_num_launches(op))
        each_s = self._added_s(compute_s, sum(launches)) / max(1, sum(launches))
        return [each_s * count for count in launches]

    def _added_s(self, compute_s: float, num_launches: int) -> float:
        host_s, norm = self.constants.launch_s * num_launches, self.constants.launch_norm
        longer, shorter = max(compute_s, host_s), min(compute_s, host_s)
        return float(longer * (1.0 + (shorter / longer) ** norm) ** (1.0 / norm)) - compute_s if longer else 0.0


def _part(op: Op) -> int:
    """The part of a layer that an operator is launched in, 0 where its launch is not waited for."""
    phase = op.origin.phase
    if isinstance(op, CommOp) or op.stream != COMPUTE or phase is None or phase is Phase.OPTIMIZER:
        return 0
    return 1 if phase in _FORWARD else 2 if phase is Phase.RECOMPUTE else 3


def _num_launches(op: CompOp) -> int:
    return op.work.num_launches if isinstance(op.work, (Gemm, MemoryBound)) else 1
