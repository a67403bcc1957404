"""DDP on gloo: gradient buckets handed to the route by a communication hook.

The hook does what DDP's reducer does without one, to the bit: it scales a bucket as the reducer scales the gradients
that it copies into it, sums over ranks, asynchronously. DDP waits for the buckets inside its C++ reducer, when the
backward pass is over: the route is told so. Settings that scale in a way that a hook cannot see are left alone.
"""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # public, but not marked as re-exported
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.online.adapters.base import missing_names, say_once
from lagom_overlap.online.routes.gloo import GlooRoute

_NEEDED = ("_comm_hooks", "_join_config", "reducer", "process_group")
_C10D: Any = dist
"""Where DDP looks its private functions up, which the stubs leave out."""
_NO_PASS = -1
"""What `_current_graph_task_id` answers outside a backward pass."""

Reduce = Callable[[torch.Tensor, dist.ProcessGroup, bool], Future[torch.Tensor]]
"""Sums a bucket over a group; the flag says that it is the last of its backward pass."""


class DdpHook:
    """The one communication hook of a model, which DDP keeps; what it does can be changed.

    `reduce` None: as without a hook. `theirs`: a hook that the user registered since, which DDP would refuse.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self.reduce: Reduce | None = None
        self.theirs: tuple[Any, Callable[[Any, GradBucket], Future[torch.Tensor]]] | None = None
        self._model = ref(model)  # DDP's reducer keeps the hook: C++ holds no cycle that Python could collect
        self._group: dist.ProcessGroup = model.process_group
        self._divides = bool(getattr(model, "batched_grad_copy", False))

    @property
    def group(self) -> dist.ProcessGroup:
        """Where DDP sums now: a job may give it another group (`_update_process_group`)."""
        if (model := self._model()) is not None:
            self._group = model.process_group
        return self._group

    def __call__(self, _state: None, bucket: GradBucket) -> Future[torch.Tensor]:
        """Called by DDP when a bucket is full."""
        if self.theirs is not None:
            state, hook = self.theirs
            return hook(state, bucket)
        buffer: torch.Tensor = bucket.buffer()
        model, group = self._model(), self.group
        is_joinable = model is not None and model._join_config.enable
        with torch.no_grad():
            is_counted = model is not None and is_joinable and not model._divide_by_initial_world_size
            self._scale(buffer, _num_active(group, buffer.device) if is_counted else group.size())
        # Ranks that have joined make no steps: they would not count the calls as the others do.
        if self.reduce is None or is_joinable or buffer.layout is not torch.strided:
            return first_result(group.allreduce([buffer]), buffer)
        return self.reduce(buffer, group, bucket.is_last())

    def _scale(self, buffer: torch.Tensor, num_ranks: int) -> None:
        """As the reducer: it multiplies in copying, and divides where it does not copy one by one."""
        if self._divides or buffer.layout is not torch.strided:
            buffer.div_(num_ranks)
        else:
            buffer.mul_(1.0 / num_ranks)


def _num_active(group: dist.ProcessGroup, device: torch.device) -> int:
    """The ranks that still have inputs; those that joined contribute zeros, outside of a backward pass."""
    is_active = torch.full((1,), float(torch._C._current_graph_task_id() != _NO_PASS), device=device)
    group.allreduce([is_active]).wait()
    return max(1, int(is_active.item()))


_HOOKS: WeakKeyDictionary[DistributedDataParallel, DdpHook] = WeakKeyDictionary()
"""DDP takes one hook in its life; a later route of the same model uses the same."""


class DdpAdapter:
    """Implements `Adapter`."""

    name = "ddp"

    def fits(self, model: nn.Module) -> bool:
        """See `Adapter`; a model with a hook of the user's own is left alone."""
        return any(not getattr(each, "_comm_hooks", None) for each in ddp_models(model))

    def attach(self, model: nn.Module, route: GlooRoute) -> Callable[[], None]:
        """See `Adapter`; DDP keeps the hook, which does what DDP does without one when the route is closed."""
        if not ddp_models(model):
            say_once(f"DDP is left alone: {type(model).__name__} holds no DistributedDataParallel")

        def reduce(buffer: torch.Tensor, group: dist.ProcessGroup, is_last: bool) -> Future[torch.Tensor]:
            if is_last and route.is_measuring:
                # After the pass, and before the callback in which DDP waits, which it queues when this returns.
                with suppress(RuntimeError):  # in no backward pass
                    torch.autograd.Variable._execution_engine.queue_callback(partial(route.joins, group))
            # Not by dist.all_reduce, which the adapter "calls" may have routed, too.
            return first_result(
                route.call(CollectiveKind.ALL_REDUCE, buffer, buffer, group, lambda: group.allreduce([buffer])), buffer
            )

        return reduce_by(model, reduce)[1]


def ddp_models(model: nn.Module) -> list[DistributedDataParallel]:
    """A model that is DDP, or those that it holds: `torch.compile`'s wrapper, or a container of several."""
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def reduce_by(model: nn.Module, reduce: Reduce) -> tuple[int, Callable[[], None]]:
    """Lets every DDP model in it sum its buckets by `reduce`; (how many do so, what undoes it)."""
    hooks = [hook for each in ddp_models(model) if (hook := hook_of(each)) is not None]
    for hook in hooks:
        hook.reduce = reduce

    def undo() -> None:
        for hook in hooks:
            if hook.reduce is reduce:
                hook.reduce = None

    return len(hooks), undo


def hook_of(model: DistributedDataParallel) -> DdpHook | None:
    """The hook of a DDP model, registered if it is not yet; None, and why in one line, where it is left alone."""
    if model in _HOOKS:
        return _HOOKS[model]
    why_not = _why_not(model)
    if why_not is None:
        hook = DdpHook(model)
        try:
            _C10D._register_comm_hook(model.reducer, None, hook)
        except RuntimeError as error:  # a built-in hook is seen nowhere else
            why_not = str(error).splitlines()[0]
        else:
            _HOOKS[model] = hook
            _let_users_register()
            return hook
    say_once(f"DDP is left alone: {why_not}")
    return None


def _why_not(model: DistributedDataParallel) -> str | None:
    missing = missing_names(model, _NEEDED) + missing_names(_C10D, ("_register_comm_hook",))
    missing += missing_names(torch._C, ("_current_graph_task_id",))
    missing += missing_names(torch.autograd.Variable._execution_engine, ("queue_callback",))
    if missing:
        return f"it has no {missing[0]}"
    if model._comm_hooks:
        return "it has a communication hook"
    if getattr(model, "_use_python_reducer", False) or getattr(model, "_delay_all_reduce_all_params", False):
        return "its gradients do not go through DDP's own reducer"
    if model.gradient_as_bucket_view:
        return "gradient_as_bucket_view: DDP itself scales each gradient, also in a pass that ends early"
    return None


def _let_users_register() -> None:
    """A hook that the user registers after us takes our hook's place, where DDP would raise."""
    original = _C10D._register_comm_hook
    if getattr(original, "is_lagoms", False):
        return
    original_builtin = getattr(_C10D, "_register_builtin_comm_hook", None)

    def ours_of(reducer: Any) -> DdpHook | None:
        ours = next((hook for model, hook in _HOOKS.items() if model.reducer is reducer), None)
        return None if ours is None or ours.theirs is not None else ours  # DDP itself refuses a second one

    def register(reducer: Any, state: Any, hook: Any) -> None:
        ours = ours_of(reducer)
        if ours is None:
            original(reducer, state, hook)
        else:
            ours.theirs = (state, hook)

    def register_builtin(reducer: Any, kind: Any) -> None:
        ours = ours_of(reducer)
        if ours is None or kind not in _BUILTIN:
            original_builtin(reducer, kind)  # type: ignore[misc]  # it is there: it was replaced
        else:
            ours.theirs = (ours.group, _BUILTIN[kind])

    register.is_lagoms = True  # type: ignore[attr-defined]
    _C10D._register_comm_hook = register
    if original_builtin is not None:
        _C10D._register_builtin_comm_hook = register_builtin


_BUILTIN = {
    _C10D.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
    _C10D.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}
"""What DDP's hooks in C++ do, in Python."""


def first_result(work: dist.Work, bucket: torch.Tensor) -> Future[torch.Tensor]:
    """The reduced bucket, when it is there.

    PyTorch 2.15's own NCCL engine has the current stream wait for the collective where its future is asked for, so that
    nothing would hide it: here that is a stream of ours. DDP waits for the future in the end, as always.
    """
    aside = torch.cuda.stream(_stream_aside(bucket.device)) if bucket.is_cuda else nullcontext()
    with aside:
        future: Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


@cache
def _stream_aside(device: torch.device) -> torch.cuda.Stream:
    """A stream on which nothing but such waits lies; one of PyTorch's pool."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types there
