"""`Reorder` applied: all operators in another issue order, some on other streams, some with one more wait."""

from collections import Counter
from dataclasses import replace

from lagom_overlap.errors import JobError
from lagom_overlap.workload.iteration import Iteration
from lagom_overlap.workload.ops import Op
from lagom_overlap.workload.rewrite.steps import Reorder


def reordered(iteration: Iteration, step: Reorder) -> Iteration:
    """The iteration in that order.

    Raises:
        JobError: if the order does not name every operator once, or issues one before what it waits for.
    """
    ops = {op.name: op for op in iteration.ops}
    _check_names(iteration, step)
    place = {name: number for number, name in enumerate(step.order)}
    waits: dict[str, list[str]] = {}
    for name, earlier in step.waits:
        waits.setdefault(name, []).append(earlier)
    for op in iteration.ops:
        early = [dep for dep in (*op.deps, *waits.get(op.name, ())) if place[dep] > place[op.name]]
        if early:
            raise JobError(
                f"the plan's order issues {op.name!r} before {early[0]!r}, which it waits for in {iteration.name!r}"
            )
    streams = dict(step.streams)

    def moved(op: Op) -> Op:
        if op.name not in streams and op.name not in waits:
            return op
        deps = tuple(dict.fromkeys((*op.deps, *waits.get(op.name, ()))))
        return replace(op, stream=streams.get(op.name, op.stream), deps=deps)

    return replace(iteration, ops=tuple(moved(ops[name]) for name in step.order))


def _check_names(iteration: Iteration, step: Reorder) -> None:
    names = {op.name for op in iteration.ops}
    unknown = [
        name
        for name in (*step.order, *(name for name, _ in step.streams), *(name for pair in step.waits for name in pair))
        if name not in names
    ]
    if unknown:
        raise JobError(f"a plan for another graph: iteration {iteration.name!r} has no operator {unknown[0]!r}")
    if len(set(step.order)) != len(step.order):
        twice = [name for name, times in Counter(step.order).items() if times > 1]
        raise JobError(f"the plan's order names {twice[0]!r} twice")
    missing = names.difference(step.order)
    if missing:
        raise JobError(
            f"a plan for another graph: its order leaves out {min(missing)!r} of iteration {iteration.name!r} "
            f"({len(missing)} operators in all)"
        )
