"""All ranks of a box in one process: a communicator's end on each GPU, each with its stream; results checked."""

import ctypes
import time
from collections.abc import Sequence
from typing import Final

import torch

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.engines.nccl.library import NcclLibrary, UniqueId, make_config
from lagom_overlap.errors import BackendError

HANG_S: Final = 20.0
"""No call of a self-test takes this long: one that has not ended by then hangs. Chosen, not measured."""
_LARGEST_SUM: Final = 256
"""Integers up to this are exact in bf16, whatever the order of the sum."""
_POLL_S: Final = 20e-6
"""Pause between two looks at a running call. Chosen, not measured."""

Buffers = tuple[list[torch.Tensor], list[torch.Tensor]]
"""What each rank sends, and where it receives."""


class LocalRanks:
    """A communicator over all ranks of this process; ranks of one GPU follow each other."""

    def __init__(
        self, library: NcclLibrary, *, num_gpus: int, ranks_per_gpu: int = 1, num_channels: int | None = None
    ) -> None:
        """`num_channels` None: as many as NCCL, or a tuner, chooses.

        Raises:
            BackendError: if NCCL cannot connect them.
        """
        self.devices = [torch.device("cuda", gpu) for gpu in range(num_gpus) for _ in range(ranks_per_gpu)]
        self.streams = [torch.cuda.Stream(device, priority=-1) for device in self.devices]  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._library = library
        self._comms = self._connect(num_channels)

    def enqueue(self, kind: CollectiveKind, buffers: Buffers) -> None:
        """One call on every rank, in one group, where NCCL knows each rank's device; does not wait."""
        self._library.call("ncclGroupStart")
        for stream, comm, sent, received in zip(self.streams, self._comms, *buffers, strict=True):
            self._library.collective(
                kind=kind,
                source=sent.data_ptr(),
                target=received.data_ptr(),
                count=min(sent.numel(), received.numel()),
                comm=comm,
                stream=stream.cuda_stream,
            )
        self._library.call("ncclGroupEnd")

    def finish(self) -> None:
        """Returns when every rank's stream is idle; a signal is taken meanwhile.

        Raises:
            BackendError: after `HANG_S` seconds.
        """
        await_events([stream.record_event() for stream in self.streams])

    def close(self) -> None:
        """Destroys every end."""
        for device in dict.fromkeys(self.devices):
            torch.cuda.synchronize(device)
        for comm in self._comms:
            self._library.call("ncclCommDestroy", comm)
        self._comms = []

    def _connect(self, num_channels: int | None) -> list[ctypes.c_void_p]:
        unique, num_ranks = UniqueId(), len(self.devices)
        self._library.call("ncclGetUniqueId", ctypes.byref(unique))
        comms = [ctypes.c_void_p() for _ in self.devices]
        configs = [make_config(self._library.code, num_channels) for _ in self.devices]
        self._library.call("ncclGroupStart")
        for rank, (device, comm, config) in enumerate(zip(self.devices, comms, configs, strict=True)):
            with torch.cuda.device(device):
                self._library.call(
                    "ncclCommInitRankConfig", ctypes.byref(comm), num_ranks, unique, rank, ctypes.byref(config)
                )
        self._library.call("ncclGroupEnd")
        return comms


def await_events(events: Sequence[torch.cuda.Event]) -> None:
    """Returns when all have happened; a signal is taken meanwhile.

    Raises:
        BackendError: after `HANG_S` seconds.
    """
    give_up = time.monotonic() + HANG_S
    while not all(event.query() for event in events):  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if time.monotonic() > give_up:
            raise BackendError(
                f"a collective has not ended after {HANG_S:.0f} s: its ranks' blocks may not all be resident"
            )
        time.sleep(_POLL_S)


def make_buffers(kind: CollectiveKind, num_bytes: int, devices: Sequence[torch.device]) -> Buffers:
    """Buffers for a whole tensor of `num_bytes` in bf16, filled with small whole numbers."""
    num_ranks = len(devices)
    num_elements = max(1, num_bytes // 2 // num_ranks) * num_ranks
    part = num_elements // num_ranks
    bound = max(1, min(8, _LARGEST_SUM // num_ranks))
    num_sent = part if kind.traits.takes_part else num_elements
    num_received = part if kind.traits.leaves_part else num_elements
    sent = [torch.randint(-bound, bound + 1, (num_sent,), device=device).bfloat16() for device in devices]
    received = [torch.empty(num_received, dtype=torch.bfloat16, device=device) for device in devices]
    return sent, received


def poison(buffers: Buffers) -> None:
    """So that an element that nobody wrote is found; done when it returns."""
    for tensor in buffers[1]:
        tensor.fill_(float("nan"))
    for device in {tensor.device for tensor in buffers[1]}:
        torch.cuda.synchronize(device)


def wrong_rank(kind: CollectiveKind, buffers: Buffers) -> int | None:
    """The first rank whose result differs from the reference in any element; None: all are right."""
    sent, received = buffers
    there = sent[0].device
    if kind is CollectiveKind.ALL_GATHER:
        expected = torch.cat([tensor.to(there) for tensor in sent])
    elif kind is CollectiveKind.BROADCAST:
        expected = sent[0]
    else:
        expected = sent[0].clone()
        for tensor in sent[1:]:
            expected += tensor.to(there)
    for rank, got in enumerate(received):
        mine = expected
        if kind is CollectiveKind.REDUCE_SCATTER:
            mine = expected[rank * got.numel() : (rank + 1) * got.numel()]
        elif kind is CollectiveKind.REDUCE and rank > 0:
            break  # only the root has a result
        if not torch.equal(got, mine.to(got.device)):
            return rank
    return None
