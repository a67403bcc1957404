"""Times of operators alone on one GPU, and the same operators as kernels for the contention model.

One source for both: overlap groups and whole iterations are priced by the same constants. Attention is a grid of query
rows per block and head; a memory-bound operator is a grid of many small blocks, of which a plain `MemoryBound`
streams.

Known limit: the fastest of all tiles is more even than what cuBLAS does. Measured times show whole waves of 128x256
tiles (vidur, A40, 2560 x 2560: one time for every m in 3232..4096) where this model finds a smaller tile. A caller who
knows the grid gives a `Kernel`. Rates scale with 2 / element_bytes from bf16.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from lagom_overlap.cost.kernels import kernel_of_time, product_of_time
from lagom_overlap.cost.operators.gemm import GemmConstants, GemmTime, gemm_time, wide_tiles
from lagom_overlap.cost.operators.operator_constants import OperatorConstants
from lagom_overlap.cost.profile import Profile
from lagom_overlap.hardware import Gpu
from lagom_overlap.workload import Access, Attention, Gemm, Kernel, MemoryBound

SMALL_BLOCKS: Final = 16
"""Resident blocks per SM of an elementwise kernel..."""
SMALL_WAVES: Final = 8
"""...and its waves: enough that quantisation does not matter."""

OperatorWork = Gemm | Attention | MemoryBound


@dataclass(frozen=True, slots=True)
class OperatorTimes:
    """Prices single operators on one GPU."""

    gpu: Gpu
    constants: OperatorConstants

    def seconds(self, work: OperatorWork) -> float:
        """The GPU's time for a work; further launches cost what an empty kernel does."""
        match work:
            case MemoryBound():
                further_s = (work.num_launches - 1) * self.constants.touch_s
                return self._touch(work.num_bytes, work.access) + further_s
            case Attention():
                idle = max(1.0, self.gpu.num_sms / self._attention_blocks(work))
                wider = work.widened(self.constants.least_window)
                reach = wider * (work.reach or work.seq_len * (1 if work.causal else 2))
                rate = self.constants.attention_rate(work.head_dim, reach, backward=work.backward, narrow=work.narrow)
                rate *= 2 / work.element_bytes
                return self.constants.gemm.launch_s + wider * work.flops / rate * idle
            case Gemm():
                return self._gemm(work, work.batch).alone_s

    def kernel(self, work: OperatorWork, profile: Profile) -> Kernel:
        """The work as the contention model sees it: its time alone, grid and memory traffic."""
        blocks_per_sm = 1
        match work:
            case MemoryBound():
                num_blocks, blocks_per_sm = self.gpu.num_sms * SMALL_BLOCKS * SMALL_WAVES, SMALL_BLOCKS
                total_bytes = float(work.num_bytes)
            case Attention():
                num_blocks = self._attention_blocks(work)
                tensor = work.batch * work.num_heads * work.seq_len * work.head_dim * work.element_bytes
                total_bytes = 4.0 * tensor * work.passes
            case Gemm():
                time = self._gemm(work, work.batch)
                if profile.for_gpu(self.gpu).sm_flops is not None:
                    return product_of_time(
                        self.gpu,
                        profile,
                        alone_s=time.alone_s,
                        flops=work.flops * work.element_bytes / work.packed / 2,
                        num_blocks=work.batch * wide_tiles(work.m, work.n, self.gpu.num_sms),
                    )
                num_blocks, total_bytes = time.num_blocks, time.total_bytes
        alone_s = self.seconds(work)
        share = profile.for_gpu(self.gpu).product_share
        if share is not None and not isinstance(work, MemoryBound):
            total_bytes = share * self.gpu.hbm_bytes_per_s * alone_s
        return kernel_of_time(
            self.gpu,
            profile,
            alone_s=alone_s,
            num_blocks=num_blocks,
            blocks_per_sm=blocks_per_sm,
            total_bytes=total_bytes,
        )

    def _touch(self, num_bytes: int, access: Access) -> float:
        c = self.constants
        rate = c.reduction_bytes_per_s if access is Access.REDUCTION else c.stream_bytes_per_s
        if access is Access.REARRANGE:
            rate *= c.rearranged_share
        return c.touch_s + num_bytes / rate

    def _gemm(self, gemm: Gemm, batch: int) -> GemmTime:
        time = gemm_time(
            (gemm.m, gemm.n, gemm.k),
            batch=batch,
            element_bytes=gemm.element_bytes / gemm.packed,
            result_bytes=gemm.result_bytes,
            num_sms=self.gpu.num_sms,
            l2_bytes=self.gpu.l2_bytes,
            constants=self._gemm_constants(gemm),
        )
        if not gemm.chunked:
            return time
        chunked_s = self.constants.gemm.launch_s + gemm.flops / (self.constants.chunk_flops * self.gpu.num_sms)
        return replace(time, alone_s=max(time.alone_s, chunked_s))

    def _gemm_constants(self, gemm: Gemm) -> GemmConstants:
        if gemm.packed > 1:
            return self.constants.packed_gemm
        if gemm.block_scaled:
            return self.constants.block_gemm
        return self.constants.wide_gemm if gemm.element_bytes >= 2 else self.constants.gemm

    def _attention_blocks(self, work: Attention) -> int:
        return work.batch * work.num_heads * ceil(work.seq_len / self.constants.attention_rows)
