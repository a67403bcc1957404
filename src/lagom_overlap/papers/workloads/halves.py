"""Collects the operators of two half-batches that take turns on one computation stream, with one communication stream.

Half 1 computes while half 0's collective runs, and the other way round: Domino's split of the batch under tensor
parallelism (arXiv 2409.15241), the dual batches of expert parallelism (DeepSeek-V3, arXiv 2412.19437).
"""

from lagom_overlap.collective import Collective
from lagom_overlap.papers.workloads.parts import Backward, Works
from lagom_overlap.workload.iteration import Iteration
from lagom_overlap.workload.ops import CommOp, CompOp, Op

HALVES = (0, 1)


class HalvesBuilder:
    """Operators in issue order; each half remembers the collective that its next computation waits for."""

    def __init__(self, communicator: str) -> None:
        self._ops: list[Op] = []
        self._communicator = communicator
        self._pending: dict[int, str | None] = dict.fromkeys(HALVES)

    def compute(self, half: int, prefix: str, works: Works) -> None:
        """Runs works of a half after its pending collective."""
        waits = self._pending[half]
        deps = () if waits is None else (waits,)
        for name, work in works:
            self._ops.append(CompOp(name=f"{prefix}.{name}.{half}", work=work, deps=deps))
            deps = ()
        if works:
            self._pending[half] = None

    def send(self, half: int, name: str, collective: Collective) -> None:
        """Issues a collective of what the half computed last; its next computation waits for it."""
        last = self._ops[-1].name
        comm = CommOp(
            name=f"{name}.{half}",
            collective=collective,
            communicator=self._communicator,
            deps=(last,),
        )
        self._ops.append(comm)
        self._pending[half] = comm.name

    def backward(self, half: int, prefix: str, work: Backward, name: str, collective: Collective) -> None:
        """Gradients of inputs, their collective, and concurrently the gradients of weights."""
        self.compute(half, prefix, work.inputs)
        self.send(half, name, collective)
        for what, weight in work.weights:
            self._ops.append(CompOp(name=f"{prefix}.{what}.{half}", work=weight))

    def iteration(self, name: str) -> Iteration:
        """What was collected."""
        return Iteration(name, tuple(self._ops))
