"""Over how many ranks a named model is parallelised, and in which ways."""

from dataclasses import dataclass

from lagom_overlap.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Degrees of parallelism; `replicate x fsdp x tensor x pipeline` ranks in all.

    `replicate` alone is data parallelism with whole parameters (FSDP2-based `replicate`), with `fsdp` it is hybrid
    sharding (HSDP). `expert` ranks out of `replicate x fsdp` share a layer's experts. `axial` is dynamic axial
    parallelism (Evoformer only). `sequence` cuts what tensor parallelism leaves whole along the sequence.
    """

    replicate: int = 1
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    axial: int = 1
    sequence: bool = True

    def __post_init__(self) -> None:
        for name in ("replicate", "fsdp", "tensor", "expert", "pipeline", "axial"):
            value = getattr(self, name)
            if value < 1:
                raise JobError(f"parallel: {name} is {value}, must be at least 1")
        if (self.replicate * self.fsdp) % self.expert:
            raise JobError(
                f"parallel: expert is {self.expert}, must divide replicate x fsdp = {self.replicate * self.fsdp}"
            )
        if self.expert > 1 and self.tensor > 1:
            raise JobError("parallel: expert and tensor together are not captured; give one of the two")
        if self.pipeline > 1 and (self.replicate > 1 or self.fsdp > 1):
            raise JobError("parallel: a pipeline is captured with tensor only; give no fsdp and no replicate with it")
        if self.axial > 1 and self.num_ranks != self.axial:
            raise JobError("parallel: axial goes with no other degree")

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        return self.replicate * self.fsdp * self.tensor * self.pipeline * self.axial
