"""A decoder-only transformer as plain modules, by the shapes of a `TransformerModel`.

Departures from the published models: no rotary or ALiBi positions (elementwise; the Hugging Face capture has them), no
dropout. A mixture of experts routes evenly: every expert gets the same number of tokens, so that shapes are known.
"""

import torch
import torch.nn.functional as F  # noqa: N812  torch's customary name
from torch import nn

from lagom_overlap.capturing.models.experts import MixtureOfExperts
from lagom_overlap.workload.models import TransformerModel


def _norm(model: TransformerModel) -> nn.Module:
    return nn.LayerNorm(model.hidden) if model.norm_bias else nn.RMSNorm(model.hidden)


class DecoderAttention(nn.Module):
    """Causal self-attention with grouped keys; under tensor parallelism it sees its share of the heads."""

    def __init__(self, model: TransformerModel) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        columns, kv_columns = model.attention_columns, model.num_kv_heads * model.head_dim
        self.query = nn.Linear(model.hidden, columns, bias=model.linear_bias)
        self.key = nn.Linear(model.hidden, kv_columns, bias=model.linear_bias)
        self.value = nn.Linear(model.hidden, kv_columns, bias=model.linear_bias)
        self.out = nn.Linear(columns, model.hidden, bias=model.linear_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Batch x sequence x hidden in and out."""
        batch, tokens, _ = x.shape
        query, key, value = (
            project(x).view(batch, tokens, -1, self.head_dim).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return out


class FeedForward(nn.Module):
    """Two matrices with GELU, or three with a gate (SwiGLU)."""

    def __init__(self, model: TransformerModel, ffn: int) -> None:
        super().__init__()
        self.up = nn.Linear(model.hidden, ffn, bias=model.linear_bias)
        self.gate = nn.Linear(model.hidden, ffn, bias=model.linear_bias) if model.gated else None
        self.down = nn.Linear(ffn, model.hidden, bias=model.linear_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Batch x sequence x hidden in and out."""
        hidden = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        out: torch.Tensor = self.down(hidden)
        return out


class SharedAndRouted(nn.Module):
    """A mixture of experts in parallel with the dense MLP that every token visits, if the model has one."""

    def __init__(self, model: TransformerModel) -> None:
        super().__init__()
        self.routed = MixtureOfExperts(
            hidden=model.hidden,
            ffn=model.ffn,
            num_experts=model.num_experts,
            experts_per_token=model.experts_per_token,
        )
        self.shared = FeedForward(model, model.shared_ffn) if model.shared_ffn else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Batch x sequence x hidden in and out."""
        routed: torch.Tensor = self.routed(x)
        return routed if self.shared is None else routed + self.shared(x)


class Side(nn.Module):
    """Attention and MLP side by side behind one norm (Phi-2)."""

    def __init__(self, attention: DecoderAttention, mlp: nn.Module) -> None:
        super().__init__()
        self.attention, self.mlp = attention, mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Their sum."""
        total: torch.Tensor = self.attention(x) + self.mlp(x)
        return total


class Layer(nn.Module):
    """One layer: attention and MLP with residuals, or both behind one norm."""

    def __init__(self, model: TransformerModel) -> None:
        super().__init__()
        attention = DecoderAttention(model)
        mlp = SharedAndRouted(model) if model.num_experts else FeedForward(model, model.ffn)
        self.norm = _norm(model)
        if model.norms_per_layer == 1:
            self.side: Side | None = Side(attention, mlp)
        else:
            self.side = None
            self.attention, self.norm_2, self.mlp = attention, _norm(model), mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Batch x sequence x hidden in and out."""
        if self.side is not None:
            side: torch.Tensor = self.side(self.norm(x))
            return x + side
        x = x + self.attention(self.norm(x))
        added: torch.Tensor = self.mlp(self.norm_2(x))
        return x + added


class Decoder(nn.Module):
    """Token ids in, logits out; a part of the layers if `layers` says so, then hidden states instead.

    `has_embedding` and `has_head` are False in the middle of a pipeline.
    """

    def __init__(
        self,
        model: TransformerModel,
        layers: range | None = None,
        *,
        has_embedding: bool = True,
        has_head: bool = True,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocab, model.hidden) if has_embedding else None
        self.layers = nn.ModuleDict({str(number): Layer(model) for number in layers or range(model.num_layers)})
        self.norm = _norm(model) if has_head else None
        self.head = nn.Linear(model.hidden, model.vocab, bias=model.head_bias) if has_head else None
        if model.tied_embeddings and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Batch x sequence of ids, or hidden states."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x
