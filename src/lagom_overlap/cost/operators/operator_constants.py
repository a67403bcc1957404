"""Constants of operators and of training frameworks, as data, each with how it was fitted.

A GPU's are the table `[operators]` of its file (`hardware.gpu_file`), a framework's `[constants]` of its own
(`workload.step.framework_file`).
"""

from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import Any, Final

from lagom_overlap.cost.operators.gemm import GemmConstants
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import Gpu, load_gpu
from lagom_overlap.hardware.gpu_file import table_of
from lagom_overlap.toml_tables import from_table
from lagom_overlap.workload import Issuer
from lagom_overlap.workload.parallel import AttentionKernel
from lagom_overlap.workload.step.framework_file import framework_file

_REFERENCE: Final = "a100"
"""What a GPU is compared with whose operators nobody put down."""
WIDE_HEAD: Final = 128
"""Columns of a head from which on attention is not slower for its exponentials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRates:
    """What a kernel of flash attention reached in its authors' benchmark, with heads of 128 columns.

    Half the greatest rate is reached at a causal sequence of `half` tokens, as Hockney's half-performance length has it
    (Parallel Computers 2, 1988): time = flops / rate * (1 + half / length). What does not grow with the square of the
    length is loads and stores of a row of tiles, the masked half of the diagonal's, and sums beside the kernel.
    """

    kernel: AttentionKernel
    forward_flops: float
    forward_half: float
    backward_flops: float
    backward_half: float

    def __post_init__(self) -> None:
        for field in ("forward_flops", "backward_flops"):
            value = getattr(self, field)
            if not 0 < value < inf:
                raise ValueError(f"attention of {self.kernel}: {field} is {value}, must be positive and finite")
        for field in ("forward_half", "backward_half"):
            value = getattr(self, field)
            if not 0 <= value < inf:
                raise ValueError(f"attention of {self.kernel}: {field} is {value}, must be finite and not negative")

    def at(self, reach: float, *, backward: bool) -> float:
        """Flops per second where queries see as many keys as in a causal sequence of that length."""
        flops, half = (self.backward_flops, self.backward_half) if backward else (self.forward_flops, self.forward_half)
        return flops / (1.0 + half / reach)

    def scaled(self, share: float) -> "AttentionRates":
        """The same at that share of the rates."""
        return replace(self, forward_flops=self.forward_flops * share, backward_flops=self.backward_flops * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorConstants:
    """What one GPU does with one operator at a time.

    `stream_bytes_per_s` and `reduction_bytes_per_s` are the bandwidths of memory-bound kernels by `Access`;
    `touch_s` is what such a kernel costs without bytes. `attention` are the published rates of kernels of flash
    attention with heads of 128 columns, of which `attention_kernel` is chosen; `attention_share` is what they keep in a
    whole step. `attention_flops` is the rate of any other, at any length; `attention_exp_width` the columns whose
    products take as long as the exponentials of the scores, which make narrower heads slower; `attention_rows` the
    query rows of one block of it; `narrow_attention_gain` what MXFP8 makes of the rate where heads are wider than 128
    columns (others gain nothing). `peak_flops` is the datasheet's dense 2-byte rate, which only the MFU refers to.
    `rearranged_share` is what kernels that rearrange reach of the stream's rate. `sustained_share` is what products
    keep of their rates through a whole training step, where power and heat hold the clock down and tiles are not always
    the fastest. All shares are 1 where nothing was measured. `chunk_flops` is what an SM reaches in the products of a
    scan's chunks (`Gemm.chunked`), infinite where nothing holds them back. `fp4_gain` is the datasheet's dense FP4 rate
    over twice its FP8 rate. `block_share` is what products whose operands have a scale per block (MXFP8) keep of the
    rate with one per tensor. `wide_flops` is what an SM reaches at most in products of 2-byte operands, infinite where
    no rate was fitted in FP8 alone. `least_window` are the keys below which a narrower window makes attention no
    faster.
    """

    name: str
    fitted_on: str
    gemm: GemmConstants
    stream_bytes_per_s: float
    reduction_bytes_per_s: float
    touch_s: float
    attention_flops: float
    peak_flops: float
    attention_exp_width: int = 0
    attention_rows: int = 128
    rearranged_share: float = 1.0
    sustained_share: float = 1.0
    chunk_flops: float = inf
    fp4_gain: float = 1.0
    block_share: float = 1.0
    wide_flops: float = inf
    narrow_attention_gain: float = 1.0
    least_window: int = 0
    attention_share: float = 1.0
    attention: tuple[AttentionRates, ...] = ()
    attention_kernel: AttentionKernel | None = None

    def __post_init__(self) -> None:
        if self.attention_rows < 1:
            raise ValueError(f"operators of {self.name!r}: attention_rows is {self.attention_rows}, must be positive")
        for field in (
            "stream_bytes_per_s",
            "reduction_bytes_per_s",
            "touch_s",
            "attention_flops",
            "peak_flops",
            "rearranged_share",
            "sustained_share",
            "fp4_gain",
            "block_share",
            "attention_share",
            "narrow_attention_gain",
        ):
            value = getattr(self, field)
            if not 0 < value < float("inf"):
                raise ValueError(f"operators of {self.name!r}: {field} is {value}, must be positive and finite")
        if self.attention_exp_width < 0:
            raise ValueError(f"operators of {self.name!r}: attention_exp_width must not be negative")
        if not self.wide_flops > 0:
            raise ValueError(f"operators of {self.name!r}: wide_flops is {self.wide_flops}, must be positive")
        if self.least_window < 0:
            raise ValueError(f"operators of {self.name!r}: least_window must not be negative")
        if not self.chunk_flops > 0:
            raise ValueError(f"operators of {self.name!r}: chunk_flops is {self.chunk_flops}, must be positive")
        kernels = [str(rates.kernel) for rates in self.attention]
        twice = sorted(kernel for kernel in set(kernels) if kernels.count(kernel) > 1)
        if twice:
            raise ValueError(f"operators of {self.name!r}: attention has {twice[0]} twice, must have it once")

    def attention_rate(
        self, head_dim: int, reach: float = inf, *, backward: bool = False, narrow: bool = False
    ) -> float:
        """Flops per second of the chosen kernel at such heads and such a reach (`Attention.reach`), `narrow` in MXFP8.

        A score costs its products, which grow with the columns, and two exponentials (forward and backward). Products
        of 14 flops per score and column (4 and 10) over 16 exponentials a cycle give `attention_exp_width`. On a
        GB200 heads of 64 columns with a window of 1,024 reach 0.66 of the rate of 128 (cuDNN 9.19, 4,096 tokens:
        NVIDIA/cudnn-frontend @afa9f7c0, `benchmark/sdpa_benchmark_training/results`), this says 0.73.
        """
        width = min(head_dim, WIDE_HEAD)
        alone = self.attention_exp_width
        rates = next((one for one in self.attention if one.kernel is self.attention_kernel), None)
        flops = self.attention_flops if rates is None else rates.at(reach, backward=backward)
        gain = self.narrow_attention_gain if narrow and head_dim > WIDE_HEAD else 1.0
        return gain * flops * width * (WIDE_HEAD + alone) / (WIDE_HEAD * (width + alone))

    def running(self, framework: "FrameworkConstants", asked: AttentionKernel | None = None) -> "OperatorConstants":
        """The same as a framework's kernels have it.

        Attention is that of the kernel that a job asks for, or of the framework's first that the GPU has; without any
        of them it has `attention_flops`.

        Raises:
            JobError: if the framework does not run the kernel asked for, or the GPU has no rates of it.
        """
        known = [one.kernel for one in self.attention]
        if asked is not None and asked not in framework.attention_kernels:
            raise JobError(
                f"parallel.attention_kernel is {str(asked)!r}, which framework {framework.name} does not run; it runs: "
                f"{', '.join(framework.attention_kernels) or 'none'}"
            )
        if asked is not None and asked not in known:
            raise JobError(
                f"parallel.attention_kernel is {str(asked)!r}, whose rates on {self.name} are not known; known: "
                f"{', '.join(known) or 'none'}"
            )
        return replace(
            self,
            attention_kernel=asked or next((kernel for kernel in framework.attention_kernels if kernel in known), None),
            stream_bytes_per_s=self.stream_bytes_per_s * framework.memory_efficiency,
            reduction_bytes_per_s=self.reduction_bytes_per_s * framework.memory_efficiency,
        )

    @property
    def packed_gemm(self) -> GemmConstants:
        """The constants of products whose operands have half a byte per element."""
        return _scaled(self.gemm, self.fp4_gain)

    @property
    def block_gemm(self) -> GemmConstants:
        """The constants of products whose operands have a byte per element and a scale per block."""
        return _scaled(self.gemm, self.block_share)

    @property
    def wide_gemm(self) -> GemmConstants:
        """The constants of products of 2-byte operands."""
        return _scaled(self.gemm, min(1.0, self.wide_flops / self.gemm.tile_flops[0]))

    def in_training(self) -> "OperatorConstants":
        """The same GPU in the middle of a training step."""
        return replace(
            self,
            gemm=_scaled(self.gemm, self.sustained_share),
            sustained_share=1.0,
            attention=tuple(rates.scaled(self.attention_share) for rates in self.attention),
            attention_share=1.0,
        )


def _scaled(gemm: GemmConstants, share: float) -> GemmConstants:
    first, second, third = (rate * share for rate in gemm.tile_flops)
    return replace(gemm, tile_flops=(first, second, third))


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkConstants:
    """What a training framework adds to the kernels.

    The host needs `launch_s` to issue one kernel, and `further_launch_s` for each further one that a library launches
    in a loop, `eager_launch_s` for each further operator of PyTorch (None: the same); a pass that the GPU finishes
    earlier takes the host's time, blended by `launch_norm` (p of a p-norm). `memory_efficiency` is what the framework's
    memory-bound kernels reach of the GPU's bandwidths. `data_bytes_per_s` limits what the framework's data-parallel
    collectives reach between nodes, where it is not the wire (0: the wire). `attention_kernels` are whose flash
    attention it takes, the first that the GPU has rates of.
    """

    name: str
    fitted_on: str
    launch_s: float
    launch_norm: float
    memory_efficiency: float
    data_bytes_per_s: float
    further_launch_s: float | None = None
    attention_kernels: tuple[AttentionKernel, ...] = ()
    eager_launch_s: float | None = None

    def __post_init__(self) -> None:
        for field in ("launch_s", "data_bytes_per_s"):
            value = getattr(self, field)
            if not 0 <= value < float("inf"):
                raise ValueError(f"framework {self.name!r}: {field} is {value}, must be finite and not negative")
        for field in ("further_launch_s", "eager_launch_s"):
            value = getattr(self, field)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"framework {self.name!r}: {field} is {value}, must not be negative")
        if not 0 < self.memory_efficiency <= 1:
            raise ValueError(
                f"framework {self.name!r}: memory_efficiency is {self.memory_efficiency}, must be in (0, 1]"
            )
        if self.launch_norm < 1:
            raise ValueError(f"framework {self.name!r}: launch_norm is {self.launch_norm}, must be at least 1")

    def graphed(self) -> "FrameworkConstants":
        """The same where a step is replayed as one CUDA graph: the host launches nothing."""
        return replace(self, launch_s=0.0, further_launch_s=0.0, eager_launch_s=0.0)

    def next_launch_s(self, issuer: Issuer) -> float:
        """What the host needs for each kernel of an operator but the first."""
        further_s = {Issuer.LIBRARY: self.further_launch_s, Issuer.EAGER: self.eager_launch_s}.get(issuer)
        return self.launch_s if further_s is None else further_s


@cache
def load_operators(gpu: Gpu) -> OperatorConstants:
    """The constants of a GPU: the `[operators]` of its file.

    A GPU whose file has none gets the A100's, its rates scaled by the achieved product rate and memory bandwidth of the
    two; `fitted_on` says so.

    Raises:
        JobError: if the table of a user's own file is none.
    """
    own = table_of(gpu, "operators")
    if own is not None:
        return _decoded(*own)
    reference = load_gpu(_REFERENCE)
    known = load_operators(reference)
    per_sm = gpu.gemm_flops / gpu.num_sms / (reference.gemm_flops / reference.num_sms)
    memory = gpu.hbm_bytes_per_s / reference.hbm_bytes_per_s
    first, second, third = known.gemm.tile_flops
    products = per_sm * gpu.num_sms / reference.num_sms
    return replace(
        known,
        name=gpu.name,
        fitted_on=f"nothing: {gpu.name} has no file, its rates follow the A100's by datasheet ratios",
        gemm=replace(
            known.gemm,
            tile_flops=(first * per_sm, second * per_sm, third * per_sm),
            bytes_per_s=known.gemm.bytes_per_s * memory,
        ),
        stream_bytes_per_s=known.stream_bytes_per_s * memory,
        reduction_bytes_per_s=known.reduction_bytes_per_s * memory,
        attention_flops=known.attention_flops * products,
        attention=tuple(rates.scaled(products) for rates in known.attention),
        peak_flops=gpu.gemm_flops,
    )


def _decoded(table: Any, source: str) -> OperatorConstants:  # any TOML value
    if isinstance(table, dict) and "attention_kernel" in table:
        raise JobError(f"{source}: unknown key 'operators.attention_kernel'; a job has parallel.attention_kernel")
    operators = from_table(table, OperatorConstants, source, "operators.")
    try:  # what a step makes of them: two finite numbers may have a product that is none
        trained = operators.in_training()
        _ = trained.packed_gemm, trained.block_gemm, trained.wide_gemm
    except ValueError as error:
        raise JobError(f"{source}: operators: rates times their shares: {error}") from None
    return operators


@cache
def load_framework(name: str) -> FrameworkConstants:
    """The framework of that name.

    Raises:
        UnknownNameError: if there is none.
    """
    table = {"name": name, **framework_file(name).constants}
    return from_table(table, FrameworkConstants, f"frameworks/{name}.toml", "constants.")
