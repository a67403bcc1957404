"""CUDA graphs that the job captures: no collective in one may hang on what the tuner tries.

NCCL asks its tuner while a graph is captured, and a replay keeps the answer for good. A rank that captures under one
trial and another that does so under the next would replay different algorithms, and hang; one setting that was only
tried would stay in the graph for the rest of the job. So within a capture every collective keeps NCCL's own choice, on
all ranks alike whenever each of them captures, and no later switch touches it. Once collectives were captured, the
profiler cannot tell what they overlap (all kernels of a replay have one correlation), so nothing is measured any more.
Settings that are adopted reach a graph in a new job: `lagom run --config` decides by one table from the start.

Other threads may communicate outside of a capture, where other ranks are not capturing: such a call must be decided
like any other, or ranks would run it under different settings. NCCL tells a tuner neither the stream nor whether it
captures, and the collectives of a captured backward come from autograd's threads, not from the one that captures. But
it tells our profiler plug-in, call by call and before it asks the tuner (`csrc/lagom_capture.h`). Where it does not
(before NCCL 2.28, another profiler, non-blocking communicators), all calls during a capture keep NCCL's choice: a job
whose other threads communicate meanwhile must then capture before it is tuned.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, Final

import torch

_log = logging.getLogger(__name__)


class GraphCaptures:
    """The captures of one class of graphs; `watch` before the job makes any."""

    def __init__(self, graph: type[Any]) -> None:
        self._graph = graph
        self._originals: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        self._wrappers: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        self._num_open = 0
        self._holds_collectives = False

    def watch(self, begin: Callable[[], None], end: Callable[[], bool]) -> None:
        """Calls `begin` before a capture and `end`, which says whether collectives were issued, after it."""
        self.unwatch()
        capture_begin, capture_end = self._graph.capture_begin, self._graph.capture_end

        def ended() -> None:
            self._num_open -= 1
            if self._num_open == 0 and end() and not self._holds_collectives:
                self._holds_collectives = True
                _log.warning(
                    "a CUDA graph with collectives was captured: they keep NCCL's own choice for good; a job that is "
                    "to be tuned runs without graphs (torchtitan: --training.disable-cuda-graphs)"
                )

        @functools.wraps(capture_begin)
        def begin_capture(graph: Any, *args: Any, **kwargs: Any) -> None:
            self._num_open += 1
            if self._num_open == 1:
                begin()
            try:
                capture_begin(graph, *args, **kwargs)
            except BaseException:
                ended()
                raise

        @functools.wraps(capture_end)
        def end_capture(graph: Any, *args: Any, **kwargs: Any) -> None:
            try:
                capture_end(graph, *args, **kwargs)
            finally:
                ended()

        self._originals, self._wrappers = (capture_begin, capture_end), (begin_capture, end_capture)
        self._graph.capture_begin, self._graph.capture_end = self._wrappers

    def unwatch(self) -> None:
        """Puts the methods back, unless somebody has wrapped them once more; safe to call twice."""
        if self._originals and (self._graph.capture_begin, self._graph.capture_end) == self._wrappers:
            self._graph.capture_begin, self._graph.capture_end = self._originals
        self._originals = self._wrappers = None
        self._holds_collectives = False  # a capture that is still open will end by its own wrapper

    def why_not(self) -> str:
        """Why a step cannot be measured; empty if it can."""
        return "a CUDA graph holds collectives, which replay NCCL's own choice" if self._holds_collectives else ""


GRAPH_CAPTURES: Final = GraphCaptures(torch.cuda.CUDAGraph)
