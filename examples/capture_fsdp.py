"""A training step of your own, captured without a GPU.

    lagom capture examples/capture_fsdp.py:fsdp --ranks 16 --out step.json.gz
    lagom capture examples/capture_fsdp.py:hybrid --ranks 16 --out hybrid.json.gz

Each function is called in a world of fake ranks, under FakeTensorMode: meshes, process groups and `fully_shard` are
PyTorch's own, tensors have shapes and no data. Build the model as your training script does, on the device "cpu".
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lagom_overlap import TrainingStep

HIDDEN, LAYERS, SEQ_LEN, BATCH = 1024, 8, 2048, 2


class Model(nn.Module):
    """A stack of PyTorch's own encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(HIDDEN, 16, 4 * HIDDEN, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _step(mesh: DeviceMesh) -> TrainingStep:
    model = Model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for layer, following in zip(model.layers, [*model.layers][1:], strict=False):
        layer.set_modules_to_forward_prefetch([following])
    return TrainingStep(
        model=model,
        inputs=(torch.zeros(BATCH, SEQ_LEN, HIDDEN),),
        loss=lambda out: out.float().square().mean(),
        optimizers=(torch.optim.AdamW(model.parameters(), foreach=True),),
    )


def fsdp() -> TrainingStep:
    """Fully sharded over 16 ranks."""
    return _step(init_device_mesh("cpu", (16,), mesh_dim_names=("fsdp",)))


def hybrid() -> TrainingStep:
    """Sharded over 8 ranks, replicated twice."""
    return _step(init_device_mesh("cpu", (2, 8), mesh_dim_names=("replicate", "fsdp")))
