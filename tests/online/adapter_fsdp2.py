"""What jobs do with FSDP2."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from adapter_programs import WIDTH, Layers, Steps, batch, bits, both, in_order, train
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from lagom_overlap.online.adapters.calls import CallsAdapter
from lagom_overlap.online.adapters.fsdp2 import Fsdp2Adapter
from lagom_overlap.online.routes.gloo import GlooRoute


def sharded(order: Callable[[int], str] = in_order, *, layers: str = "abc", **how: Any) -> nn.Module:
    model = Layers(order)
    for name in layers:
        fully_shard(getattr(model, name), **how)
    return fully_shard(model, **how)


def evaluated_under_average(model: nn.Module, step: int) -> float | None:
    """Every third step the model is evaluated with other weights, which are then taken back."""
    if step % 3:
        return None
    own = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
        loss = model(batch(1000 + step)).square().mean().item()
        for parameter, value in zip(model.parameters(), own, strict=True):
            parameter.copy_(value)
    return loss


def loaded_after_evaluation(model: nn.Module, step: int) -> float | None:
    """A checkpoint is loaded after an evaluation."""
    if step % 4 != 1:
        return None
    with torch.no_grad():
        loss = model(batch(1000 + step)).square().mean().item()
    state = {name: value.clone().mul_(0.9) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    return loss


class Momentum(nn.Module):
    """A key encoder that follows a query encoder within the forward pass, as MoCo's does."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = (fully_shard(nn.Linear(WIDTH, WIDTH), reshard_after_forward=True) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.query(x)
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                key.mul_(0.9).add_(query, alpha=0.1)
            k = self.key(x)
        return q + k


def two_batches(model: nn.Module, steps: Steps) -> list[Any]:
    """Gradients of two batches are added up, the first without communication in every other step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in steps:
        if step % 2:
            model.set_requires_gradient_sync(False)  # type: ignore[operator]
        losses.append(model(batch(step)).square().mean())
        losses[-1].backward()
        model.set_requires_gradient_sync(True)  # type: ignore[operator]
        losses.append(model(batch(step + 500)).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


def optimizer_in_backward(model: nn.Module, steps: Steps) -> list[float]:
    """Each parameter is changed as soon as its gradient is there."""

    def change(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(change)
    losses = []
    for step in steps:
        losses.append(model(batch(step)).square().mean())
        losses[-1].backward()
    return [loss.item() for loss in losses]


def read_in_backward(model: nn.Module, steps: Steps) -> list[Any]:
    """A backward hook of the first layer reads the gradients of the others."""
    seen: list[Any] = []

    def look(*_: Any) -> None:
        seen.extend(bits(p.grad) for p in [*model.b.parameters(), *model.c.parameters()] if p.grad is not None)

    model.a.register_full_backward_hook(look)  # type: ignore[union-attr]
    return [train(model, steps), seen]


class Raising(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("not finite")


def caught(model: nn.Module, steps: Steps) -> list[Any]:
    """The backward pass of some steps raises when two layers have their gradients, which the job uses all the same."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Any] = []
    for step in steps:
        handle = None
        if step % 3 == 0:
            handle = model.b.register_forward_pre_hook(lambda _, inputs: Raising.apply(inputs[0]))  # type: ignore[union-attr]
        loss = model(batch(step)).square().mean()
        with contextlib.suppress(ArithmeticError):
            loss.backward()
        found += [loss.item(), [None if p.grad is None else bits(p.grad) for p in model.parameters()]]
        optimizer.step()
        if handle is not None:
            handle.remove()
            if hasattr(model, "reset_iter_state"):  # since PyTorch 2.13
                model.reset_iter_state()  # type: ignore[operator]
        optimizer.zero_grad()
    return found


def custom_since(model: nn.Module, steps: Steps) -> list[Any]:
    """The user asks FSDP2 for other buffers after the adapter came."""

    def ask(model: nn.Module, step: int) -> None:
        if step == 2:
            model.a.set_allocate_memory_from_process_group_for_comm(True)  # type: ignore[union-attr, operator]

    return train(model, steps, between=ask)


def prefetching() -> nn.Module:
    """Lists of the user's own, one of which never comes true."""
    model = sharded(lambda step: "acb" if step % 2 else "abc")
    model.a.set_modules_to_forward_prefetch([model.b])  # type: ignore[union-attr, operator]
    model.c.set_modules_to_backward_prefetch([model.a])  # type: ignore[union-attr, operator]
    return model


def together() -> nn.Module:
    """Two modules that share their parameter group."""
    model = Layers()
    fully_shard([model.a, model.b])
    return fully_shard(model)


def recomputing() -> nn.Module:
    model = sharded()
    forward = model.forward
    model.forward = lambda x: checkpoint(forward, x, use_reentrant=False)  # type: ignore[method-assign]
    return model


def evaluating(order: str) -> dict[str, Any]:
    return fsdp2(partial(sharded, lambda _: order), partial(train, between=evaluated_under_average))


def fsdp2(make: Callable[[], nn.Module], program: Callable[[nn.Module, Steps], Any] = train) -> dict[str, Any]:
    return both(Fsdp2Adapter(), make, program)


class AndPlainCalls(Fsdp2Adapter):
    """FSDP2's adapter, and that of the functions which FSDP2 calls in its turn."""

    def attach(self, model: nn.Module, route: GlooRoute) -> Callable[[], None]:
        route.on_close(CallsAdapter().attach(model, route))
        return super().attach(model, route)


def halves(param: torch.dtype, reduced: torch.dtype | None) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduced)


FSDP2: dict[str, Callable[[], dict[str, Any]]] = {
    "in another order than registered, evaluated under an average": lambda: evaluating("acb"),
    "in the order registered, evaluated under an average": lambda: evaluating("abc"),
    "in another order than registered, loaded after an evaluation": lambda: fsdp2(
        partial(sharded, lambda _: "acb"), partial(train, between=loaded_after_evaluation)
    ),
    "an order for every step, layers left out": lambda: fsdp2(
        partial(sharded, lambda step: ["abc", "ca", "b", "bca"][step % 4]),
        partial(train, between=evaluated_under_average),
    ),
    "plain calls routed, too": lambda: both(AndPlainCalls(), sharded, train),
    "as it is": lambda: fsdp2(sharded),
    "a layer used twice": lambda: fsdp2(partial(sharded, lambda _: "abab")),
    "parameters changed within forward": lambda: fsdp2(lambda: fully_shard(Momentum())),
    "gradients of two batches": lambda: fsdp2(sharded, two_batches),
    "kept after forward": lambda: fsdp2(partial(sharded, reshard_after_forward=False)),
    "bf16, reduced in fp32": lambda: fsdp2(partial(sharded, mp_policy=halves(torch.bfloat16, torch.float32))),
    "bf16 all along": lambda: fsdp2(partial(sharded, mp_policy=halves(torch.bfloat16, None))),
    "a parameter in the root": lambda: fsdp2(partial(sharded, layers="ac")),
    "an optimizer in backward": lambda: fsdp2(sharded, optimizer_in_backward),
    "gradients read in backward": lambda: fsdp2(sharded, read_in_backward),
    "a backward pass that raises": lambda: fsdp2(sharded, caught),
    "other buffers since": lambda: fsdp2(sharded, custom_since),
    "two modules sharded together": lambda: fsdp2(together),
    "prefetch lists of the user's own": lambda: fsdp2(prefetching),
    "activations computed again": lambda: fsdp2(recomputing),
}
