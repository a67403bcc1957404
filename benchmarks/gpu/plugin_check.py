"""Our tuner plug-in in a real NCCL: what was asked, what ran, how long it took, and whether the results are right.

Two ranks on one GPU in one process. For every implementation that NCCL offers, with several channel counts and chunks,
a table is put in force from memory, the collective runs into poisoned memory and is compared element by element, its
kernel's grid is read from the profiler and its time from events. Then tables are swapped at random while calls are in
flight, every result checked. Writes plugin_check.json; NCCL's own log goes to nccl.%p.log in the same folder.
"""

import argparse
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from nccl_pair import Comms, Kind, Library, buffers_of, poison, wrong_rank

from lagom_overlap.collective import CollectiveKind, CommConfig, CommunicatorId, ConfigKey, ConfigTable
from lagom_overlap.nccl_plugin import (
    ProcessCommunicator,
    RecordRing,
    TunerPlugin,
    encode_table,
    installed_library,
)
from lagom_overlap.nccl_plugin.space import CHUNKS
from lagom_overlap.nccl_plugin.table_layout import MAX_CHANNELS

KINDS = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
SIZES = (1 << 20, 16 << 20, 128 << 20)
CHANNELS = (1, 2, 4, 8, 16, 32)
CHUNK_CHANNELS = 8
NUM_TIMED = 8
NUM_SWAPS = 300
COMMUNICATOR = CommunicatorId(description="pair", ranks=(0, 1))


class Driver:
    """The pair, the plug-in in this process, and its record."""

    def __init__(self, library: Path, out: Path) -> None:
        plugin, record = installed_library(), out / "record.bin"
        os.environ |= {
            "NCCL_TUNER_PLUGIN": str(plugin),
            "LAGOM_RECORD": str(record),
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,ENV,TUNING",
            "NCCL_DEBUG_FILE": str(out / "nccl.%p.log"),
        }
        self.nccl = Library(library, {})
        self.comms = Comms(self.nccl, None)
        self.ring = RecordRing(record)
        self.log = self.ring.take()
        self._plugin, self._generation = TunerPlugin(plugin), 0
        self._buffers: dict[tuple[Kind, int], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def set(self, kind: Kind, num_bytes: int, config: CommConfig) -> None:
        """Put one setting in force from the next call on."""
        self._generation += 1
        key = ConfigKey(communicator=COMMUNICATOR, kind=CollectiveKind(kind.value), num_bytes=num_bytes, occurrence=0)
        members = [ProcessCommunicator(COMMUNICATOR, 1, MAX_CHANNELS)]
        rows = ConfigTable({key: config})
        data = encode_table(rows, generation=self._generation, communicators=members).data
        self._plugin.prepare(data, self._generation)
        self._plugin.commit(self._generation)
        self._plugin.step()

    def checked(self, kind: Kind, num_bytes: int) -> bool:
        """Run once into poisoned memory; whether every element is right."""
        sent, received = self._tensors(kind, num_bytes)
        poison(received)
        self.comms.enqueue(kind, sent, received)
        torch.cuda.synchronize()
        return wrong_rank(kind, sent, received) is None

    def timed_s(self, kind: Kind, num_bytes: int) -> float:
        """Median seconds of a call, between events on rank 0's stream."""
        sent, received = self._tensors(kind, num_bytes)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_TIMED + 1)]
        for i, mark in enumerate(marks):
            mark.record(self.comms.streams[0])
            if i < NUM_TIMED:
                self.comms.enqueue(kind, sent, received)
        torch.cuda.synchronize()
        return median(a.elapsed_time(b) * 1e-3 for a, b in itertools.pairwise(marks))  # ms

    def _tensors(self, kind: Kind, num_bytes: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        if (kind, num_bytes) not in self._buffers:
            self._buffers[kind, num_bytes] = buffers_of(kind, num_bytes)
        return self._buffers[kind, num_bytes]


def settings(offered: Sequence[Any]) -> Iterator[CommConfig]:
    """NCCL's own choice, then every implementation x channels, then chunks at eight channels."""
    yield CommConfig()
    yield from (CommConfig(num_channels=channels) for channels in CHANNELS)
    for algorithm, protocol in sorted(offered):
        for channels in CHANNELS:
            yield CommConfig(algorithm=algorithm, protocol=protocol, num_channels=channels)
        for chunk in CHUNKS[protocol]:
            yield CommConfig(algorithm=algorithm, protocol=protocol, num_channels=CHUNK_CHANNELS, chunk_bytes=chunk)


def sweep(driver: Driver, budget_s: float) -> list[dict[str, Any]]:
    """A row per (kind, size, setting): asked, ran, time, right or wrong."""
    rows: list[dict[str, Any]] = []
    end = time.monotonic() + budget_s
    for num_bytes, kind in itertools.product(SIZES, KINDS):
        driver.ring.take()
        driver.checked(kind, num_bytes)  # connects NCCL's own choice, and shows what is offered
        offered = sorted(driver.ring.take().decisions[-1].offered_s)
        asked = []
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
            for config in settings(offered):
                if time.monotonic() > end:
                    break
                driver.set(kind, num_bytes, config)
                asked.append((config, driver.checked(kind, num_bytes)))
        grids = kernel_grids(profiler)
        log = driver.ring.take()
        for place, (config, is_right) in enumerate(asked):
            driver.set(kind, num_bytes, config)
            mine = grids[2 * place : 2 * place + 2] if len(grids) == 2 * len(asked) else []
            rows.append(
                {
                    "kind": str(kind),
                    "num_bytes": num_bytes,
                    "algorithm": config.algorithm,
                    "protocol": config.protocol,
                    "num_channels": config.num_channels,
                    "chunk_bytes": config.chunk_bytes,
                    "is_right": is_right,
                    "grids": mine,
                    "time_s": driver.timed_s(kind, num_bytes),
                }
            )
        print(
            f"{kind} {num_bytes}: {len(asked)} settings, {len(grids)} kernels, {len(log.decisions)} decisions,"
            f" {sum(not ok for _, ok in asked)} wrong, offered {offered}",
            flush=True,
        )
        driver.ring.take()
    return rows


def kernel_grids(profiler: torch.profiler.profile) -> list[list[Any]]:
    """[blocks, name, microseconds] of each NCCL kernel, by start."""
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"plugin_check_{os.getpid()}.json"
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    path.unlink()
    kernels = [e for e in events if e.get("cat") == "kernel" and "nccl" in e["name"].lower()]
    kernels.sort(key=lambda e: e["ts"])
    return [[e["args"].get("grid", [0])[0], e["name"].split("(")[0], e["dur"]] for e in kernels]


def swaps(driver: Driver, num_swaps: int) -> dict[str, Any]:
    """Swap tables at random with calls in flight; every result is checked at its end."""
    chance = random.Random(1)
    num_bytes, wrong = 16 << 20, 0
    began = time.monotonic()
    for _ in range(num_swaps):
        kind = chance.choice(KINDS)
        sent, received = driver._tensors(kind, num_bytes)
        poison(received)
        for _ in range(4):
            driver.set(kind, num_bytes, CommConfig(num_channels=chance.choice(CHANNELS)))
            driver.comms.enqueue(kind, sent, received)
        torch.cuda.synchronize()
        wrong += wrong_rank(kind, sent, received) is not None
    return {"num_swaps": 4 * num_swaps, "num_wrong": wrong, "seconds": time.monotonic() - began}


def decision_s(driver: Driver, *, is_on: bool) -> float:
    """Host seconds per group of two calls of 4 KiB, with the plug-in deciding or switched off."""
    driver._plugin.enable(is_enabled=is_on)
    sent, received = buffers_of(Kind.ALL_REDUCE, 4096)
    for _ in range(50):
        driver.comms.enqueue(Kind.ALL_REDUCE, sent, received)
    torch.cuda.synchronize()
    times = []
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(50):
            driver.comms.enqueue(Kind.ALL_REDUCE, sent, received)
        times.append((time.perf_counter() - began) / 50)
        torch.cuda.synchronize()
    driver._plugin.enable(is_enabled=True)
    return median(times)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--nccl-library", type=Path, required=True, help="libnccl.so.2 >= 2.30.3")
    parser.add_argument("--budget-s", type=float, default=60.0, help="start no setting after this many seconds")
    parser.add_argument("--out", type=Path, default=Path("plugin_check"), help="folder for the results")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.cuda.set_device(0)
    driver = Driver(options.nccl_library, options.out)
    found: dict[str, Any] = {
        "nccl": driver.nccl.version,
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "interface": [c.abi_version for c in driver.log.communicators],
        "communicators": [[c.num_ranks, c.num_nodes, c.creation_order] for c in driver.log.communicators],
    }
    print(found, flush=True)
    found["rows"] = sweep(driver, options.budget_s)
    (options.out / "plugin_check.json").write_text(json.dumps(found) + "\n")
    found["swaps"] = swaps(driver, NUM_SWAPS)
    print(found["swaps"], flush=True)
    found["host_s"] = {str(on): [decision_s(driver, is_on=on) for _ in range(3)] for on in (True, False)}
    print(found["host_s"], flush=True)
    (options.out / "plugin_check.json").write_text(json.dumps(found) + "\n")
    driver.comms.close()
    wrong = sum(not row["is_right"] for row in found["rows"]) + found["swaps"]["num_wrong"]
    print(f"{len(found['rows'])} settings and {found['swaps']['num_swaps']} swaps, {wrong} wrong results")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
