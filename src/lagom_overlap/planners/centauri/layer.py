"""Layer tier: data gradients first or weight gradients first in a backward layer (Centauri, Eq. 1).

    T1 = W_AG + max(G_act, act_AG) + max(G_w, act_RS) + max(G_w_RS, others)
    T2 = act_AG + max(G_w, W_AG) + max(G_act, G_w_RS) + act_RS + others

(the paper's text speaks of four terms in T2, it has five). T1 suits tensor parallelism, T2 sharded parameters. Without
parameter collectives T1 <= T2; without activation collectives T2 <= T1 if also G_w_RS <= G_act.

`best_order_s` is not the paper's: every order of the same seven operators on one stream for computations and one or two
for collectives. Both formulas are points of that space, or above one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import permutations


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


_COMPUTATIONS = ("data_gradient", "weight_gradient", "others")
_COLLECTIVES = ("weight_gather", "activation_gather", "activation_scatter", "weight_scatter")
_NEEDS = {
    "data_gradient": ("weight_gather",),
    "weight_gradient": ("activation_gather",),
    "activation_scatter": ("data_gradient",),
    "weight_scatter": ("weight_gradient",),
    "others": ("activation_scatter",),
}
_PARAMETER_COLLECTIVES = ("weight_gather", "weight_scatter")


def best_order_s(costs: LayerCosts, *, two_links: bool = False) -> float:
    """The shortest of all orders on in-order streams; with `two_links` parameters and activations have one each."""
    seconds = {name: getattr(costs, f"{name}_s") for name in (*_COMPUTATIONS, *_COLLECTIVES)}
    orders = [
        _makespan(seconds, computations, collectives, two_links)
        for computations in permutations(_COMPUTATIONS)
        for collectives in permutations(_COLLECTIVES)
    ]
    return min(orders)


def _makespan(
    seconds: dict[str, float], computations: Sequence[str], collectives: Sequence[str], two_links: bool
) -> float:
    """Infinite where the streams wait for each other."""
    queues = [list(computations)]
    if two_links:
        queues += [[name for name in collectives if name in _PARAMETER_COLLECTIVES]]
        queues += [[name for name in collectives if name not in _PARAMETER_COLLECTIVES]]
    else:
        queues += [list(collectives)]
    ends: dict[str, float] = {}
    free = [0.0] * len(queues)
    moved = True
    while moved:
        moved = False
        for number, queue in enumerate(queues):
            while queue and all(need in ends for need in _NEEDS.get(queue[0], ())):
                name = queue.pop(0)
                start = max([free[number], *(ends[need] for need in _NEEDS.get(name, ()))])
                ends[name] = free[number] = start + seconds[name]
                moved = True
    return max(ends.values()) if not any(queues) else float("inf")
