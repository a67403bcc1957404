"""Measure who gets SMs first: launch order x stream priority x carve-out, a batch of GEMMs during a finite spinner.

Both sides wait for one event, so that the order in which they are enqueued is the order in which they are launched.
The spinner stands for a collective: `channels` blocks, each of which holds an SM for `SPIN_S` after it has started. Per
point: how long the spinner's last block waited for its SM after the first of either side began (`wait_s`), and when
both sides were done (`makespan_s`), during the GEMMs alone (`solo_s`). The model's prediction stands in each row
(`lagom_overlap.sim.group`: the waits of one kernel behind which the spinner comes). `--dry-run` runs the same
loop without a GPU on closed forms; a file says which of the two it holds.
"""

import argparse
import csv
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from bench import NUM_SMS

from lagom_overlap.cost.measured_surface import InjectorSetting, Provenance

ORDERS = ("collective_first", "computation_first")
PRIORITIES = ("high", "normal")
CARVE_OUTS = (0, 8, 16)
CHANNELS = (4, 8, 16)
NUM_GEMMS = 4
SPIN_S = 500e-6
GEMM = "gemm_cublas_4096x4096x4096"


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderPoint:
    """One row."""

    order: str
    priority: str
    carve_out: int
    channels: int
    num_repeats: int
    solo_s: float | None = None
    makespan_s: float | None = None
    wait_s: float | None = None
    predicted_wait_s: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One repeat: when both were done, and how long the spinner waited for its last SM."""

    makespan_s: float
    wait_s: float


class OrderBench(Protocol):
    """What can launch both sides in an order."""

    def solo(self, carve_out: int) -> float:
        """Seconds of the GEMMs alone."""

    def together(self, order: str, priority: str, carve_out: int, channels: int) -> Reading:
        """One repeat of both."""


def predicted_wait_s(order: str, carve_out: int, channels: int, gemm_s: float) -> float:
    """What the model says of a persistent GEMM: nothing in front, or with room next to it; else the whole GEMM."""
    return gemm_s if order == "computation_first" and carve_out < channels else 0.0


class ClosedForm:
    """A bench without a GPU: the model's own waits, and a displaced block that runs after the spinner."""

    GEMM_S = 180e-6

    def solo(self, carve_out: int) -> float:
        """A batch on the SMs that are left."""
        return NUM_GEMMS * self.GEMM_S * NUM_SMS / (NUM_SMS - carve_out)

    def together(self, order: str, priority: str, carve_out: int, channels: int) -> Reading:
        """With room the two run side by side; without, one GEMM is stretched by the spinner."""
        del priority
        alone_s = self.solo(carve_out)
        wait_s = predicted_wait_s(order, carve_out, channels, alone_s / NUM_GEMMS)
        done_s = max(alone_s, SPIN_S) if carve_out >= channels else alone_s + SPIN_S
        return Reading(makespan_s=done_s, wait_s=wait_s)


class OnGpu:
    """The GEMMs of victims.py and the spinner of standin.cu, launched from here."""

    def __init__(self, out: Path) -> None:
        import torch  # noqa: PLC0415 - the rest of this file needs none
        from standin import Spin, build_library  # noqa: PLC0415 - needs the GPU machine
        from victims import all_specs  # noqa: PLC0415

        self._torch, self._spin, self._library = torch, Spin, build_library(out)
        torch.backends.cuda.preferred_blas_library("cublaslt")
        (spec,) = [spec for spec in all_specs() if spec.name == GEMM]
        self._launch, _ = spec.make()
        self._streams = {"high": torch.cuda.Stream(priority=-1), "normal": torch.cuda.Stream(priority=0)}
        self._compute, self._gate = torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=0)
        torch.cuda.synchronize()  # operands are made on the default stream

    def solo(self, carve_out: int) -> float:
        """A batch between two events."""
        return self._run(carve_out, None).makespan_s

    def together(self, order: str, priority: str, carve_out: int, channels: int) -> Reading:
        """Both behind the gate, enqueued in order."""
        setting = InjectorSetting(injector="spin", num_channels=channels)
        spin = self._spin(self._library, setting, self._streams[priority], SPIN_S)
        return self._run(carve_out, spin, first=order == "collective_first")

    def _run(self, carve_out: int, spin: Any, *, first: bool = False) -> Reading:
        torch = self._torch
        mark = self._spin(self._library, InjectorSetting(injector="spin", num_channels=1), self._gate, 0.0)
        torch._C._set_sm_carveout_experimental(carve_out or None)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._gate):
            torch.cuda._sleep(2_000_000)  # about a millisecond: both sides are enqueued before the gate opens
        mark.launch()  # its time is when the gate opened
        for stream in [self._compute, *([spin.stream] if spin else [])]:
            stream.wait_stream(self._gate)
        if spin is not None and first:
            spin.launch()
        with torch.cuda.stream(self._compute):
            begin.record()
            for i in range(NUM_GEMMS):
                self._launch(i)
        if spin is not None:
            if not first:
                spin.launch()
            self._compute.wait_stream(spin.stream)
        end.record(self._compute)
        end.synchronize()
        torch._C._set_sm_carveout_experimental(None)
        wait_s = (spin.last_start_ns() - mark.first_start_ns()) * 1e-9 if spin else 0.0
        return Reading(makespan_s=begin.elapsed_time(end) * 1e-3, wait_s=wait_s)  # ms


def points(bench: OrderBench, num_repeats: int) -> list[OrderPoint]:
    """All rows; solo and joint repeats alternate, after one unrecorded of each."""
    rows = []
    for carve_out, channels, order, priority in itertools.product(CARVE_OUTS, CHANNELS, ORDERS, PRIORITIES):
        try:
            bench.solo(carve_out), bench.together(order, priority, carve_out, channels)
            solo, readings = [], []
            for _ in range(num_repeats):
                solo.append(bench.solo(carve_out))
                readings.append(bench.together(order, priority, carve_out, channels))
            solo_s = median(solo)
            row = OrderPoint(
                order=order,
                priority=priority,
                carve_out=carve_out,
                channels=channels,
                num_repeats=num_repeats,
                solo_s=solo_s,
                makespan_s=median(reading.makespan_s for reading in readings),
                wait_s=median(reading.wait_s for reading in readings),
                predicted_wait_s=predicted_wait_s(order, carve_out, channels, solo_s / NUM_GEMMS),
            )
        except (RuntimeError, ValueError, OSError) as error:
            row = OrderPoint(
                order=order,
                priority=priority,
                carve_out=carve_out,
                channels=channels,
                num_repeats=0,
                error=f"{type(error).__name__}: {error}",
            )
        rows.append(row)
    return rows


def write(folder: Path, rows: Sequence[OrderPoint], provenance: Provenance) -> None:
    """launch_order.json, which says what it is, and the rows as launch_order.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "provenance": provenance,
        "spin_s": SPIN_S,
        "num_gemms": NUM_GEMMS,
        "points": [asdict(row) for row in rows],
    }
    (folder / "launch_order.json").write_text(json.dumps(content, indent=1) + "\n")
    with (folder / "launch_order.csv").open("w", newline="") as stream:
        table = csv.DictWriter(stream, [field.name for field in fields(OrderPoint)], lineterminator="\n")
        table.writeheader()
        table.writerows(asdict(row) for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--num-repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("launch_order"), help="folder for the two files")
    parser.add_argument("--json", action="store_true", help="a summary object on stdout")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: closed-form times through the same loop")
    options = parser.parse_args(arguments)
    bench: OrderBench = ClosedForm() if options.dry_run else OnGpu(options.out)
    rows = points(bench, options.num_repeats)
    write(options.out, rows, Provenance.DRY_RUN if options.dry_run else Provenance.MEASURED)
    summary = {"num_points": len(rows), "num_failed": sum(row.error is not None for row in rows)}
    print(json.dumps(summary) if options.json else summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
