"""Measure both sides of the SM split: a GEMM told to leave SMs free, under an injector that needs them.

A persistent GEMM launches one block per SM; when a collective holds some, the last blocks wait a whole pass. torch can
tell cuBLASLt to leave SMs free (`torch._C._set_sm_carveout_experimental`, read in torch's cuBLASLt paths: hence the
preferred library below; whether the grid obeys is in the file's `victims`). Per point (carve-out, channels): GEMM alone
and during the spinner or the channel copy, as contention_surface.py measures it.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from bench import NUM_SMS, Bench, ClosedForm
from contention_surface import line, measure

from lagom_overlap.cost.measured_surface import ContentionSurface, InjectorSetting, Point, Provenance

CARVE_OUTS = (0, 4, 8, 16, 32)  # SMs left free by the GEMM; 0 is torch's default
CHANNELS = (4, 8, 16, 32)
VICTIM = "gemm_cublas_4096x4096x4096"


def carved_points(bench: Bench, num_sms_free: int, num_repeats: int) -> list[Point]:
    """One row per injector setting, with the victim named after its carve-out."""
    rows = []
    for injector, chunk in (("spin", None), ("unpaced", 256 << 10)):
        for channels in CHANNELS:
            setting = InjectorSetting(injector=injector, num_channels=channels, num_threads=512, chunk_bytes=chunk)
            try:
                row = measure(bench, "carve_out", VICTIM, setting, num_repeats)
            except (RuntimeError, ValueError, OSError) as error:
                row = Point.failed("carve_out", VICTIM, setting, f"{type(error).__name__}: {error}")
            rows.append(replace(row, victim=f"{VICTIM}+free{num_sms_free}"))
            print(line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def measured(out: Path, num_repeats: int) -> tuple[list[Point], dict[str, str], dict[str, dict[str, str]]]:
    """Rows, machine and kernels of all carve-outs on the GPU; the GEMM is captured anew under each."""
    from gpu_bench import GpuBench  # noqa: PLC0415 - needs the GPU machine

    rows: list[Point] = []
    machine: dict[str, str] = {}
    facts: dict[str, dict[str, str]] = {}
    torch.backends.cuda.preferred_blas_library("cublaslt")
    for num_sms_free in CARVE_OUTS:
        torch._C._set_sm_carveout_experimental(num_sms_free or None)
        try:
            bench = GpuBench(out, None, 1)  # the first victim is VICTIM
            if bench.names != [VICTIM]:
                raise ValueError(f"expected {VICTIM} to be the first victim, found {bench.names}")
            machine = bench.machine()
            facts[f"{VICTIM}+free{num_sms_free}"] = bench.victim_facts()[VICTIM]
            rows += carved_points(bench, num_sms_free, num_repeats)
        finally:
            torch._C._set_sm_carveout_experimental(None)
    return rows, machine, facts


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--num-repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("carve_out"), help="folder for carve_out.json and .csv")
    parser.add_argument("--json", action="store_true", help="a summary object on stdout")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: closed-form times through the same loop")
    options = parser.parse_args(arguments)
    if options.dry_run:
        rows = [row for free in CARVE_OUTS for row in carved_points(ClosedForm(), free, options.num_repeats)]
        facts = dict[str, dict[str, str]]()
        machine = {"note": f"no GPU: closed form of {NUM_SMS} SMs"}
    else:
        rows, machine, facts = measured(options.out, options.num_repeats)
    surface = ContentionSurface(
        provenance=Provenance.DRY_RUN if options.dry_run else Provenance.MEASURED,
        machine=machine,
        protocol={"repeats": str(options.num_repeats), "order": "solo and overlapped batches alternate"},
        victims=facts,
        points=tuple(rows),
    )
    surface.write(options.out, "carve_out")
    summary = {"num_points": len(rows), "num_failed": sum(row.error is not None for row in rows)}
    print(json.dumps(summary) if options.json else summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
