"""Along which axes an operator can be cut into pieces, and how the pieces' results make the whole.

Concerto's SPMD specification (ASPLOS 2025; spec, planners section 1.6), which also carries Centauri's dimension types:
an axis whose pieces are concatenated is Centauri's output dimension (OD), one whose pieces are summed its contraction
dimension (CD), a dimension without an axis its non-divisible one (ND).

A matrix product [m, k] x [k, n]: inputs ((0, 1), (1, 2)), combine (gather 0, reduce, gather 1).
"""

from dataclasses import dataclass
from functools import lru_cache

from lagom_overlap.errors import JobError


@dataclass(frozen=True, slots=True)
class Gather:
    """The pieces' outputs are concatenated along dimension `dim` of the output."""

    dim: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """The pieces' outputs are summed."""


Combine = Gather | Reduce


@dataclass(frozen=True, slots=True)
class TensorUse:
    """One tensor that an operator reads.

    `source` is the name of the operator that made it, "" for what the step was given (parameters, batch). `axes` has
    one entry per dimension of the tensor: the shard axis, or None where the dimension must stay whole.
    """

    source: str
    axes: tuple[int | None, ...]


@lru_cache(maxsize=1024)
def _axis_beyond(axes: tuple[int | None, ...], num_axes: int) -> int | None:
    """The first axis that there is not; kept: a step has few kinds of operator."""
    return next((axis for axis in axes if axis is not None and not 0 <= axis < num_axes), None)


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """The shard axes of an operator: `combine[axis]` says how the pieces along that axis make the output.

    `sizes[axis]` is the length of that axis (elements): it bounds the number of pieces.
    """

    inputs: tuple[TensorUse, ...]
    combine: tuple[Combine, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.combine):
            raise JobError(f"ShardSpec: {len(self.sizes)} sizes for {len(self.combine)} axes")
        num_axes = len(self.combine)
        for use in self.inputs:
            wrong = _axis_beyond(use.axes, num_axes)
            if wrong is not None:
                raise JobError(f"ShardSpec: input of {use.source!r} names axis {wrong}, there are {num_axes}")
