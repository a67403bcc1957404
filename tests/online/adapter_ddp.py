"""What jobs do with DDP."""

import copy
import inspect
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from adapter_programs import WIDTH, Layers, Steps, batch, both, train
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lagom_overlap.online.adapters.ddp import DdpAdapter
from small_messages import SCALE


def replicated(make: Callable[[], nn.Module] = Layers, **how: Any) -> nn.Module:
    return DistributedDataParallel(make(), bucket_cap_mb=1 / SCALE, **how)


def ddp(make: Callable[[], nn.Module], program: Callable[[nn.Module, Steps], Any] = train) -> dict[str, Any]:
    return both(DdpAdapter(), make, program)


def kept_gradients(model: nn.Module, steps: Steps) -> list[Any]:
    """Gradients are zeroed in place, so with bucket views they stay views."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in steps:
        losses.append(model(batch(step)).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return [loss.item() for loss in losses]


def without_sync(model: nn.Module, steps: Steps) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in steps:
        with model.no_sync():  # type: ignore[operator]
            losses.append(model(batch(step)).square().mean())
            losses[-1].backward()
        losses.append(model(batch(step + 500)).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


def uneven(model: nn.Module, steps: Steps, *, by_first: bool = True) -> list[Any]:
    """Each rank has one batch less than the one before it; all batches of one rank make one of the route's steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in steps:
        with model.join(divide_by_initial_world_size=by_first):  # type: ignore[operator]
            for number in range(3 + dist.get_world_size() - dist.get_rank()):
                losses.append(model(batch(20 * step + number)).square().mean())
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
    return [loss.item() for loss in losses]


def other_groups(model: nn.Module, steps: Steps) -> list[Any]:
    """The job gives DDP a group of two ranks (a third one is alone in its own), and later one of all ranks."""
    some, alone, every = dist.new_group([0, 1]), dist.new_group([dist.get_world_size() - 1]), dist.new_group()
    groups = {1: some if dist.get_rank() < 2 else alone, 6: every}

    def change(model: nn.Module, step: int) -> None:
        if step in groups:
            model._update_process_group(groups[step])  # type: ignore[operator]

    return train(model, steps, between=change)


def hook_since(model: nn.Module, steps: Steps) -> list[Any]:
    """The user registers a communication hook after the adapter came."""

    def negated(state: dict[str, int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        state["calls"] += 1
        work = dist.all_reduce(bucket.buffer().neg_(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    state = {"calls": 0}
    model.register_comm_hook(state, negated)  # type: ignore[operator]
    return [train(model, steps), state["calls"]]


def builtin_since(model: nn.Module, steps: Steps, kind: Any) -> list[Any]:
    """The user registers one of DDP's own hooks in C++ after the adapter came."""

    def register(model: nn.Module, step: int) -> None:
        if step == 3:
            model._register_builtin_comm_hook(kind)  # type: ignore[operator]

    return train(model, steps, between=register)


def saved(model: nn.Module, steps: Steps) -> list[Any]:
    """The whole wrapped model is pickled."""

    def save(model: nn.Module, step: int) -> None:
        if step == 3:
            torch.save(model, io.BytesIO())
            copy.deepcopy(model.module)

    return train(model, steps, between=save)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WIDTH, WIDTH, sparse=True)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + self.words(x[:, 0].abs().mul(100).long().clamp(max=WIDTH - 1)))


class Pair(nn.Module):
    """Two models that DDP wraps, in one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = replicated(), replicated()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x).tanh())


def compiled() -> nn.Module:
    """What `torch.compile` has around DDP is of another class."""
    torch.compiler.reset()
    layers = partial(nn.Sequential, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return torch.compile(replicated(layers), backend="eager")  # type: ignore[return-value]  # a module, of a module


def compiled_steps(model: nn.Module, steps: Steps) -> list[Any]:
    """Without dynamo's own cuts at buckets, which it makes of a first bucket as large as usual."""
    with torch._dynamo.config.patch(optimize_ddp=False):
        return train(model, steps)


DDP: dict[str, Callable[[], dict[str, Any]]] = {
    "as it is": lambda: ddp(replicated),
    "bucket views": lambda: ddp(partial(replicated, gradient_as_bucket_view=True)),
    "bucket views, gradients kept": lambda: ddp(partial(replicated, gradient_as_bucket_view=True), kept_gradients),
    "gradients kept": lambda: ddp(replicated, kept_gradients),
    "unused parameters": lambda: ddp(
        partial(replicated, partial(Layers, lambda step: ["abc", "ab", "cb"][step % 3]), find_unused_parameters=True)
    ),
    "a static graph": lambda: ddp(partial(replicated, static_graph=True)),
    "gradients of two batches": lambda: ddp(replicated, without_sync),
    "uneven inputs": lambda: ddp(replicated, uneven),
    "uneven inputs, divided by those that have some": lambda: ddp(replicated, partial(uneven, by_first=False)),
    "a hook of the user's own, since": lambda: ddp(replicated, hook_since),
    **{
        f"DDP's own hook {kind.name}, since": partial(ddp, replicated, partial(builtin_since, kind=kind))
        for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS)
    },
    "other groups": lambda: ddp(replicated, other_groups),
    "two in a model": lambda: ddp(Pair),
    "compiled": lambda: ddp(compiled, compiled_steps),
    "saved whole": lambda: ddp(replicated, saved),
    "sparse gradients": lambda: ddp(partial(replicated, Embedded)),
    "bf16": lambda: ddp(lambda: replicated(lambda: Layers().bfloat16()), half_steps),
}
if "batched_grad_copy" in inspect.signature(DistributedDataParallel).parameters:  # since PyTorch 2.12
    DDP["copied in batches"] = lambda: ddp(partial(replicated, batched_grad_copy=True))
    DDP["copied in batches, gradients kept"] = lambda: ddp(partial(replicated, batched_grad_copy=True), kept_gradients)


def half_steps(model: nn.Module, steps: Steps) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in steps:
        losses.append(model(batch(step).bfloat16()).float().square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]
