"""One GPU as the contention model sees it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lagom_overlap.errors import JobError
from lagom_overlap.toml_tables import NOT_A_KEY


@dataclass(frozen=True, slots=True)
class GpuTables:
    """Tables that a user's own file has about a GPU besides its hardware; whoever needs one decodes it (`gpu_file`).

    Compared by what is in them: a file that was edited is another one.
    """

    source: str
    tables: Mapping[str, Any] = field(hash=False, repr=False)  # any TOML value


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The resources that computation and communication share.

    `hbm_bytes_per_s` is the bandwidth that a copy achieves, not the datasheet's peak
    (A40: 600 of 696 GB/s); `gemm_flops` is the dense bf16 rate that a large matrix product achieves. On AMD GPUs a
    compute unit counts as an SM and the last-level cache (Infinity Cache) as the L2; `num_xcds` are the dies among
    which the hardware deals the workgroups of a kernel in turn. NVIDIA's GPUs are one.

    `fp8` and `mxfp8` say whether products multiply one-byte operands with a scale per tensor, or one per 32 elements,
    `nvfp4` whether they do of half a byte.

    `gpc_sms` are the SMs of each GPC, inside which a thread-block cluster runs (empty: not known), and
    `gpc_first_sms` those of them that single blocks take before all others (`cost.placement`).
    """

    name: str
    num_sms: int
    gemm_flops: float
    hbm_bytes_per_s: float
    l2_bytes: int
    memory_bytes: int
    num_xcds: int = 1
    fp8: bool = False
    mxfp8: bool = False
    nvfp4: bool = False
    gpc_sms: tuple[int, ...] = ()
    gpc_first_sms: tuple[int, ...] = ()
    own: GpuTables | None = field(default=None, repr=False, metadata=NOT_A_KEY)
    """None: what is known of the GPU besides is in the package's files, found by its name."""

    def __post_init__(self) -> None:
        for name in ("num_sms", "gemm_flops", "hbm_bytes_per_s", "l2_bytes", "memory_bytes"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise JobError(f"gpu {self.name!r}: {name} is {value}, must be positive and finite")
        if self.num_xcds < 1 or self.num_sms % self.num_xcds:
            raise JobError(
                f"gpu {self.name!r}: num_xcds is {self.num_xcds}, must divide num_sms, which is {self.num_sms}"
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
