"""How long a capture takes and how much memory: named models on fake ranks, each in a process of its own.

    python benchmarks/capture_speed.py [--case NAME ...] [--repeats N] [--json]

Per case: wall and CPU time of building the model and capturing the step (imports of torch's compiler included, of torch
itself not), peak memory of the whole process, and what was captured. The first case is the target: Llama-3-8B as plain
modules under FSDP2 on 16 ranks, sequence 4096, in under 10 s and 500 MB.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from statistics import median

TARGET_S, TARGET_MB = 10.0, 500.0
CASES: dict[str, tuple[str, dict[str, int | str], int]] = {
    "llama-3-8b fsdp16": ("llama-3-8b", {"fsdp": 16}, 4096),
    "llama-3-8b tensor8 fsdp2": ("llama-3-8b", {"tensor": 8, "fsdp": 2}, 4096),
    "llama-3-8b replicate4 fsdp4": ("llama-3-8b", {"replicate": 4, "fsdp": 4}, 4096),
    "llama-3-8b tensor2 pipeline4, 8 micro-batches": (
        "llama-3-8b",
        {"tensor": 2, "pipeline": 4, "micro_batches": 8},
        4096,
    ),
    "olmoe-1b-7b fsdp16 expert8": ("olmoe-1b-7b", {"fsdp": 16, "expert": 8}, 2048),
    "hf:phi-2 fsdp16": ("hf:phi-2", {"fsdp": 16}, 2048),
    "hf:llama-3-8b fsdp16": ("hf:llama-3-8b", {"fsdp": 16}, 2048),
    "hf:mpt-7b fsdp16": ("hf:mpt-7b", {"fsdp": 16}, 2048),
    "hf:olmoe-1b-7b fsdp16 expert8": ("hf:olmoe-1b-7b", {"fsdp": 16, "expert": 8}, 2048),
    "hf:deepseek-v2-lite fsdp16 expert8": ("hf:deepseek-v2-lite", {"fsdp": 16, "expert": 8}, 2048),
    "vit-h-14 fsdp8": ("vit-h-14", {"fsdp": 8}, 1),
    "wide-resnet-50-2 replicate8": ("wide-resnet-50-2", {"replicate": 8}, 1),
    "evoformer axial4": ("evoformer", {"axial": 4}, 256),
}


def measure(case: str) -> dict[str, object]:
    """Runs one case in this process."""
    from lagom_overlap.capturing.models.named import capture_named  # noqa: PLC0415  the import is not what is timed

    name, options, seq_len = CASES[case]
    wall, cpu = time.perf_counter(), time.process_time()
    capture = capture_named(name, options, micro_batch=1, seq_len=seq_len)
    return {
        "case": case,
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "num_ops": len(capture.iteration.ops),
        "num_comms": len(capture.iteration.comms),
        "num_shardable": sum(op.shards is not None for op in capture.iteration.ops),
        "load": os.getloadavg()[0],
    }


def main() -> int:
    """Measures the cases and prints a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=list(CASES), help="one case only; may be repeated")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cases = arguments.case or list(CASES)
    if arguments.here:
        print(json.dumps(measure(cases[0])))
        return 0
    rows = []
    for case in cases:
        command = [sys.executable, __file__, "--here", "--case", case]
        runs = [
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            for _ in range(arguments.repeats)
        ]
        row = {**runs[0], **{key: median(run[key] for run in runs) for key in ("wall_s", "cpu_s", "peak_mb", "load")}}
        rows.append(row | {"cpu_spread_s": max(r["cpu_s"] for r in runs) - min(r["cpu_s"] for r in runs)})
        if not arguments.json:
            print(
                f"| {case} | {row['wall_s']:.1f} | {row['cpu_s']:.1f} ({rows[-1]['cpu_spread_s']:.1f}) | "
                f"{row['peak_mb']:.0f} | {row['num_ops']:,} | {row['num_comms']} | {row['num_shardable']:,} | "
                f"{row['load']:.0f} |",
                flush=True,
            )
    if arguments.json:
        print(json.dumps({"target_s": TARGET_S, "target_mb": TARGET_MB, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
