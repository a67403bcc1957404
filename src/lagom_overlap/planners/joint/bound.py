"""A lower bound on the contended makespan, over every order and every choice of settings.

Two bounds. With contention, over every cut too, a linear program: of every class, a number of calls run with setting s
during kernel k (z, or alone), which takes x of the collective and stretches the kernel from T to T'. Per link,
collectives of one link running one after the other:

    makespan >= sum of z x                               the link is busy so long
    makespan >= Y + sum of z x (1 - T / T')              a second during a kernel costs it its share of progress,
                                                         a second alone is lost whole (T / T' = 0)
    sum of z x / T' <= number of kernels k               there is no more of it to overlap with

Every schedule is a point of it, so its minimum bounds them all. Spec, planners section 5.8, whose bound has one `tax`
per setting, the least over all kernels; this one knows how much of each kernel there is.

Of the step without chains cut: critical path and Jackson's preemptive bound (`planners.schedule`), every collective at
its fastest setting, every computation alone; and the program again, knowing that nothing computes before the first
computation can start, nor after the last. A chain that is cut with its collective gets below it: its pieces do not wait
for the whole.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np

from lagom_overlap.hardware import LinkKind
from lagom_overlap.planners.base import OpTimes, PlanProblem
from lagom_overlap.planners.joint.contended import Contended, class_of
from lagom_overlap.planners.joint.settings import Choices
from lagom_overlap.planners.schedule import lower_bound, task_graph
from lagom_overlap.planners.schedule.bounds import heads, tails
from lagom_overlap.workload import CommOp, CompOp, Op

_MOSTLY: Final = 0.95
"""Of a second more on a link, or of the computation, this much reaches the bound: it alone is what limits."""


class Limit(StrEnum):
    """What a bound says is short: the link, the computation, or both alike."""

    LINK = "link"
    COMPUTATION = "computation"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class JointBound:
    """Seconds that nothing beats, what they are spent on, and seconds that only cut chains beat."""

    seconds: float
    limit: Limit
    unchained_s: float = 0.0


def joint_bound(problem: PlanProblem, choices: Choices) -> JointBound:
    """Both bounds.

    Raises:
        JobError: if the problem's times are not the cost model's.
    """
    contended = Contended.of(problem)
    graph = task_graph(replace(problem, times=_Fastest(problem.times, contended, choices)))
    ends = zip(problem.iteration.ops, heads(graph), tails(graph), strict=True)
    computing = [(head, tail) for op, head, tail in ends if isinstance(op, CompOp)]
    idle_s = graph.seconds(sum(map(min, zip(*computing, strict=True))))
    waiting_s = max(graph.seconds(lower_bound(graph)), contention_bound(contended, choices, idle_s).seconds)
    return replace(contention_bound(contended, choices), unchained_s=waiting_s)


class _Fastest:
    """Times of the untouched step with every collective at its fastest setting."""

    def __init__(self, times: OpTimes, contended: Contended, choices: Choices) -> None:
        self._times = times
        model = contended.model
        self._least_s = {
            kind: min(model.collective(kind.collective, config).seconds() for config in configs)
            for kind, configs in choices.items()
        }

    def seconds(self, op: Op) -> float:
        """Seconds of one operator alone."""
        return self._least_s[class_of(op)] if isinstance(op, CommOp) else self._times.seconds(op)


def contention_bound(contended: Contended, choices: Choices, idle_s: float = 0.0) -> JointBound:
    """The bound with contention; of dependences it knows that nothing computes for `idle_s` (s) at both ends in all."""
    model = contended.model
    kernels = Counter(model.kernel(op.work) for op in contended.whole.computations)
    alone_s = {kernel: model.kernel_seconds(kernel) for kernel in kernels}
    counts = Counter(class_of(comm) for comm in contended.whole.comms)
    pairs: dict[LinkKind, list[_Pair]] = defaultdict(list)
    for number, (kind, configs) in enumerate(choices.items()):
        for config in configs:
            cost = model.collective(kind.collective, config)
            pairs[cost.link].append(_Pair(number, None, model.collective_seconds([cost], 0.0)[0], 1.0, 0.0))
            for place, kernel in enumerate(kernels):
                together = model.running_times([kernel], [cost])
                comm_s, kernel_s = together.comm_s[0], together.kernel_s[0]
                lost = max(0.0, 1 - alone_s[kernel] / kernel_s)
                pairs[cost.link].append(_Pair(number, place, comm_s, lost, comm_s / kernel_s))
    total_s = sum(count * alone_s[kernel] for kernel, count in kernels.items())
    classes = [counts[kind] for kind in choices]
    bounds = [_solved(total_s, idle_s, of_link, classes, list(kernels.values())) for of_link in pairs.values()]
    return max(bounds, key=lambda bound: bound.seconds, default=JointBound(total_s + idle_s, Limit.COMPUTATION))


@dataclass(frozen=True, slots=True)
class _Pair:
    """A class under one setting during one kernel (None: alone).

    Seconds of the collective, share of its rate that the kernel loses, and how many kernels pass during one call.
    """

    kind: int
    kernel: int | None
    comm_s: float
    lost: float
    passed: float


def _solved(
    alone_s: float, idle_s: float, pairs: Sequence[_Pair], calls: Sequence[int], kernels: Sequence[int]
) -> JointBound:
    """The least makespan of one link's collectives: the linear program over numbers of calls, and the makespan last.

    `calls` are the calls of every class, `kernels` how often each kernel runs; a class uses one link.
    """
    size, here = len(pairs), sorted({pair.kind for pair in pairs})
    rows = np.zeros((3 + len(kernels), size + 1))
    rows[0, :size] = [pair.comm_s for pair in pairs]
    rows[1, :size] = [pair.comm_s * pair.lost for pair in pairs]
    rows[2, :size] = [0.0 if pair.kernel is None else pair.comm_s * pair.lost for pair in pairs]
    rows[:3, size] = -1.0
    whole = np.zeros((len(here), size + 1))
    for at, pair in enumerate(pairs):
        whole[here.index(pair.kind), at] = 1.0
        if pair.kernel is not None:
            rows[3 + pair.kernel, at] = pair.passed
    goal = np.zeros(size + 1)
    goal[size] = 1.0
    limits = [0.0, -alone_s, -alone_s - idle_s, *kernels]
    from scipy.optimize import linprog  # noqa: PLC0415 - takes longer to load than most verbs to start

    solved = linprog(goal, A_ub=rows, b_ub=limits, A_eq=whole, b_eq=[calls[kind] for kind in here])
    assert solved.fun is not None, f"a bounded, feasible program was not solved: {solved.message}"
    link, *computation = (-price for price in solved.ineqlin.marginals[:3])  # they add up to 1
    if link > _MOSTLY:
        return JointBound(float(solved.fun), Limit.LINK)
    return JointBound(float(solved.fun), Limit.COMPUTATION if sum(computation) > _MOSTLY else Limit.BOTH)
