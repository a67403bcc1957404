"""Where each line of the Lagom paper's Figs. 7 and 8 holds, over what the paper does not say, as a results file.

python benchmarks/reproduce_unknowns.py > benchmarks/results/reproduce_unknowns_DATE.md

Takes some six minutes of one core. Ctrl-C prints what was swept until then.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence

from lagom_overlap.papers.reproduce.ground import PROFILES
from lagom_overlap.papers.reproduce.judge import FITTED_PROFILES
from lagom_overlap.papers.reproduce.result import Line
from lagom_overlap.papers.reproduce.unknowns import AXES, Region, Setting, regions, swept

FIGURES = ("fig8", "fig7")


def document(found: Sequence[Region], words: Iterable[str] = ()) -> Iterator[str]:
    """The file, line by line."""
    yield from ("# Where the Lagom paper's lines hold, over what it does not say", "")
    yield "Written by `python benchmarks/reproduce_unknowns.py`. Everything is predicted by the contention model,"
    yield "nothing was measured on a GPU. Fig. 8 at every combination, Fig. 7 at each deviation alone."
    yield from words
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
    parser.add_argument("--figures", default=",".join(FIGURES), help="fig7, fig8, or both by comma")
    parser.add_argument("--profiles", default=",".join(PROFILES), help="profiles, by comma")
    args = parser.parse_args(argv)
    figures, profiles = args.figures.split(","), args.profiles.split(",")
    for wrong, allowed in ((set(figures) - {*FIGURES}, FIGURES), (set(profiles) - {*PROFILES}, PROFILES)):
        if wrong:
            parser.error(f"{min(wrong)!r} is not among {', '.join(allowed)}")
    found: list[tuple[Setting, Sequence[Line]]] = []
    words = ["The run was interrupted: what is missing was not swept."]
    with contextlib.suppress(KeyboardInterrupt):
        for figure in figures:
            for profile in profiles:
                found += swept(figure, profile, 1, note=lambda line: print(line, file=sys.stderr))
        words = []
    print("\n".join(document(regions(found), words)))


if __name__ == "__main__":
    main()
