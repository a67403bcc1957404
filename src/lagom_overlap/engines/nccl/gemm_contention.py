"""A GEMM during collectives by channels: the contention surface of this box, with the columns of `measured_surface`.

Solo and overlapped batches alternate. The collective repeats until it outlasts the GEMMs; a point whose collective
ended earlier is marked as not covered.
"""

import math
import time
from typing import Final

import torch

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig
from lagom_overlap.cost.measured_surface import InjectorSetting, Point, TimeSpread
from lagom_overlap.engines.nccl.cases import divisible
from lagom_overlap.engines.nccl.local_ranks import await_events
from lagom_overlap.engines.nccl.plugin_bench import PluginBench
from lagom_overlap.units import MIB, MS, US

# The setup of the surface was chosen, not measured; every row of its output states it.
SHAPE: Final = 4096
VICTIM: Final = f"gemm_cublas_{SHAPE}x{SHAPE}x{SHAPE}"
MESSAGE_BYTES: Final = 256 * MIB
"""A collective long enough to cover the launches."""
NUM_LAUNCHES: Final = 8
"""Products in a row, timed together."""
NUM_REPEATS: Final = 5
"""Timings of a setting, for their median."""
SETTLE_S: Final = 300 * US
"""From the start event until the collective's kernel surely holds its SMs."""
_SLOWEST: Final = 4
"""The largest slow-down of the GEMM for which the collectives still cover it."""
_MAX_CALLS: Final = 400
"""Bounds the queue of collectives if one is very short."""


class GemmContention:
    """Implements `ContentionBench`: a bf16 GEMM on the first GPU."""

    def __init__(self, bench: PluginBench) -> None:
        self._bench = bench
        self._device = bench.ranks.devices[0]
        self._here = [place for place, device in enumerate(bench.ranks.devices) if device == self._device]
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]  # as above
        shape = (SHAPE, SHAPE)
        self._a, self._b = (torch.randn(shape, device=self._device, dtype=torch.bfloat16) for _ in range(2))
        self._out = torch.empty_like(self._a)
        torch.cuda.synchronize(self._device)

    def point(self, kind: CollectiveKind, num_channels: int) -> Point:
        """See `ContentionBench`."""
        num_ranks = len(self._bench.ranks.devices)
        num_bytes = divisible(MESSAGE_BYTES, num_ranks)
        self._bench.set(kind, num_bytes, CommConfig(num_channels=num_channels))
        one_s = self._bench.timed_s(kind, num_bytes)
        num_calls = self._num_calls(one_s)
        solo, during, rates, is_covered = [], [], [], True
        for repeat in range(NUM_REPEATS + 1):
            alone_s = self._solo_s()
            slow_s, call_s, covered = self._during(kind, num_bytes, num_calls)
            if repeat:  # the first warms up
                solo.append(alone_s)
                during.append(slow_s)
                rates.append(Collective(kind, num_bytes, num_ranks).wire_bytes * len(self._here) / call_s)
                is_covered = is_covered and covered
        return Point.build(
            "nccl",
            VICTIM,
            InjectorSetting(
                injector=kind, num_channels=num_channels, num_ranks=len(self._here), message_bytes=num_bytes
            ),
            during=TimeSpread.of(during),
            solo=TimeSpread.of(solo),
            covered=is_covered,
            injector_bytes_per_s=sorted(rates)[len(rates) // 2],
            num_repeats=NUM_REPEATS,
            num_launches=NUM_LAUNCHES,
        )

    def _num_calls(self, one_s: float) -> int:
        self._solo_s()
        needed_s = _SLOWEST * NUM_LAUNCHES * self._solo_s() + 2 * MS
        return min(_MAX_CALLS, max(2, math.ceil(needed_s / one_s)))

    def _solo_s(self) -> float:
        """Seconds per GEMM, alone."""
        self._launch()
        await_events(self._marks)
        return self._per_launch_s()

    def _during(self, kind: CollectiveKind, num_bytes: int, num_calls: int) -> tuple[float, float, bool]:
        """Seconds per GEMM and per collective, and whether the collectives outlasted the GEMMs."""
        streams = [self._bench.ranks.streams[place] for place in self._here]
        starts, ends = (
            [torch.cuda.Event(enable_timing=True) for _ in streams]  # type: ignore[no-untyped-call]  # torch leaves it untyped
            for _ in range(2)
        )
        for stream, event in zip(streams, starts, strict=True):
            event.record(stream)
        for _ in range(num_calls):
            self._bench.enqueue(kind, num_bytes)
        for stream, event in zip(streams, ends, strict=True):
            event.record(stream)
        await_events(starts)
        time.sleep(SETTLE_S)
        self._launch()
        await_events(self._marks)
        self._bench.ranks.finish()
        covered = all(self._marks[1].elapsed_time(end) > 0 for end in ends)
        call_s = max(a.elapsed_time(b) for a, b in zip(starts, ends, strict=True)) * MS / num_calls
        return self._per_launch_s(), call_s, covered

    def _launch(self) -> None:
        with torch.cuda.stream(self._stream):
            self._marks[0].record(self._stream)
            for _ in range(NUM_LAUNCHES):
                torch.mm(self._a, self._b, out=self._out)
            self._marks[1].record(self._stream)

    def _per_launch_s(self) -> float:
        return float(self._marks[0].elapsed_time(self._marks[1]) * MS / NUM_LAUNCHES)
