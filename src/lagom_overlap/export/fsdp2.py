"""Whether FSDP2 should keep the blocks' parameters after forward (`reshard_after_forward=False`), by simulation.

Kept, they are not gathered again in backward: less to communicate, more memory from a block's forward to its backward.
The plan is issued again without those gathers, everything else in its place: what FSDP2 would do, no new search. The
advice is given where that fits the memory and gains more than `MIN_GAIN`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from lagom_overlap.engines.fx.fsdp2_advice import Fsdp2Advice
from lagom_overlap.planners.base import Plan, PlanProblem
from lagom_overlap.planners.memory import gathers_by_group
from lagom_overlap.planners.simulated import simulated
from lagom_overlap.planners.times import origin_name
from lagom_overlap.units import format_bytes
from lagom_overlap.workload import Buffer, CompOp, Iteration, MemoryBound, Op, Phase
from lagom_overlap.workload.rewrite.steps import Fuse

MIN_GAIN: Final = 0.02
"""Of the iteration: below, it is no more than steps of one program scatter by."""
USABLE_MEMORY: Final = 0.9
"""Of the GPU's, where no limit is given: the rest is the framework's and lost to fragments (an assumption)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptParameters:
    """A plan's predicted iteration and peak memory with the blocks' parameters gathered again, and kept."""

    resharded_s: float
    kept_s: float
    resharded_bytes: int
    kept_bytes: int
    limit_bytes: int

    @property
    def gain(self) -> float:
        """What is saved, as a part of the iteration."""
        return 1 - self.kept_s / self.resharded_s

    @property
    def is_advised(self) -> bool:
        """Whether it fits and is worth it."""
        return self.kept_bytes <= self.limit_bytes and self.gain > MIN_GAIN

    def applied_to(self, advice: Fsdp2Advice) -> Fsdp2Advice:
        """The advice with this one in it: without gathers in backward there is nothing to prefetch there."""
        if not self.is_advised:
            return advice
        return replace(advice, reshard_after_forward=False, backward_prefetch=0)

    def sentence(self) -> str:
        """The predicted effect, and why it is advised or not."""
        effect = (
            f"reshard_after_forward=False: predicted iteration {1e3 * self.resharded_s:.3g} ms -> "
            f"{1e3 * self.kept_s:.3g} ms ({self.gain:+.1%}), peak memory {format_bytes(self.resharded_bytes)} -> "
            f"{format_bytes(self.kept_bytes)} of {format_bytes(self.limit_bytes)}"
        )
        if self.is_advised:
            return f"{effect}: advised"
        why = "does not fit" if self.kept_bytes > self.limit_bytes else f"gains no more than {MIN_GAIN:.0%}"
        return f"{effect}: not advised, {why}"


def kept_parameters(problem: PlanProblem, plan: Plan) -> KeptParameters | None:
    """The plan with and without the second gathers of blocks; None where there are none, or they are fused."""
    pairs = _pairs(problem.iteration)
    fused = {name for step in plan.rewrites if isinstance(step, Fuse) for name in step.comms}
    if not pairs or fused & {*pairs, *pairs.values()}:
        return None
    before = simulated(problem, plan.iteration)
    after = simulated(problem, _kept(plan.iteration, pairs))
    limit = problem.memory_limit_bytes or int(USABLE_MEMORY * problem.cluster.gpu.memory_bytes)
    return KeptParameters(
        resharded_s=before.makespan_s,
        kept_s=after.makespan_s,
        resharded_bytes=before.peak_bytes,
        kept_bytes=after.peak_bytes,
        limit_bytes=limit,
    )


def _pairs(iteration: Iteration) -> dict[str, str]:
    """Gathers in backward, each with the one of the same block in forward."""
    return {
        later.name: earlier.name
        for group in gathers_by_group(iteration)
        for earlier, later in pairwise(group)
        if later.origin.layer is not None
        and later.origin.microbatch == earlier.origin.microbatch
        and later.origin.phase is Phase.BACKWARD
    }


def _kept(iteration: Iteration, pairs: Mapping[str, str]) -> Iteration:
    """The iteration without the gathers that `pairs` names first, and without the copies around them."""
    bases = {*pairs, *pairs.values()}
    makers = _makers(iteration, bases)
    twin = {name: base for name, base in makers.items() if base in pairs}
    gone = {*twin, *_only_for(iteration, twin)}
    first = {base: tuple(name for name, of in makers.items() if of == base) for base in pairs.values()}
    ops: list[Op] = []
    for op in iteration.ops:
        if op.name in gone:
            continue
        deps: list[str] = []
        for dep in op.deps:
            deps += first[pairs[twin[dep]]] if dep in twin else [dep]
        ops.append(replace(op, deps=tuple(dict.fromkeys(dep for dep in deps if dep not in gone))))
    return replace(iteration, ops=tuple(ops), buffers=_buffers(iteration, gone, twin, pairs, makers))


def _makers(iteration: Iteration, bases: Iterable[str]) -> dict[str, str]:
    """Which gather each operator is, a piece of, or a copy of its result."""
    known = dict.fromkeys(bases)
    found: dict[str, str] = {}
    for op in iteration.ops:
        base = origin_name(op.name, known)
        read = {found.get(dep) for dep in op.deps}
        if base in known:
            found[op.name] = base
        elif isinstance(op, CompOp) and isinstance(op.work, MemoryBound) and len(read) == 1 and (only := read.pop()):
            found[op.name] = only
    return found


def _only_for(iteration: Iteration, gone: Iterable[str]) -> set[str]:
    """Copies that nothing but those operators waits for."""
    left = set(gone)
    readers: dict[str, set[str]] = {}
    for op in iteration.ops:
        for dep in op.deps:
            readers.setdefault(dep, set()).add(op.name)
    for op in reversed(iteration.ops):
        is_copy = isinstance(op, CompOp) and isinstance(op.work, MemoryBound)
        if is_copy and readers.get(op.name) and readers[op.name] <= left:
            left.add(op.name)
    return left - set(gone)


def _buffers(
    iteration: Iteration, gone: set[str], twin: Mapping[str, str], pairs: Mapping[str, str], makers: Mapping[str, str]
) -> tuple[Buffer, ...]:
    """Buffers of the first gathers live until their backward uses; those of the second are not made."""
    later: dict[tuple[str, int], list[str]] = {}
    for buffer in iteration.buffers:
        if buffer.maker in twin:
            key = (pairs[twin[buffer.maker]], buffer.num_bytes)
            later.setdefault(key, []).extend(user for user in buffer.users if user not in gone)
    kept = []
    for buffer in iteration.buffers:
        if buffer.maker in gone:
            continue
        more = later.get((makers.get(buffer.maker, ""), buffer.num_bytes), [])
        users = (user for user in (*buffer.users, *more) if user not in gone)
        kept.append(replace(buffer, users=tuple(dict.fromkeys(users))))
    return tuple(kept)
