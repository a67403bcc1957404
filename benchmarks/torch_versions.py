"""Which releases of PyTorch the package's own tests pass with: runs them under each interpreter named, one by one.

    python benchmarks/torch_versions.py ~/venvs/torch211/bin/python ~/venvs/torch214/bin/python

Each interpreter needs this package (editable), its test extra and its own PyTorch. Two runs each: the tests that need
PyTorch and spawn no ranks, the slow ones left out, and all that spawn ranks. `--only` makes one of the two runs and
keeps what the file has of the other. Writes `src/lagom_overlap/engines/data/torch_versions.toml`, in which rows of
other releases stay, and the table of docs/support.md between its two marks.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from lagom_overlap.engines.torch_versions import CheckedTorch, Ran, as_markdown, releases_tested

ROOT: Final = Path(__file__).parents[1]
DATA: Final = ROOT / "src" / "lagom_overlap" / "engines" / "data" / "torch_versions.toml"
SUPPORT: Final = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- torch versions: begin -->", "<!-- torch versions: end -->"
TESTS: Final = {"alone": "torch and not gloo and not slow", "with_ranks": "gloo"}
_FACTS: Final = """
import json, platform, torch
nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
print(json.dumps([torch.__version__, platform.python_version(), ".".join(map(str, nccl))]))
"""


def facts_of(python: Path) -> tuple[str, str, str]:
    """The releases of PyTorch, Python and NCCL under one interpreter."""
    facts = subprocess.run([python, "-c", _FACTS], check=True, capture_output=True, text=True, cwd=ROOT)
    torch, python_version, nccl = json.loads(facts.stdout.splitlines()[-1])
    return torch, python_version, nccl


def run_tests(python: Path, tests: str, num_workers: int, limit_s: float) -> Ran:
    """Tests under one interpreter, by pytest's expression of marks."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        how = ["-m", tests, "-n", str(num_workers), "--dist", "loadgroup", f"--junitxml={report}"]
        subprocess.run([python, "-m", "pytest", *how], check=False, cwd=ROOT, timeout=limit_s, stdout=sys.stderr)
        return read(report)


def read(report: Path) -> Ran:
    """What a report in JUnit's format says."""
    cases = list(ET.parse(report).getroot().iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    num_skipped = sum(case.find("skipped") is not None for case in cases)
    return Ran(
        date=datetime.now(UTC).date().isoformat(),
        num_passed=len(cases) - len(bad) - num_skipped,
        num_skipped=num_skipped,
        failed=tuple(sorted(f"{case.get('classname')}::{case.get('name')}" for case in bad)),
    )


def write(rows: tuple[CheckedTorch, ...]) -> None:
    """The data file and the table made of it."""
    blocks = [
        f'[[tested]]\ntorch = "{row.torch}"\npython = "{row.python}"\nnccl = "{row.nccl}"\n'
        + "".join(f"{name} = {_table(ran)}\n" for name, ran in zip(TESTS, row.runs, strict=True))
        for row in rows
    ]
    runs = ", ".join(f'{name}: pytest -m "{tests}"' for name, tests in TESTS.items())
    head = f"# Written by benchmarks/torch_versions.py; {runs}.\n\n"
    DATA.write_text(head + "\n".join(blocks), encoding="utf-8")
    text = SUPPORT.read_text(encoding="utf-8")
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    SUPPORT.write_text(f"{before}\n\n{as_markdown(releases_tested())}\n{after}", encoding="utf-8")


def _table(ran: Ran) -> str:
    return (
        f'{{ date = "{ran.date}", num_passed = {ran.num_passed}, num_skipped = {ran.num_skipped}, '
        f"failed = {json.dumps(list(ran.failed))} }}"
    )


def main() -> None:
    """Runs, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", nargs="+", type=Path, help="an interpreter of each environment")
    parser.add_argument("-n", "--workers", type=int, default=2)
    parser.add_argument("--only", choices=TESTS, help="make this run alone; the file must have the other")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="longest run, seconds")
    asked = parser.parse_args()
    rows = {row.torch: row for row in releases_tested()}
    for python in asked.python:
        torch, python_version, nccl = facts_of(python.absolute())
        runs = {
            name: rows[torch].runs[place]
            if asked.only not in (None, name)
            else run_tests(python.absolute(), tests, asked.workers, asked.limit_s)
            for place, (name, tests) in enumerate(TESTS.items())
        }
        found = rows[torch] = CheckedTorch(torch=torch, python=python_version, nccl=nccl, **runs)
        write(tuple(sorted(rows.values(), key=lambda row: (row.release, row.torch))))
        print(as_markdown((found,)).splitlines()[-1])
        for name in found.failed:
            print(f"  failed: {name}")


if __name__ == "__main__":
    main()
