"""Our overlap figures for any profiler trace, file by file.

    python benchmarks/trace_overlap.py TRACE... [--json] [--pattern REGEX]

For every file the exact figures of every rank in it, next to those that follow HolisticTraceAnalysis's conventions. A
file that cannot be read gets its reason in `error`; the exit code is then 2. With --json one object on one line:
`{"files": [{"file", "error", "seconds", "ranks": [{"rank", "exact": {...}, "hta": {...}}], "warnings"}]}`, where
`exact` and `hta` hold the fields of `ranks[]` in docs/formats_analyze.md; `hta` is empty without a timeline.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from lagom_overlap.analysis.hta import hta_figures
from lagom_overlap.errors import LagomError
from lagom_overlap.results.analyze_rows import rank_times
from lagom_overlap.verbs.analyze import AnalyzeRequest, run_analyze

COLUMNS = ("span_s", "compute_s", "comm_s", "overlap_s", "exposed_comm_s", "idle_s", "stretched_compute_s")


def figures_of(path: Path, pattern: str | None) -> dict[str, object]:
    """One file's figures."""
    start = time.perf_counter()
    try:
        found = run_analyze(AnalyzeRequest(traces=(path,), pattern=pattern))
    except LagomError as error:
        return {
            "file": str(path),
            "error": str(error),
            "seconds": time.perf_counter() - start,
            "ranks": [],
            "warnings": [],
        }
    took = time.perf_counter() - start
    ranks = []
    for rank, exact in zip(found.analysis.findings.ranks, found.to_dict()["ranks"], strict=True):
        hta = rank_times(rank, hta_figures(rank.trace)) if len(rank.trace.events) else None
        fields = () if hta is None else (*COLUMNS[:-1], "overlap_pct", "non_compute_s")
        held = {name: getattr(hta, name) for name in fields}
        ranks.append({"rank": rank.trace.rank, "exact": exact, "hta": held})
    return {"file": str(path), "error": None, "seconds": took, "ranks": ranks, "warnings": found.warnings}


def main() -> int:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--pattern", metavar="REGEX", help="kernels that communicate besides those known")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = [figures_of(path, arguments.pattern) for path in arguments.traces]
    if arguments.json:
        print(json.dumps({"files": found}))
    else:
        for held in found:
            print(f"{held['file']}: {held['error'] or ''}")
            for rank in held["ranks"]:
                parts = (f"{name.removesuffix('_s')} {1e3 * rank['exact'][name]:.3f} ms" for name in COLUMNS)
                print(f"  rank {rank['rank']}: {', '.join(parts)}")
    return 2 if any(held["error"] for held in found) else 0


if __name__ == "__main__":
    sys.exit(main())
