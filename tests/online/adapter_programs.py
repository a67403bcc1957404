"""Programs run twice, by the framework alone and with an adapter: whether all bits agree.

`both` drives the gloo route as the tuner does, without one: the program's steps are untouched, measured, set, measured
and set, and after the route was closed.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from lagom_overlap.collective import CommConfig, ConfigKey, ConfigTable
from lagom_overlap.collective.sites import cycles_of
from lagom_overlap.online.routes.gloo import GlooRoute
from small_messages import SLICE_BYTES, num_used

WIDTH = 64  # a layer's message is 16 KiB: two slices of `small_messages`
STEPS = 11
CONFIG = CommConfig(num_channels=2, chunk_bytes=SLICE_BYTES)


class Steps:
    """The steps of one training, in every state of a route; without a route they are only counted."""

    def __init__(self, route: GlooRoute | None, *, num_steps: int = STEPS) -> None:
        self._route = route
        self._num_steps = num_steps
        self._calls: list[ConfigKey] = []
        """Of the last step that was measured, in the order of issue."""
        self.num_unjoined = 0
        """Calls of which nobody saw the computation wait for them."""

    def __iter__(self) -> Iterator[int]:
        for step in range(self._num_steps):
            if self._route is None:
                yield step
                continue
            if step == 5:
                # An all-reduce of more than two ranks sums in another order when it is sliced: `deterministic`.
                rows = {key: CONFIG for key in self._calls if self._route.is_exact(key)}
                self._route.prepare(ConfigTable(rows, cycles=cycles_of(self._calls)), 1)
                self._route.commit(1)
            is_measured = step not in {0, 5, 7}
            self._route.begin_step(is_measured=is_measured)
            yield step
            if is_measured:
                calls = self._route.end_step().calls
                self._calls = [call.key for call in calls]
                self.num_unjoined += sum(call.joined_s is None for call in calls)
            if step == 8:
                self._route.close()


def both(adapter: Any, make: Callable[[], nn.Module], program: Callable[[nn.Module, Steps], Any]) -> dict[str, Any]:
    """Whether the program's outcome and the model's parameters are the same bits with the adapter as without."""
    outcomes, num_calls = [], 0
    for is_ours in (False, True):
        torch.manual_seed(0)
        model = make()
        route = GlooRoute(new_store()) if is_ours else None
        if route is not None:
            route.on_close(adapter.attach(model, route))
        steps, used_before = Steps(route), num_used()
        outcome = program(model, steps)
        outcomes.append([bits(outcome), [bits(parameter.data) for parameter in model.parameters()]])
        num_in_force = num_used() - used_before
        if route is not None:
            num_calls = sum(count.num_calls for count in route.counts().values())
            route.close()
    stock, ours = outcomes
    counts = {"num_used": num_in_force, "num_calls": num_calls, "num_unjoined": steps.num_unjoined}
    return {"equal": stock == ours, **counts, "stock": shown(stock), "ours": shown(ours)}


num_stores = 0


def new_store() -> Any:
    """A prefix of its own in the job's store for each route."""
    global num_stores  # noqa: PLW0603 - this is a script
    num_stores += 1
    return dist.PrefixStore(f"route{num_stores}", dist.distributed_c10d._get_default_store())


def bits(value: Any) -> Any:
    """Tensors as what they hold on this rank: numbers where they are few, else a digest of all their bits."""
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        local = local.to_dense() if local.layout is torch.sparse_coo else local
        local = local.detach().contiguous().flatten()
        if local.numel() <= 4:
            return local.tolist()
        return hashlib.blake2b(local.view(torch.uint8).numpy(), digest_size=16).hexdigest()
    return [bits(item) for item in value] if isinstance(value, (list, tuple)) else value


def shown(outcome: list[Any]) -> str:
    """The beginning of what came of a program, without its parameters."""
    return str(outcome[0])[:300]


def in_order(_step: int) -> str:
    return "abc"


class Layers(nn.Module):
    """Linear layers a, b and c, run in the order that `order` gives for the step."""

    def __init__(self, order: Callable[[int], str] = in_order) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.order = order
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.order(self.step):
            x = x + getattr(self, name)(x).tanh()
        return x


def batch(step: int) -> torch.Tensor:
    """Another one for each rank and step."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def train(model: nn.Module, steps: Steps, *, between: Callable[[nn.Module, int], Any] | None = None) -> list[Any]:
    """The losses, and what was found between the steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Any] = []
    for step in steps:
        for module in model.modules():
            if isinstance(module, Layers):
                module.step = step
        loss = model(batch(step)).square().mean()
        loss.backward()
        found += [loss.item(), [None if p.grad is None else bits(p.grad) for p in model.parameters()]]
        optimizer.step()
        optimizer.zero_grad()
        if between is not None:
            found.append(between(model, step))
    return found
