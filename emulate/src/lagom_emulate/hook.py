"""What runs in a Python process of an emulated job: it tells the device which operator of PyTorch launches its kernels.

A dispatch mode sees every operator with its tensors; bytes follow from their sizes, flops from PyTorch's own counter.
Products are left to BLAS, which knows their shapes, and operators of libraries that are not emulated to `stand_ins.py`.
Steps are told apart by the optimizer: one begins when an optimizer has worked since the last backward pass. No error of
ours raises into the job. It concerns the operator that it came from: one line for each, and its kernels, priced by
their bytes or their names, are counted for the end.
"""

import atexit
import contextlib
import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from lagom_emulate import inductor, triton_kernels
from lagom_emulate.operator_bytes import bytes_of, wire_bytes_of
from lagom_emulate.operator_flops import Formulas
from lagom_emulate.operator_outputs import Outputs
from lagom_emulate.stand_ins import StandIns
from lagom_emulate.symmetric import SymmetricGroups, SymmetricRanksError, enter_world, groups_of_job
from lagom_emulate.values import COLLECTIVES, Values
from lagom_overlap.after_import import after_import
from lagom_overlap.stderr import write_lines

WITHOUT_CUDA: Final = 2
"""The exit code of a process whose PyTorch cannot use a GPU."""
REFUSAL: Final = "refusal"
"""In the job's folder: why such a process ended."""
_DEVICE: Final = "libcuda.so.1"
_PLAIN: Final = frozenset({"Tensor", "Parameter", "Buffer"})
_WRAPPERS: Final = frozenset({"DTensor", "AsyncCollectiveTensor"})
"""Tensors whose operators run others on plain ones, which come here again."""
PRODUCTS: Final = frozenset({"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "dot", "mv", "addmv"})
"""BLAS's, which tell the device their shapes themselves."""


def arm() -> None:
    """Waits for the job to import torch."""
    enter_world(os.environ)
    after_import("torch", _begin)


def _refuse(why: str) -> None:
    """Leaves the reason to the verb, which says it once for all ranks; says it here if that cannot be."""
    try:
        Path(os.environ["LAGOM_EMULATION_SOCKET"]).with_name(REFUSAL).write_text(why, encoding="utf-8")
    except (KeyError, OSError):
        write_lines(f"lagom emulate: {why}")


def _begin(torch: ModuleType) -> None:
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        # Here, where it is certain and has cost an import, not after hours of training on the CPU.
        _refuse(
            f"{sys.executable} has PyTorch {torch.__version__}, which has no CUDA: give the command a Python with "
            "PyTorch's CUDA build (pip's own on Linux; no GPU is needed)"
        )
        raise SystemExit(WITHOUT_CUDA)
    try:
        device = DriverFunctions(ctypes.CDLL(_DEVICE))
        if os.environ.get("LAGOM_EMULATION_PYTHON_CLOCK") == "virtual":
            _read_virtual_time(device)
        groups = groups_of_job(torch, device)
        values = Values(torch, device, _complain_of_values, lambda: device.mark({"saved": "zeros"}))
        Hook(torch, device, values, groups).start()
    except SymmetricRanksError:
        raise
    except Exception as error:
        _complain(error)


def _complain(error: BaseException, what: str = "operators are") -> None:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    write_lines(f"lagom emulate: {what} not described (process {os.getpid()}): {text}")


def _complain_of_values(operator: str, error: BaseException) -> None:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    write_lines(f"lagom emulate: values of {operator} are not computed (process {os.getpid()}): {text}")


class DriverFunctions:
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
        self._launch = library.lagom_emulation_launch
        self._launch.argtypes, self._launch.restype = [ctypes.c_char_p, ctypes.c_void_p], None
        self._clear = library.lagom_emulation_clear
        self._clear.argtypes, self._clear.restype = [ctypes.c_void_p, ctypes.c_size_t], None
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

    def launch(self, name: str, stream: int) -> None:
        """A kernel by its name, which computes nothing."""
        self._launch(name.encode(), stream)

    def clear(self, address: int, num_bytes: int) -> None:
        """Zeros, which take no page."""
        self._clear(address, num_bytes)

    def name_group(self, num_started: int, ranks: Sequence[int], own: int, peer: int) -> None:
        """The ranks of the communicator that this thread makes next; none: not known."""
        self._group(num_started, len(ranks), (ctypes.c_int * len(ranks))(*ranks), own, peer)

    def refuse(self, text: str) -> None:
        """Ends the job with a line."""
        self._refuse(text.encode())

    def host_ns(self) -> int:
        """This process's virtual clock."""
        return int(self._host_ns())


def _read_virtual_time(device: DriverFunctions) -> None:
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


class _Running(threading.local):
    """The operator that a thread is in."""

    is_counted = False
    """It has flops of its own."""


class Hook:
    """Describes operators and marks steps in one process."""

    def __init__(
        self, torch: Any, device: DriverFunctions, values: Values | None = None, groups: SymmetricGroups | None = None
    ) -> None:
        self._torch, self._device, self._values, self._groups = torch, device, values, groups
        self._has_backward = self._sees_backward = False
        self._main_thread = threading.get_ident()
        self._failed: set[str] = set()
        self._running = _Running()
        outputs = Outputs(torch)
        self._stand_ins = StandIns(torch, device, outputs)
        self._formulas = Formulas(torch, outputs, self._known_on_host)
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
        inductor.watch(self)
        triton_kernels.watch(self)
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
        """The operator, described.

        Raises:
            UnsupportedOperatorError: if it needs a library that is not emulated.
        """
        stand_in = self._stand_ins.call(func, args, kwargs)
        fields = None if stand_in is not None else self._fields(func, args, kwargs)

        def call() -> Any:
            if self._groups is not None and func.namespace in COLLECTIVES:
                return self._groups.call(func, args, kwargs, lambda: func(*args, **kwargs))
            if stand_in is not None:
                return stand_in()
            if fields is not None:
                self._device.describe_next(fields)
            self._running.is_counted = fields is not None and "flops" in fields
            try:
                return func(*args, **kwargs)
            except RuntimeError as error:
                named = self._stand_ins.named(func, error)
                if named is error:
                    raise
                raise named from None
            finally:
                self._running.is_counted = False
                if fields is not None:
                    self._device.describe_next(None)

        return call() if self._values is None else self._values.run(func, args, kwargs, call)

    def describe_kernel(self, fields: Mapping[str, Any] | None) -> None:
        """A Triton kernel that this thread launches next; inside an operator with flops of its own, that one's."""
        if not self._running.is_counted:
            self._device.describe_next(fields)

    def clear(self, tensor: Any) -> None:
        """Leaves zeros in a tensor of the GPU that a kernel should have written."""
        if self._values is not None:
            self._values.clear(tensor)

    def formula(self, target: Any) -> Callable[..., int] | None:
        """A registered formula for flops."""
        return self._formulas.formula(target)

    def _fields(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any] | None:
        namespace, _, name = func._schema.name.partition("::")
        fields: dict[str, Any] = {"op": f"{namespace}::{name}"}
        try:
            # Autograd's threads for devices, or its pass on the main thread (set_multithreading_enabled(False)).
            if threading.get_ident() != self._main_thread or self._torch._C._current_graph_task_id() >= 0:
                self._has_backward = self._sees_backward = True
            if namespace in COLLECTIVES or name in PRODUCTS or func.is_view:
                return None
            num_bytes = bytes_of(self._torch, func, args, kwargs)
            if num_bytes is None:
                return None
            fields["bytes"] = num_bytes
            if wire_bytes := wire_bytes_of(self._torch, func, args, kwargs):
                fields["wire_bytes"] = wire_bytes
            return fields | self._formulas.fields(func, args, kwargs)
        except Exception as error:
            if fields["op"] not in self._failed:
                self._failed.add(fields["op"])
                _complain(error, f"{fields['op']} is")
            return fields | {"uncounted": True}

    def _known_on_host(self, tensor: Any) -> Any:
        return None if self._values is None else self._values.known_on_host(tensor)

    def _after_update(self, *_: Any) -> None:
        """One of several optimizers in a row begins no step of its own: there was no backward pass in between."""
        if self._sees_backward and not self._has_backward:
            return
        self._has_backward = False
        if self._values is not None:
            self._values.progressed()
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
