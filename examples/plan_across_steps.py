"""Three training steps of two micro-batches with a sharded optimizer (ZeRO-1), for `lagom plan`: Centauri's model tier.

Parameters are whole on every rank; gradients are scattered after the last micro-batch, the shards updated and gathered
again. Written plainly, the gathers are awaited at the end of the step. Planned, they run into the next step's forward,
and the micro-batches' work is put where it hides them.
"""

import torch
from torch import distributed as dist

FUNCTIONAL = torch.ops._c10d_functional
STEPS, MICRO_BATCHES, LAYERS, WIDTH, TOKENS = 3, 2, 4, 512, 256


def step():
    """What lagom calls on every rank: the step and its inputs."""
    weights = torch.Generator().manual_seed(0)
    tokens = torch.Generator().manual_seed(dist.get_rank() + 1)
    layers = [torch.randn(WIDTH, WIDTH, generator=weights) / WIDTH**0.5 for _ in range(LAYERS)]
    batches = [torch.randn(TOKENS, WIDTH, generator=tokens) for _ in range(STEPS * MICRO_BATCHES)]
    return train_steps, [*batches, *layers]


def updated(layer, gradient):
    """The new layer: gradient scattered, this rank's rows updated, all rows gathered."""
    size, group = dist.group.WORLD.size(), dist.group.WORLD.group_name
    part = FUNCTIONAL.wait_tensor(FUNCTIONAL.reduce_scatter_tensor(gradient, "sum", size, group))
    rows = layer.shape[0] // size
    shard = layer[dist.get_rank() * rows : (dist.get_rank() + 1) * rows] - 0.01 * part
    return FUNCTIONAL.wait_tensor(FUNCTIONAL.all_gather_into_tensor(shard, size, group))


def gradients_of(batch, layers):
    """Gradients of the mean square of the last activation, last layer first."""
    inputs = [batch]
    for layer in layers:
        inputs.append(torch.relu(inputs[-1] @ layer))
    gradient, found = 2 * inputs[-1] / inputs[-1].numel(), []
    for layer, before, after in zip(reversed(layers), reversed(inputs[:-1]), reversed(inputs[1:]), strict=True):
        gradient = gradient * (after > 0)
        found.append(before.t() @ gradient)
        gradient = gradient @ layer.t()
    return found


def train_steps(*given):
    """The layers after all steps."""
    batches, layers = given[: STEPS * MICRO_BATCHES], list(given[STEPS * MICRO_BATCHES :])
    for number in range(STEPS):
        micro = batches[number * MICRO_BATCHES : (number + 1) * MICRO_BATCHES]
        sums = gradients_of(micro[0], layers)
        for batch in micro[1:]:
            sums = [total + more for total, more in zip(sums, gradients_of(batch, layers), strict=True)]
        layers = [updated(layer, gradient) for layer, gradient in zip(layers, reversed(sums), strict=True)]
    return tuple(layers)
