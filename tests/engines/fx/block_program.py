"""A program for planners: two tensor-parallel blocks with sequence shards, forward, backward, gradients all-reduced."""

import torch
from torch import distributed as dist

FUNCTIONAL = torch.ops._c10d_functional
ROWS, HIDDEN, FFN = 16, 32, 64


def step():
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(ROWS, HIDDEN, generator=generator)
    weights = [torch.randn(shape, generator=generator) / 8 for shape in ((HIDDEN, FFN), (FFN, HIDDEN)) * 2]
    return train, [x, *weights]


def _group():
    return dist.group.WORLD.size(), dist.group.WORLD.group_name


def gather(x):
    return FUNCTIONAL.wait_tensor(FUNCTIONAL.all_gather_into_tensor(x, *_group()))


def scatter(x):
    return FUNCTIONAL.wait_tensor(FUNCTIONAL.reduce_scatter_tensor(x, "sum", *_group()))


def reduced(x):
    return FUNCTIONAL.wait_tensor(FUNCTIONAL.all_reduce(x, "sum", _group()[1]))


def train(x, *weights):
    saved = []
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        whole = gather(x)
        hidden = torch.relu(whole @ up)
        saved.append((whole, hidden))
        x = x + scatter(hidden @ down)
    gradient, gradients = x, []
    for (whole, hidden), up, down in zip(reversed(saved), weights[-2::-2], weights[::-2], strict=True):
        from_all = gather(gradient)
        gradients.append(reduced(hidden.t() @ from_all))
        into_hidden = (from_all @ down.t()) * (hidden > 0)
        gradients.append(reduced(whole.t() @ into_hidden))
        gradient = gradient + scatter(into_hidden @ up.t())
    return (x, gradient, *gradients)
