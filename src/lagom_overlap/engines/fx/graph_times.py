"""How long the operators of a graph take alone, on the ranks that will run it: what a compiler's pass plans with.

Each distinct call (operator, shapes, settings) runs by itself on tensors of its own, so that no more memory is needed
than one operator takes. Numbers are zeros where they may be indices, else random. Calls that fail on such tensors have
no time. All ranks must time the same graph: collectives are real.

What a compiler fuses is timed apart here: chains of element-wise operators are shorter once compiled.
"""

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from time import perf_counter
from typing import Any, Final

import torch
from torch import fx

from lagom_overlap.engines.fx.nodes import is_collective
from lagom_overlap.workload import Iteration

REPEATS: Final = 5
"""Runs of each operator, of which the median counts. Chosen, not measured."""
_log = logging.getLogger(__name__)


def has_fixed_shapes(graph: fx.Graph) -> bool:
    """Whether every tensor of the graph has a size that is known; a plan is for one size."""
    values = (node.meta.get("val") for node in graph.nodes)
    return not any(isinstance(value, torch.SymInt) or _is_open(value) for value in values)


def _is_open(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not all(isinstance(size, int) for size in value.shape)


def times_alone(graph: fx.Graph, iteration: Iteration, *, repeats: int = REPEATS) -> dict[str, float]:
    """Median seconds of the iteration's operators, which are nodes of the graph by the same names.

    They run on a thread of their own: one that compiles has modes of PyTorch entered, under which a collective hangs.
    """
    with ThreadPoolExecutor(1) as apart:
        return apart.submit(_times_here, graph, iteration, repeats).result()


def _times_here(graph: fx.Graph, iteration: Iteration, repeats: int) -> dict[str, float]:
    nodes = {node.name: node for node in graph.nodes}
    known: dict[object, float | None] = {}
    times_s: dict[str, float] = {}
    with torch.no_grad():
        for op in iteration.ops:
            node = nodes[op.name]
            call = _call_of(node)
            if call not in known:
                known[call] = _seconds(node, repeats)
            seconds = known[call]
            if seconds is not None:
                times_s[op.name] = seconds
    return times_s


def _call_of(node: fx.Node) -> str:
    """Equal for nodes that do the same work."""

    def shape(used: fx.Node) -> Any:
        value = used.meta["val"]
        if not isinstance(value, torch.Tensor):
            return value
        return f"<{tuple(value.shape)} {value.stride()} {value.dtype} {value.device}>"

    return f"{node.target} {fx.map_arg((node.args, node.kwargs), shape)}"


def _seconds(node: fx.Node, repeats: int) -> float | None:
    try:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: _example(used.meta["val"]))
        times = [_once(node, args, kwargs) for _ in range(repeats + 1)][1:]
    except Exception as error:
        if is_collective(node):
            raise  # other ranks wait for it
        _log.debug("no time for %s alone: %s", node.target, error)
        return None
    return median(times)


def _once(node: fx.Node, args: Any, kwargs: Mapping[str, Any]) -> float:
    device = getattr(node.meta["val"], "device", None)
    _wait_for(device)
    start = perf_counter()
    value = node.target(*args, **kwargs)  # type: ignore[operator]  # an operator
    if is_collective(node):
        for tensor in value if isinstance(value, list | tuple) else [value]:
            torch.ops._c10d_functional.wait_tensor.default(tensor)
    _wait_for(device)
    return max(perf_counter() - start, 1e-9)


def _wait_for(device: torch.device | None) -> None:
    """Returns when a device has done what it was given; a CPU has."""
    if device is not None and device.type != "cpu":
        torch.accelerator.synchronize(device)


def _example(value: Any) -> Any:
    """A tensor like the fake one."""
    if isinstance(value, list | tuple):
        return type(value)(_example(one) for one in value)
    if not isinstance(value, torch.Tensor):
        return value
    example = torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype, device=value.device)
    return example.uniform_(-1, 1) if value.dtype.is_floating_point and value.element_size() > 1 else example.zero_()
