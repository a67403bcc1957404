"""Our profiler plug-in in a real NCCL: are its times right, and what does it cost?

Two ranks on one GPU in one process. Part one: the same calls timed by the plug-in, by PyTorch's profiler (each kernel)
and by CUDA events on rank 0's stream. Part two: seconds a call, back to back, with the plug-in on and off by turns,
then in a second process that never loaded it. Writes profiler_check.json into --out after every step.
"""

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.engines.nccl.library import NcclLibrary
from lagom_overlap.engines.nccl.local_ranks import Buffers, LocalRanks, make_buffers, poison, wrong_rank
from lagom_overlap.engines.nccl.plugin_bench import SHARED_GPU
from lagom_overlap.nccl_plugin.library import TunerPlugin, installed_library
from lagom_overlap.nccl_plugin.profile_log import ProfiledCollective, ProfileRing

KINDS = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)
NUM_CALLS = {1 << 20: 40, 16 << 20: 20, 128 << 20: 6}
"""Calls in a timed block, by bytes."""
CASES = tuple(itertools.product(NUM_CALLS, KINDS))
CHANNELS = (None, 8)
NUM_COMPARED = 10
NUM_BLOCKS = 6
CHILD_LIMIT_S = 45
RESULT, WITHOUT = "profiler_check.json", "without.json"


class Span(NamedTuple):
    """Something that ran on the GPU, by one clock; its end is not kept, for as a float it would be 256 ns coarse."""

    start_ns: int
    duration_ns: float

    @property
    def duration_s(self) -> float:
        """From start to end."""
        return self.duration_ns * 1e-9


class Driver:
    """A pair of ranks, with the plug-in's ring if it was loaded."""

    def __init__(self, nccl: NcclLibrary, num_channels: int | None, profile: Path | None) -> None:
        began = time.monotonic()
        self.ranks = LocalRanks(nccl, num_gpus=1, ranks_per_gpu=2, num_channels=num_channels)
        self.start_s = time.monotonic() - began
        self._ring = ProfileRing(profile, TunerPlugin(installed_library()).flush_profile) if profile else None
        self._buffers: dict[tuple[int, CollectiveKind], Buffers] = {}

    def enqueue(self, num_bytes: int, kind: CollectiveKind) -> None:
        """One call on both ranks."""
        self.ranks.enqueue(kind, self._tensors(num_bytes, kind))

    def is_right(self, num_bytes: int, kind: CollectiveKind) -> bool:
        """One call into poisoned memory; whether every element is right."""
        buffers = self._tensors(num_bytes, kind)
        poison(buffers)
        self.ranks.enqueue(kind, buffers)
        torch.cuda.synchronize()
        return wrong_rank(kind, buffers) is None

    def timed_s(self, calls: Callable[[], None]) -> float:
        """Seconds between events on rank 0's stream around what is enqueued; waits for all of it."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(self.ranks.streams[0])
        calls()
        last.record(self.ranks.streams[0])
        torch.cuda.synchronize()
        return first.elapsed_time(last) * 1e-3  # ms

    def profiled(self, num: int) -> list[ProfiledCollective]:
        """The next `num` collectives of our ring; NCCL's proxy thread reports them a little after their ends."""
        found: list[ProfiledCollective] = []
        give_up = time.monotonic() + 2.0
        while self._ring and len(found) < num and time.monotonic() < give_up:
            found += self._ring.take().collectives
        return found

    def forget(self) -> None:
        """Drops what the ring holds of finished calls."""
        time.sleep(0.01)  # the last reports
        if self._ring:
            self._ring.take()

    def counters(self) -> dict[str, int]:
        """What the plug-in could not keep."""
        return {"dropped": self._ring.num_dropped, "late": self._ring.num_late} if self._ring else {}

    def _tensors(self, num_bytes: int, kind: CollectiveKind) -> Buffers:
        if (num_bytes, kind) not in self._buffers:
            self._buffers[num_bytes, kind] = make_buffers(kind, num_bytes, self.ranks.devices)
            torch.cuda.synchronize()
        return self._buffers[num_bytes, kind]


def compared(driver: Driver, folder: Path) -> list[dict[str, Any]]:
    """A row per case: the same calls by three clocks, one at a time, so that a call's events hold nothing else."""
    for case in CASES:  # connects, and warms up
        driver.enqueue(*case)
    torch.cuda.synchronize()
    measured = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        for case in CASES:
            driver.forget()
            events_s = [driver.timed_s(lambda case=case: driver.enqueue(*case)) for _ in range(NUM_COMPARED)]
            measured.append((case, events_s, driver.profiled(2 * NUM_COMPARED)))
    path = folder / f"trace_{os.getpid()}.json"
    profiler.export_chrome_trace(str(path))
    kernels = kernel_spans(json.loads(path.read_text()))
    path.unlink()
    rows = []
    for place, ((num_bytes, kind), events_s, entries) in enumerate(measured):
        row: dict[str, Any] = {"kind": str(kind), "num_bytes": num_bytes, "num_entries": len(entries)}
        row["num_incomplete"] = sum(not entry.is_complete for entry in entries)
        row["ran"] = sorted(
            {(str(e.algorithm), str(e.protocol), e.num_channels or 0, e.num_bytes or 0) for e in entries}
        )
        window = slice(place * NUM_COMPARED, (place + 1) * NUM_COMPARED)
        try:
            ours = [[span_of(entry) for entry in entries if entry.rank == rank] for rank in (0, 1)]
            row |= comparison(paired(ours, [spans[window] for spans in kernels]), events_s, ours[0])
            row["lag_s"] = median(lag_s(entry) for entry in entries)
        except ValueError as error:
            row["error"] = str(error)
        row["is_right"] = driver.is_right(num_bytes, kind)
        rows.append(row)
    return rows


def span_of(entry: ProfiledCollective) -> Span:
    """The collective on the GPU's clock."""
    if entry.start_ns is None or entry.end_ns is None:
        raise ValueError(f"{entry.kind} call {entry.call} of rank {entry.rank} has no times: {entry.num_ended} ends")
    return Span(entry.start_ns, entry.end_ns - entry.start_ns)


def lag_s(entry: ProfiledCollective) -> float:
    """From the end on the GPU until it was reported: right but for the distance of the two clocks."""
    return ((entry.seen_ns or 0) - (entry.end_ns or 0)) * 1e-9


def kernel_spans(trace: Mapping[str, Any]) -> list[list[Span]]:
    """NCCL's kernels in a Chrome trace, for each stream in order of their starts."""
    by_stream: dict[Any, list[Span]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel" and "nccl" in event["name"].lower():
            by_stream[event["args"]["stream"]].append(Span(round(event["ts"] * 1e3), event["dur"] * 1e3))  # us
    return [sorted(spans) for spans in by_stream.values()]


def paired(ours: Sequence[Sequence[Span]], kernels: Sequence[Sequence[Span]]) -> list[tuple[Span, Span]]:
    """Our span and the kernel's, of the same call and rank.

    Each argument holds the calls of either rank, in order. Which stream is which rank the trace does not say, so within
    a call the rank that starts first by our clock is taken for the one that starts first by the profiler's.

    Raises:
        ValueError: if the numbers of calls differ.
    """
    if len(ours) != len(kernels) or len({len(calls) for calls in (*ours, *kernels)}) != 1:
        raise ValueError(f"calls of each rank: {[*map(len, ours)]} in our ring, {[*map(len, kernels)]} in the trace")
    return [
        pair
        for mine, theirs in zip(zip(*ours, strict=True), zip(*kernels, strict=True), strict=True)
        for pair in zip(sorted(mine), sorted(theirs), strict=True)
    ]


def comparison(
    pairs: Sequence[tuple[Span, Span]], events_s: Sequence[float], rank_0: Sequence[Span]
) -> dict[str, float]:
    """Medians over calls: durations, our ratio to the others, the clocks' distance and its spread, our clock's step."""
    offsets_ns = [kernel.start_ns - mine.start_ns for mine, kernel in pairs]
    low, _, high = quantiles(offsets_ns, n=4)
    times_ns = [int(time_ns) for mine, _ in pairs for time_ns in mine]  # starts and durations
    return {
        "ours_s": median(mine.duration_s for mine, _ in pairs),
        "kernel_s": median(kernel.duration_s for _, kernel in pairs),
        "event_s": median(events_s),
        "to_kernel": median(mine.duration_s / kernel.duration_s for mine, kernel in pairs),
        "to_event": median(mine.duration_s / s for mine, s in zip(rank_0, events_s, strict=True)),
        "start_offset_ns": median(offsets_ns),
        "start_offset_iqr_ns": high - low,
        "clock_step_ns": math.gcd(*times_ns),
    }


def timed(driver: Driver, switch: Mapping[str, Callable[[], object]], budget_s: float) -> list[dict[str, Any]]:
    """A row per case and position of the switch: seconds a call on the GPU and on the host, block by block in turns."""
    rows = []
    end = time.monotonic() + budget_s
    for num_bytes, kind in CASES:
        if time.monotonic() > end:
            break
        num_calls = NUM_CALLS[num_bytes]
        gpu_s: dict[str, list[float]] = defaultdict(list)
        host_s: dict[str, list[float]] = defaultdict(list)

        def block(
            name: str, num_bytes: int = num_bytes, kind: CollectiveKind = kind, num_calls: int = num_calls
        ) -> None:
            began = time.perf_counter()
            for _ in range(num_calls):
                driver.enqueue(num_bytes, kind)
            host_s[name].append((time.perf_counter() - began) / num_calls)  # noqa: B023  this case's

        for turn in range(NUM_BLOCKS):
            for name in sorted(switch, reverse=turn % 2 == 1):  # on off, off on, ...
                switch[name]()
                driver.enqueue(num_bytes, kind)
                torch.cuda.synchronize()
                gpu_s[name].append(driver.timed_s(lambda name=name, block=block: block(name)) / num_calls)
        rows += [
            {"kind": str(kind), "num_bytes": num_bytes, "switch": name, "gpu_s": gpu_s[name], "host_s": host_s[name]}
            for name in switch
        ]
    return rows


def table(found: Mapping[str, Any]) -> str:
    """The rows that decide: our time against the others', and what the plug-in costs."""
    lines = ["kind            bytes      channels  ours/kernel  ours/event  on/off  on/never loaded"]
    never = {(r["channels"], r["kind"], r["num_bytes"]): median(r["gpu_s"]) for r in found.get("without", [])}
    gpu_s = {
        (r["channels"], r["kind"], r["num_bytes"], r["switch"]): median(r["gpu_s"]) for r in found.get("timed", [])
    }
    for row in found.get("compared", []):
        key = (row["channels"], row["kind"], row["num_bytes"])
        on, off = gpu_s.get((*key, "on")), gpu_s.get((*key, "off"))
        cells = [
            row.get("to_kernel"),
            row.get("to_event"),
            on and off and on / off,
            on and key in never and on / never[key],
        ]
        shown = "  ".join(f"{cell:10.4f}" if cell else f"{'-':>10}" for cell in cells)
        lines.append(
            f"{row['kind']:<15} {row['num_bytes']:>9}  {row['channels']!s:>8}  {shown}  {row.get('error', '')}"
        )
    return "\n".join(lines)


def measured(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """This process's part, with the plug-in or without, written after every step."""
    profile = None if options.without else options.out / "profile.bin"
    result = options.out / (WITHOUT if options.without else RESULT)
    if profile:
        os.environ |= {"NCCL_PROFILER_PLUGIN": str(installed_library()), "LAGOM_PROFILE": str(profile)}
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV"}
    os.environ["NCCL_DEBUG_FILE"] = str(options.out / "nccl.%p.log")
    torch.cuda.set_device(0)
    os.environ |= SHARED_GPU
    nccl = NcclLibrary(options.nccl_library)
    found |= {"nccl": nccl.code, "gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "timed": []}
    for channels in CHANNELS:
        driver = Driver(nccl, channels, profile)
        switch: dict[str, Callable[[], object]] = {"never": lambda: None}
        if profile:
            plugin = TunerPlugin(installed_library())
            rows = [{"channels": channels} | row for row in compared(driver, options.out)]
            found["compared"] = found.get("compared", []) + rows
            result.write_text(json.dumps(found) + "\n")
            switch = {
                "on": lambda plugin=plugin: plugin.profile(is_enabled=True),
                "off": lambda plugin=plugin: plugin.profile(is_enabled=False),
            }
        else:
            for case in CASES:
                driver.enqueue(*case)
            torch.cuda.synchronize()
        found["timed"] += [{"channels": channels} | row for row in timed(driver, switch, options.budget_s)]
        found["counters"] = driver.counters()
        found["start_s"] = [*found.get("start_s", []), driver.start_s]
        if profile:
            plugin.profile(is_enabled=True)
        driver.ranks.close()
        result.write_text(json.dumps(found) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--nccl-library", type=Path, required=True, help="libnccl.so.2 >= 2.30.3")
    parser.add_argument("--budget-s", type=float, default=4.0, help="per channel count, start no timed case after this")
    parser.add_argument("--out", type=Path, default=Path("profiler_check"), help="folder for the results")
    parser.add_argument("--without", action="store_true", help="the second process: time calls without the plug-in")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    measured(options, found)
    if options.without:
        return 0
    print(table(found), flush=True)
    environment = {k: v for k, v in os.environ.items() if k not in ("NCCL_PROFILER_PLUGIN", "LAGOM_PROFILE")}
    again = [sys.executable, __file__, *(sys.argv[1:] if arguments is None else arguments), "--without"]
    subprocess.run(again, env=environment, timeout=CHILD_LIMIT_S, check=False)
    if (options.out / WITHOUT).exists():
        found["without"] = json.loads((options.out / WITHOUT).read_text())["timed"]
        (options.out / RESULT).write_text(json.dumps(found) + "\n")
        print(table(found))
    wrong = [row for row in found["compared"] if not row["is_right"] or row["num_incomplete"] or "error" in row]
    print(f"{len(found['compared'])} cases, {len(wrong)} with a wrong result or missing times, {found['counters']}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
