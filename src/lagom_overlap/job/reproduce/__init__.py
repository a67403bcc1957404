"""`lagom reproduce`: the Lagom paper's evaluation (arXiv 2602.20656v1) on the simulator, line by line.

Nothing here is measured: every number of ours comes from the contention model, under the profile that is counted from
sources (`plausible`) and the one that is fitted to the paper's end-to-end range (`paper_scale`).
"""

from collections.abc import Callable, Sequence
from typing import Final

from lagom_overlap.cost import load_profile
from lagom_overlap.errors import UnknownNameError
from lagom_overlap.job.reproduce.convergence import convergence
from lagom_overlap.job.reproduce.figure3 import figure3
from lagom_overlap.job.reproduce.figure5 import figure5
from lagom_overlap.job.reproduce.figure7 import cases, lines
from lagom_overlap.job.reproduce.figure8 import figure8
from lagom_overlap.job.reproduce.ground import PROFILES
from lagom_overlap.job.reproduce.hidden import breakdown_lines, hidden
from lagom_overlap.record import utc_now
from lagom_overlap.report.reproduce_report import Bar, Case, Curve, Line, ReproduceReport, Surface

CHAPTERS: Final = ("fig3", "fig5", "fig7", "fig8", "convergence", "hidden")
ALL: Final = "all"

Note = Callable[[str], None]


def run_reproduce(
    what: str, *, seed: int = 1, profiles: Sequence[str] = PROFILES, note: Note = lambda _: None
) -> ReproduceReport:
    """One chapter, or `all` of them, under each profile.

    Raises:
        UnknownNameError: if there is no such chapter or profile.
    """
    if what not in (*CHAPTERS, ALL):
        raise UnknownNameError.among("figure", what, (*CHAPTERS, ALL))
    chapters = CHAPTERS if what == ALL else (what,)
    found_lines: list[Line] = []
    surfaces: list[Surface] = []
    curves: list[Curve] = []
    held: list[Case] = []
    bars: list[Bar] = []
    for chapter in chapters:
        for profile in profiles:
            note(f"{chapter}, {profile}")
            match chapter:
                case "fig3":
                    surface, more, new = figure3(profile)
                    surfaces.append(surface)
                    curves += more
                case "fig5":
                    more, new = figure5(profile)
                    curves += more
                case "fig7":
                    rows = cases(profile, seed, note=note)
                    held += rows
                    new = lines(rows)
                case "fig8":
                    new_bars, new = figure8(profile, seed)
                    bars += new_bars
                case "convergence":
                    more, new = convergence(profile, seed)
                    curves += more
                case _:
                    more, new = hidden(profile)
                    curves += more
            found_lines += new
        if chapter == "hidden":
            found_lines += breakdown_lines()
    return ReproduceReport(
        chapters=tuple(chapters),
        date=utc_now(),
        seed=seed,
        lines=tuple(found_lines),
        surfaces=tuple(surfaces),
        curves=tuple(curves),
        cases=tuple(held),
        bars=tuple(bars),
        profile_labels={name: load_profile(name).label for name in profiles},
    )
