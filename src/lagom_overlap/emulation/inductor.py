"""Triton kernels that Inductor has made: what flex attention computes, and no search that could find nothing.

A compiled flex attention is a Triton kernel, which no operator of PyTorch announces; by name and grid it would cost
microseconds. Its tensors are at hand where Inductor launches it, so its flops are told there: per score two products
forward, and seven backward, whose two halves compute scores and their gradients each for themselves
(torch/_inductor/kernel/flex/templates/flex_backwards.py.jinja of PyTorch 2.15 has three products for the queries'
gradient and four for those of keys and values). Which blocks a mask leaves out lies in tensors that nobody computed: as
many queries as keys are taken for a causal mask, which leaves half.

Autotuning compiles variants of a kernel and keeps the fastest; coordinate descent (`coordinate_descent_tuning`, which
torchtitan sets with `max_autotune`) compiles dozens. Variants that are priced by name and grid tell it nothing, and
each rank compiles its own, so Inductor's first choice is taken: for products that is cuBLAS's.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import ModuleType
from typing import Any, Final

from lagom_overlap.after_import import after_import

_HEURISTICS: Final = "torch._inductor.runtime.triton_heuristics"
_CHOICES: Final = "torch._inductor.select_algorithm"
_FLEX: Final = re.compile(r"triton_tem_.*flex_attention(?P<backward>_backward)?")
_PRODUCTS: Final = {False: 2, True: 7}


def watch(describe: Callable[[Mapping[str, Any] | None], None]) -> None:
    """Once the job has loaded Inductor: `describe` hears of each kernel that is known, and of None behind it."""
    after_import(_HEURISTICS, lambda module: _wrap(module, describe))
    after_import(_CHOICES, _take_first)


def _take_first(module: ModuleType) -> None:
    add = getattr(module, "add_preprocessing_fn", None)
    if add is not None:
        add(lambda choices: choices[:1])


def _wrap(module: ModuleType, describe: Callable[[Mapping[str, Any] | None], None]) -> None:
    kernel = getattr(module, "CachingAutotuner", None)
    run = getattr(kernel, "run", None)
    if kernel is None or run is None:
        return  # a release that names them otherwise: its kernels are priced by name

    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = str((getattr(self, "inductor_meta", None) or {}).get("kernel_name", ""))
        fields = fields_of(name, args)
        if fields is None:
            return run(self, *args, **kwargs)
        describe(fields)
        try:
            return run(self, *args, **kwargs)
        finally:
            describe(None)

    kernel.run = told
    if hasattr(kernel, "coordinate_descent_tuning"):
        kernel.coordinate_descent_tuning = lambda self, launcher, *_, **__: launcher


def fields_of(name: str, args: Sequence[Any]) -> dict[str, Any] | None:
    """Bytes and flops of a kernel by its name and arguments; None where neither says them."""
    found = _FLEX.match(name)
    shapes = [tuple(getattr(each, "shape", ())) for each in args[:3]]
    if found is None or len(shapes) < 3 or any(len(shape) != 4 for shape in shapes):
        return None
    is_backward = found["backward"] is not None
    (batch, heads, num_queries, width), (_, _, num_keys, _), _ = shapes
    share = 0.5 if num_queries == num_keys else 1.0
    scores = batch * heads * num_queries * num_keys * share
    # Queries, keys, values and the result; backward, these and their gradients.
    moved = sum(prod(shape) for shape in shapes) + prod(shapes[0])
    num_bytes = moved * args[0].element_size() * (2 if is_backward else 1)
    flops = int(2 * width * scores * _PRODUCTS[is_backward])
    return {"op": "flex_attention_backward" if is_backward else "flex_attention", "bytes": num_bytes, "flops": flops}
