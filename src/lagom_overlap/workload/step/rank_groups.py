"""The communicators of rank 0 and their ranks: tensor, context, data, pipeline, as Megatron lays them out."""

from dataclasses import dataclass, field
from typing import Final

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.workload.fsdp2.hooks import reduce_communicator

TENSOR: Final = "tp"
SHARDS: Final = "fsdp"
REPLICAS: Final = "dp"
CONTEXT: Final = "cp"
EXPERTS: Final = "ep"
EXPERT_REPLICAS: Final = "edp"
PIPELINE: Final = "pp"
TIED: Final = "embd"
DATA: Final = (SHARDS, REPLICAS, EXPERT_REPLICAS, *map(reduce_communicator, (SHARDS, EXPERT_REPLICAS)))
"""Communicators of data parallelism: parameters and gradients travel on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups:
    """Degrees: `shard` consecutive data-parallel ranks share parameters, `replicas` of such groups hold the same.

    Ranks of one context group are data-parallel ranks here: they hold the same parameters. `expert_tensor` is in how
    many parts tensor parallelism cuts experts; where it does not, its ranks are among those that share them out.
    `tied_stage` is the stage that holds the first one's table, too (None: the last).
    """

    tensor: int
    shard: int
    replicas: int
    expert: int
    pipeline: int = 1
    context: int = 1
    expert_tensor: int | None = None
    tied_stage: int | None = None
    _sizes: dict[str, tuple[int, int]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _calls: dict[tuple[object, ...], Collective] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        data = self.shard * self.replicas
        cut = self.tensor if self.expert_tensor is None else self.expert_tensor
        sharers = self.tensor // cut * data
        tied_stage = self.pipeline - 1 if self.tied_stage is None else self.tied_stage
        sizes = {  # with strides
            TENSOR: (self.tensor, 1),
            SHARDS: (self.shard, self.tensor),
            REPLICAS: (self.replicas, self.tensor * self.shard),
            CONTEXT: (self.context, self.tensor),
            EXPERTS: (self.expert, cut),
            EXPERT_REPLICAS: (sharers // self.expert, cut * self.expert),
            PIPELINE: (self.pipeline, self.tensor * data),
            TIED: (2, self.tensor * data * max(1, tied_stage)),
        }
        for group in (SHARDS, EXPERT_REPLICAS):
            sizes[reduce_communicator(group)] = sizes[group]
        self._sizes.update(sizes)

    def size(self, group: str) -> int:
        """Ranks of a group."""
        return self._sizes[group][0]

    def ranks(self, group: str) -> tuple[int, ...]:
        """The global ranks of the group that rank 0 is in."""
        size, stride = self._sizes[group]
        return tuple(range(0, size * stride, stride))

    def collective(self, kind: CollectiveKind, num_bytes: int, group: str, copies: int = 0) -> Collective:
        """A collective of `num_bytes` (as `Collective` counts them) over a group; a transfer is between neighbours."""
        key = kind, num_bytes, group, copies
        if key not in self._calls:
            self._calls[key] = Collective(kind, max(1, num_bytes), self.size(group), copies=copies)
        return self._calls[key]
