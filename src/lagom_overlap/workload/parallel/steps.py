"""Steps of one pass on one GPU, in the order in which they run: kernels, and collectives between them."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.workload.ops import Attention, Gemm, MemoryBound


class Access(StrEnum):
    """How an elementwise kernel walks its memory, which decides the bandwidth it reaches.

    `stream` reads and writes once in order (addition, activation, dropout, fused softmax); `reduction` reduces along
    rows or columns of activations (norms, gradients of biases).
    """

    STREAM = "stream"
    REDUCTION = "reduction"


class GroupKind(StrEnum):
    """Which ranks a collective runs over."""

    TENSOR = "tp"
    DATA = "dp"
    EXPERT = "ep"
    PIPELINE = "pp"


@dataclass(frozen=True, slots=True)
class BatchedGemm:
    """`batch` equal matrix products in one kernel: the products of an attention that is not fused."""

    gemm: Gemm
    batch: int

    @property
    def flops(self) -> float:
        """Floating-point operations of all of them."""
        return self.gemm.flops * self.batch


@dataclass(frozen=True, slots=True)
class Touch:
    """A memory-bound kernel with its kind of access."""

    work: MemoryBound
    access: Access


StepWork = Gemm | BatchedGemm | Attention | Touch


@dataclass(frozen=True, slots=True)
class ComputeStep:
    """A kernel, or `num_launches` equal ones that share the work."""

    name: str
    work: StepWork
    num_launches: int = 1


@dataclass(frozen=True, slots=True)
class CommStep:
    """A collective; `hidden_by` runs beside it where it is asynchronous, and is empty where the stream waits for it.

    `num_bytes` follows `Collective.num_bytes`: the whole tensor.
    """

    name: str
    kind: CollectiveKind
    num_bytes: int
    group: GroupKind
    hidden_by: tuple[ComputeStep, ...] = ()


Step = ComputeStep | CommStep


@dataclass(frozen=True, slots=True)
class Pass:
    """The steps of one forward or backward through a part of the model."""

    steps: tuple[Step, ...]

    @property
    def kernels(self) -> tuple[ComputeStep, ...]:
        """Every kernel, hidden ones included."""
        found: list[ComputeStep] = []
        for step in self.steps:
            if isinstance(step, ComputeStep):
                found.append(step)
            else:
                found.extend(step.hidden_by)
        return tuple(found)

    @property
    def comms(self) -> tuple[CommStep, ...]:
        """Every collective."""
        return tuple(step for step in self.steps if isinstance(step, CommStep))

    @property
    def flops(self) -> float:
        """Floating-point operations of the matrix products and the attention."""
        return sum(step.work.flops for step in self.kernels if not isinstance(step.work, Touch))


def joined(passes: Iterable[Pass]) -> Pass:
    """Passes one after the other."""
    return Pass(tuple(step for one in passes for step in one.steps))
