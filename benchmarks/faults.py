"""Every fault at every state of the switching protocol, on two to four gloo ranks: all cells, as the tests run some.

    python benchmarks/faults.py --json matrix.jsonl
    python benchmarks/faults.py --point "getting ready" --fault lost --words

The table is `tests/online/fault_matrix.py`. The exit status is 1 if a cell is not as it must be.
"""

import argparse
import json
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "online")]

from fault_matrix import FAULTS, POINTS, Outcome, cells, run  # type: ignore[attr-defined] # noqa: E402


def _lines(path: Path | None) -> list[str]:
    return path.read_text().splitlines() if path is not None and path.exists() else []


def main() -> None:
    """Runs the cells, prints each, and what was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--point", action="append", choices=POINTS)
    parser.add_argument("--fault", action="append", choices=FAULTS)
    parser.add_argument("--json", type=Path, help="a line for each cell; those in it that were right are not run again")
    parser.add_argument("--words", action="store_true", help="what the ranks wrote, in cells that are wrong")
    parser.add_argument("--at-once", type=int, default=3, help="jobs that run at a time")
    chosen = parser.parse_args()
    done_before = {(row["point"], row["fault"]) for row in map(json.loads, _lines(chosen.json)) if not row["faults"]}
    todo = [cell for cell in cells(chosen.point, chosen.fault) if (cell.point, cell.fault) not in done_before]
    random.Random(1).shuffle(todo)  # whatever time there is, it is spent on all of the table
    wrong: list[Outcome] = []
    ends: Counter[str] = Counter()
    took: list[tuple[float, str]] = []

    def tell(outcome: Outcome) -> None:
        cell = outcome.cell
        found = [result for result in outcome.results if result is not None]
        state = found[0]["states"][-1] if found else "in doubt" if outcome.is_in_doubt else "ended"
        ends[state] += 1
        said = "ok" if not outcome.faults else "; ".join(outcome.faults)
        where = f"{cell.fault} at {cell.point!r}, rank {cell.victim} of {cell.num_ranks}"
        took.append((outcome.took_s, where))
        print(f"{where}: {outcome.codes} {state} {outcome.took_s:.1f} s: {said}", flush=True)
        if outcome.faults:
            wrong.append(outcome)
            if chosen.words:
                print(outcome.words, flush=True)
        if chosen.json is not None:
            row = {**asdict(cell), "victim": cell.victim, "codes": outcome.codes, "state": state}
            row |= {
                "reason": found[0].get("reason") if found else "",
                "took_s": outcome.took_s,
                "faults": outcome.faults,
            }
            with chosen.json.open("a") as file:
                file.write(f"{json.dumps(row)}\n")

    with ThreadPoolExecutor(chosen.at_once) as pool:
        for done in as_completed([pool.submit(run, cell) for cell in todo]):
            tell(done.result())
    for took_s, where in sorted(took, reverse=True)[:5]:
        print(f"among the longest: {where}, {took_s:.0f} s")
    print(f"{sum(ends.values())} cells, {len(wrong)} not as they must be; {dict(ends)}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
