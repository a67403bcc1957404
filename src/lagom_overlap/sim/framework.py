"""What a training framework adds to the operators of a step: launch gaps, and the rates that its kernels reach.

The host needs time to launch every kernel. Within one part of a step (a layer's forward, or the backward of consecutive
layers, in one micro-batch) the host's time for all launches and the GPU's time for all kernels combine by a p-norm: a
short part takes as long as its launches. In backward the host gets ahead of the GPU in layers with few launches (a
Mamba layer replayed as a graph) and falls back in others (a mixture of many experts). In forward it does not: a
mixture's dispatcher waits for the row counts, and everything is launched after that. The added time is spread over the
part's kernels in proportion to their launches, as time in which their stream waits. Kernels that a library launches in
a loop cost `further_launch_s` from the second on, PyTorch's own operators `eager_launch_s`; consecutive kernels of a
CUDA graph need one launch.
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
from lagom_overlap.workload import CommOp, CompOp, Gemm, Issuer, Iteration, MemoryBound, Op, Phase, Work
from lagom_overlap.workload.ops import FORWARD_PHASES
from lagom_overlap.workload.parallel import AttentionKernel
from lagom_overlap.workload.step.rank_groups import DATA
from lagom_overlap.workload.step.rolled import RolledStep
from lagom_overlap.workload.streams import COMPUTE

_ISSUERS: Final = tuple(Issuer)
_BACKWARD_PART: Final = 3
"""`_part` of operators in backward; forward is 1, recomputation 2."""


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
        attention_kernel: AttentionKernel | None = None,
        rank_skew_s: float = 0.0,
    ) -> "FrameworkModel":
        """The GPU's operators as the framework's kernels run them, attention by another kernel if one is named."""
        running = operators.running(constants, attention_kernel)
        return cls(ContentionModel(cluster, profile, sm_carveout, running, rank_skew_s), constants)

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
        cached = self._alone.get(id(op.work))
        if cached is None:
            cached = self._alone[id(op.work)] = (op.work, self.model.kernel_seconds(self.model.kernel(op.work)))
        return cached[1]

    def host_s(self, columns: Columns) -> NDArray[np.float64]:
        """Seconds that each operator's stream waits for the host."""
        waits = np.zeros(len(columns.of))
        if not self.constants.launch_s:
            return waits
        part, issuers = columns.numbers(_part), columns.numbers(_issuer)
        launched = np.flatnonzero(part)
        layers = columns.layers.max() + 1
        within = np.where(part == _BACKWARD_PART, layers + 1 + _runs(columns.layers), columns.layers + 1)[launched]
        parts = (columns.batches[launched] * 2 * (layers + 1) + within) * 4 + part[launched]
        order = np.argsort(parts, kind="stable")
        waits_by_key: dict[bytes, list[float]] = {}
        for numbers in np.split(launched[order], np.flatnonzero(np.diff(parts[order])) + 1):
            key = columns.works[numbers].tobytes() + issuers[numbers].tobytes()
            if key not in waits_by_key:
                waits_by_key[key] = self._waits_of(
                    [columns.distinct[number] for number in columns.of[numbers].tolist()]
                )
            waits[numbers] = waits_by_key[key]
        return waits

    def _waits_of(self, ops: Sequence[Op]) -> list[float]:
        """What the computations of one part wait for the host."""
        compute_s, launches_s, is_replayed = 0.0, [], False
        for op in ops:
            assert isinstance(op, CompOp)
            compute_s += self.alone_s(op)
            is_begun, is_replayed = is_replayed, op.origin.issuer is Issuer.GRAPH
            launches_s.append(self.constants.launch_s if is_replayed and not is_begun else self._launches_s(op))
        host_s = sum(launches_s)
        added = self._added_s(compute_s, host_s) / host_s if host_s else 0.0
        return [added * each_s for each_s in launches_s]

    def _launches_s(self, op: CompOp) -> float:
        """What the host needs for an operator's launches, that of a graph left out."""
        num, constants = _num_launches(op), self.constants
        if not num or op.origin.issuer is Issuer.GRAPH:
            return 0.0
        return constants.launch_s + (num - 1) * constants.next_launch_s(op.origin.issuer)

    def _added_s(self, compute_s: float, host_s: float) -> float:
        norm, longer, shorter = self.constants.launch_norm, max(compute_s, host_s), min(compute_s, host_s)
        return float(longer * (1.0 + (shorter / longer) ** norm) ** (1.0 / norm)) - compute_s if longer else 0.0


def _runs(layers: NDArray[np.intp]) -> NDArray[np.intp]:
    """The number of each operator's run of layers that follow each other, 0 where it is in no layer."""
    present = np.unique(layers)
    begins = np.concatenate([[True], np.diff(present) > 1]) & (present >= 0)
    if len(present) > 1 and present[0] < 0:
        begins[1] = True
    numbers = np.cumsum(begins, dtype=np.intp)
    return numbers[np.searchsorted(present, layers)]


def _part(op: Op) -> int:
    """The part of a layer that an operator is launched in, 0 where its launch is not waited for."""
    phase = op.origin.phase
    if isinstance(op, CommOp) or op.stream != COMPUTE or phase is None or phase is Phase.OPTIMIZER:
        return 0
    return 1 if phase in FORWARD_PHASES else 2 if phase is Phase.RECOMPUTE else _BACKWARD_PART


def _issuer(op: Op) -> int:
    return _ISSUERS.index(op.origin.issuer)


def _num_launches(op: CompOp) -> int:
    return op.work.num_launches if isinstance(op.work, (Gemm, MemoryBound)) else 1
