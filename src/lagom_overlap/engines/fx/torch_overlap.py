"""PyTorch's own overlap scheduler on a traced program: the order that it would issue, as a rewrite of ours.

`torch._inductor.fx_passes.overlap_scheduling` (PyTorch 2.13 to 2.15, a private module) reorders the graph that Inductor
compiles; `config.aten_distributed_optimizations.enable_overlap_scheduling` switches it on. It is given the times that
the plan is made from, buckets nothing, and works on a copy. What it places behind a `wait_tensor` waits for that
collective, as the compiled code does.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final

import torch
from torch import fx

from lagom_overlap.engines.fx.nodes import OP_NAME, is_wait, op_name
from lagom_overlap.errors import BackendError
from lagom_overlap.workload import Iteration
from lagom_overlap.workload.rewrite.steps import Reorder

_MODULE: Final = "torch._inductor.fx_passes.overlap_scheduling"
_FUNCTION: Final = "schedule_overlap_bucketing"
_SETTINGS: Final[Mapping[str, object]] = {
    "collective_bucketing": False,
    "pre_bucketing_fsdp_collectives": False,
    "insert_overlap_deps": False,
    "enable_fusion_regions": False,
    "compute_estimator": "analytical",
    "collective_estimator": "analytical",
}
_ROOFLINE: Final = "estimate_roofline_runtime_ms"
"""Asks the GPU, also where every operator's time is given."""
_LEAST_MS: Final = 1e-6
"""Of views and waits."""


def own_scheduler() -> Callable[..., Any]:
    """The installed PyTorch's scheduler.

    Raises:
        BackendError: if it has none, or one with other arguments.
    """
    try:
        scheduler: Callable[..., Any] = getattr(import_module(_MODULE), _FUNCTION)
    except (ImportError, AttributeError):
        raise BackendError(f"PyTorch {torch.__version__} has no {_MODULE}.{_FUNCTION}") from None
    missing = {*_SETTINGS, "custom_runtime_estimation"} - set(inspect.signature(scheduler).parameters)
    if missing:
        raise BackendError(f"PyTorch {torch.__version__}: its overlap scheduler takes no {min(missing)}")
    return scheduler


def own_order(module: fx.GraphModule, iteration: Iteration, seconds: Mapping[str, float]) -> Reorder:
    """The order in which PyTorch would issue the graph's operators; `seconds` of each alone, by name.

    The operators of the graph must carry their names (`apply.name_operators`).

    Raises:
        BackendError: if PyTorch has no such scheduler, or it fails.
    """
    schedule = own_scheduler()
    copied = copy.deepcopy(module)

    def milliseconds(node: fx.Node, override_size: int | None = None) -> float:
        whole_ms = 1e3 * seconds.get(str(node.meta.get(OP_NAME)), 0.0)
        value = node.meta.get("val")
        if override_size is not None and isinstance(value, torch.Tensor) and value.numel():
            whole_ms *= override_size / (value.numel() * value.element_size())
        return max(whole_ms, _LEAST_MS)

    owner = import_module(_MODULE)
    stock = getattr(owner, _ROOFLINE, None)
    try:
        if stock is not None:
            setattr(owner, _ROOFLINE, milliseconds)
        copied = schedule(copied, custom_runtime_estimation=milliseconds, **_SETTINGS)
    except Exception as error:
        raise BackendError(f"PyTorch's overlap scheduler failed: {type(error).__name__}: {error}") from None
    finally:
        if stock is not None:
            setattr(owner, _ROOFLINE, stock)
    order, waits, waited = [], [], list[str]()
    comms = {op.name for op in iteration.comms}
    for node in copied.graph.nodes:
        if is_wait(node) and OP_NAME in node.all_input_nodes[0].meta:
            waited.append(op_name(node.all_input_nodes[0]))
        elif OP_NAME in node.meta:
            name = op_name(node)
            order.append(name)
            if name not in comms:  # collectives run on streams of their own
                waits += [(name, comm) for comm in waited]
                waited.clear()
    missing = {op.name for op in iteration.ops} - set(order)
    if missing:
        raise BackendError(f"PyTorch's overlap scheduler lost {min(missing)!r} of the graph")
    return Reorder(tuple(order), waits=tuple(waits))
