"""A small GPT under FSDP2: `lagom plan examples/plan_fsdp2_gloo.toml --execute` chooses its settings and runs them.

The function is called on every rank and makes the step as a training script does: model, `fully_shard`, loss,
optimizer. It runs as FSDP2 issues it, twice: as it is, and told the plan's settings by `apply_fsdp2`.
"""

import torch
from torch import nn
from torch.distributed import get_rank, get_world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lagom_overlap import TrainingStep

WIDTH, LAYERS, LENGTH, BATCH, VOCABULARY = 256, 4, 64, 4, 512


class Model(nn.Module):
    """Tokens to logits, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def step() -> TrainingStep:
    """One step of this rank."""
    mesh = init_device_mesh("cpu", (get_world_size(),), mesh_dim_names=("fsdp",))
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    tokens = (torch.arange(BATCH * (LENGTH + 1)) * 7 + get_rank()).view(BATCH, LENGTH + 1) % VOCABULARY
    targets = tokens[:, 1:].flatten()
    return TrainingStep(
        model=model,
        inputs=(tokens[:, :-1],),
        loss=lambda logits: nn.functional.cross_entropy(logits.flatten(0, 1), targets),
        optimizers=(torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True),),
    )
