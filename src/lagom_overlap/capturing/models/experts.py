"""A mixture of experts with expert parallelism: one all-to-all to the experts, one back (GShard, arXiv 2006.16668).

Routing is even: of tokens x experts-per-token slots every expert gets the same number, so that all shapes are known
without data. Each rank holds `num_experts / ranks` experts; their products run as one batched product each.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's customary name
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from lagom_overlap.errors import JobError


class Experts(nn.Module):
    """The experts of one rank: gated MLPs of three matrices, one batch entry each."""

    def __init__(self, num_experts: int, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(num_experts, hidden, ffn))
        self.up = nn.Parameter(torch.empty(num_experts, hidden, ffn))
        self.down = nn.Parameter(torch.empty(num_experts, ffn, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Experts x slots x hidden in and out."""
        return torch.bmm(F.silu(torch.bmm(x, self.gate)) * torch.bmm(x, self.up), self.down)


class RoutedExperts(nn.Module):
    """Dispatch, experts, combine, for tokens whose experts are chosen; `spread_over` makes it expert-parallel."""

    def __init__(self, *, hidden: int, ffn: int, num_experts: int) -> None:
        super().__init__()
        self._shape = (num_experts, hidden, ffn)
        self.local = Experts(*self._shape)
        self._group: dist.ProcessGroup | None = None

    def spread_over(self, group: dist.ProcessGroup) -> None:
        """Keeps this rank's share of the experts.

        Raises:
            JobError: if the group does not divide the experts.
        """
        num_experts, hidden, ffn = self._shape
        if num_experts % group.size():
            raise JobError(f"parallel: expert is {group.size()}, must divide the model's {num_experts} experts")
        self._group = group
        self.local = Experts(num_experts // group.size(), hidden, ffn)

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        if self._group is None:
            return x
        ranks = self._group.size()
        splits = [x.shape[0] // ranks] * ranks
        moved: torch.Tensor = all_to_all_single_autograd(x.contiguous(), splits, splits, self._group)
        return moved

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Tokens x hidden in and out; `chosen` and `weights` are tokens x experts per token."""
        num_experts, per_token = self._shape[0], chosen.shape[-1]
        order = torch.argsort(chosen.flatten())
        capacity = order.shape[0] // num_experts
        order = order[: capacity * num_experts]
        ranks = 1 if self._group is None else self._group.size()
        local = num_experts // ranks
        sent = self._exchange(tokens[order // per_token])
        grouped = sent.view(ranks, local, capacity, -1).transpose(0, 1).reshape(local, ranks * capacity, -1)
        done = self.local(grouped).view(local, ranks, capacity, -1).transpose(0, 1).reshape(sent.shape)
        weighted = self._exchange(done) * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, order // per_token, weighted.to(tokens.dtype))


class MixtureOfExperts(nn.Module):
    """A router and its experts."""

    def __init__(self, *, hidden: int, ffn: int, num_experts: int, experts_per_token: int) -> None:
        super().__init__()
        self._per_token = experts_per_token
        self.router = nn.Linear(hidden, num_experts, bias=False)
        self.experts = RoutedExperts(hidden=hidden, ffn=ffn, num_experts=num_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Batch x sequence x hidden in and out."""
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = torch.topk(torch.softmax(self.router(tokens), dim=-1), self._per_token, dim=-1)
        out: torch.Tensor = self.experts(tokens, chosen, weights)
        return out.view_as(x)
