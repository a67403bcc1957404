"""Plain calls of random programs, waited for in every way that torch offers."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from programs import Program
from torch import distributed as dist
from unequal import unlike_call

OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def drawn_numbers(seed: int, *shape: int) -> torch.Tensor:
    """The same on every device."""
    drawn = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return drawn.to(torch.get_default_device())


class Calls:
    """The calls of a program, in groups of all ranks and of some."""

    def __init__(self, program: Program) -> None:
        self._features = program.all("call")
        self._program = program
        ranks = program.get("subgroup")
        self._some: Any = (
            dist.group.WORLD
            if ranks is None
            else dist.new_group([r for r in ranks if r < dist.get_world_size()] or [0])
        )

    def run(self, step: int, when: str) -> list[Any]:
        """Makes those of that place in the step, waits for them in another order, and gives what they gave.

        "before" the model is called, "within" (between its forward and its backward), "after" the update.
        """
        found: list[Any] = []
        waiting: list[Callable[[], Any]] = []
        results: list[torch.Tensor] = []
        for number, (kind, dtype, size, group, op, wait, at) in enumerate(self._features):
            pg = self._some if group == "some" else dist.group.WORLD
            if at != when or dist.get_rank(pg) < 0:
                continue
            x = drawn_numbers(100 * step + number + 7 * dist.get_rank(), size)
            x = (x * 8).to(getattr(torch, dtype))
            try:
                work, outputs, extra = one_call(kind, x, pg, OPS[op], is_async=wait != "now")
            except (RuntimeError, ValueError, TypeError) as error:
                found.append([kind, words(error)])
                continue
            found += extra
            if wait == "dropped":  # nobody can know when it is over, but over it has to be
                continue
            results += outputs
            if work is not None:
                waiting.append(lambda work=work, wait=wait: waited(work, wait))  # type: ignore[misc]
        for wait_for in waiting[1::2] + waiting[0::2]:
            try:
                found.append(wait_for())
            except (RuntimeError, ValueError) as error:
                found.append(words(error))
        for feature in self._program.all("unlike") if when == "before" else ():
            results += unlike_call(*feature, step)
        coalesced = self._program.get("coalesce")
        if coalesced is not None and when == "after":
            ours = [torch.full((2304,), float(number + dist.get_rank())) for number in range(coalesced[0])]
            with dist._coalescing_manager():
                for one in ours:
                    dist.all_reduce(one)
            results += ours
        for (what,) in self._program.all("wrong") if when == "after" else ():
            try:
                wrong(what)
            except (RuntimeError, ValueError, TypeError) as error:
                found.append(words(error))
        return [*found, *results]


def words(error: BaseException) -> list[str]:
    """An exception as it is compared: its type, and the first line of what it says."""
    return [type(error).__name__, (str(error).splitlines() or [""])[0]]


def waited(work: Any, how: str) -> Any:
    """What a handle says when it is over; the last wait is for all of them, or the memory is reused too early."""
    found: Any = None
    match how:
        case "future" | "then" | "result":
            try:
                if how == "result":
                    work.wait()  # before that torch's own handle refuses, unless it happens to be over
                    found = [item.clone() for item in work.result()]
                elif how == "future":
                    found = [item.clone() for item in work.get_future().wait()]
                else:
                    found = work.get_future().then(lambda done: done.value()[0].sum().item()).wait()
            except (RuntimeError, ValueError) as error:
                found = words(error)[0]
        case "asked":
            work.is_completed()  # gloo's own answer is a matter of luck
        case "timeout":
            work.wait(timedelta(seconds=30))
    work.wait()
    return found


def one_call(
    kind: str, x: torch.Tensor, group: Any, op: Any, *, is_async: bool
) -> tuple[Any, list[torch.Tensor], list[Any]]:
    """(handle, results, what else came of it)"""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    match kind:
        case "all_reduce":
            return dist.all_reduce(x, op=op, group=group, async_op=is_async), [x], []
        case "all_gather":
            out = x.new_empty(x.numel() * n)
            return dist.all_gather_into_tensor(out, x, group=group, async_op=is_async), [out], []
        case "reduce_scatter":
            whole = x.repeat(n)
            out = torch.empty_like(x)
            return dist.reduce_scatter_tensor(out, whole, op=op, group=group, async_op=is_async), [out], []
        case "all_to_all":
            whole = x.repeat(n).view(n, -1)
            out = torch.empty_like(whole)
            return dist.all_to_all_single(out, whole, group=group, async_op=is_async), [out], []
        case "gather in place" | "gather overlapping" | "scatter in place" | "exchange overlapping":
            return overlapping_call(kind, x, group, op, is_async=is_async)
        case "uneven":
            counts = [[(i + 2 * j) % 3 for j in range(n)] for i in range(n)]
            leaving, arriving = counts[rank], [row[rank] for row in counts]
            source = x[:1].repeat(sum(leaving))
            out = x.new_empty(sum(arriving))
            return dist.all_to_all_single(out, source, arriving, leaving, group=group, async_op=is_async), [out], []
        case "broadcast":
            first = dist.get_process_group_ranks(group)[0]
            return dist.broadcast(x, first, group=group, async_op=is_async), [x], []
        case "list":
            outs = [torch.empty_like(x) for _ in range(n)]
            return dist.all_gather(outs, x, group=group, async_op=is_async), outs, []
        case "object":
            every: list[Any] = [None] * n
            dist.all_gather_object(every, {"rank": rank, "first": x[:1].tolist()}, group=group)
            some = [every[-1]]
            dist.broadcast_object_list(some, dist.get_process_group_ranks(group)[0], group=group)
            return None, [], [str(every), str(some)]
        case _:
            if n == 1:
                return None, [x], []
            ranks = dist.get_process_group_ranks(group)
            out = torch.empty_like(x)
            posts = [
                dist.P2POp(dist.isend, x, ranks[(rank + 1) % n], group),
                dist.P2POp(dist.irecv, out, ranks[(rank - 1) % n], group),
            ]
            for work in dist.batch_isend_irecv(posts):
                work.wait()
            return None, [out], []


def overlapping_call(
    kind: str, x: torch.Tensor, group: Any, op: Any, *, is_async: bool
) -> tuple[Any, list[torch.Tensor], list[Any]]:
    """The same of a call whose input and output share memory."""
    n, rank, size = dist.get_world_size(group), dist.get_rank(group), x.numel()
    whole = x.repeat(2 * n)
    match kind:
        case "gather in place" | "gather overlapping":
            whole = whole[: n * size]
            part = rank if kind == "gather in place" else (rank + 1) % n
            source = whole[part * size : (part + 1) * size]
            return dist.all_gather_into_tensor(whole, source, group=group, async_op=is_async), [whole], []
        case "scatter in place":
            whole = whole[: n * size]
            out = whole[rank * size : (rank + 1) * size]
            return dist.reduce_scatter_tensor(out, whole, op=op, group=group, async_op=is_async), [out], []
        case _:
            source, out = whole[: n * size], whole[size : (n + 1) * size]
            return dist.all_to_all_single(out, source, group=group, async_op=is_async), [out], []


def wrong(what: str) -> None:
    """What torch refuses."""
    n = dist.get_world_size()
    x = torch.ones(2304)
    match what:
        case "shape":
            dist.all_to_all_single(torch.empty(n + 1, 2 * n + 1), torch.empty(n + 1, 2 * n))
        case "type":
            dist.all_reduce("x")  # type: ignore[arg-type]
        case "keyword":
            dist.all_reduce(x, color="red")  # type: ignore[call-arg]
        case "gather":
            dist.all_gather_into_tensor(torch.empty(2304 * n + 1), x)
        case _:
            dist.reduce_scatter_tensor(torch.empty(2304), torch.ones(2304 * n + 1))
