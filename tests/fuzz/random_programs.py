"""Training programs drawn at random, each run by the framework alone and under an adapter: do all bits agree?

A program is a number: every rank draws the same one from it. What is drawn are the features of PyTorch that decide when
parameters are gathered and gradients are summed: the order in which modules run, evaluation under other weights,
checkpoints loaded, gradients of several batches, exceptions that the job catches, frozen and shared layers.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from adapter_fsdp2 import Raising, evaluated_under_average, loaded_after_evaluation
from adapter_programs import Layers, Steps, batch, bits, both
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lagom_overlap.online.adapters.calls import CallsAdapter
from lagom_overlap.online.adapters.ddp import DdpAdapter
from lagom_overlap.online.adapters.fsdp2 import Fsdp2Adapter

KINDS = ("fsdp2", "fsdp2", "ddp", "calls")
SIZES = (3 << 16, 3 << 18, 3 << 17)
"""Elements of a plain call, which three ranks divide, too: below and above the least slice."""


@dataclass(frozen=True)
class Drawn:
    """A training program; `orders` are those in which layers run, in turn."""

    orders: tuple[str, ...]
    frozen: str
    sharded: str
    between: str
    num_batches: int
    clips: bool
    raises_every: int
    recomputes: bool
    adam: bool
    how: tuple[tuple[str, Any], ...]


def drawn(seed: int, kind: str) -> Drawn:
    """The program of a number."""
    rng = random.Random(seed)
    names = "abc"
    full = "".join(rng.sample(names, 3))
    orders = [full]
    for _ in range(rng.choice([0, 0, 1, 2])):
        orders.append("".join(rng.choices(names, k=rng.randint(1, 4))))
    how: dict[str, Any] = {}
    if kind == "fsdp2":
        if rng.random() < 0.3:
            how["reshard_after_forward"] = rng.random() < 0.5
        if rng.random() < 0.25:
            how["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=rng.choice([None, torch.float32])
            )
    else:
        how = {"find_unused_parameters": len(orders) > 1, "gradient_as_bucket_view": rng.random() < 0.3}
    return Drawn(
        orders=tuple(orders),
        frozen=rng.choice(["", "", "", rng.choice(names)]),
        sharded=rng.choice(["abc", "abc", "ac", "b", ""]) if kind == "fsdp2" else "",
        between=rng.choice(["", "average", "load"]) if kind == "fsdp2" else "",
        num_batches=rng.choice([1, 1, 2]),
        clips=rng.random() < 0.3,
        raises_every=rng.choice([0, 0, 3]) if kind == "fsdp2" else 0,
        recomputes=rng.random() < 0.2,
        adam=rng.random() < 0.3,
        how=tuple(how.items()),
    )


def made(what: Drawn, kind: str) -> nn.Module:
    model: nn.Module = Layers(lambda step: what.orders[step % len(what.orders)])
    for name in what.frozen:
        getattr(model, name).requires_grad_(False)
    if what.recomputes:
        forward = model.forward
        model.forward = lambda x: checkpoint(forward, x, use_reentrant=False)  # type: ignore[method-assign]
    if kind == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=1, **dict(what.how))
    for name in what.sharded:
        fully_shard(getattr(model, name), **dict(what.how))
    return fully_shard(model, **dict(what.how))


def trained(what: Drawn, model: nn.Module, steps: Steps) -> list[Any]:
    """Losses and gradients of all steps, and what was found between them."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3) if what.adam else torch.optim.SGD(parameters, lr=0.1)
    between = {"": lambda *_: None, "average": evaluated_under_average, "load": loaded_after_evaluation}[what.between]
    layers = [module for module in model.modules() if isinstance(module, Layers)]
    found: list[Any] = []
    for step in steps:
        for module in layers:
            module.step = step
        raises = what.raises_every and step % what.raises_every == 1
        handle = layers[0].b.register_forward_pre_hook(lambda _, x: Raising.apply(x[0])) if raises else None
        try:
            for number in range(what.num_batches):
                found.append(one_batch(model, step + 500 * number, is_last=number + 1 == what.num_batches))
        except ArithmeticError as error:
            found.append(str(error))
            model.reset_iter_state()  # type: ignore[operator]
        if handle is not None:
            handle.remove()
        if what.clips and any(parameter.grad is not None for parameter in parameters):
            found.append(bits(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))
        found.append([None if parameter.grad is None else bits(parameter.grad) for parameter in parameters])
        optimizer.step()
        optimizer.zero_grad()
        found.append(between(model, step))
    return found


def one_batch(model: nn.Module, number: int, *, is_last: bool) -> float:
    """A forward and a backward pass, without communication unless it is the step's last."""
    if isinstance(model, DistributedDataParallel) and not is_last:
        with model.no_sync():
            loss = model(batch(number)).square().mean()
            loss.backward()
        return loss.item()
    if not isinstance(model, DistributedDataParallel):
        model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
    loss = model(batch(number)).square().mean()
    loss.backward()
    return loss.item()


def called(seed: int, steps: Steps) -> list[Any]:
    """Plain calls, the same in every step, in groups of all and of some, waited for in another order."""
    rng, n = random.Random(seed), dist.get_world_size()
    kinds = [rng.choice(["reduce", "gather", "scatter", "exchange", "some"]) for _ in range(rng.randint(1, 5))]
    sizes = [rng.choice(SIZES) for _ in kinds]
    waits = rng.sample(range(len(kinds)), len(kinds))
    coalesces, asks = rng.random() < 0.2, rng.random() < 0.3
    some = dist.new_group(sorted(rng.sample(range(n), rng.randint(1, n))))
    found: list[Any] = []
    for step in steps:
        works, results = [], []
        for number, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
            x = torch.randn(size, generator=torch.Generator().manual_seed(1000 * step + 10 * number + dist.get_rank()))
            work, result = one_call(kind, x, some, n)
            works.append(work)
            results.append(result)
        for number in waits:
            work = works[number]
            if work is not None and asks and kinds[number] != "scatter":
                results.append(work.get_future().wait()[0])
            if work is not None:
                work.wait()
        if coalesces:
            with dist._coalescing_manager():
                dist.all_reduce(results[0])
        found.append([bits(result) for result in results])
    if some is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.destroy_process_group(some)
    return found


def one_call(kind: str, x: torch.Tensor, some: Any, n: int) -> tuple[Any, torch.Tensor]:
    """(handle, result)"""
    match kind:
        case "reduce":
            return dist.all_reduce(x, async_op=True), x
        case "some":
            return dist.all_reduce(x, group=some, async_op=True) if dist.get_rank(some) >= 0 else None, x
        case "gather":
            result = torch.empty(x.numel() * n)
            return dist.all_gather_into_tensor(result, x, async_op=True), result
        case "scatter":
            result = torch.empty(x.numel() // n)
            return dist.reduce_scatter_tensor(result, x, async_op=True), result
        case _:
            result = torch.empty_like(x)
            return dist.all_to_all_single(result, x, async_op=True), result


def caught(program: Callable[[nn.Module, Steps], Any], model: nn.Module, steps: Steps) -> Any:
    """What a program raises is what came of it: it must raise the same under an adapter."""
    try:
        return program(model, steps)
    except (RuntimeError, AttributeError, ValueError) as error:
        return [type(error).__name__, str(error).splitlines()[0]]


def run(seed: int, kind: str | None = None) -> dict[str, Any]:
    """What came of a program: `both`, and what it was."""
    kind = kind or KINDS[seed % len(KINDS)]
    if kind == "calls":
        found = both(CallsAdapter(), lambda: nn.Linear(1, 1), partial(caught, lambda _, steps: called(seed, steps)))
        return {"name": f"{seed}: calls", **found}
    what = drawn(seed, kind)
    adapter: Any = DdpAdapter() if kind == "ddp" else Fsdp2Adapter()
    program: Callable[[nn.Module, Steps], Any] = partial(trained, what)
    return {"name": f"{seed}: {kind}: {what}", **both(adapter, partial(made, what, kind), partial(caught, program))}
