"""What jobs call of `torch.distributed` by its full name."""

import contextlib
import gc
import re
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
from adapter_programs import bits, both
from torch import distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed import _functional_collectives as funcol
from torch.fx.experimental.proxy_tensor import make_fx

from lagom_overlap.online.adapters.calls import CallsAdapter


def calls(program: Callable[[int], Any]) -> dict[str, Any]:
    """The program's outcome in every step."""
    return both(CallsAdapter(), lambda: nn.Linear(1, 1), lambda _, steps: [bits(program(step)) for step in steps])


def raised(call: Callable[[], Any]) -> list[str]:
    """What a wrong call raises."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, re.sub(r"\d\d:\d\d:\d\d\.\d+", "", str(error).splitlines()[0])]  # gloo says when
    return ["nothing"]


def numbers(step: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(step * 10 + dist.get_rank()))


MESSAGE = 3 << 12


def every_function(step: int) -> list[Any]:
    n = dist.get_world_size()
    x = numbers(step, MESSAGE)
    gathered, scattered, mean, exchanged = torch.empty(MESSAGE * n), *(torch.empty(MESSAGE // n) for _ in "ab"), x * 0
    dist.all_gather_into_tensor(gathered, x)
    dist.reduce_scatter_tensor(scattered, x)
    work = dist.reduce_scatter_tensor(output=mean, input=x, op=dist.ReduceOp.AVG, async_op=True)
    dist.all_to_all_single(exchanged, input=x)
    work.wait()
    dist.all_reduce(tensor=x)
    return [t[:: MESSAGE // 16] for t in (gathered, scattered, mean, exchanged, x)]


def handles(step: int) -> list[Any]:
    """All that a handle offers."""
    n = dist.get_world_size()
    x, y = numbers(step, MESSAGE), torch.empty(MESSAGE)
    gathered = torch.empty(MESSAGE * n)
    exchange = dist.all_to_all_single(y, x, async_op=True)
    gather = dist.all_gather_into_tensor(gathered, x, async_op=True)
    futures = [exchange.get_future(), gather.get_future().then(lambda done: [t * 2 for t in done.value()])]
    first = futures[0].wait()[0]
    doubled = futures[1].wait()
    assert exchange.wait(timedelta(seconds=50))
    gather.wait()
    total = dist.all_reduce(x, async_op=True)
    total.wait()
    results = [exchange.result()[0], *gather.result(), total.result()[0], first, *doubled]
    scattered = dist.reduce_scatter_tensor(torch.empty(MESSAGE // n), x, async_op=True)
    no_future = [raised(scattered.get_future), raised(scattered.result)]
    scattered.wait()
    flags = [work.is_success() for work in (exchange, gather, total, scattered)]
    return [*(t[:: MESSAGE // 16] for t in results), no_future, flags, x is total.result()[0]]


@cache
def pair() -> Any:
    """A group of ranks 0 and 1, made by all ranks."""
    return dist.new_group([0, 1])


def other_groups(step: int) -> list[Any]:
    """A group that this rank may not be in."""
    x = numbers(step, MESSAGE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says so
        found = [dist.all_reduce(x, group=pair()), dist.all_reduce(x, group=pair(), async_op=True)]
    if found[1] is not None:
        found[1].wait()
    return [x[:: MESSAGE // 16], found[0] is None, found[1] is None]


def coalesced(step: int) -> list[Any]:
    n = dist.get_world_size()
    x, y = numbers(step, MESSAGE), numbers(step + 1, MESSAGE)
    with dist._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(y)
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(x)
        dist.all_reduce(y, async_op=True)
    manager.wait()
    dist.all_reduce(x)
    return [t[:: MESSAGE // 16] for t in (x, y)] + [n]


def unusual(step: int) -> list[Any]:
    """Legal calls that the engine does not run."""
    n = dist.get_world_size()
    x = numbers(step, MESSAGE)
    most, whole, wide = x.clone(), x.int(), x.double()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(whole)
    dist.all_reduce(wide)
    leaf = nn.Parameter(x.clone())
    dist.all_reduce(leaf.data)
    with torch.no_grad():
        dist.all_reduce(leaf)
    scattered = nn.Parameter(torch.empty(MESSAGE // n))
    with torch.no_grad():
        dist.reduce_scatter_tensor(scattered, x, op=dist.ReduceOp.AVG)
    with torch.inference_mode():
        inferred = x.clone()
        dist.all_reduce(inferred)
        parts = torch.empty(MESSAGE // n)
        dist.reduce_scatter_tensor(parts, x.clone(), op=dist.ReduceOp.AVG)
    sizes = [MESSAGE // n + (1 if rank == dist.get_rank() else 0) for rank in range(n)]
    moved = torch.empty(sum(sizes))
    dist.all_to_all_single(moved, torch.cat([x, x[:1]]), sizes, sizes)
    return [t[:: MESSAGE // 16] for t in (most, whole, wide, leaf, scattered, inferred, parts, moved)]


def elsewhere(step: int) -> list[Any]:
    """What is not contiguous, by a job whose default device is another one."""
    n = dist.get_world_size()
    x = numbers(step, MESSAGE)
    reduced, gathered, leaf = x.clone().view(n, -1).t(), torch.empty(MESSAGE, n).t(), torch.zeros(MESSAGE // n)
    scattered, exchanged = torch.empty(2, MESSAGE // 2 // n).t(), torch.empty(MESSAGE // n, n).t()
    with torch.device("meta"):
        dist.all_reduce(reduced)
        dist.all_gather_into_tensor(gathered, x.view(1, -1))
        dist.reduce_scatter_tensor(scattered, x.view(-1, 2))
        dist.reduce_scatter_tensor(leaf, x.clone().requires_grad_())
        dist.all_to_all_single(exchanged, x.view(n, -1))
    return [t.reshape(-1)[:: MESSAGE // 16] for t in (reduced, gathered, scattered, leaf, exchanged)]


def scattered_by_columns(step: int) -> list[Any]:
    """The order in which torch adds ranks' numbers goes by where they lie, of transposed ones, too."""
    n = dist.get_world_size()
    tall = numbers(step, MESSAGE).view(2, -1).t()
    with_gaps = torch.zeros(len(tall), 4)[:, ::2].copy_(tall)
    out = [torch.empty(len(tall) // n, 2) for _ in "ab"]
    dist.reduce_scatter_tensor(out[0], tall)
    dist.reduce_scatter_tensor(out[1], with_gaps)
    return out


def arrived_late(step: int) -> list[Any]:
    """What functional collectives give is waited for where it is used."""
    n, world = dist.get_world_size(), dist.group.WORLD
    late, out = [funcol.all_reduce(numbers(step, size), "sum", world) for size in (MESSAGE, MESSAGE * n)]
    scattered, exchanged = torch.empty(MESSAGE // n), torch.empty(MESSAGE)
    dist.all_gather_into_tensor(out, late)
    dist.reduce_scatter_tensor(scattered, late)
    dist.all_to_all_single(exchanged, late)
    dist.all_reduce(late)
    return [type(late).__name__, *(t[:: MESSAGE // 16] + 0 for t in (late, out, scattered, exchanged))]


def without_numbers(step: int) -> list[Any]:
    """What torch issues no call for, or traces, counts on no rank: rank 0 alone does it, between two calls of all."""
    n = dist.get_world_size()
    found: list[Any] = []
    if dist.get_rank() == 0:
        fake = FakeTensorMode()
        with fake:
            x, y, z = torch.ones(MESSAGE), torch.ones(MESSAGE * n), torch.ones(MESSAGE // n)
        for inside in (fake, contextlib.nullcontext()):
            with inside:
                dist.all_reduce(x)
                dist.all_gather_into_tensor(y, x)
                dist.reduce_scatter_tensor(z, x)
                work = dist.all_to_all_single(x.clone(), x, async_op=True)
                work.wait()
                found.append(type(x).__name__)
    gathered = torch.empty(MESSAGE * n)
    dist.all_gather_into_tensor(gathered, numbers(step, MESSAGE))
    return [*found, gathered[:: MESSAGE // 16]]


def traced(step: int) -> list[Any]:
    def twice(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x * 2

    graph = make_fx(twice)(numbers(step, MESSAGE))
    pure = torch.func.functionalize(twice)(numbers(step, MESSAGE))
    x = numbers(step, MESSAGE)
    dist.all_reduce(x)
    return [graph.code.count("allreduce"), *(t[:: MESSAGE // 16] for t in (pure, x))]


def with_autograd(step: int) -> list[Any]:
    """What autograd makes of a call: what it refuses to go back through, what requires a gradient then, and which."""
    n = dist.get_world_size()
    found: list[Any] = []
    # Such reduce-scatters are not measured, so a setting reaches one only where others of its size are made without.
    dist.reduce_scatter_tensor(torch.empty(MESSAGE // n), numbers(step, MESSAGE))
    for kind in (None, dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        for is_output, is_leaf in ((False, True), (False, False), (True, False), (True, True)):
            x = numbers(step, MESSAGE).requires_grad_(not is_output)
            out = torch.ones(MESSAGE if kind is None else MESSAGE // n).requires_grad_(is_output)
            source, target = (x, out) if is_leaf else (x * 1, out * 1)
            saved = (torch.ones_like(target, requires_grad=True) * target).sum()
            with contextlib.nullcontext() if step >= 5 or kind is None else torch.no_grad():
                if kind is None:
                    call = partial(dist.all_to_all_single, target, source)
                else:
                    call = partial(dist.reduce_scatter_tensor, target, source, op=kind)
                found.append(raised(call))
            found += [target.requires_grad, type(target.grad_fn).__name__, target.detach()[:: MESSAGE // 16]]
            found += [raised(saved.backward), raised(target.sum().backward), x.grad]
    return found


def dropped(step: int) -> list[Any]:
    """Nobody keeps the handle of a call, which ends all the same."""
    out, turned = torch.zeros(MESSAGE), torch.zeros(MESSAGE // 96, 96).t()
    for target in (out, turned):
        dist.all_to_all_single(target, numbers(step, MESSAGE).view(target.shape), async_op=True)
        gc.collect()
        dist.barrier()
        give_up = time.monotonic() + 60
        while not target.all() and time.monotonic() < give_up:
            time.sleep(0.001)
    return [out, turned]


def overlapping(step: int) -> list[Any]:
    """Output and input share memory, in place or not. (An all-to-all of torch's is a matter of luck then.)"""
    n, rank = dist.get_world_size(), dist.get_rank()
    size = 4 * MESSAGE
    found = []
    for begin in (rank, (rank + 1) % n, 0.5):
        part = slice(int(begin * size), int((begin + 1) * size))
        whole = torch.cat([numbers(step + place, size) for place in range(n)])
        dist.all_gather_into_tensor(whole, whole[part])
        found.append(whole)
        whole = torch.cat([numbers(step + place, size) for place in range(n)])
        dist.reduce_scatter_tensor(whole[part], whole)
        found.append(whole[part])
    return [tensor.clone() for tensor in found]


def wrong(step: int) -> list[Any]:
    """What torch refuses is refused in its words."""
    n = dist.get_world_size()
    x = numbers(step, MESSAGE)
    return [
        raised(lambda: dist.all_reduce("x")),  # type: ignore[arg-type]
        raised(dist.all_reduce),
        raised(lambda: dist.all_reduce(x, color="red")),
        raised(lambda: dist.all_gather_into_tensor(torch.empty(MESSAGE * n - 1), x)),
        raised(lambda: dist.reduce_scatter_tensor(torch.empty(MESSAGE), x)),
        raised(lambda: dist.all_to_all_single(torch.empty(MESSAGE - 1), x[1:])),
        raised(lambda: dist.all_to_all_single(torch.empty(n + 1, 2 * n), torch.empty(n + 1, 2 * n))),
    ]


def compiled(step: int) -> list[Any]:
    @torch.compile(backend="eager", fullgraph=True)
    def twice(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x * 2

    return [twice(numbers(step, MESSAGE))[:: MESSAGE // 16]]


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "every function": lambda: calls(every_function),
    "handles": lambda: calls(handles),
    "groups that a rank is not in": lambda: calls(other_groups),
    "coalesced": lambda: calls(coalesced),
    "what the engine does not run": lambda: calls(unusual),
    "under another default device": lambda: calls(elsewhere),
    "transposed": lambda: calls(scattered_by_columns),
    "handles that are dropped": lambda: calls(dropped),
    "memory that overlaps": lambda: calls(overlapping),
    "what arrives late": lambda: calls(arrived_late),
    "what holds no numbers": lambda: calls(without_numbers),
    "traced": lambda: calls(traced),
    "with autograd": lambda: calls(with_autograd),
    "what torch refuses": lambda: calls(wrong),
    "compiled": lambda: calls(compiled),
}
