"""The documents' counts of reproduced lines are those of the file that the command wrote."""

from collections import Counter
from pathlib import Path

import reproduce_tables
from lagom_overlap.papers.reproduce.result import Line, ReproducedVerdict

ROOT = Path(__file__).parents[2]
FILE = max((ROOT / "benchmarks" / "results").glob("reproduce_simulated_*.md"))


def rows() -> list[tuple[str, str]]:
    """(chapter, verdict) of each line in the file."""
    found, chapter = [], ""
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            chapter = line[3:]
        elif line.startswith("| ") and not line.startswith("| published"):
            found.append((chapter, line.rstrip(" |").rpartition("| ")[2]))
    return found


def words(verdicts: list[str]) -> str:
    counted = Counter(verdicts)
    assert set(counted) <= set(ReproducedVerdict)
    return f"{len(verdicts)} lines: " + ", ".join(f"{counted[verdict]} {verdict}" for verdict in ReproducedVerdict)


def test_documents_name_the_counts_of_the_newest_file() -> None:
    everything = words([verdict for _, verdict in rows()])
    of_paper = words([verdict for chapter, verdict in rows() if chapter in reproduce_tables.PAPER])
    assert f"**{everything}.** Of the Lagom paper alone {of_paper}." in FILE.read_text(encoding="utf-8")
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert everything in results
    assert FILE.name in results
    assert of_paper in (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")


def test_a_line_becomes_a_row_under_its_chapter() -> None:
    line = Line(
        figure="fig3",
        profile="plausible",
        what="a",
        published="1",
        ours="2",
        verdict=ReproducedVerdict.NOT,
        why="",
        taken="",
    )
    text = "\n".join(reproduce_tables.document([line, line], seed=7))
    assert "**2 lines: 0 reproduced, 0 direction only, 0 built in, 2 not reproduced.**" in text
    assert text.count("## fig3") == 1
    assert text.count("| a | plausible | 1 | 2 | not reproduced |") == 2
