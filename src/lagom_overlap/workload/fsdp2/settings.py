"""What FSDP2 can be told at run time: prefetch lists, who keeps its parameters, buffers and groups. Needs no torch.

Each field is a call of `FSDPModule` (PyTorch 2.13, `_fully_shard.py`); none but `reduce_in_param_dtype` changes what is
computed.
"""

from dataclasses import dataclass

from lagom_overlap.errors import JobError
from lagom_overlap.workload.fsdp2.hooks import prefetched

MAX_PREFETCH = 64
"""Chosen, as the next: a list or queue of more units is a whole model."""
MAX_REDUCE_BUFFERS = 64
"""Sets of buffers that reductions may hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp2Settings:
    """Settings of a model that `fully_shard` has sharded; the default is what FSDP2 does by itself.

    `units` are the sharded modules by name, in the order of their forward, the root left out. `forward_prefetch` and
    `backward_prefetch` are how many units each one names in its list (0: no list, and then FSDP2 prefetches nothing
    in forward and one unit in backward). `kept` units hold their parameters from forward to backward.
    `reduce_buffers` is how many inputs of reduce-scatters may be in flight. `separate_reduce_group` gives
    reduce-scatters a process group of their own. `reduce_in_param_dtype` reduces gradients in the type in which
    parameters are gathered (a `MixedPrecisionPolicy` with param_dtype alone): results change.
    """

    units: tuple[str, ...]
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    kept: tuple[str, ...] = ()
    reduce_buffers: int = 1
    separate_reduce_group: bool = False
    reduce_in_param_dtype: bool = False

    def __post_init__(self) -> None:
        if len(set(self.units)) != len(self.units):
            raise JobError("fsdp2: a unit is named twice")
        for name in ("forward_prefetch", "backward_prefetch"):
            if not 0 <= getattr(self, name) <= MAX_PREFETCH:
                raise JobError(f"fsdp2: {name} is {getattr(self, name)}, must be 0 to {MAX_PREFETCH}")
        if not 1 <= self.reduce_buffers <= MAX_REDUCE_BUFFERS:
            raise JobError(f"fsdp2: reduce_buffers is {self.reduce_buffers}, must be 1 to {MAX_REDUCE_BUFFERS}")
        unknown = [name for name in self.kept if name not in self.units]
        if unknown:
            raise JobError(f"fsdp2: kept names {unknown[0]!r}, which is none of the units")

    def keys(self) -> dict[str, int | bool]:
        """The keys of `[parallel]` that say the same of a named model's job.

        Raises:
            JobError: if no key says so: units that are kept are not the last ones, or results change.
        """
        if self.reduce_in_param_dtype or self.kept != self.units[len(self.units) - len(self.kept) :]:
            raise JobError("fsdp2: a job keeps the last units of forward, and says in [precision] what is reduced in")
        keeps_all = self.units == self.kept
        return {
            "zero_stage": 2 if keeps_all else 3,
            "kept_units": 0 if keeps_all else len(self.kept),
            "forward_prefetch": self.forward_prefetch,
            "backward_prefetch": self.backward_prefetch,
            "reduce_buffers": self.reduce_buffers,
            "separate_reduce_group": self.separate_reduce_group,
        }

    @property
    def is_default(self) -> bool:
        """Whether FSDP2 is told nothing."""
        return self == Fsdp2Settings(units=self.units)

    def forward_list(self, unit: str) -> tuple[str, ...]:
        """The units that one names for its forward, first needed first."""
        return tuple(prefetched(self.units, self.units.index(unit), self.forward_prefetch, is_forward=True))

    def backward_list(self, unit: str) -> tuple[str, ...]:
        """The units that one names for its backward, first needed first; kept ones have nothing to gather."""
        before = [name for name in self.units[: self.units.index(unit)] if name not in self.kept]
        return tuple(prefetched(before, len(before), self.backward_prefetch, is_forward=False))
