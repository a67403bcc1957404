"""`lagom reproduce`: the Lagom paper's evaluation (arXiv 2602.20656v1) on the simulator, line by line.

Two chapters check the notes "Communication Overlap in Megatron-LM": what is hidden, and how it scales.

Nothing here is measured: every number of ours comes from the contention model, under the profile that is counted from
sources (`plausible`) and the one that is fitted to the paper's end-to-end range (`paper_scale`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from lagom_overlap.cost import load_profile
from lagom_overlap.errors import UnknownNameError
from lagom_overlap.papers.flags import ALL_CHAPTERS, CHAPTERS
from lagom_overlap.papers.reproduce.convergence import convergence
from lagom_overlap.papers.reproduce.equations import equations
from lagom_overlap.papers.reproduce.figure3 import figure3
from lagom_overlap.papers.reproduce.figure5 import figure5
from lagom_overlap.papers.reproduce.figure7 import cases
from lagom_overlap.papers.reproduce.figure7 import lines as lines_of_cases
from lagom_overlap.papers.reproduce.figure8 import figure8
from lagom_overlap.papers.reproduce.ground import PROFILES
from lagom_overlap.papers.reproduce.hidden import breakdown_lines, hidden
from lagom_overlap.papers.reproduce.judge import FITTED_PROFILES, under_profile
from lagom_overlap.papers.reproduce.optimality import optimality
from lagom_overlap.papers.reproduce.result import (
    Case,
    Curve,
    Line,
    Region,
    ReproducedSurface,
    ReproduceReport,
    SpeedupBar,
)
from lagom_overlap.papers.reproduce.scaling import scaling
from lagom_overlap.papers.reproduce.unknowns import SWEPT, Setting, regions, swept
from lagom_overlap.record import utc_now

NOTES_CHAPTERS: Final = ("hidden", "scaling")
"""What checks the Megatron notes."""

Note = Callable[[str], None]


def run_reproduce(
    what: str,
    *,
    seed: int = 1,
    profiles: Sequence[str] = PROFILES,
    unknowns: bool = False,
    note: Note = lambda _: None,
) -> ReproduceReport:
    """One chapter, or `all` of them, under each profile; an interrupt keeps the chapters that were done.

    With `unknowns` the lines of `SWEPT` are also judged over what the paper leaves open: some minutes with Fig. 7.

    Raises:
        KeyboardInterrupt: if it comes before one chapter is done.
        UnknownNameError: if there is no such chapter or profile, or the chapter has nothing to sweep.
    """
    if what not in (*CHAPTERS, ALL_CHAPTERS):
        raise UnknownNameError.among("figure", what, (*CHAPTERS, ALL_CHAPTERS))
    if unknowns and what not in (*SWEPT, ALL_CHAPTERS):
        raise UnknownNameError.among("figure with --unknowns", what, (*SWEPT, ALL_CHAPTERS))
    chapters = CHAPTERS if what == ALL_CHAPTERS else (what,)
    reproduced, done, is_interrupted = _Found(), list[str](), False
    try:
        for chapter in chapters:
            reproduced.add(_chapter(chapter, profiles, seed, note))
            done.append(chapter)
            if unknowns and chapter in SWEPT:
                _sweep(reproduced, chapter, profiles, seed, note)
    except KeyboardInterrupt:
        if not done:
            raise
        is_interrupted = True
    return ReproduceReport(
        chapters=tuple(done),
        date=utc_now(),
        seed=seed,
        lines=tuple(reproduced.lines),
        surfaces=tuple(reproduced.surfaces),
        curves=tuple(reproduced.curves),
        cases=tuple(reproduced.cases),
        bars=tuple(reproduced.bars),
        profile_labels={name: load_profile(name).label for name in profiles},
        regions=tuple(reproduced.regions),
        is_interrupted=is_interrupted,
    )


@dataclass(slots=True)
class _Found:
    """What chapters hold."""

    lines: list[Line] = field(default_factory=list)
    surfaces: list[ReproducedSurface] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    bars: list[SpeedupBar] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)

    def add(self, other: "_Found") -> None:
        """Another chapter's, behind."""
        self.lines += other.lines
        self.surfaces += other.surfaces
        self.curves += other.curves
        self.cases += other.cases
        self.bars += other.bars
        self.regions += other.regions


def _sweep(chapter_results: _Found, chapter: str, profiles: Sequence[str], seed: int, note: Note) -> None:
    """Adds the regions of a chapter; of what was tried, if an interrupt ends it."""
    judged: list[tuple[Setting, Sequence[Line]]] = []
    try:
        for profile in profiles:
            for setting, lines in swept(chapter, profile, seed, note=note):
                judged.append((setting, lines))
    finally:
        chapter_results.regions += regions(judged)


def _chapter(chapter: str, profiles: Sequence[str], seed: int, note: Note) -> _Found:
    results = _Found()
    for profile in profiles:
        if chapter in NOTES_CHAPTERS and profile in FITTED_PROFILES:
            continue  # fitted to another paper
        note(f"{chapter}, {profile}")
        match chapter:
            case "fig3":
                surface, curves, lines = figure3(profile)
                results.add(_Found(lines=under_profile(lines, profile), surfaces=[surface], curves=[*curves]))
            case "fig5":
                curves, lines = figure5(profile)
                results.add(_Found(lines=under_profile(lines, profile), curves=[*curves]))
            case "fig7":
                rows = cases(profile, seed, note=note)
                results.add(_Found(lines=under_profile(lines_of_cases(rows), profile), cases=[*rows]))
            case "fig8":
                bars, lines = figure8(profile, seed)
                results.add(_Found(lines=under_profile(lines, profile), bars=[*bars]))
            case "convergence":
                curves, lines = convergence(profile, seed)
                results.add(_Found(lines=under_profile(lines, profile), curves=[*curves]))
            case "equations":
                results.add(_Found(lines=under_profile([*equations(profile), *optimality(profile)], profile)))
            case "hidden":
                curves, lines = hidden(profile)
                results.add(_Found(lines=[*lines], curves=[*curves]))
            case _:
                curves, lines = scaling(profile)
                results.add(_Found(lines=[*lines], curves=[*curves]))
    if chapter == "hidden":
        results.lines += breakdown_lines()
    return results
