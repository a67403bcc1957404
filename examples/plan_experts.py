"""A step of expert layers for `lagom plan`: two micro-batches whose tokens travel to experts and back, unequally many.

Every rank holds one expert and sends each other rank as many rows as its tokens chose (drawn once, alike on all ranks),
so that all-to-alls have parts of unequal size. Written plainly, both exchanges of a layer are awaited on the spot;
planned, one micro-batch's tokens travel while the other one's are worked on.
"""

import torch
from torch import distributed as dist

FUNCTIONAL = torch.ops._c10d_functional
LAYERS, BATCHES, WIDTH, HIDDEN, ROWS = 4, 2, 384, 768, 192


def step():
    """What lagom calls on every rank: the step and its inputs."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    routes = torch.Generator().manual_seed(0)
    rows = torch.randint(ROWS // 2, 3 * ROWS // 2, (BATCHES, num_ranks, num_ranks), generator=routes).tolist()
    mine = torch.Generator().manual_seed(rank + 1)
    batches = [torch.randn(sum(rows[number][rank]), WIDTH, generator=mine) for number in range(BATCHES)]
    shapes = ((WIDTH, HIDDEN), (HIDDEN, WIDTH)) * LAYERS
    experts = [torch.randn(shape, generator=mine) / shape[0] ** 0.5 for shape in shapes]

    def exchanged(x, sent, received):
        name = dist.group.WORLD.group_name
        return FUNCTIONAL.wait_tensor(FUNCTIONAL.all_to_all_single(x, received, sent, name))

    def expert_layers(*given):
        """Each micro-batch's tokens after all layers."""
        done = []
        for number, x in enumerate(given[:BATCHES]):
            sent = rows[number][rank]
            received = [row[rank] for row in rows[number]]
            y = x
            for up, down in zip(given[BATCHES::2], given[BATCHES + 1 :: 2], strict=True):
                tokens = exchanged(y, sent, received)
                tokens = torch.relu(tokens @ up) @ down
                y = y + exchanged(tokens, received, sent)
            done.append(y)
        return tuple(done)

    return expert_layers, [*batches, *experts]
