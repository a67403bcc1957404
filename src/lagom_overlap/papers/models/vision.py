"""A vision transformer and a wide residual network, for Concerto's grid; shapes from their papers.

ViT: arXiv 2010.11929, Table 1 (Large, Huge; patch 14). WideResNet-50-2: arXiv 1605.07146 as torchvision builds it
(bottlenecks whose middle is twice as wide).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812  torch's customary name
from torch import nn

from lagom_overlap.capturing.fake_tensor import TrainingStep
from lagom_overlap.capturing.models.degrees import Degrees
from lagom_overlap.capturing.models.named import RegisteredModel
from lagom_overlap.capturing.models.parallelize import apply_data, data_mesh, default_dtype, optimizers_of
from lagom_overlap.errors import JobError

IMAGE: Final = 224
"""Pixels of a side: ImageNet's crops."""
NUM_CLASSES: Final = 1000
"""ImageNet's."""


@dataclass(frozen=True, slots=True)
class _VitShape:
    num_layers: int
    hidden: int
    num_heads: int
    patch: int


_VITS: Final[Mapping[str, _VitShape]] = {
    "vit-l-14": _VitShape(24, 1024, 16, 14),
    "vit-h-14": _VitShape(32, 1280, 16, 14),
}
WIDE_RESNET: Final = "wide-resnet-50-2"


class _VitLayer(nn.Module):
    def __init__(self, shape: _VitShape) -> None:
        super().__init__()
        self._num_heads = shape.num_heads
        self.norm, self.norm_2 = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.out = nn.Linear(shape.hidden, shape.hidden)
        self.up, self.down = nn.Linear(shape.hidden, 4 * shape.hidden), nn.Linear(4 * shape.hidden, shape.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        heads = self.qkv(self.norm(x)).view(batch, tokens, 3, self._num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        added: torch.Tensor = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + added


class VisionTransformer(nn.Module):
    """Images in, class scores out; the mean of all patches is classified."""

    def __init__(self, shape: _VitShape) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, shape.hidden, shape.patch, stride=shape.patch)
        self.positions = nn.Parameter(torch.empty(1, (IMAGE // shape.patch) ** 2, shape.hidden))
        self.layers = nn.ModuleList(_VitLayer(shape) for _ in range(shape.num_layers))
        self.norm, self.head = nn.LayerNorm(shape.hidden), nn.Linear(shape.hidden, NUM_CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Batch x 3 x 224 x 224 to batch x classes."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        scores: torch.Tensor = self.head(self.norm(x).mean(dim=1))
        return scores


class _Bottleneck(nn.Module):
    def __init__(self, given: int, middle: int, out: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(given, middle, 1, bias=False),
            nn.BatchNorm2d(middle),
            nn.ReLU(),
            nn.Conv2d(middle, middle, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(middle),
            nn.ReLU(),
            nn.Conv2d(middle, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        changes = stride != 1 or given != out
        self.shortcut = (
            nn.Sequential(nn.Conv2d(given, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out)) if changes else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.convolutions(x) + (x if self.shortcut is None else self.shortcut(x)))


class WideResNet(nn.Module):
    """WideResNet-50-2: stages of 3, 4, 6 and 3 bottlenecks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks, given = [], 64
        for stage, num_blocks in enumerate((3, 4, 6, 3)):
            middle, out = 128 << stage, 256 << stage
            for block in range(num_blocks):
                blocks.append(_Bottleneck(given, middle, out, 2 if stage and not block else 1))
                given = out
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(given, NUM_CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Batch x 3 x 224 x 224 to batch x classes."""
        x = self.stem(images)
        for layer in self.layers:
            x = layer(x)
        scores: torch.Tensor = self.head(x.mean(dim=(2, 3)))
        return scores


def _shape(name: str, num_layers: int | None) -> _VitShape:
    return _VITS[name] if num_layers is None else replace(_VITS[name], num_layers=num_layers)


def vision_step(
    name: str, degrees: Degrees, *, micro_batch: int, num_micro_batches: int = 1, num_layers: int | None = None
) -> Callable[[], TrainingStep]:
    """What builds the training step of a vision model on `micro_batch` images per rank.

    `num_layers` makes a vision transformer shallower.

    Raises:
        JobError: if it cannot be parallelised so.
    """
    for key in ("tensor", "expert", "pipeline", "axial"):
        if getattr(degrees, key) > 1:
            raise JobError(f"parallel: {key} is not captured for {name}; allowed: replicate, fsdp")

    def build() -> TrainingStep:
        data, _ = data_mesh(degrees)
        dtype = torch.float32 if data is not None else torch.bfloat16
        with default_dtype(dtype):
            model = WideResNet() if name == WIDE_RESNET else VisionTransformer(_shape(name, num_layers))
        apply_data(model, list(model.layers), data, degrees, set())
        images = torch.zeros(micro_batch, 3, IMAGE, IMAGE, dtype=dtype)
        labels = torch.zeros(micro_batch, dtype=torch.int64)
        return TrainingStep(
            model=model,
            inputs=(images,),
            loss=lambda scores: F.cross_entropy(scores.float(), labels),
            optimizers=optimizers_of(model),
            num_micro_batches=num_micro_batches,
        )

    return build


def _named_step(
    name: str, degrees: Degrees, *, micro_batch: int, seq_len: int, num_micro_batches: int
) -> Callable[[], TrainingStep]:
    """Images have one size: `seq_len` is not used."""
    return vision_step(name, degrees, micro_batch=micro_batch, num_micro_batches=num_micro_batches)


VISION: Final = RegisteredModel(_named_step)
