"""Matrices of the model, and the collectives that bring parameters and take gradients away."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from lagom_overlap.workload.ops import Phase


class Unit(StrEnum):
    """What one collective of parameters or gradients holds: a layer's (FSDP2) or a matrix (Centauri, Fig. 12)."""

    LAYER = "layer"
    MATRIX = "matrix"


@dataclass(slots=True)
class Weight:
    """A matrix [inputs, outputs] on one rank, or `num_matrices` of them (experts).

    `gathered` names what gathered it, by phase and micro-batch; `gradients` are its gradients' operators.
    """

    name: str
    layer: int | None
    inputs: int
    outputs: int
    num_matrices: int = 1
    is_expert: bool = False
    gathered: dict[tuple[Phase, int], str] = field(default_factory=dict)
    gradients: list[str] = field(default_factory=list)

    @property
    def num_params(self) -> int:
        """Elements."""
        return self.inputs * self.outputs * self.num_matrices


def parts_of(weights: Sequence[Weight], unit: Unit) -> list[list[Weight]]:
    """The matrices that travel together; experts' apart, whose groups differ."""
    if unit is Unit.MATRIX:
        return [[weight] for weight in weights]
    parts = [[w for w in weights if not w.is_expert], [w for w in weights if w.is_expert]]
    return [part for part in parts if part]
