"""DDP on gloo: gradient buckets handed to the route by a communication hook.

The hook does what DDP does without one: divide by the number of ranks, sum over ranks, asynchronously. DDP waits for
the buckets inside its C++ reducer, unseen, so the whole step counts as one window.
"""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # public, but not marked as re-exported
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.runtime.gloo_route import GlooRoute, RunWork


class _Completion:
    """A thread that turns waiting for a sliced call into a future; started with the first one."""

    def __init__(self) -> None:
        self._todo: SimpleQueue[tuple[RunWork, torch.Tensor, Future[torch.Tensor]]] = SimpleQueue()
        self._thread: Thread | None = None

    def future(self, work: RunWork, result: torch.Tensor) -> Future[torch.Tensor]:
        """Holds the result once the call is complete."""
        future: Future[torch.Tensor] = Future()
        self._todo.put((work, result, future))
        if self._thread is None:
            self._thread = Thread(target=self._serve, name="lagom-ddp", daemon=True)
            self._thread.start()
        return future

    def _serve(self) -> None:
        while True:
            work, result, future = self._todo.get()
            try:
                work.complete()
            except Exception as error:  # whoever waits for the bucket is told, or would wait for ever
                future.set_exception(error)  # type: ignore[arg-type]  # the stub wants a result
            else:
                future.set_result(result)
            del work, result, future


class DdpAdapter:
    """Implements `Adapter`."""

    name = "ddp"

    def fits(self, model: nn.Module) -> bool:
        """See `Adapter`; a model with a hook of the user's own is left alone."""
        return isinstance(model, DistributedDataParallel) and not model._comm_hooks

    def attach(self, model: nn.Module, route: GlooRoute) -> Callable[[], None]:
        """See `Adapter`; DDP keeps the hook, which makes the native call once the route is closed."""
        assert isinstance(model, DistributedDataParallel), "asked to attach to something else"
        group, num_ranks = model.process_group, model.process_group.size()
        completion = _Completion()

        def hook(_state: None, bucket: GradBucket) -> Future[torch.Tensor]:
            buffer = bucket.buffer().div_(num_ranks)
            work = route.call(
                CollectiveKind.ALL_REDUCE,
                buffer,
                buffer,
                group,
                lambda: dist.all_reduce(buffer, group=group, async_op=True),
            )
            if isinstance(work, RunWork):
                return completion.future(work, buffer)
            return work.get_future().then(lambda done: done.value()[0])

        model.register_comm_hook(None, hook)
        return lambda: None
