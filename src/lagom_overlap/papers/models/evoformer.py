"""AlphaFold's Evoformer blocks under dynamic axial parallelism (DAP), for Concerto's grid.

Shapes: Jumper et al. 2021, Suppl. 1.6 (MSA 256 wide, 8 heads; pairs 128 wide, 4 heads; outer product 32). DAP: FastFold
(arXiv 2203.00854, section 4.2): both representations are cut along one axis; an all-to-all turns the cut before the
operators that work along it, an all-gather brings the one operand that triangle updates and outer products need whole.

Departures: no dropout; the bias of pairs in attention is gathered, as FastFold does; transitions and gates as in the
paper; gradients of the (whole) parameters are not reduced.
"""

from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's customary name
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from lagom_overlap.capturing.fake_tensor import TrainingStep
from lagom_overlap.capturing.models.degrees import Degrees
from lagom_overlap.capturing.models.named import RegisteredModel
from lagom_overlap.capturing.models.parallelize import default_dtype, optimizers_of
from lagom_overlap.errors import JobError

_gather = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd
"""Renamed in torch 2.13."""

MSA, PAIR, OUTER, TRIANGLE = 256, 128, 32, 128
"""Widths of the two representations, of the outer product and of a triangle update (Suppl. 1.6)."""
NUM_SEQUENCES, NUM_BLOCKS = 128, 4
"""AlphaFold's initial training has as many sequences; of its 48 blocks, all alike, 4. Chosen."""


class _Axes:
    """The two exchanges of DAP over one group; None is a single rank."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def turned(self, x: torch.Tensor, cut: int, whole: int) -> torch.Tensor:
        """`x` is cut along dimension `cut` and whole along `whole`; afterwards the other way round."""
        if self._group is None:
            return x
        ranks = self._group.size()
        parts = torch.cat(x.chunk(ranks, dim=whole), dim=0).contiguous()
        splits = [parts.shape[0] // ranks] * ranks
        moved = functional.all_to_all_single_autograd(parts, splits, splits, self._group)
        return torch.cat(moved.chunk(ranks, dim=0), dim=cut)

    def gathered(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole of what is cut along `dim`."""
        if self._group is None:
            return x
        whole: torch.Tensor = _gather(x.contiguous(), dim, self._group)
        return whole


class _GatedAttention(nn.Module):
    """Attention along the last but one dimension of rows x length x width, with an optional bias of pairs."""

    def __init__(self, width: int, num_heads: int, *, biased: bool) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.gate, self.out = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width),
            nn.Linear(width, width),
        )
        self.bias = nn.Linear(PAIR, num_heads, bias=False) if biased else None

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows, length, width = x.shape
        x = self.norm(x)
        heads = self.qkv(x).view(rows, length, 3, self._num_heads, -1).permute(2, 0, 3, 1, 4)
        mask = None if bias is None else bias.permute(2, 0, 1).unsqueeze(0)
        query, key, value = heads.unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        mixed = mixed.transpose(1, 2).reshape(rows, length, width)
        out: torch.Tensor = self.out(torch.sigmoid(self.gate(x)) * mixed)
        return out


class _Transition(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.relu(self.up(self.norm(x))))
        return out


class _OuterProductMean(nn.Module):
    """From sequences x residues (cut along residues) to pairs (cut along the first residue)."""

    def __init__(self, axes: _Axes) -> None:
        super().__init__()
        self._axes = axes
        self.norm, self.left, self.right = nn.LayerNorm(MSA), nn.Linear(MSA, OUTER), nn.Linear(MSA, OUTER)
        self.out = nn.Linear(OUTER * OUTER, PAIR)

    def forward(self, msa: torch.Tensor) -> torch.Tensor:
        normed = self.norm(msa)
        left, right = self.left(normed), self._axes.gathered(self.right(normed), 1)
        sequences, mine, _ = left.shape
        product = left.reshape(sequences, -1).t() @ right.reshape(sequences, -1)
        pairs = product.view(mine, OUTER, right.shape[1], OUTER).transpose(1, 2).reshape(mine, right.shape[1], -1)
        out: torch.Tensor = self.out(pairs / sequences)
        return out


class _Triangle(nn.Module):
    """Multiplicative update over the third corner; pairs come cut along the first residue."""

    def __init__(self, axes: _Axes) -> None:
        super().__init__()
        self._axes = axes
        self.norm, self.norm_out = nn.LayerNorm(PAIR), nn.LayerNorm(TRIANGLE)
        self.both, self.gates = nn.Linear(PAIR, 2 * TRIANGLE), nn.Linear(PAIR, 2 * TRIANGLE)
        self.out, self.gate = nn.Linear(TRIANGLE, PAIR), nn.Linear(PAIR, PAIR)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        normed = self.norm(pairs)
        left, right = (self.both(normed) * torch.sigmoid(self.gates(normed))).chunk(2, dim=-1)
        right = self._axes.gathered(right, 0)
        product = torch.bmm(left.permute(2, 0, 1), right.permute(2, 1, 0)).permute(1, 2, 0)
        out: torch.Tensor = self.out(self.norm_out(product)) * torch.sigmoid(self.gate(normed))
        return out


class EvoformerBlock(nn.Module):
    """MSA (cut along sequences) and pairs (cut along the first residue) in and out."""

    def __init__(self, axes: _Axes) -> None:
        super().__init__()
        self._axes = axes
        self.row, self.column = _GatedAttention(MSA, 8, biased=True), _GatedAttention(MSA, 8, biased=False)
        self.transition, self.pair_transition = _Transition(MSA), _Transition(PAIR)
        self.outer = _OuterProductMean(axes)
        self.outgoing, self.incoming = _Triangle(axes), _Triangle(axes)
        self.starting, self.ending = _GatedAttention(PAIR, 4, biased=True), _GatedAttention(PAIR, 4, biased=True)

    def _bias(self, attention: _GatedAttention, pairs: torch.Tensor) -> torch.Tensor:
        assert attention.bias is not None
        return self._axes.gathered(attention.bias(pairs), 0)

    def forward(self, msa: torch.Tensor, pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequences x residues x 256 and residues x residues x 128."""
        axes = self._axes
        msa = msa + self.row(msa, self._bias(self.row, pairs))
        msa = axes.turned(msa, 0, 1)
        msa = msa + self.column(msa.transpose(0, 1)).transpose(0, 1)
        msa = msa + self.transition(msa)
        pairs = pairs + self.outer(msa)
        msa = axes.turned(msa, 1, 0)
        pairs = pairs + self.outgoing(pairs)
        turned = axes.turned(pairs, 0, 1).transpose(0, 1)
        turned = turned + self.incoming(turned)
        pairs = axes.turned(turned.transpose(0, 1), 1, 0)
        pairs = pairs + self.starting(pairs, self._bias(self.starting, pairs))
        turned = axes.turned(pairs, 0, 1).transpose(0, 1)
        turned = turned + self.ending(turned, self._bias(self.ending, turned))
        pairs = axes.turned(turned.transpose(0, 1), 1, 0)
        return msa, pairs + self.pair_transition(pairs)


class Evoformer(nn.Module):
    """Some blocks; the AlphaFold trunk has 48."""

    def __init__(self, axes: _Axes, num_blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EvoformerBlock(axes) for _ in range(num_blocks))

    def forward(self, msa: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        """A scalar of both representations, so that every parameter has a gradient."""
        for layer in self.layers:
            msa, pairs = layer(msa, pairs)
        return msa.float().mean() + pairs.float().mean()


def evoformer_step(
    degrees: Degrees, *, num_residues: int, num_micro_batches: int = 1, num_blocks: int = NUM_BLOCKS
) -> Callable[[], TrainingStep]:
    """What builds the training step of four blocks on 128 sequences of `num_residues` residues.

    Raises:
        JobError: if it cannot be parallelised so.
    """
    ranks = degrees.axial
    if degrees.num_ranks != ranks:
        raise JobError("parallel: the Evoformer is captured with axial alone")
    for what, value in (("128 sequences", NUM_SEQUENCES), (f"seq_len = {num_residues} residues", num_residues)):
        if value % ranks:
            raise JobError(f"parallel: axial is {ranks}, must divide {what}")

    def build() -> TrainingStep:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dap",)) if ranks > 1 else None
        with default_dtype(torch.bfloat16):
            model = Evoformer(_Axes(None if mesh is None else mesh.get_group()), num_blocks)
            msa = torch.zeros(NUM_SEQUENCES // ranks, num_residues, MSA)
            pairs = torch.zeros(num_residues // ranks, num_residues, PAIR)
        return TrainingStep(
            model=model,
            inputs=(msa, pairs),
            loss=lambda total: total,
            optimizers=optimizers_of(model),
            num_micro_batches=num_micro_batches,
        )

    return build


def _named_step(
    name: str, degrees: Degrees, *, micro_batch: int, seq_len: int, num_micro_batches: int
) -> Callable[[], TrainingStep]:
    """Its size is the number of residues, which stands for the sequence's; a batch is one of them."""
    return evoformer_step(degrees, num_residues=seq_len, num_micro_batches=num_micro_batches)


EVOFORMER: Final = RegisteredModel(_named_step, world_name="dap")
