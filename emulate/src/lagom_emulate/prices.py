"""What a description costs: views on the one cost model, with what each price rests on.

    description                          price                                                    `PriceSource`
    gemm                                 by its shape, as everywhere                              shape
    kernel, operator with flops          flops at the rate of attention, or of products, its grid framework
    kernel with a product (convolution)  by its shape, moving the bytes that are said             framework
    kernel, operator with bytes          a memory-bound kernel of so many bytes                   framework
    the same between GPUs (symm_mem)     its bytes, or those on the wire, whichever take longer   framework
    further kernels of an operator       an empty kernel: the first one has the bytes             framework
    kernel by its name                   a memory-bound kernel of its elements and their size     name
    copy on the device, memset           a memory-bound kernel of its bytes                       size
    copy to or from the host, to a peer  bytes at the wire's rate, disturbing nobody              size
    collective                           by algorithm, protocol, channels, threads, chunk         configuration
    collective that the model refuses    as NCCL runs it untouched                                default

Kernels that no framework describes are the weakest part: their elements come from the launch, or from grid and block,
and their size from the name. The report says how much of the time was priced by which.
"""

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import inf, prod
from typing import Final, TypeVar

from lagom_emulate.clock import INSTANT, SetTimes, Work
from lagom_emulate.description import CollectiveText, Description, GemmText, read_description
from lagom_overlap.analysis.kernel_class import KernelClass, kernel_class
from lagom_overlap.collective import Algorithm, Collective, CommConfig, Protocol
from lagom_overlap.cost import CollectiveCost, ContentionModel
from lagom_overlap.cost.kernels import kernel_of_time
from lagom_overlap.cost.operators import WIDE_HEAD, OperatorConstants, load_operators
from lagom_overlap.cost.operators.gemm import gemm_time
from lagom_overlap.errors import JobError, SpaceError
from lagom_overlap.units import NS
from lagom_overlap.workload import Access, Gemm, Kernel, MemoryBound

HOST_COPY_BYTES_PER_S: Final = 25e9
"""A copy between pinned memory and the GPU: PCIe 4.0 x16 as CUDA's bandwidthTest shows it on A100 (24 to 26 GB/s)."""
HOST_COPY_S: Final = 5e-6
"""What a copy to or from the host takes without bytes: order of magnitude."""
VECTOR_ELEMENTS: Final = 4
"""Elements per thread of an elementwise kernel whose launch does not say (PyTorch's vectorised kernels have 4 or 8)."""
_DTYPE_BYTES: Final = (
    (re.compile(r"BFloat16|Half|bf16|f16|__half|fp16", re.IGNORECASE), 2),
    (re.compile(r"Float8|fp8|e4m3|e5m2|int8|char|bool", re.IGNORECASE), 1),
    (re.compile(r"double|f64|fp64|int64|long", re.IGNORECASE), 8),
)
_ELEMENT_BYTES: Final = {
    **dict.fromkeys(("bf16", "bfloat16", "f16", "fp16", "float16"), 2),
    **dict.fromkeys(("f32", "fp32", "float32", "tf32", "tfloat32"), 4),
    **dict.fromkeys(("f64", "float64", "complex64"), 8),
    **dict.fromkeys(("fp8", "float8_e4m3fn", "float8_e5m2", "i8", "int8"), 1),
    "complex128": 16,
}
"""Of the formats that the emulated BLAS names; four bits are taken for one byte."""
_LEAST_BYTES_PER_S: Final = 1.0
"""The rate of a collective that waits: as good as none, and still a rate."""


_Word = TypeVar("_Word", Algorithm, Protocol)


class PriceSource(StrEnum):
    """What a price rests on."""

    SHAPE = "shape"
    FRAMEWORK = "framework"
    NAME = "name"
    SIZE = "size"
    CONFIGURATION = "configuration"
    DEFAULT = "default"
    INSTANT = "instant"


class Doubt(StrEnum):
    """Why a price is to be doubted."""

    FLOOR = "floor"
    """By the bytes of its arguments: what it computes is not known."""
    UNCOUNTED = "uncounted"
    """Counting the operator's bytes or flops failed."""
    NAME = "name"
    """By name, grid and block."""


@dataclass(frozen=True, slots=True)
class Priced:
    """A description with its work, its price alone (ns) and what that rests on."""

    description: Description
    work: Work
    alone_ns: float
    source: PriceSource

    @property
    def doubt(self) -> Doubt | None:
        """Why the price is to be doubted; None: as the others."""
        if self.description.uncounted:
            return Doubt.UNCOUNTED
        if self.description.floor:
            return Doubt.FLOOR
        return Doubt.NAME if self.source is PriceSource.NAME else None


class CostModelPrices:
    """Prices of one cluster; every distinct text is priced once."""

    def __init__(self, model: ContentionModel) -> None:
        self._model = model
        self._known: dict[bytes, Priced] = {}
        self._kernels: list[Kernel] = []
        self._costs: list[CollectiveCost] = []
        self._kinds: dict[tuple[object, ...], Work] = {}

    @property
    def set_times(self) -> SetTimes:
        """As the clock asks for them."""
        return self._set_times

    def work(self, text: bytes) -> Work:
        """The work that a description stands for."""
        return self.priced(text).work

    def communicator(self, text: bytes) -> str:
        """The communicator of a collective among others; empty for anything else."""
        one = self.priced(text).description.collective
        return one.comm if one is not None and one.num_ranks > 1 else ""

    def priced(self, text: bytes) -> Priced:
        """The price of a description.

        Raises:
            ProtocolError: if the text is none.
        """
        found = self._known.get(text)
        if found is None:
            description = read_description(text)
            work, source = self._price(description)
            alone_ns = work.fixed_ns if work.kind is None else self._set_times((work.kind,))[0]
            found = self._known[text] = Priced(description, work, alone_ns, source)
        return found

    def _set_times(self, kinds: tuple[int, ...]) -> list[float]:
        """In the order of content rather than of arrival, so that sums do not depend on who came first."""
        comms = sorted((kind for kind in kinds if kind >= 0), key=lambda kind: str(self._costs[kind]))
        computing = sorted((kind for kind in kinds if kind < 0), key=lambda kind: str(self._kernels[-1 - kind]))
        times = self._model.running_times(
            [self._kernels[-1 - kind] for kind in computing], [self._costs[kind] for kind in comms]
        )
        by_kind = dict(zip((*comms, *computing), (*times.comm_s, *times.kernel_s), strict=True))
        return [by_kind[kind] / NS for kind in kinds]

    def _price(self, one: Description) -> tuple[Work, PriceSource]:
        if one.collective is not None:
            return self._collective(one.collective)
        if one.gemm is not None:
            return self._gemm(one.gemm) if one.kernel is None else self._convolution(one.gemm, one.bytes or 0.0)
        if one.copy is not None:
            return self._copy(one.copy, int(one.bytes or 0))
        if one.memset is not None:
            return self._touch(one.memset), PriceSource.SIZE
        if one.kernel is not None:
            return self._kernel(one)
        return INSTANT, PriceSource.INSTANT

    def _gemm(self, gemm: GemmText) -> tuple[Work, PriceSource]:
        if not min(gemm.m, gemm.n, gemm.k, gemm.batch):
            return self._touch(1), PriceSource.SHAPE
        width = _width(gemm)
        result = _ELEMENT_BYTES.get(gemm.result.lower())
        work = Gemm(gemm.m, gemm.n, gemm.k, width, gemm.batch, result_bytes=None if result == width else result)
        return self._computation(self._model.kernel(work)), PriceSource.SHAPE

    def _convolution(self, gemm: GemmText, num_bytes: float) -> tuple[Work, PriceSource]:
        """The tiles of an implicit product, whose operands are never laid out: memory has each tensor once."""
        gpu, constants, width = self._model.cluster.gpu, self._operators, _width(gemm)
        time = gemm_time(
            (gemm.m, gemm.n, gemm.k),
            batch=gemm.batch,
            element_bytes=width,
            num_sms=gpu.num_sms,
            l2_bytes=gpu.l2_bytes,
            constants=constants.wide_gemm if width >= 2 else constants.gemm,
            moved_bytes=num_bytes,
        )
        kernel = kernel_of_time(
            gpu,
            self._model.profile,
            alone_s=time.alone_s,
            num_blocks=time.num_blocks,
            blocks_per_sm=1,
            total_bytes=num_bytes,
        )
        return self._computation(kernel), PriceSource.FRAMEWORK

    def _touch(self, num_bytes: float, access: Access = Access.STREAM) -> Work:
        return self._computation(self._model.kernel(MemoryBound(max(1, round(num_bytes)), access)))

    def _copy(self, kind: str, num_bytes: int) -> tuple[Work, PriceSource]:
        if kind == "d2d":
            return self._touch(2 * num_bytes), PriceSource.SIZE
        wire = self._model.cluster.intra.bytes_per_s if kind == "p2p" else HOST_COPY_BYTES_PER_S
        return Work(fixed_ns=(HOST_COPY_S + num_bytes / wire) / NS), PriceSource.SIZE

    def _kernel(self, one: Description) -> tuple[Work, PriceSource]:
        name = one.kernel or ""
        if one.part:
            return self._touch(1), PriceSource.FRAMEWORK
        if one.flops:
            return self._by_flops(one, one.flops), PriceSource.FRAMEWORK
        if one.wire_bytes:
            return self._between_gpus(one), PriceSource.FRAMEWORK
        # A softmax of rows streams, as the training step has it: what it reads again is in its bytes.
        reduces = kernel_class(name) is KernelClass.REDUCTION and "softmax" not in name.lower()
        access = Access.REDUCTION if reduces else Access.STREAM
        if one.bytes is not None:
            return self._touch(one.bytes, one.access or access), PriceSource.FRAMEWORK
        elements = one.num_elements or VECTOR_ELEMENTS * prod(one.grid) * prod(one.block)
        size = next((size for pattern, size in _DTYPE_BYTES if pattern.search(name)), 4)
        return self._touch(2.0 * size * elements, access), PriceSource.NAME

    def _by_flops(self, one: Description, flops: float) -> Work:
        """Flops at the rate of attention, or of products, on the launch's own grid; its bytes, if they take longer."""
        constants, gpu = self._operators, self._model.cluster.gpu
        is_attention = "attention" in (one.op or "") or kernel_class(one.kernel or "") is KernelClass.ATTENTION
        rate = gpu.gemm_flops
        if is_attention:
            backward = "backward" in (one.op or "")
            rate = constants.attention_rate(one.head_dim or WIDE_HEAD, one.reach or inf, backward=backward)
        num_blocks = max(1, prod(one.grid))
        idle = max(1.0, gpu.num_sms / num_blocks)
        alone_s = constants.gemm.launch_s + flops / rate * idle
        if not is_attention:  # whose rate was measured with its bytes
            moved = MemoryBound(max(1, round(one.bytes or 0)), one.access or Access.STREAM)
            alone_s = max(alone_s, self._model.kernel_seconds(self._model.kernel(moved)))
        kernel = kernel_of_time(
            gpu,
            self._model.profile,
            alone_s=alone_s,
            num_blocks=num_blocks,
            blocks_per_sm=1,
            total_bytes=one.bytes or 0.0,
        )
        return self._computation(kernel)

    def _between_gpus(self, one: Description) -> Work:
        """A kernel that reads and writes peers' memory; it waits for none of them."""
        link = self._model.cluster.intra
        own = self._model.kernel(MemoryBound(max(1, round(one.bytes or 0))))
        wire_s = 2 * link.hop_s + one.wire_bytes / link.bytes_per_s  # a barrier before and one behind
        kernel = kernel_of_time(
            self._model.cluster.gpu,
            self._model.profile,
            alone_s=max(self._model.kernel_seconds(own), wire_s),
            num_blocks=max(1, prod(one.grid)),
            blocks_per_sm=1,
            total_bytes=one.bytes or 0.0,
        )
        return self._computation(kernel)

    @cached_property
    def _operators(self) -> OperatorConstants:
        return self._model.operators or load_operators(self._model.cluster.gpu)

    def _computation(self, kernel: Kernel) -> Work:
        work = self._kinds.get(("kernel", kernel))
        if work is None:
            self._kernels.append(kernel)
            work = self._kinds["kernel", kernel] = Work(kind=-len(self._kernels))
        return work

    def _collective(self, text: CollectiveText) -> tuple[Work, PriceSource]:
        if text.num_ranks < 2 or not text.bytes:
            return self._touch(2 * text.bytes), PriceSource.CONFIGURATION
        # Ranks that do not spread evenly over hosts are taken as if they did, as the emulated NCCL does.
        filled = -(-text.num_ranks // text.nodes) * text.nodes
        collective = Collective(text.kind, text.bytes, filled, None if text.nodes == 1 else text.nodes)
        cost, source = self._cost(collective, text)
        num_members = text.present or text.num_ranks
        work = self._kinds.get((cost, num_members))
        if work is None:
            self._costs += [cost, _held(cost)]
            held = len(self._costs) - 1 if cost.num_channels else None
            work = Work(kind=len(self._costs) - 2, held_kind=held, num_members=num_members)
            self._kinds[cost, num_members] = work
        return work, source

    def _cost(self, collective: Collective, text: CollectiveText) -> tuple[CollectiveCost, PriceSource]:
        try:
            asked = CommConfig(
                algorithm=_word(Algorithm, text.algorithm),
                protocol=_word(Protocol, text.protocol),
                num_channels=text.num_channels or None,
                num_threads=text.num_threads or None,
                chunk_bytes=text.chunk_bytes or None,
            )
        except ValueError:
            return self._model.collective(collective, CommConfig()), PriceSource.DEFAULT
        for config in (asked, replace(asked, chunk_bytes=None), replace(asked, algorithm=None, chunk_bytes=None)):
            try:
                return self._model.collective(collective, config), PriceSource.CONFIGURATION
            except SpaceError:
                continue
            except JobError:
                break
        return self._model.collective(collective, CommConfig()), PriceSource.DEFAULT


def _width(gemm: GemmText) -> int:
    return _ELEMENT_BYTES.get(gemm.dtype.lower(), 1 if "float4" in gemm.dtype else 2)


def _word(words: type[_Word], text: str | None) -> _Word | None:
    """NCCL's name in any case; none for point-to-point."""
    return None if not text or text.lower() in ("none", "undefined") else words(text.lower())


def _held(cost: CollectiveCost) -> CollectiveCost:
    """A collective that waits for its members: it holds its SMs, and moves nothing."""
    return replace(cost, channel_bytes_per_s=_LEAST_BYTES_PER_S, touches=0.0, fifo_bytes=0.0)
