"""One GPU as the contention model sees it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lagom_overlap.errors import JobError
from lagom_overlap.toml_tables import NOT_A_KEY


@dataclass(frozen=True, slots=True)
class GpuTables:
    """The tables of a user's own GPU file other than `[gpu]`; the package that needs one decodes it (`gpu_file`).

    Compared by content: an edited file is a different one.
    """

    source: str
    tables: Mapping[str, Any] = field(hash=False, repr=False)  # any TOML value


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The resources that computation and communication share.

    `hbm_bytes_per_s` is the bandwidth that a copy achieves, not the datasheet's peak (A40: 600 of 696 GB/s);
    `gemm_flops` is the dense bf16 rate that a large matrix product achieves. On AMD GPUs a compute unit counts as an SM
    and the last-level cache (Infinity Cache) as the L2; `num_xcds` is the number of dies over which the hardware
    distributes the workgroups of a kernel round-robin (NVIDIA: 1), `channel_xcds` over how many of them it
    distributes the channels of a collective (0: all).

    `fp8`, `mxfp8` and `nvfp4` say whether the GPU multiplies one-byte operands with a scale per tensor, one-byte
    operands with a scale per 32 elements, and half-byte operands.

    `gpc_sms` are the SMs of each GPC, inside which a thread-block cluster runs (empty: not known), and
    `gpc_first_sms` how many of them single blocks take before all others (`cost.persistent`).
    """

    name: str
    num_sms: int
    gemm_flops: float
    hbm_bytes_per_s: float
    l2_bytes: int
    memory_bytes: int
    num_xcds: int = 1
    channel_xcds: int = 0
    fp8: bool = False
    mxfp8: bool = False
    nvfp4: bool = False
    gpc_sms: tuple[int, ...] = ()
    gpc_first_sms: tuple[int, ...] = ()
    own: GpuTables | None = field(default=None, repr=False, metadata=NOT_A_KEY)
    """None: the other tables are those of the package's files, found by the GPU's name."""

    def __post_init__(self) -> None:
        for name in ("num_sms", "gemm_flops", "hbm_bytes_per_s", "l2_bytes", "memory_bytes"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise JobError(f"gpu {self.name!r}: {name} is {value}, must be positive and finite")
        if self.num_xcds < 1 or self.num_sms % self.num_xcds:
            raise JobError(
                f"gpu {self.name!r}: num_xcds is {self.num_xcds}, must divide num_sms, which is {self.num_sms}"
            )
        if not 0 <= self.channel_xcds <= self.num_xcds:
            raise JobError(
                f"gpu {self.name!r}: channel_xcds is {self.channel_xcds}, must lie in 0..{self.num_xcds}, its num_xcds"
            )
        if self.gpc_sms and (min(self.gpc_sms) < 1 or sum(self.gpc_sms) != self.num_sms):
            raise JobError(f"gpu {self.name!r}: gpc_sms is {self.gpc_sms}, must be positive and sum to {self.num_sms}")
        first = self.gpc_first_sms
        if len(first) != len(self.gpc_sms) or any(
            not 0 <= own <= sms for own, sms in zip(first, self.gpc_sms, strict=True)
        ):
            raise JobError(
                f"gpu {self.name!r}: gpc_first_sms is {first}, must lie in 0..SMs for each of {self.gpc_sms}"
            )
