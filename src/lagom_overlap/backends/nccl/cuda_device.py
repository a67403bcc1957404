"""The seam to the GPU: memory, streams, marks in time. The only module of this backend that calls CUDA."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol

import torch

from lagom_overlap.errors import BackendError
from lagom_overlap.nccl_plugin.loaded import loaded_nccl

HEAD_START_CYCLES: Final = 4_000_000
"""What the GPU sleeps at first before a run, while the host queues it: about 2 ms, which is some 40 launches."""

SHARED_GPU_VARIABLE: Final = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL 2.30.3 and later: several ranks on one GPU."""


class DeviceMark(Protocol):
    """A point in a stream's order."""


class DeviceStream(Protocol):
    """An ordered queue of work."""


class Device(Protocol):
    """One rank's device."""

    torch_device: torch.device
    group_backend: str
    description: str

    def new_stream(self) -> DeviceStream:
        """A stream of its own, apart from the default one."""

    def use(self, stream: DeviceStream | None) -> AbstractContextManager[object]:
        """Work issued inside goes to the stream; None: the default one."""

    def mark(self, stream: DeviceStream | None) -> DeviceMark:
        """A mark after what the stream was given so far."""

    def wait(self, stream: DeviceStream | None, mark: DeviceMark) -> None:
        """The stream goes on only after the mark."""

    def head_start(self, factor: int) -> None:
        """Holds the default stream back while the host queues a run: `factor` times the shortest time there is."""

    def is_passed(self, mark: DeviceMark) -> bool:
        """Whether the device has come to a mark."""

    def finish(self) -> None:
        """Returns when the device is idle."""

    def seconds(self, marks: Sequence[DeviceMark]) -> list[float]:
        """Seconds from the first mark to each; the device is idle."""


class CudaDevice:
    """Implements `Device` on one GPU."""

    group_backend = "nccl"

    def __init__(self, local_rank: int) -> None:
        """Takes the GPU; ranks share one only where NCCL was told that they may (NCCL_MULTI_RANK_GPU_ENABLE).

        Raises:
            BackendError: if there is none of that number.
        """
        num = torch.cuda.device_count()
        if local_rank >= num and os.environ.get(SHARED_GPU_VARIABLE) == "1":
            local_rank %= num
        if local_rank >= num:
            raise BackendError(f"local rank {local_rank} needs a GPU of its own, this node has {num}")
        torch.cuda.set_device(local_rank)
        self.torch_device = torch.device("cuda", local_rank)
        name = torch.cuda.get_device_name(self.torch_device)
        version = ".".join(map(str, loaded_nccl() or torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # torch's
        self.description = f"{name}, NCCL {version}, torch {torch.__version__}"

    def new_stream(self) -> DeviceStream:
        """See `Device`."""
        return torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def use(self, stream: DeviceStream | None) -> AbstractContextManager[object]:
        """See `Device`."""
        return torch.cuda.stream(self._stream(stream))

    def mark(self, stream: DeviceStream | None) -> DeviceMark:
        """See `Device`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record(self._stream(stream))
        return event

    def wait(self, stream: DeviceStream | None, mark: DeviceMark) -> None:
        """See `Device`."""
        assert isinstance(mark, torch.cuda.Event), "a mark of this device"
        self._stream(stream).wait_event(mark)

    def head_start(self, factor: int) -> None:
        """See `Device`."""
        torch.cuda._sleep(factor * HEAD_START_CYCLES)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def is_passed(self, mark: DeviceMark) -> bool:
        """See `Device`."""
        assert isinstance(mark, torch.cuda.Event), "a mark of this device"
        return bool(mark.query())  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def finish(self) -> None:
        """See `Device`."""
        torch.cuda.synchronize(self.torch_device)

    def seconds(self, marks: Sequence[DeviceMark]) -> list[float]:
        """See `Device`."""
        events = [mark for mark in marks if isinstance(mark, torch.cuda.Event)]
        return [events[0].elapsed_time(event) * 1e-3 for event in events]  # CUDA counts in milliseconds

    def _stream(self, stream: DeviceStream | None) -> torch.cuda.Stream:
        return stream if isinstance(stream, torch.cuda.Stream) else torch.cuda.current_stream(self.torch_device)
