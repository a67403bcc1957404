"""Where the Lagom paper's lines hold, over what the paper does not say, as a results file.

python benchmarks/reproduce_unknowns.py > benchmarks/results/reproduce_unknowns_DATE.md

The same as `lagom reproduce FIGURE --unknowns` for each figure; Fig. 7 takes some ten minutes of one core. Ctrl-C
prints what was swept until then.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

from lagom_overlap.papers.reproduce import run_reproduce
from lagom_overlap.papers.reproduce.judge import FITTED_PROFILES
from lagom_overlap.papers.reproduce.result import ReproduceReport
from lagom_overlap.papers.reproduce.unknowns import AXES, SWEPT


def document(reports: Sequence[ReproduceReport]) -> Iterator[str]:
    """The file, line by line."""
    found = [region for report in reports for region in report.regions]
    yield from ("# Where the Lagom paper's lines hold, over what it does not say", "")
    yield "Written by `python benchmarks/reproduce_unknowns.py`. Everything is predicted by the contention model,"
    yield "nothing was measured on a GPU. Fig. 7 and convergence at each deviation alone, others at every combination."
    if any(report.is_interrupted for report in reports):
        yield "The run was interrupted: what is missing was not swept."
    yield from ("", "| the paper leaves open | tried, the first is what `lagom reproduce` assumes |", "|---|---|")
    yield from (f"| {axis} | {', '.join(values)} |" for axis, values in AXES.items())
    for profile in dict.fromkeys(region.profile for region in found):
        built_in = ": fitted to the paper's range, so what holds is built in" * (profile in FITTED_PROFILES)
        yield from ("", f"## {profile}{built_in}", "")
        yield from ("| published | paper | where it holds | what is needed |", "|---|---|---|---|")
        for region in found:
            if region.profile == profile:
                yield f"| {region.figure}: {region.what} | {region.published} | {region.where} | {region.needed} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--figures", default=",".join(SWEPT), help=f"of {', '.join(SWEPT)}, by comma")
    figures = parser.parse_args(argv).figures.split(",")
    if wrong := set(figures) - {*SWEPT}:
        parser.error(f"{min(wrong)!r} is not among {', '.join(SWEPT)}")
    reports: list[ReproduceReport] = []
    for figure in figures:
        reports.append(run_reproduce(figure, unknowns=True, note=lambda line: print(line, file=sys.stderr)))
        if reports[-1].is_interrupted:
            break
    print("\n".join(document(reports)))


if __name__ == "__main__":
    main()
