"""A program with what is easily broken: dropout, a checkpointed block, tied weights, experts with uneven splits.

All numbers are whole and below 2**53: sums in another order and products in pieces have the same bits.
"""

import torch
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

FUNCTIONAL = torch.ops._c10d_functional
WIDTH = 16


def _group():
    return dist.group.WORLD.size(), dist.group.WORLD.group_name


def gather(shard):
    return FUNCTIONAL.wait_tensor(FUNCTIONAL.all_gather_into_tensor(shard, *_group()))


def scatter(gradient):
    return FUNCTIONAL.wait_tensor(FUNCTIONAL.reduce_scatter_tensor(gradient, "sum", *_group()))


def step():
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sent = [[(a + 2 * b) % 3 + 1 for b in range(num_ranks)] for a in range(num_ranks)]
    mine, theirs = sent[rank], [row[rank] for row in sent]
    generator = torch.Generator().manual_seed(rank)

    def whole_numbers(*shape):
        return torch.randint(-2, 3, shape, generator=generator).double()

    x, *shards = whole_numbers(sum(mine), WIDTH), *(whole_numbers(WIDTH // num_ranks, WIDTH) for _ in range(3))

    def exchanged(rows, to, come):
        return FUNCTIONAL.wait_tensor(FUNCTIONAL.all_to_all_single(rows, come, to, _group()[1]))

    def train(x, *shards):
        tied, inner, expert = (gather(shard).requires_grad_() for shard in shards)
        hidden = torch.dropout(torch.relu(x @ tied), 0.5, True)
        hidden = hidden + checkpoint(lambda rows: torch.relu(rows @ inner), hidden, use_reentrant=False)
        tokens = exchanged(hidden.detach(), mine, theirs)
        experts_loss = (tokens @ expert).square().sum()
        back = exchanged((tokens @ expert).detach(), theirs, mine)
        loss = ((hidden + back) @ tied.t()).square().sum() + experts_loss
        gradients = [scatter(gradient) for gradient in torch.autograd.grad(loss, (tied, inner, expert))]
        updated = [shard - gradient for shard, gradient in zip(shards, gradients, strict=True)]
        return (*updated, back, torch.rand_like(x))

    return train, [x, *shards]
