"""Two NCCL ranks on one GPU as an injector: real collectives without a second GPU, channels, chunk and threads pinned.

Needs NCCL 2.30.3 or later (NCCL_MULTI_RANK_GPU_ENABLE). Each rank has its own channels, so a collective with NC
channels holds 2 NC SMs, and both ways of its traffic go through this GPU's memory: the scheduling is real, the link is
not. All blocks must be resident at once, or the collective hangs: `MAX_BLOCKS` is refused beyond, and the caller still
needs a time limit. The ranks, their buffers and the check of results are the package's (`engines/nccl`).
"""

import math
import os
import time
from pathlib import Path

import torch
from standin import Cover

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.cost.measured_surface import InjectorSetting
from lagom_overlap.engines.nccl.library import NcclLibrary
from lagom_overlap.engines.nccl.local_ranks import LocalRanks, await_events, make_buffers, poison, wrong_rank
from lagom_overlap.engines.nccl.plugin_bench import SHARED_GPU
from lagom_overlap.errors import WrongResultError

NUM_RANKS = 2
MAX_BLOCKS = 120
KINDS = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)
SETTLE_S = 300e-6  # from the start event to a kernel that surely holds its SMs
RING_SIMPLE = {
    "NCCL_NO_CACHE": "ALL",  # NCCL_BUFFSIZE and NCCL_NTHREADS are read again by every communicator
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}
"""For a sweep over channels and chunks of one kind of kernel."""


def load_library(path: Path) -> NcclLibrary:
    """The library, in an environment for a sweep of Simple rings on one GPU."""
    os.environ.update(SHARED_GPU | RING_SIMPLE)
    return NcclLibrary(path)


class NcclPair:
    """One collective between two ranks of this GPU, repeated until the victim is covered."""

    def __init__(self, library: NcclLibrary, kind: CollectiveKind, setting: InjectorSetting) -> None:
        if setting.num_blocks > MAX_BLOCKS:
            raise ValueError(f"{setting.num_blocks} blocks cannot all be resident; at most {MAX_BLOCKS}")
        if setting.num_ranks != NUM_RANKS or setting.message_bytes is None:
            raise ValueError("an NCCL setting has two ranks and a message size")
        for variable, value in (("NCCL_BUFFSIZE", setting.chunk_bytes), ("NCCL_NTHREADS", setting.num_threads)):
            os.environ.pop(variable, None)
            if value is not None:  # the chunk of a Simple ring is half of the buffer: 4 of 8 steps
                os.environ[variable] = str(2 * value if variable == "NCCL_BUFFSIZE" else value)
        self._kind, self._message_bytes = kind, setting.message_bytes
        self._setting = setting
        self._ranks = LocalRanks(library, num_gpus=1, ranks_per_gpu=NUM_RANKS, num_channels=setting.num_channels)
        self._buffers = make_buffers(kind, setting.message_bytes, self._ranks.devices)
        torch.cuda.synchronize()
        self._starts = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_RANKS)]
        self._ends = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_RANKS)]
        self.check()
        self.one_s = self._time_one()
        self._num_calls = 1

    def cover(self, duration_s: float) -> None:
        """Repeat the collective often enough to outlast `duration_s` of a victim that runs up to four times slower."""
        self._num_calls = min(400, max(2, math.ceil((4 * duration_s + 2e-3) / self.one_s)))

    def start(self) -> None:
        """Enqueue all repetitions on both ranks' streams and return once the first holds its SMs."""
        self._enqueue(self._num_calls)
        await_events(self._starts)
        time.sleep(SETTLE_S)

    def enqueue_once(self) -> None:
        """Enqueue one call on both ranks; does not wait."""
        self._enqueue(1)

    def stop_after(self, victim_stream: torch.cuda.Stream) -> None:
        """Nothing: a collective ends by itself, and `finish` says whether it ended too early."""

    def finish(self, victim_end: torch.cuda.Event) -> Cover:
        """Wait for both ranks; covered means that both ended after the victim did."""
        await_events(self._ends)
        victim_end.synchronize()
        covered = all(victim_end.elapsed_time(end) > 0 for end in self._ends)
        elapsed_s = max(a.elapsed_time(b) for a, b in zip(self._starts, self._ends, strict=True)) * 1e-3  # ms
        wire_bytes = Collective(self._kind, self._message_bytes, NUM_RANKS).wire_bytes * NUM_RANKS * self._num_calls
        return Cover(covered=covered, bytes_per_s=wire_bytes / elapsed_s, num_held_sms=None)

    def check(self) -> None:
        """Run the collective once into poisoned memory and compare every element with a reference."""
        poison(self._buffers)
        self._enqueue(1)
        await_events(self._ends)
        if (rank := wrong_rank(self._kind, self._buffers)) is not None:
            raise WrongResultError(f"{self._kind} gave a wrong result on rank {rank} with {self._setting}")

    def close(self) -> None:
        """Destroy both communicators."""
        self._ranks.close()

    def _enqueue(self, num_calls: int) -> None:
        for stream, event in zip(self._ranks.streams, self._starts, strict=True):
            event.record(stream)
        for _ in range(num_calls):
            self._ranks.enqueue(self._kind, self._buffers)
        for stream, event in zip(self._ranks.streams, self._ends, strict=True):
            event.record(stream)

    def _time_one(self) -> float:
        self._enqueue(3)
        await_events(self._ends)
        self._enqueue(5)
        await_events(self._ends)
        return self._starts[0].elapsed_time(self._ends[0]) * 1e-3 / 5  # ms, five calls
