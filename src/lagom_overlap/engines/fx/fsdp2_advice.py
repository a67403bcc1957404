"""What FSDP2 can be told of a plan: how far to prefetch, what to gather together, what to keep. Needs no torch."""

from dataclasses import dataclass

from lagom_overlap.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp2Advice:
    """Settings of `torch.distributed.fsdp.fully_shard`.

    `forward_prefetch` and `backward_prefetch` are how many units' parameters are gathered ahead of the one in use (0:
    FSDP2's own way, which prefetches one in backward), `modules_per_unit` how many neighbouring modules share one
    gather and one scatter.
    """

    forward_prefetch: int = 0
    backward_prefetch: int = 0
    modules_per_unit: int = 1
    reshard_after_forward: bool = True
    separate_reduce_scatter_group: bool = False

    def __post_init__(self) -> None:
        for name in ("forward_prefetch", "backward_prefetch"):
            if getattr(self, name) < 0:
                raise JobError(f"fsdp2: {name} is {getattr(self, name)}, must be at least 0")
        if self.modules_per_unit < 1:
            raise JobError(f"fsdp2: modules_per_unit is {self.modules_per_unit}, must be at least 1")

    def sentences(self) -> tuple[str, ...]:
        """The settings as the calls that make them."""
        unit = "each block" if self.modules_per_unit == 1 else f"lists of {self.modules_per_unit} neighbouring blocks"
        said = [f"fully_shard {unit}, reshard_after_forward={self.reshard_after_forward}"]
        for phase in ("forward", "backward"):
            depth = getattr(self, f"{phase}_prefetch")
            if depth:
                said.append(f"set_modules_to_{phase}_prefetch: the {depth} unit{'s' if depth > 1 else ''} that follow")
        if self.separate_reduce_scatter_group:
            said.append("set_separate_reduce_scatter_group(True)")
        return tuple(said)
