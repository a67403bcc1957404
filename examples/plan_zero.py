"""A training step with sharded parameters (ZeRO-2), written with functional collectives, for `lagom plan`.

Written plainly: every layer's parameters are gathered right before they are used, every gradient is scattered as soon
as it is there, and each of them is awaited on the spot. `lagom plan` moves them.
"""

import torch
from torch import distributed as dist

FUNCTIONAL = torch.ops._c10d_functional
LAYERS, HIDDEN, FFN, TOKENS = 6, 384, 1536, 256


def step():
    """What lagom calls on every rank: the step and its inputs."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    shards = []
    for _ in range(LAYERS):
        shards.append(torch.randn(HIDDEN // num_ranks, FFN, generator=generator) / HIDDEN**0.5)
        shards.append(torch.randn(FFN // num_ranks, HIDDEN, generator=generator) / FFN**0.5)
    batch = torch.randn(TOKENS, HIDDEN, generator=generator)
    return train_step, [batch, *shards]


def gathered(shard):
    group = dist.group.WORLD
    return FUNCTIONAL.wait_tensor(FUNCTIONAL.all_gather_into_tensor(shard, group.size(), group.group_name))


def scattered(gradient):
    group = dist.group.WORLD
    return FUNCTIONAL.wait_tensor(FUNCTIONAL.reduce_scatter_tensor(gradient, "sum", group.size(), group.group_name))


def train_step(batch, *shards):
    """Loss, and the new shards after a step of gradient descent."""
    x, weights, activations = batch, [], []
    for up, down in zip(shards[::2], shards[1::2], strict=True):
        w1 = gathered(up)
        h = torch.relu(x @ w1)
        w2 = gathered(down)
        weights += [w1, w2]
        activations.append((x, h))
        x = x + h @ w2
    loss = (x * x).mean()
    gradient = 2 * x / x.numel()
    new = []
    for (x, h), w1, w2, up, down in zip(
        reversed(activations), reversed(weights[::2]), reversed(weights[1::2]),
        reversed(shards[::2]), reversed(shards[1::2]), strict=True,
    ):  # fmt: skip
        grad_h = (gradient @ w2.t()) * (h > 0)
        new.append(down - 0.01 * scattered(h.t() @ gradient))
        gradient = gradient + grad_h @ w1.t()
        new.append(up - 0.01 * scattered(x.t() @ grad_h))
    return (loss, *reversed(new))
