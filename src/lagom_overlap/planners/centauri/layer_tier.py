"""Layer tier: data gradients first or weight gradients first in a backward layer (Centauri, Eq. 1).

    T1 = W_AG + max(G_act, act_AG) + max(G_w, act_RS) + max(G_w_RS, others)
    T2 = act_AG + max(G_w, W_AG) + max(G_act, G_w_RS) + act_RS + others

(the paper's text speaks of four terms in T2, it has five). T1 suits tensor parallelism, T2 sharded parameters. Without
parameter collectives T1 <= T2; without activation collectives T2 <= T1 if also G_w_RS <= G_act.
"""

from dataclasses import dataclass
from enum import StrEnum


class FirstGradient(StrEnum):
    """Which gradients of a layer are computed first."""

    DATA = "data"
    WEIGHT = "weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """Seconds of a backward layer's parts; W: parameters, act: activations, G: gradients."""

    weight_gather_s: float = 0.0
    activation_gather_s: float = 0.0
    data_gradient_s: float = 0.0
    weight_gradient_s: float = 0.0
    activation_scatter_s: float = 0.0
    weight_scatter_s: float = 0.0
    others_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}, must be finite and not negative")


def t1_s(c: LayerCosts) -> float:
    """Data gradients first."""
    return (
        c.weight_gather_s
        + max(c.data_gradient_s, c.activation_gather_s)
        + max(c.weight_gradient_s, c.activation_scatter_s)
        + max(c.weight_scatter_s, c.others_s)
    )


def t2_s(c: LayerCosts) -> float:
    """Weight gradients first."""
    return (
        c.activation_gather_s
        + max(c.weight_gradient_s, c.weight_gather_s)
        + max(c.data_gradient_s, c.weight_scatter_s)
        + c.activation_scatter_s
        + c.others_s
    )


def first_gradient(costs: LayerCosts) -> FirstGradient:
    """The smaller of the two; data gradients if they are equal."""
    return FirstGradient.DATA if t1_s(costs) <= t2_s(costs) else FirstGradient.WEIGHT
