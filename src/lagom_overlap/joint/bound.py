"""A lower bound on the contended makespan, over every order and every choice of settings.

Each class is split over its settings by shares (a convex mix costs no less than the best pure choice, so the bound
holds). Per link, collectives of one link running one after the other:

    makespan >= sum of x                        the link is busy so long
    makespan >= Y + sum of x tax                each second of a collective costs the computation at least `tax`
                                                seconds: hidden, it slows it; exposed, it leaves it idle

`tax` is the least share of its rate that any kernel of the step loses beside that setting. Spec, planners section 5.8.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from lagom_overlap.collective import CommConfig
from lagom_overlap.hardware import LinkKind
from lagom_overlap.joint.contended import CommClass, Contended, class_of
from lagom_overlap.joint.settings import Choices
from lagom_overlap.workload import Kernel


@dataclass(frozen=True, slots=True)
class _Option:
    """One setting of a class: seconds of all its collectives, and what they cost the computation at least."""

    link: LinkKind
    comm_s: float
    taxed_s: float


def contended_bound_s(contended: Contended, choices: Choices) -> float:
    """Seconds that no order and no choice of settings can beat under the model."""
    model = contended.model
    kernels = Counter(model.kernel(op.work) for op in contended.whole.computations)
    alone_s = sum(count * model.kernel_seconds(kernel) for kernel, count in kernels.items())
    counts = Counter(class_of(comm) for comm in contended.whole.comms)
    options = [
        [_option(contended, kind, config, counts[kind], tuple(kernels)) for config in configs]
        for kind, configs in choices.items()
    ]
    return _solved(alone_s, options)


def _option(
    contended: Contended, kind: CommClass, config: CommConfig, count: int, kernels: Sequence[Kernel]
) -> _Option:
    model = contended.model
    cost = model.collective(kind.collective, config)
    comm_s = count * model.collective_seconds([cost], 0.0)[0]
    tax = min(
        (1 - model.kernel_seconds(kernel) / model.running_times([kernel], [cost]).kernel_s[0] for kernel in kernels),
        default=0.0,
    )
    return _Option(cost.link, comm_s, comm_s * max(0.0, tax))


def _solved(alone_s: float, options: Sequence[Sequence[_Option]]) -> float:
    """The smallest M that covers every link and the taxed computation: a linear program over the shares."""
    flat = [option for of_class in options for option in of_class]
    if not flat:
        return alone_s
    rows, limits = [], []
    for link in sorted({option.link for option in flat}):
        on_link = [option.link == link for option in flat]
        rows.append([*(o.comm_s * here for o, here in zip(flat, on_link, strict=True)), -1.0])
        limits.append(0.0)
        rows.append([*(o.taxed_s * here for o, here in zip(flat, on_link, strict=True)), -1.0])
        limits.append(-alone_s)
    whole, place = np.zeros((len(options), len(flat) + 1)), 0
    for number, of_class in enumerate(options):
        whole[number, place : place + len(of_class)] = 1.0
        place += len(of_class)
    goal = np.zeros(len(flat) + 1)
    goal[-1] = 1.0
    solved = linprog(goal, A_ub=np.array(rows), b_ub=limits, A_eq=whole, b_eq=np.ones(len(options)))
    assert solved.fun is not None, f"a bounded, feasible program was not solved: {solved.message}"
    return float(solved.fun)
