"""What the profiler plug-in's callbacks cost the host, in CPU time, and what a step of so many collectives pays.

    python benchmarks/profiler_cost.py [--repeats 7] [--out benchmarks/results]

`csrc/profiler_cost.c` makes the calls as NCCL 2.30 does, from one thread; nothing of the GPU's side is in it.
CPU time of the process, so that a busy machine changes little.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from decision_cost import cpu_name  # noqa: E402

SHAPES = ((1, 0), (8, 0), (16, 0), (64, 0), (8, 16), (16, 64))
NUM_COLLECTIVES = 4000
NUM_PER_STEP = 100
"""About what FSDP2 calls in a step of 32 layers: two gathers and a reduction each."""


def build(folder: Path) -> tuple[Path, Path]:
    """The plug-in and the driver, with the wheel's flags."""
    csrc = ROOT / "csrc"
    plugin, driver = folder / "liblagom_tuner.so", folder / "profiler_cost"
    sources = [*sorted(csrc.glob("lagom_tuner*.c")), *sorted(csrc.glob("lagom_profiler*.c"))]
    flags = ["-std=c11", "-O3", "-DNDEBUG"]
    shared = ["-fPIC", "-shared", "-fvisibility=hidden", "-lm", "-ldl", "-lpthread"]
    subprocess.run(["cc", *flags, "-o", plugin, *sources, *shared], check=True)
    subprocess.run(["cc", *flags, "-o", driver, csrc / "profiler_cost.c", "-ldl"], check=True)
    return plugin, driver


def main() -> None:
    """Measures, prints and, with --out, writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="processes per row")
    parser.add_argument("--out", type=Path, help="folder to write the result to")
    arguments = parser.parse_args()
    found: dict[tuple[int, int], list[tuple[float, ...]]] = {shape: [] for shape in SHAPES}
    with tempfile.TemporaryDirectory() as name:
        plugin, driver = build(Path(name))
        for _ in range(arguments.repeats):
            for shape in SHAPES:
                given = [driver, plugin, Path(name) / "ring", *map(str, shape), str(NUM_COLLECTIVES)]
                said = subprocess.run(given, check=True, capture_output=True, text=True).stdout
                found[shape].append(tuple(float(number) for number in re.findall(r"[\d.]+", said)))
    rows = []
    for (channels, transfers), runs in found.items():
        launch, channel, transfer = (median(values) for values in zip(*runs, strict=True))
        spread = [f"{min(values):.0f} to {max(values):.0f}" for values in zip(*runs, strict=True)]
        network = f"{transfer:.0f} ({spread[2]})" if transfers else "-"
        proxy_ns = channel + 2 * channels * transfers * transfer
        rows.append(
            f"| {channels} | {transfers} | {launch:.0f} ({spread[0]}) | {channel:.0f} ({spread[1]}) | {network} |"
            f" {launch * NUM_PER_STEP / 1e3:.0f} | {proxy_ns * NUM_PER_STEP / 1e3:.0f} |"
        )
    text = "\n".join(
        [
            "# What the profiler plug-in's callbacks cost the host",
            "",
            f"{cpu_name()}, {os.cpu_count()} cores (shared, not pinned), {date.today().isoformat()}. CPU time,"
            f" interface 6, {NUM_COLLECTIVES} collectives a process, 256 under way at once;"
            f" median of {arguments.repeats} processes (least to most).",
            "**Not run on a GPU or network.** What NCCL does around the callbacks, and what a block's writing of its"
            " times costs the GPU, is not in it: for the latter see [the H100](gpu_h100_nccl_2026-11-22.md).",
            "",
            "Nanoseconds: per collective in the thread that launches (call, group, collective), per collective in the"
            " proxy thread for its channels, and per transfer in the proxy thread. A step, in microseconds: of"
            f" {NUM_PER_STEP} collectives, each with that many transfers a channel either way.",
            "",
            "| channels | transfers | launch | channels' events | a transfer | step, launching | step, proxy |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            "Command: `python benchmarks/profiler_cost.py --out benchmarks/results`.",
            "",
        ]
    )
    print(text)
    if arguments.out:
        (arguments.out / f"profiler_callback_cost_{date.today().isoformat()}.md").write_text(text)


if __name__ == "__main__":
    main()
