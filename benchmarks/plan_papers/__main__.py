"""The papers' overlap planners on the papers' grids, simulated, next to what the papers state, as markdown.

    python benchmarks/plan_papers [SECTION ...] [--work MILLION_STEPS] [--into FILE]

Nothing here is measured: operators take what the contention model says of one alone (profile `plausible`), streams run
in order, links are one stream each (`lagom_overlap.planners.predict`); FSDP2's own captured step is simulated with
contention (`lagom_overlap.planners.simulated`). With `--into` the sections are written into the
file, in place of what it said of them; without, they are printed. Planners are given work, not seconds, so a busy
machine gives the same plans. Each section says when it ran, how long, with how much work and at which load.
"""

import argparse
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from lagom_overlap.planners.deadline import SearchBudget

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SECTIONS = {
    "algorithm1": ("algorithm_1", "algorithm1", 40.0),
    "centauri": ("centauri", "centauri", 1200.0),
    "concerto": ("concerto_tables", "concerto", 80.0),
    "experiments": ("concerto_experiments", "experiments", 10.0),
    "dap": ("concerto_captured", "dap", 40.0),
    "zero3": ("concerto_captured", "zero_3", 40.0),
    "zero2": ("concerto_captured", "zero_2", 40.0),
    "searched": ("concerto_captured", "searched", 40.0),
    "megatron": ("megatron", "megatron", 40.0),
}
"""Name: module, function, millions of steps per plan. Centauri never needs all of its own."""

HEAD = """# The papers' planners on the papers' grids, simulated

    python benchmarks/plan_papers [SECTION ...] [--work MILLION_STEPS] [--into FILE]

**No GPU was used.** Operators take what the contention model says of one alone (profile `plausible`), streams run in
order, one stream per link, without contention; Concerto's ZeRO-3 alone is judged with contention against FSDP2's own
order. Written by that command, one run of each section. Planners are given work, so the load of the machine changes
no plan.

Verdicts: *reproduced* is within a third of the paper's relative gain or a percentage point, *direction* at least half
of it, *built in* agrees but rests on times that the paper itself gives (FP32 computations).

What the papers do not print and we chose: FSDP and DP gradients of 2 bytes, vocabulary 32,000, "big" with 8 layers,
gathers three layers ahead; Concerto's GPT on 16 GPUs is its 14.5 B (hidden 8192, 18 layers), 8 sequences of 2048
tokens, FP32 is FP16 with the paper's own ratio of computations (4.77) and twice the bytes; fusion on its 0.9 B, 2
sequences per GPU, parameters gathered by matrix; captured steps 16 images, or 2 sequences of the 0.9 B, per GPU.
"""
_PART = re.compile(r"<!-- (\w+) -->\n(.*?)(?=<!-- |\Z)", re.DOTALL)


def section(name: str, million_steps: float | None) -> Iterator[str]:
    """Lines of one section, what it ran on last."""
    module, function, usual = SECTIONS[name]
    run: Callable[[SearchBudget], Iterator[str]] = getattr(import_module(f"plan_papers.{module}"), function)
    work = SearchBudget(usual if million_steps is None else million_steps)
    started, cpu_s, load = time.perf_counter(), time.process_time(), os.getloadavg()[0]
    yield from run(work)
    took = f"{time.perf_counter() - started:.0f} s ({time.process_time() - cpu_s:.0f} s of CPU)"
    yield (
        f"Ran {datetime.now(UTC):%d %B %Y %H:%M} UTC in {took}, {work.million_steps:g} million steps per plan, load "
        f"{load:.0f} to {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores ({platform.machine()}); Python "
        f"{platform.python_version()}, OR-Tools {version('ortools')}."
    )
    yield ""


def write_into(path: Path, parts: dict[str, str]) -> None:
    """Replaces the sections in a file, which keeps the others; sections stand in their order."""
    known = dict(_PART.findall(path.read_text(encoding="utf-8"))) if path.exists() else {}
    known.update(parts)
    body = "".join(f"<!-- {name} -->\n{known[name].strip()}\n\n" for name in SECTIONS if name in known)
    path.write_text(f"{HEAD}\n{body.rstrip()}\n", encoding="utf-8")


def main() -> None:
    """Runs the sections asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], default=[])
    parser.add_argument("--work", type=float, help="millions of steps per plan, in place of each section's own")
    parser.add_argument("--into", type=Path, help="results file to write the sections into")
    arguments = parser.parse_args()
    for name in arguments.sections or SECTIONS:
        lines = []
        for line in section(name, arguments.work):
            lines.append(line)
            if arguments.into is None:
                print(line, flush=True)
        if arguments.into is not None:
            write_into(arguments.into, {name: "\n".join(lines)})


if __name__ == "__main__":
    main()
