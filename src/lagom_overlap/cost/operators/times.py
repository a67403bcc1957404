"""Times of operators alone on one GPU, and the same operators as kernels for the contention model."""

from dataclasses import dataclass
from math import ceil

from lagom_overlap.cost.kernels import SMALL_BLOCKS, SMALL_WAVES, kernel_of_time
from lagom_overlap.cost.operators.constants import OperatorConstants
from lagom_overlap.cost.operators.gemm import GemmTime, gemm_time
from lagom_overlap.cost.profile import Profile
from lagom_overlap.hardware import Gpu
from lagom_overlap.workload import Attention, Gemm, Kernel
from lagom_overlap.workload.parallel import Access, BatchedGemm, ComputeStep, Touch
from lagom_overlap.workload.parallel.steps import StepWork

QUERY_ROWS = 128
"""Query rows of one block of a flash attention."""


@dataclass(frozen=True, slots=True)
class OperatorTimes:
    """Prices single operators on one GPU."""

    gpu: Gpu
    constants: OperatorConstants
    memory_efficiency: float = 1.0

    def step_seconds(self, step: ComputeStep) -> float:
        """The GPU's time for a step; further launches cost what an empty kernel does."""
        return self.seconds(step.work) + (step.num_launches - 1) * self.constants.touch_s

    def seconds(self, work: StepWork) -> float:
        """The GPU's time for a work."""
        match work:
            case Touch():
                stream = work.access is Access.STREAM
                rate = self.constants.stream_bytes_per_s if stream else self.constants.reduction_bytes_per_s
                return self.constants.touch_s + work.work.num_bytes / (rate * self.memory_efficiency)
            case Attention():
                blocks = work.batch * work.num_heads * ceil(work.seq_len / QUERY_ROWS)
                idle = max(1.0, self.gpu.num_sms / blocks)
                rate = self.constants.attention_flops * 2 / work.element_bytes
                return self.constants.gemm.launch_s + work.flops / rate * idle
            case Gemm():
                return self._gemm(work, 1).alone_s
            case BatchedGemm():
                return self._gemm(work.gemm, work.batch).alone_s

    def _gemm(self, gemm: Gemm, batch: int) -> GemmTime:
        return gemm_time(
            (gemm.m, gemm.n, gemm.k),
            batch=batch,
            element_bytes=gemm.element_bytes,
            num_sms=self.gpu.num_sms,
            l2_bytes=self.gpu.l2_bytes,
            constants=self.constants.gemm,
        )

    def kernel(self, step: ComputeStep, profile: Profile) -> Kernel:
        """The step as the contention model sees it: the same time alone, its grid and its memory traffic."""
        work, gpu = step.work, self.gpu
        if isinstance(work, Touch):
            blocks, per_sm = gpu.num_sms * SMALL_BLOCKS * SMALL_WAVES, SMALL_BLOCKS
            num_bytes = float(work.work.num_bytes)
        elif isinstance(work, Attention):
            blocks, per_sm = work.batch * work.num_heads * ceil(work.seq_len / QUERY_ROWS), 1
            tensor = work.batch * work.num_heads * work.seq_len * work.head_dim * work.element_bytes
            num_bytes = 4.0 * tensor * work.passes
        else:
            gemm, batch = (work.gemm, work.batch) if isinstance(work, BatchedGemm) else (work, 1)
            time = self._gemm(gemm, batch)
            blocks, per_sm = time.num_blocks, 1
            elements = batch * (gemm.m * gemm.k + gemm.n * gemm.k + gemm.m * gemm.n)
            num_bytes = float(elements * gemm.element_bytes)
        return kernel_of_time(
            gpu,
            profile,
            alone_s=self.step_seconds(step),
            num_blocks=blocks,
            blocks_per_sm=per_sm,
            total_bytes=num_bytes,
        )
