"""Keeping parameters after forward: worked by hand on a step of three blocks whose gathers are all that takes time."""

from dataclasses import replace

import pytest

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.engines.fx.fsdp2_advice import Fsdp2Advice
from lagom_overlap.export.fsdp2 import kept_parameters
from lagom_overlap.hardware import load_preset
from lagom_overlap.planners.base import Plan, PlanProblem
from lagom_overlap.workload import Buffer, CommOp, CompOp, Gemm, Iteration, MemoryBound, Origin, Phase
from lagom_overlap.workload.rewrite.steps import Fuse

BLOCKS, GATHER_S, COMPUTE_S, COPY_S = 3, 10e-3, 1e-3, 0.5e-3

WITH_COPIES_S = GATHER_S + 2 * COPY_S + COMPUTE_S


class Times:
    def seconds(self, op):
        if isinstance(op, CommOp):
            return GATHER_S
        return COMPUTE_S if isinstance(op.work, Gemm) else COPY_S


def block(phase, layer, before, *, copies):
    """A gather and a product that reads it, as a framework writes them: with a copy in and a copy out if asked."""
    name, origin = f"{phase}{layer}", Origin(phase=phase, layer=layer)
    collective = Collective(CollectiveKind.ALL_GATHER, 1000, 4)
    ops = [CommOp(name=f"{name}.gather", collective=collective, communicator="fsdp", origin=origin)]
    read = f"{name}.gather"
    if copies:
        ops.insert(0, CompOp(name=f"{name}.in", work=MemoryBound(10), origin=origin))
        ops[1] = replace(ops[1], deps=(f"{name}.in",))
        ops.append(CompOp(name=f"{name}.out", work=MemoryBound(10), deps=(read,), origin=origin))
        read = f"{name}.out"
    ops.append(CompOp(name=name, work=Gemm(8, 8, 8), deps=(read, *before), origin=origin))
    users = (f"{name}.out", name) if copies else (name,)
    return ops, Buffer(name=f"{name}.parameters", num_bytes=1000, maker=f"{name}.gather", users=users)


def problem_of(*, copies=False, limit=None):
    ops, buffers, before = [], [], ()
    for phase, layers in ((Phase.FORWARD, range(BLOCKS)), (Phase.BACKWARD, reversed(range(BLOCKS)))):
        for layer in layers:
            found, buffer = block(phase, layer, before, copies=copies)
            ops, buffers, before = [*ops, *found], [*buffers, buffer], (found[-1].name,)
    return PlanProblem(
        iteration=Iteration("blocks", tuple(ops), True, tuple(buffers)),
        cluster=load_preset("a40_nvlink"),
        times=Times(),
        groups={"fsdp": (0, 1, 2, 3)},
        memory_limit_bytes=limit,
    )


def kept_of(problem, rewrites=()):
    plan = Plan(planner="none", rewrites=rewrites, iteration=problem.iteration, lower_bound_s=0.0)
    return kept_parameters(problem, plan)


@pytest.mark.parametrize(
    ("copies", "resharded_s", "kept_s", "resharded_bytes"),
    [
        # Six gathers in a row, then the last product; kept: three gathers, then four products.
        (False, 6 * GATHER_S + COMPUTE_S, 3 * GATHER_S + 4 * COMPUTE_S, 2000),
        # A copy in comes behind the product before it, so nothing overlaps.
        (True, 6 * WITH_COPIES_S, 3 * WITH_COPIES_S + 3 * COMPUTE_S, 1000),
    ],
)
def test_kept_parameters_are_gathered_once_and_held_together(copies, resharded_s, kept_s, resharded_bytes):
    kept = kept_of(problem_of(copies=copies))
    assert (kept.resharded_s, kept.kept_s) == pytest.approx((resharded_s, kept_s), rel=1e-4)
    assert (kept.resharded_bytes, kept.kept_bytes) == (resharded_bytes, 3000)
    assert kept.is_advised
    assert kept.applied_to(Fsdp2Advice(backward_prefetch=2, forward_prefetch=1)) == Fsdp2Advice(
        forward_prefetch=1, reshard_after_forward=False
    )


def test_what_does_not_fit_is_not_advised():
    kept = kept_of(problem_of(limit=2999))
    assert not kept.is_advised
    assert "does not fit" in kept.sentence()
    assert kept.applied_to(Fsdp2Advice()) == Fsdp2Advice()


def test_a_gain_within_the_scatter_of_steps_is_not_advised():
    kept = replace(kept_of(problem_of()), kept_s=0.99, resharded_s=1.0)
    assert not kept.is_advised
    assert "gains no more than 2%" in kept.sentence()


def test_a_step_that_gathers_once_has_nothing_to_keep():
    problem = problem_of()
    forward = problem.iteration.ops[: 2 * BLOCKS]
    once = replace(problem, iteration=Iteration("once", forward, True, problem.iteration.buffers[:BLOCKS]))
    assert kept_of(once) is None


def test_fused_gathers_are_left_alone():
    assert kept_of(problem_of(), (Fuse(("forward0.gather", "forward1.gather")),)) is None
