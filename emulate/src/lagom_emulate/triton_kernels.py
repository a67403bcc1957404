"""Triton kernels of a job's own: what can be read from a launch before it runs.

Grid and block say nothing of what a kernel moves: a program may loop over anything. Its tensors are at hand where
Triton launches it, and each is taken to be read or written once. That is too little for what multiplies, reads again or
searches, so that such a price is marked as a floor, and too much for what reads a few rows of a table. A job that has
registered a formula (`torch.utils.flop_counter.register_flop_formula`, called as PyTorch calls it) has its flops too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Final, Protocol

from lagom_overlap.after_import import after_import

_LAUNCHER: Final = "triton.runtime.jit"


class TritonHook(Protocol):
    """What this module asks of the hook."""

    def describe_kernel(self, fields: Mapping[str, Any] | None) -> None:
        """What the kernel is that this thread launches next; None ends it."""

    def formula(self, target: Any) -> Callable[..., int] | None:
        """A registered formula for flops."""


def watch(described: TritonHook) -> None:
    """Once the job has loaded Triton: each launch is described."""
    after_import(_LAUNCHER, lambda module: _wrap(module, described))


def _wrap(module: ModuleType, described: TritonHook) -> None:
    kernel = getattr(module, "JITFunction", None)
    run = getattr(kernel, "run", None)
    if kernel is None or run is None:
        return  # a release that names them otherwise: its kernels are priced by name

    def told(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        fields = None if warmup else _fields(self, args, kwargs, grid, described)
        if fields is None:
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        described.describe_kernel(fields)
        try:
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        finally:
            described.describe_kernel(None)

    kernel.run = told


def _fields(
    kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any], grid: Any, described: TritonHook
) -> dict[str, Any] | None:
    name = str(getattr(kernel, "__name__", "kernel"))
    fields = floor_of(name, (*args, *kwargs.values()))
    try:
        formula = described.formula(kernel)
        if fields is not None and formula is not None:
            named = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
            wrapped = {"kernel_idx": -1, "constant_args_idx": -1, "grid": [grid], "tma_descriptor_metadata": {}}
            fields["flops"] = int(formula(**wrapped, kwargs=named, out_val=None))
            del fields["floor"]
    except Exception:  # of the job's formula
        return fields
    return fields


def floor_of(name: str, args: Sequence[Any]) -> dict[str, Any] | None:
    """A kernel that touches each tensor once, behind a descriptor of the memory accelerator's too; None without any."""
    sizes = {}
    for tensor in _tensors(args):
        sizes[tensor.data_ptr(), tensor.numel()] = tensor.numel() * tensor.element_size()
    return {"op": name, "bytes": sum(sizes.values()), "floor": True} if sizes else None


def _tensors(args: Sequence[Any]) -> Iterator[Any]:
    for value in args:
        held = getattr(value, "base", None) if type(value).__name__ == "TensorDescriptor" else value
        if hasattr(held, "data_ptr") and hasattr(held, "element_size"):
            yield held
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
