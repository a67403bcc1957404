"""Triton kernels of Inductor: what they move, what flex attention computes, no search that could find nothing.

No operator of PyTorch announces them; by name and grid they could cost anything. Their tensors are at hand where
Inductor launches them, and their source says what is read and written (`kernel_source.py`). What they write and do not
read is zero afterwards, as nobody computed it. A kernel that the job brought itself is taken by its arguments
(`triton_kernels.py`).

Flex attention takes its flops: per score two products forward, and seven backward, whose two halves compute scores and
their gradients each for themselves (torch/_inductor/kernel/flex/templates/flex_backwards.py.jinja of PyTorch 2.15 has
three products for the queries' gradient and four for those of keys and values). Which blocks a mask leaves out lies in
tensors that nobody computed: as many queries as keys are taken for a causal mask, which leaves half.

Autotuning compiles variants of a kernel and keeps the fastest; coordinate descent (`coordinate_descent_tuning`, which
torchtitan sets with `max_autotune`) compiles dozens. What their tiles cost is not modelled, so that variants would tell
it nothing, and each rank compiles its own. So Inductor's first choice is taken: for products that is cuBLAS's, for
its own kernels the first of the tiles that it would try.
"""

import re
from collections.abc import Mapping, Sequence
from math import prod
from types import ModuleType
from typing import Any, Final, Protocol

from lagom_emulate.kernel_source import KernelSource, Residency
from lagom_emulate.triton_kernels import floor_of
from lagom_overlap.after_import import after_import

_HEURISTICS: Final = "torch._inductor.runtime.triton_heuristics"
_CHOICES: Final = "torch._inductor.select_algorithm"
_FLEX: Final = re.compile(r"triton_tem_.*flex_attention(?P<backward>_backward)?")
_TEMPLATE: Final = re.compile(r"triton_tem_")
"""Products and attention: their loops read tiles again and again, which their source does not count."""
_OWN: Final = "triton_"
"""How the names begin of what Inductor has written, not the job."""
_PRODUCTS: Final = {False: 2, True: 7}
_sources: dict[int, tuple[Any, KernelSource | None]] = {}
"""By kernel, which is kept so that its number is not given again."""


class InductorHook(Protocol):
    """What this module asks of the hook."""

    def describe_kernel(self, fields: Mapping[str, Any] | None) -> None:
        """What the kernel is that this thread launches next; None ends it."""

    def clear(self, tensor: Any) -> None:
        """Leaves zeros in a tensor of the GPU that a kernel should have written."""


def watch(described: InductorHook) -> None:
    """Once the job has loaded Inductor: each launch of a kernel that is known is described."""
    after_import(_HEURISTICS, lambda module: _wrap(module, described))
    after_import(_CHOICES, _take_first)


def _take_first(module: ModuleType) -> None:
    add = getattr(module, "add_preprocessing_fn", None)
    if add is not None:
        add(lambda choices: choices[:1])


def _wrap(module: ModuleType, hook: InductorHook) -> None:
    kernel = getattr(module, "CachingAutotuner", None)
    run = getattr(kernel, "run", None)
    if kernel is None or run is None:
        return  # a release that names them otherwise: its kernels are priced by name

    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        fields = described(self, args)
        if fields is None:
            return run(self, *args, **kwargs)
        hook.describe_kernel(fields)
        try:
            return run(self, *args, **kwargs)
        finally:
            hook.describe_kernel(None)
            _clear(self, args, hook)

    start = kernel.__init__

    def with_one(self: Any, fn: Any, triton_meta: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        start(self, fn, triton_meta, configs[:1], *args, **kwargs)

    kernel.run, kernel.__init__ = told, with_one
    if hasattr(kernel, "coordinate_descent_tuning"):
        kernel.coordinate_descent_tuning = lambda self, launcher, *_, **__: launcher


def described(kernel: Any, args: Sequence[Any]) -> dict[str, Any] | None:
    """What a launch moves and computes; None where nothing says it."""
    name = _name_of(kernel)
    found = fields_of(name, args)
    if found is not None:
        return found
    try:
        if _TEMPLATE.match(name) or not name.startswith(_OWN):
            return floor_of(name, args)
        source = _source_of(kernel)
        if source is None:
            return None
        num_bytes = source.bytes_moved(args, _residency(kernel))
    except Exception:  # a source of another shape: by name and grid
        return None
    return {"op": name, "bytes": num_bytes} | ({"access": "rearrange"} if source.turns else {})


def _name_of(kernel: Any) -> str:
    named = (getattr(kernel, "inductor_meta", None) or {}).get("kernel_name")
    return str(named or getattr(getattr(kernel, "fn", None), "__name__", ""))


def _source_of(kernel: Any) -> KernelSource | None:
    source = _sources.get(id(kernel))
    if source is None:
        text = getattr(getattr(kernel, "fn", None), "src", None)
        source = _sources[id(kernel)] = (kernel, KernelSource.read(text) if isinstance(text, str) else None)
    return source[1]


def _clear(kernel: Any, args: Sequence[Any], hook: InductorHook) -> None:
    name = _name_of(kernel)
    if _TEMPLATE.match(name) or not name.startswith(_OWN):
        return
    try:
        source = _source_of(kernel)
        for tensor in source.overwritten(args) if source is not None else ():
            hook.clear(tensor)
    except Exception:  # what was there stays
        return


def _residency(kernel: Any) -> Residency | None:
    """How many rows of a reduction are under way at once, and what the L2 cache holds."""
    properties = getattr(kernel, "device_props", None)
    launchers = getattr(kernel, "launchers", None)
    if properties is None or not launchers:
        return None
    import torch  # noqa: PLC0415 - the job's

    config = launchers[0].config
    blocks = max(1, (properties.max_threads_per_multi_processor or 2048) // (32 * config.num_warps))
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return Residency(properties.multi_processor_count * blocks * config.kwargs.get("XBLOCK", 1), l2_bytes)


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
    return {
        "op": "flex_attention_backward" if is_backward else "flex_attention",
        "bytes": num_bytes,
        "flops": flops,
        "head_dim": width,
        "reach": 2 * share * num_keys,
    }
