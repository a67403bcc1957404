"""The GPU that a rank's job computes on, which need not be CUDA's current one, and the engine that links it to others.

A job may bind its process group to a device (`init_process_group(device_id=...)`; PyTorch 2.15's engine does so by
itself) and name that device in its own code, without ever making it the current one. Under srun, which shows every task
all GPUs of the machine, the current device of all ranks is then GPU 0: what is measured there is idle, or a
neighbour's. The same holds in threads of ours, whose current device is GPU 0 whatever the job's thread has set.
"""

import weakref
from contextlib import suppress
from math import inf
from typing import Any, Final

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from lagom_overlap.nccl_plugin.loaded import loaded_nccl
from lagom_overlap.nccl_plugin.support import NcclVersion

SHARE_OF_TIMEOUT: Final = 1 / 8
"""Of what the job's groups give a call, for one wait of ours: another rank may stand in such a call meanwhile, and at
most five waits follow each other (three connections to the store, a question, and the word that this rank is off)."""

_trained: list[weakref.ref[nn.Module]] = []
"""The model of this process's job, once it is known; one, or none."""


def note_model(model: nn.Module) -> None:
    """Says what the job trains: it computes where the model's parameters are."""
    _trained[:] = [weakref.ref(model)]


def job_device() -> torch.device | None:
    """The GPU that the default process group is bound to, else the model's, else the current one; None without CUDA."""
    if not torch.cuda.is_available():
        return None
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    for find in (lambda: getattr(world, "bound_device_id", None), _device_of_model):  # the model's is a walk over it
        device = find()
        if isinstance(device, torch.device) and device.type == "cuda" and device.index is not None:
            return device
    return torch.device("cuda", torch.cuda.current_device())


def _device_of_model() -> torch.device | None:
    """Where the parameters are; None if that is not one device, or nobody has named the model."""
    model = _trained[0]() if _trained else None
    devices = {parameter.device for parameter in model.parameters()} if model is not None else set()
    return devices.pop() if len(devices) == 1 else None


def backend_of(group: dist.ProcessGroup, device_type: str) -> str:
    """What runs a group's collectives of that device's tensors (`"gloo"`, `"nccl"`); empty where nothing does.

    `get_backend` is of no use: it says "undefined" of a group made without naming a backend.
    """
    try:
        return str(_unwrapped(group._get_backend(torch.device(device_type))).name()).lower()
    except RuntimeError:  # the group has none for this device
        return ""


def longest_wait_s() -> float:
    """The longest that this rank may wait for others because of us, by the timeouts of the process groups it is in."""
    timeouts_s = [inf]
    group: Any  # the stubs leave out a group's devices
    for group in list(c10d._world.pg_map):
        with suppress(Exception):  # a group that is being destroyed, an engine without options, a missing name
            if group.size() > 1:
                options = [_unwrapped(group._get_backend(device)).options for device in group._device_types]
                timeouts_s += [seconds for each in options if (seconds := each._timeout.total_seconds()) > 0]
    return min(timeouts_s) * SHARE_OF_TIMEOUT


def collectives_issued(backend: str, device_type: str) -> dict[str, int]:
    """How many collectives this rank has issued on each process group of that backend, as far as torch counts them.

    gloo counts sends and receives with them. By a group's own name, which is the same on all of its ranks.
    """
    issued: dict[str, int] = {}
    for group in list(c10d._world.pg_map):
        with suppress(Exception):  # a group that is being destroyed
            if group.size() > 1 and backend in backend_of(group, device_type):
                number = issued_on(group)
                issued |= {} if number is None else {group.group_name: number}
    return issued


def issued_on(group: Any) -> int | None:  # PyTorch declares the setter of the number alone
    """How many collectives this rank has issued on a process group; None where torch does not count them."""
    try:
        number: int = group._get_sequence_number_for_group()
    except Exception:  # a group that is being destroyed, an engine that does not count, a missing name
        return None
    return number


def engine_in_use() -> str:
    """What makes the communicators of the default process group, and so decides in which order: engine and release.

    PyTorch 2.15 has two engines behind `nccl`, one of which makes communicators at once and the other at first use.
    """
    group: Any = dist.distributed_c10d._get_default_group()
    kinds = [torch.device(name) for name in ("cuda", "cpu") if name in str(dist.get_backend_config(group))]
    names = set()
    with suppress(RuntimeError):  # a class of groups that somebody wrote in Python has no engine
        names = {type(_unwrapped(group._get_backend(kind))).__name__ for kind in kinds[:1]}
    release = ".".join(torch.__version__.split(".")[:2])
    return f"{names.pop() if names else dist.get_backend(group)} of torch {release}"


def nccl_in_use() -> NcclVersion | None:
    """The release of NCCL that the default process group uses; None if it uses another backend."""
    if not dist.is_nccl_available() or "nccl" not in str(dist.get_backend_config()).lower():
        return None
    return loaded_nccl() or torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _unwrapped(backend: Any) -> Any:
    """The engine itself, where TORCH_DISTRIBUTED_DEBUG=DETAIL puts a checker in front of it."""
    return getattr(backend, "wrapped_pg", backend)


class DeviceEvent:
    """An event that can be timed, recorded on the current stream of one device (None: of the current one)."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's

    def record(self) -> None:
        """Puts it behind what is queued now."""
        self._event.record(torch.cuda.current_stream(self._device))

    def query(self) -> bool:
        """Whether the device has come to it."""
        return bool(self._event.query())

    def synchronize(self) -> None:
        """Returns when the device has come to it."""
        self._event.synchronize()

    def elapsed_time(self, later: "DeviceEvent") -> float:
        """Milliseconds to a later one."""
        return float(self._event.elapsed_time(later._event))
