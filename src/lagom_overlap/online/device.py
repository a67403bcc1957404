"""The GPU that a rank's job computes on, which need not be CUDA's current one, and the engine that links it to others.

A job may bind its process group to a device (`init_process_group(device_id=...)`; PyTorch 2.15's engine does so by
itself) and name that device in its own code, without ever making it the current one. Under srun, which shows every task
all GPUs of the machine, the current device of all ranks is then GPU 0: what is measured there is idle, or a
neighbour's.
"""

from typing import Any

import torch
from torch import distributed as dist


def job_device() -> torch.device | None:
    """The GPU that the default process group is bound to, else the current one; None where there is no CUDA."""
    if not torch.cuda.is_available():
        return None
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    bound = getattr(world, "bound_device_id", None)
    if isinstance(bound, torch.device) and bound.type == "cuda" and bound.index is not None:
        return bound
    return torch.device("cuda", torch.cuda.current_device())


def engine_in_use() -> str:
    """What makes the communicators of the default process group, and so decides in which order: engine and release.

    PyTorch 2.15 has two engines behind `nccl`, one of which makes communicators at once and the other at first use.
    """
    group: Any = dist.distributed_c10d._get_default_group()
    kinds = [torch.device(name) for name in ("cuda", "cpu") if name in str(dist.get_backend_config(group))]
    names = {type(_unwrapped(group._get_backend(kind))).__name__ for kind in kinds[:1]}
    release = ".".join(torch.__version__.split(".")[:2])
    return f"{names.pop() if names else dist.get_backend(group)} of torch {release}"


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

    def synchronize(self) -> None:
        """Returns when the device has come to it."""
        self._event.synchronize()

    def elapsed_time(self, later: "DeviceEvent") -> float:
        """Milliseconds to a later one."""
        return float(self._event.elapsed_time(later._event))
