"""The lines of `lagom reproduce all` as the tables of a results file; documents name their counts, and a test compares.

python benchmarks/reproduce_tables.py > benchmarks/results/reproduce_simulated_DATE.md
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from lagom_overlap.papers.reproduce import run_reproduce
from lagom_overlap.papers.reproduce.result import Line, ReproducedVerdict

PAPER = ("fig3", "fig5", "fig7", "fig8", "convergence", "equations")
"""Chapters of the Lagom paper; the others judge Megatron's notes."""


def counts(lines: Sequence[Line]) -> str:
    """`88 lines: 10 reproduced, 13 direction only, 25 built in, 40 not reproduced`."""
    found = Counter(line.verdict for line in lines)
    return f"{len(lines)} lines: " + ", ".join(f"{found[verdict]} {verdict}" for verdict in ReproducedVerdict)


def document(lines: Sequence[Line], seed: int) -> Iterable[str]:
    """The file, line by line."""
    of_paper = [line for line in lines if line.figure in PAPER]
    yield "# The Lagom paper's evaluation and Megatron's notes, simulated"
    yield ""
    yield f"Written by `python benchmarks/reproduce_tables.py`; seed {seed}, no noise: the same everywhere. All of"
    yield "ours is predicted by the contention model; nothing was measured on a GPU. Rules: docs/guides/reproduce.md."
    yield ""
    yield f"**{counts(lines)}.** Of the Lagom paper alone {counts(of_paper)}."
    for figure in dict.fromkeys(line.figure for line in lines):
        yield from ("", f"## {figure}", "", "| published | profile | paper | ours | verdict |", "|---|---|---|---|---|")
        for line in lines:
            if line.figure == figure:
                yield f"| {line.what} | {line.profile} | {line.published} | {line.ours} | {line.verdict} |"


def main() -> None:
    """Prints the file."""
    report = run_reproduce("all")
    print("\n".join(document(report.lines, report.seed)))


if __name__ == "__main__":
    main()
