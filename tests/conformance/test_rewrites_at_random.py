"""Random rewrites, one after another: each is refused as a rewrite, or leaves a whole iteration."""

from random import Random

import pytest

pytest.importorskip("torch")

import torch
from graph_memory import C10D
from torch import distributed as dist

from lagom_overlap.capturing.fake_world import fake_world
from lagom_overlap.engines.fx.program import capture_step
from lagom_overlap.errors import JobError
from lagom_overlap.workload import CommOp, Iteration
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.steps import (
    ChainLink,
    Fuse,
    PartitionGroups,
    Rewrite,
    Split,
    Substitute,
    Substitution,
)

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]

RANKS, SEQUENCES, MOST_STEPS = 4, 1500, 6


def _done(call, *arguments):
    return C10D.wait_tensor(call(*arguments, dist.group.WORLD.group_name))


def step(a, b, c, x):
    first, second, third = (_done(C10D.all_gather_into_tensor, each, RANKS) for each in (a, b, c))
    inner = torch.relu(x @ first)
    outer = torch.relu(inner @ second)
    rows = _done(C10D.reduce_scatter_tensor, outer, "sum", RANKS)
    columns = _done(C10D.reduce_scatter_tensor, inner.t() @ x, "sum", RANKS)
    reduced = _done(C10D.all_reduce, outer @ third, "sum")
    again = _done(C10D.all_reduce, reduced * 2, "sum")
    return (rows * 2).sum(), (columns * 2).sum(), (reduced + again).sum(), again


def _drawn(random: Random, iteration: Iteration) -> Rewrite:
    comms = [op.name for op in iteration.ops if isinstance(op, CommOp)]
    computations = [op.name for op in iteration.ops if not isinstance(op, CommOp)]

    def chain() -> tuple[ChainLink, ...]:
        return tuple(
            ChainLink(random.choice(computations), random.randrange(2)) for _ in range(random.choice((0, 0, 1, 2)))
        )

    match random.randrange(6):
        case 0:
            return Split(random.choice(comms), random.randrange(2), random.choice((2, 4)), chain(), chain())
        case 1:
            order = random.choice(((0, 1), (1, 0)))
            return PartitionGroups(random.choice(comms), (2, 2), order, 0, chain())
        case 2:
            return Substitute(random.choice(comms), random.choice(list(Substitution)))
        case 3:
            return Split(random.choice(computations), random.randrange(2), 2)
        case _:
            return Fuse(tuple(random.sample(comms, 2)))


def _after(iteration: Iteration, steps: tuple[Rewrite, ...]) -> Iteration | str:
    try:
        return rewritten(iteration, steps)
    except JobError as error:
        return str(error)


def test_what_is_left_after_every_step_is_an_iteration() -> None:
    """A buffer that names an operator which is gone is a fault of the rewrite, not of the plan."""
    with fake_world(RANKS):
        shapes = ((16, 32), (8, 64), (16, 32), (64, 64))
        captured = capture_step(step, tuple(map(torch.zeros, shapes)), name="step").iteration
    num_steps = 0
    for seed in range(SEQUENCES):
        random, steps, iteration = Random(seed), (), captured
        for _ in range(random.randint(1, MOST_STEPS)):
            drawn = _drawn(random, iteration)
            found = _after(captured, (*steps, drawn))
            if isinstance(found, Iteration):
                iteration, steps = found, (*steps, drawn)
            else:
                assert "no operator of it" not in found, (seed, steps, drawn)
        num_steps += len(steps)
    assert num_steps > SEQUENCES // 2, "hardly anything was rewritten"
