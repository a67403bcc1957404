"""What runs in a Python process of an emulated job: it tells the device which operator of PyTorch launches its kernels.

A dispatch mode sees every operator with its tensors; bytes follow from their sizes, flops from PyTorch's own counter.
Products are left to BLAS, which knows their shapes. Steps are told apart by the optimizer: one begins when an optimizer
has worked since the last backward pass. Nothing here raises into the job: an error of ours is one line, and kernels are
priced by their names from then on.
"""

import atexit
import contextlib
import ctypes
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Final

from lagom_overlap.after_import import after_import
from lagom_overlap.emulation import inductor
from lagom_overlap.emulation.symmetric import SymmetricGroups, SymmetricRanksError, enter_world, groups_of_job
from lagom_overlap.emulation.values import COLLECTIVES, Values
from lagom_overlap.stderr import write_lines

WITHOUT_CUDA: Final = 2
"""The exit code of a process whose PyTorch cannot use a GPU."""
_DEVICE: Final = "libcuda.so.1"
_READS_NOTHING: Final = frozenset(
    {
        "copy_",
        "fill_",
        "zero_",
        "normal_",
        "uniform_",
        "random_",
        "arange",
        "bernoulli_",
        "_foreach_copy_",
        "_foreach_zero_",
    }
)
"""In-place operators that do not read what they write."""
_GATHERS: Final = frozenset({"embedding", "index", "index_select", "gather", "take"})
"""They read only what they take out."""
_REDUCES: Final = frozenset(
    {"sum", "mean", "amax", "amin", "argmax", "max", "min", "norm", "linalg_vector_norm", "any"}
)
_SOFTMAX_READS: Final = {
    "_softmax": 3,
    "_log_softmax": 3,
    "_softmax_backward_data": 2,
    "_log_softmax_backward_data": 2,
}
"""How often their kernels read a row of the first argument that does not fit into shared memory (`SoftMax.cu`)."""
_SHARED_BYTES: Final = 48 << 10
_PLAIN: Final = frozenset({"Tensor", "Parameter", "Buffer"})
_WRAPPERS: Final = frozenset({"DTensor", "AsyncCollectiveTensor"})
"""Tensors whose operators run others on plain ones, which come here again."""
PRODUCTS: Final = frozenset({"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "dot", "mv", "addmv"})
"""BLAS's, which tell the device their shapes themselves."""


def arm() -> None:
    """Waits for the job to import torch."""
    enter_world(os.environ)
    after_import("torch", _begin)


def _begin(torch: ModuleType) -> None:
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        # Here, where it is certain and has cost an import, not after hours of training on the CPU.
        write_lines(
            f"lagom emulate: {sys.executable} has PyTorch {torch.__version__}, which has no CUDA: "
            "give the command a Python with PyTorch's CUDA build"
        )
        raise SystemExit(WITHOUT_CUDA)
    try:
        device = Device(ctypes.CDLL(_DEVICE))
        if os.environ.get("LAGOM_EMULATION_PYTHON_CLOCK") == "virtual":
            _read_virtual_time(device)
        groups = groups_of_job(torch, device)
        values = Values(torch, device, _complain_of_values, lambda: device.mark({"saved": "zeros"}))
        Hook(torch, device, values, groups).start()
    except SymmetricRanksError:
        raise
    except Exception as error:
        _complain(error)


def _complain(error: BaseException) -> None:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    write_lines(f"lagom emulate: operators are not described (process {os.getpid()}): {text}")


def _complain_of_values(error: BaseException) -> None:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    write_lines(f"lagom emulate: values are not computed (process {os.getpid()}): {text}")


class Device:
    """The emulated driver's own functions."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._describe = library.lagom_emulation_describe_next
        self._describe.argtypes, self._describe.restype = [ctypes.c_char_p], None
        self._mark = library.lagom_emulation_mark
        self._mark.argtypes, self._mark.restype = [ctypes.c_char_p], None
        self._inexact = library.lagom_emulation_inexact_launches
        self._inexact.argtypes, self._inexact.restype = [], ctypes.c_uint64
        self._settle = library.lagom_emulation_settle
        self._settle.argtypes, self._settle.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
        self._count = library.lagom_emulation_count
        self._count.argtypes, self._count.restype = [ctypes.c_int, ctypes.c_uint64], None
        self._host_ns = library.lagom_emulation_host_ns
        self._host_ns.argtypes, self._host_ns.restype = [], ctypes.c_uint64

        self._group = library.lagom_emulation_group
        self._group.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int]
        self._group.restype = None
        self._refuse = library.lagom_emulation_refuse
        self._refuse.argtypes, self._refuse.restype = [ctypes.c_char_p], None

    def describe_next(self, fields: Mapping[str, Any] | None) -> None:
        """What the kernels are that this thread launches next; None: not known."""
        self._describe(None if fields is None else json.dumps(fields, separators=(",", ":")).encode())

    def mark(self, fields: Mapping[str, Any]) -> None:
        """A moment on the default stream."""
        self._mark(json.dumps(fields, separators=(",", ":")).encode())

    def inexact_launches(self) -> int:
        """Kernels that this thread launched so far and that computed nothing."""
        return int(self._inexact())

    def settle(self, address: int, num_bytes: int, *, may_wait: bool) -> bool:
        """Brings what a collective still owes there; whether nothing is owed any more."""
        return bool(self._settle(address, num_bytes, may_wait))

    @contextlib.contextmanager
    def counted(self, number: int) -> Iterator[None]:
        """What this thread's operators read where their kernels count."""
        self._count(1, number)
        try:
            yield
        finally:
            self._count(0, 0)

    def name_group(self, num_started: int, ranks: Sequence[int], own: int, peer: int) -> None:
        """The ranks of the communicator that this thread makes next; none: not known."""
        self._group(num_started, len(ranks), (ctypes.c_int * len(ranks))(*ranks), own, peer)

    def refuse(self, text: str) -> None:
        """Ends the job with a line."""
        self._refuse(text.encode())

    def host_ns(self) -> int:
        """This process's virtual clock."""
        return int(self._host_ns())


def _read_virtual_time(device: Device) -> None:
    """Clocks that measure read virtual time from here on; `monotonic`, by which programs time out, stays real."""
    wall_ns, host_ns = time.time_ns(), device.host_ns()
    readings: dict[str, Callable[[], float]] = {
        "perf_counter_ns": device.host_ns,
        "perf_counter": lambda: device.host_ns() / 1e9,
        "time_ns": lambda: wall_ns + device.host_ns() - host_ns,
        "time": lambda: (wall_ns + device.host_ns() - host_ns) / 1e9,
    }
    for name, reading in readings.items():
        setattr(time, name, reading)


class Hook:
    """Describes operators and marks steps in one process."""

    def __init__(
        self, torch: Any, device: Device, values: Values | None = None, groups: SymmetricGroups | None = None
    ) -> None:
        self._torch, self._device, self._values, self._groups = torch, device, values, groups
        self._has_backward = self._sees_backward = False
        self._main_thread = threading.get_ident()
        self._is_broken = False
        self._flops: Mapping[Any, Callable[..., int]] | None = None
        self._mode: Any = None

    def start(self) -> None:
        """Enters the mode for the rest of this thread and of the autograd threads that it starts."""
        from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: PLC0415 - torch is the job's

        # cuDNN is no stand-in of ours: flash attention and PyTorch's own convolutions take its place.
        self._torch.backends.cudnn.enabled = False
        self._torch.backends.cuda.enable_cudnn_sdp(False)
        # Kept: PyTorch 2.10 does not hold a mode that it takes off for a while, as printing a tensor does.
        self._mode = _mode_class(self)()
        self._mode.__enter__()
        register_optimizer_step_post_hook(self._after_update)
        self._count_replays(self._torch.cuda.CUDAGraph)
        self._print_from_host(self._torch._tensor_str)
        inductor.watch(self._device.describe_next)
        atexit.register(self._at_exit, os.getpid())

    def _count_replays(self, graph_type: Any) -> None:
        """A replayed graph runs no operator of PyTorch; a step that is replayed has its backward pass in the graph."""
        replay = graph_type.replay

        def replayed(graph: Any) -> None:
            self._has_backward = self._sees_backward = True
            replay(graph)

        graph_type.replay = replayed

    def _print_from_host(self, printing: Any) -> None:
        """PyTorch prints with all modes off, so that a GPU's operators would give it nothing, and sizes by chance."""
        original = printing._tensor_str

        def on_host(tensor: Any, indent: int) -> str:
            is_plain = type(tensor).__name__ in _PLAIN and tensor.is_cuda
            return str(original(tensor.detach().cpu() if is_plain else tensor, indent))

        printing._tensor_str = on_host

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The operator, described."""
        fields = None if self._is_broken else self._fields(func, args, kwargs)

        def call() -> Any:
            if self._groups is not None and func.namespace in COLLECTIVES:
                return self._groups.call(func, args, kwargs, lambda: func(*args, **kwargs))
            if fields is None:
                return func(*args, **kwargs)
            self._device.describe_next(fields)
            try:
                return func(*args, **kwargs)
            finally:
                self._device.describe_next(None)

        return call() if self._values is None else self._values.run(func, args, kwargs, call)

    def _fields(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any] | None:
        try:
            # Autograd's threads for devices, or its pass on the main thread (set_multithreading_enabled(False)).
            if threading.get_ident() != self._main_thread or self._torch._C._current_graph_task_id() >= 0:
                self._has_backward = self._sees_backward = True
            namespace, _, name = func._schema.name.partition("::")
            if namespace in COLLECTIVES or name in PRODUCTS or func.is_view:
                return None
            num_bytes = bytes_of(self._torch, func, args, kwargs)
            if num_bytes is None:
                return None
            fields: dict[str, Any] = {"op": f"{namespace}::{name}", "bytes": num_bytes}
            count = self._counters.get(func._overloadpacket)
            if count is not None:
                counted = _with_all_heads(self._torch, args) if "attention" in name else args
                # PyTorch's counter takes attention in full; a causal kernel skips half of it.
                share = 0.5 if _is_causal(func, args, kwargs) else 1.0
                fields["flops"] = int(share * count(*counted, **kwargs, out_val=None))
                if "attention" in name:
                    fields |= _attention_sizes(func, args, kwargs, share)
            return fields
        except Exception as error:
            self._is_broken = True
            _complain(error)
            return None

    @property
    def _counters(self) -> Mapping[Any, Callable[..., int]]:
        if self._flops is None:
            from torch.utils.flop_counter import flop_registry  # noqa: PLC0415 - slow to import, and torch is the job's

            self._flops = flop_registry
        return self._flops

    def _after_update(self, *_: Any) -> None:
        """One of several optimizers in a row begins no step of its own: there was no backward pass in between."""
        if self._sees_backward and not self._has_backward:
            return
        self._has_backward = False
        self._device.mark({"step": "begin"})

    def _at_exit(self, pid: int) -> None:
        if os.getpid() != pid:
            return
        try:
            if self._torch.cuda.is_initialized():
                self._device.mark({"peak_bytes": int(self._torch.cuda.max_memory_allocated())})
        except Exception as error:
            _complain(error)


def _mode_class(hook: Hook) -> type:
    from torch._ops import HigherOrderOperator  # noqa: PLC0415 - torch is the job's
    from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC0415 - torch is the job's

    class Described(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types there
        """Sees every operator on plain tensors; what a subclass makes of its operators comes here again.

        The operators that a higher-order one runs (flex attention, DTensor's random ones) do not come here: their
        kernels are priced by name.
        """

        supports_higher_order_operators = True

        @classmethod
        def is_infra_mode(cls) -> bool:
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if isinstance(func, HigherOrderOperator):
                return func(*args, **(kwargs or {}))
            if any(each.__name__ in _WRAPPERS for each in types):
                return NotImplemented
            if any(each.__name__ not in _PLAIN for each in types):
                return func(*args, **(kwargs or {}))  # fake tensors among them, which launch nothing
            return hook.run(func, args, kwargs or {})

    return Described


def _with_all_heads(torch: Any, args: Sequence[Any]) -> list[Any]:
    """Attention's arguments for PyTorch's counter, where queries share keys: shapes with as many heads everywhere.

    Up to PyTorch 2.10 it refuses others.
    """
    tensors = [each for each in args if isinstance(each, torch.Tensor) and each.dim() == 4]
    heads = max((each.shape[1] for each in tensors), default=0)
    if all(each.shape[1] == heads for each in tensors):
        return list(args)
    return [
        torch.Size((each.shape[0], heads, *each.shape[2:])) if any(each is one for one in tensors) else each
        for each in args
    ]


def _attention_sizes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], share: float) -> dict[str, float]:
    """What the rate of an attention depends on: a head's columns, and how far its queries reach (`Attention.reach`)."""
    values = _by_name(func, args, kwargs)
    query, key = values.get("query"), values.get("key")
    if query is None or key is None or query.dim() != 4 or not key.numel():
        return {}
    keys = key.shape[2] if "scaled_dot_product" in func._schema.name else key.shape[1]
    return {"head_dim": query.shape[-1], "reach": 2 * share * keys}


def _is_causal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return bool(_by_name(func, args, kwargs).get("is_causal"))


def _by_name(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def bytes_of(torch: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Bytes that an operator reads and writes on the GPU; None where it has nothing there."""
    name = func._schema.name.partition("::")[2]
    read = written = largest = 0
    on_gpu = False
    declared = {argument.name: argument for argument in func._schema.arguments}
    values = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    values |= kwargs
    for key, value in values.items():
        argument = declared.get(key)
        alias = None if argument is None else argument.alias_info
        is_written = alias is not None and alias.is_write
        for tensor in _tensors(torch, value):
            if not tensor.is_cuda:
                continue
            on_gpu = True
            size = tensor.numel() * tensor.element_size()
            largest = max(largest, size)
            written += size if is_written else 0
            is_output = is_written and argument is not None and argument.is_out
            read += 0 if is_output or (is_written and name in _READS_NOTHING) else size
    device = kwargs.get("device")
    if not on_gpu and (device is None or torch.device(device).type != "cuda"):
        return None
    if name == "all_gather_copy_in":  # FSDP2's: the shards go into the rank's own part of the whole buffer
        return int(2 * sum(tensor.numel() * tensor.element_size() for tensor in _tensors(torch, args[0])))
    if name in ("nll_loss_forward", "nll_loss_backward"):  # one element of a row; backward's zeros are a memset's
        scores, targets = (values[key] for key in ("self", "target"))
        return int(targets.numel() * (scores.element_size() + targets.element_size()))
    if name in _SOFTMAX_READS:
        read += (_SOFTMAX_READS[name] - 1) * _read_again(args[0])
    if name == "index_put_":
        return _put(torch, args)
    if not on_gpu or name == "_to_copy":
        written = _made(torch, args, kwargs, largest)
    elif name in _GATHERS:
        read = written = _gathered(torch, name, args)
    elif not written and name not in _REDUCES:
        written = read if name == "cat" else largest
    return read + written


def _read_again(rows: Any) -> int:
    """Bytes of rows that a softmax reads more than once, along the last dimension."""
    is_long = rows.dim() and rows.shape[-1] * rows.element_size() >= _SHARED_BYTES
    return int(rows.numel() * rows.element_size()) if is_long else 0


def _put(torch: Any, args: Sequence[Any]) -> int:
    """Bytes of the values and indices that are read, and of the elements that are written there."""
    table, indices, values = args[:3]
    places = list(_tensors(torch, indices))
    count = max((place.numel() for place in places), default=0)
    num_dims = sum(place.dim() if place.dtype is torch.bool else 1 for place in places)
    read = sum(each.numel() * each.element_size() for each in (*places, values))
    return int(read + count * math.prod(table.shape[num_dims:]) * table.element_size())


def _tensors(torch: Any, value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            if isinstance(each, torch.Tensor):
                yield each


def _made(torch: Any, args: Sequence[Any], kwargs: Mapping[str, Any], largest: int) -> int:
    """Bytes of a new tensor: of the sizes given, or of another type than the one that is copied."""
    dtype = kwargs.get("dtype")
    first = args[0] if args else None
    if isinstance(first, torch.Tensor):
        return int(first.numel() * (dtype.itemsize if dtype is not None else first.element_size()))
    if isinstance(first, (list, tuple)) and all(isinstance(size, int) for size in first):
        count = 1
        for size in first:
            count *= size
        return int(count * (dtype.itemsize if dtype is not None else 4))
    return largest


def _gathered(torch: Any, name: str, args: Sequence[Any]) -> int:
    """Bytes that a gathering operator takes out of its first argument."""
    table = args[0]
    indices = [tensor for value in args[1:] for tensor in _tensors(torch, value)]
    count = max((tensor.numel() for tensor in indices), default=0)
    if name == "gather":
        return int(count * table.element_size())
    row = table.numel() // max(1, table.shape[0]) if table.dim() else 1
    return int(count * row * table.element_size())
