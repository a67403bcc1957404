"""Fusion of communications that can change places (Concerto, Algorithm 1; spec, planners 1.9, repaired).

A walk along the order of issue collects communications of one kind (primitive, group). As printed it would merge all
parameter gathers of a step into one, so what may be merged is bounded here: no path between members; the computations
issued between the first and the last of them take no more than `auxiliary_s` in all (views, casts: they can be moved
forward); bytes up to a cap; and the predicted step must not be longer. Exchanges are left alone: their parts may be
unequal, if only on another rank, and then they cannot run as one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.deadline import OPERATOR_STEPS, Deadline
from lagom_overlap.planners.exact import adds_numbers
from lagom_overlap.planners.predict import predict
from lagom_overlap.planners.step_index import StepIndex
from lagom_overlap.workload import CommOp, Iteration
from lagom_overlap.workload.rewrite.apply import rewritten, same_kind
from lagom_overlap.workload.rewrite.steps import Fuse


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionLimits:
    """How far fusion goes."""

    auxiliary_s: float = 20e-6
    max_bytes: int = 1 << 30


def fused(
    problem: PlanProblem, plain: Iteration, iteration: Iteration, limits: FusionLimits, deadline: Deadline
) -> tuple[list[Fuse], Iteration]:
    """The fusions that neither make the step longer nor break the memory limit, and the iteration after them.

    The iteration is in order of issue; `plain` is what the rewrites so far make of the step, on its own streams, where
    what is fused must share one, too.
    """
    makespan = predict(problem, iteration).schedule.makespan
    done: list[Fuse] = []
    refused: set[tuple[str, ...]] = set()
    start = 0
    while deadline.left_s > 0:
        own = {comm.name: comm for comm in plain.comms}
        group, start = _next_group(problem, iteration, own, limits, start=start, refused=refused)
        if group is None:
            break
        step = Fuse(group)
        deadline.spend(2 * OPERATOR_STEPS * len(iteration.ops))
        fused_step = rewritten(iteration, (step,))
        predicted = predict(problem, fused_step)
        fits = problem.memory_limit_bytes is None or predicted.peak_bytes <= problem.memory_limit_bytes
        if fits and predicted.schedule.makespan <= makespan:
            iteration, makespan, plain = fused_step, predicted.schedule.makespan, rewritten(plain, (step,))
            done.append(step)
        else:
            refused.add(group)
    return done, iteration


def _next_group(
    problem: PlanProblem,
    iteration: Iteration,
    own: Mapping[str, CommOp],
    limits: FusionLimits,
    *,
    start: int,
    refused: set[tuple[str, ...]],
) -> tuple[tuple[str, ...] | None, int]:
    """The next communications from place `start` on that may be merged, and where to go on."""
    index = StepIndex(iteration)
    ops = iteration.ops
    for place in range(start, len(ops)):
        first = ops[place]
        if not isinstance(first, CommOp) or (problem.exact and adds_numbers(first)):
            continue
        if first.collective.kind is CollectiveKind.ALL_TO_ALL:
            continue
        group, between, num_bytes = [first], 0.0, first.collective.num_bytes
        for op in ops[place + 1 :]:
            if not isinstance(op, CommOp):
                between += problem.times.seconds(op)
                if between > limits.auxiliary_s:
                    break
                continue
            is_alike = same_kind(first, op) and same_kind(own[first.name], own[op.name])
            if not is_alike or num_bytes + op.collective.num_bytes > limits.max_bytes:
                continue
            if op.name not in index.reached([member.name for member in group], index.place[op.name]):
                group.append(op)
                num_bytes += op.collective.num_bytes
        names = tuple(member.name for member in group)
        if len(names) > 1 and names not in refused:
            return names, place
    return None, len(ops)
