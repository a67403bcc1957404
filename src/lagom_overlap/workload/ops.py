"""Operators of an iteration: computations by what they compute, communications by what they move."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Final

from lagom_overlap.collective import Collective
from lagom_overlap.errors import JobError
from lagom_overlap.workload.sharding import ShardSpec
from lagom_overlap.workload.streams import COMM, COMPUTE


class Phase(StrEnum):
    """The part of a training step that an operator belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT_GRAD = "weight_grad"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"
    LOSS = "loss"


FORWARD_PHASES: Final = (Phase.FORWARD, Phase.LOSS)
BACKWARD_PHASES: Final = (Phase.BACKWARD, Phase.WEIGHT_GRAD, Phase.RECOMPUTE)
"""What runs between the loss and the optimizer, of each micro-batch."""


def _check_positive(what: object, **fields: float) -> None:
    for name, value in fields.items():
        if not 0 < value < inf:
            raise JobError(f"{type(what).__name__}: {name} is {value}, must be positive and finite")


class Access(StrEnum):
    """How an elementwise kernel walks its memory, which decides the bandwidth it reaches.

    `stream` reads and writes once in order (addition, activation, dropout, fused softmax); `reduction` reduces along
    rows or columns of activations (gradients of biases); `rearrange` writes its elements in another place
    or format than it read them in (casts to FP8 with a copy by columns, rows moved by an index).
    """

    STREAM = "stream"
    REDUCTION = "reduction"
    REARRANGE = "rearrange"


@dataclass(frozen=True, slots=True)
class Gemm:
    """A matrix product (m x k) (k x n), or `batch` equal ones at once (experts, an attention not fused).

    The host launches `num_launches` kernels for them. `result_bytes` moves per element of the result: None where it is
    written in the operands' format, 8 where the epilogue adds it to an FP32 buffer. `packed` elements share a byte of
    the operands, where they have less than one each. `block_scaled`: operands have a scale per block of elements (MX).
    `chunked` are products inside the
    kernels of a scan (Mamba-2), which weigh their operands element by element on the way.
    """

    m: int
    n: int
    k: int
    element_bytes: int = 2
    batch: int = 1
    num_launches: int = 1
    result_bytes: int | None = None
    chunked: bool = field(default=False, kw_only=True)
    packed: int = field(default=1, kw_only=True)
    block_scaled: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        sizes = {"m": self.m, "n": self.n, "k": self.k, "element_bytes": self.element_bytes, "batch": self.batch}
        _check_positive(self, **sizes, num_launches=self.num_launches, result_bytes=self.result_bytes or 1)

    @property
    def flops(self) -> float:
        """Floating-point operations of all of them: 2 m n k each."""
        return 2.0 * self.m * self.n * self.k * self.batch


FLASH_BACKWARD_PASSES: Final = 2.5
"""Products of a flash attention's backward over its forward's: five against two."""
WINDOW_TILE: Final = 128
"""Keys of a tile of flash attention: a tile of as many queries meets those of its window and one further tile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Scaled dot-product attention, forward; `passes` scales it (`FLASH_BACKWARD_PASSES` for a `backward`).

    `reach` is the length of the causal sequence whose queries see as many keys in a call as these do in the mean (0:
    `seq_len`, twice that without a mask): of a window, or of a step of context parallelism's ring, shorter.
    Of the products of a window of `window` keys (0: none) `passes` counts those that whole tiles have. `narrow`: it
    multiplies in a byte per element with a scale per block (MXFP8).
    """

    batch: int
    num_heads: int
    seq_len: int
    head_dim: int
    causal: bool = True
    passes: float = 1.0
    element_bytes: int = 2
    backward: bool = False
    reach: float = 0.0
    window: int = 0
    narrow: bool = False

    def __post_init__(self) -> None:
        _check_positive(
            self,
            batch=self.batch,
            num_heads=self.num_heads,
            seq_len=self.seq_len,
            head_dim=self.head_dim,
            passes=self.passes,
            element_bytes=self.element_bytes,
        )
        if not 0 <= self.reach < inf:
            raise JobError(f"Attention: reach is {self.reach}, must be finite and not negative")
        if self.window < 0:
            raise JobError(f"Attention: window is {self.window}, must not be negative")

    @property
    def flops(self) -> float:
        """Floating-point operations: 4 b h s^2 d, half of it where causal, times `passes`."""
        full = 4.0 * self.batch * self.num_heads * self.seq_len**2 * self.head_dim
        return full * (0.5 if self.causal else 1.0) * self.passes

    def widened(self, window: int) -> float:
        """By how much the products grow where a kernel makes those of a window of at least so many keys."""
        if not self.window or window <= self.window:
            return 1.0
        return share_in_window(self.seq_len, window) / share_in_window(self.seq_len, self.window)


def share_in_window(seq_len: int, window: int) -> float:
    """Of the products of causal attention those that a window of keys leaves, in whole tiles."""
    tiles = -(-window // WINDOW_TILE) + 1
    return min(1.0, 2 * tiles * WINDOW_TILE / seq_len)


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """An elementwise or normalising operator that reads and writes `num_bytes` in all.

    It is made of `num_launches` equal kernels; 0 where it is fused into the operator before it.
    """

    num_bytes: int
    access: Access = Access.STREAM
    num_launches: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.num_bytes < inf:  # the most frequent work by far: nothing is built to find that it is right
            _check_positive(self, num_bytes=self.num_bytes)
        if self.num_launches < 0:
            raise JobError(f"MemoryBound: num_launches is {self.num_launches}, must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel in the terms of the Lagom paper's Eqs 5 and 6.

    `num_blocks` is the grid (mu), `blocks_per_sm` the resident blocks (TB), `wave_s` the time of one wave without
    memory contention (theta), `block_bytes` the device-memory bytes of one block (D). A kernel whose resident blocks
    fetch tiles as they go (work stealing, stream-K) has its tiles as `num_blocks`, and as `grid` the blocks that it
    launches, `cluster` of which run in one GPC; each brings `own_tiles` tiles with it and fetches the rest
    (`cost.persistent`). Without a `grid` every block is dispatched by the hardware. `slowdown_scale` multiplies what
    Eqs 5 and 6 add to its time during collectives; other than 1 only where a trace was fitted, and never written.
    """

    num_blocks: int
    blocks_per_sm: int
    wave_s: float
    block_bytes: float
    grid: int | None = None
    cluster: int = 1
    own_tiles: int = 0
    slowdown_scale: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(self, num_blocks=self.num_blocks, blocks_per_sm=self.blocks_per_sm, wave_s=self.wave_s)
        _check_positive(self, slowdown_scale=self.slowdown_scale)
        if self.grid is not None:
            _check_positive(self, grid=self.grid, cluster=self.cluster)
        if self.own_tiles < 0 or (self.grid is None and (self.cluster, self.own_tiles) != (1, 0)):
            raise JobError(f"Kernel: cluster {self.cluster} and own_tiles {self.own_tiles} need a grid")
        if self.grid is not None and self.grid % self.cluster:
            raise JobError(f"Kernel: grid is {self.grid}, must be a multiple of cluster, which is {self.cluster}")
        if not 0 <= self.block_bytes < float("inf"):
            raise JobError(f"Kernel: block_bytes is {self.block_bytes}, must be finite and not negative")


Work = Gemm | Attention | MemoryBound | Kernel
"""What a computation is: by shape, or as a kernel that was already reduced to the model's terms."""


class Issuer(StrEnum):
    """Who launches an operator's kernels.

    The program, call by call; PyTorch, one of its operators each; a library in a loop; a CUDA graph.
    """

    PROGRAM = "program"
    EAGER = "eager"
    LIBRARY = "library"
    GRAPH = "graph"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where in the model an operator comes from: what planners group and repeat by, and what a reader recognises.

    `module` is the fully qualified name of the module (`"layers.3.attention"`), `kernel` the framework's operator
    (`"aten.mm"`); `layer` and `microbatch` count from 0, None and 0 where there is none. `issuer` launches its kernels.
    """

    phase: Phase | None = None
    layer: int | None = None
    microbatch: int = 0
    module: str = ""
    kernel: str = ""
    issuer: Issuer = Issuer.PROGRAM


NO_ORIGIN = Origin()
"""Nothing known about where an operator comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompOp:
    """A computation on a stream; `deps` are names of operators that it waits for.

    Its predecessor on its stream need not be named, unless the iteration is a data-flow one. `shards` says along which
    axes it can be cut (None: it cannot). `is_host_read`: the host needs a value of it (`item`, `tolist`, the number of
    entries that `nonzero` finds), and issues nothing further until it has ended.
    """

    name: str
    work: Work
    stream: str = COMPUTE
    deps: tuple[str, ...] = ()
    origin: Origin = NO_ORIGIN
    shards: ShardSpec | None = None
    is_host_read: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommOp:
    """A collective on a stream; `deps` are names of operators that it waits for, as in `CompOp`.

    `communicator` is the framework's description of the communicator (`"fsdp"`, `"tp"`). `shards` says along which axes
    of its payload it can be cut, so that a concurrent computation can work on the parts.
    """

    name: str
    collective: Collective
    stream: str = COMM
    communicator: str = "default"
    deps: tuple[str, ...] = ()
    origin: Origin = NO_ORIGIN
    shards: ShardSpec | None = None


Op = CompOp | CommOp


def is_host_read(op: Op) -> bool:
    """Whether the host waits for an operator before it issues anything further."""
    return isinstance(op, CompOp) and op.is_host_read


def data_deps(op: Op, ops: Mapping[str, Op]) -> tuple[str, ...]:
    """Whose results an operator needs: its `deps` but for reads of the host, which everything behind them waits for."""
    return tuple(dep for dep in op.deps if not is_host_read(ops[dep]))
