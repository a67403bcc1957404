"""The page of one reproduction."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from lagom_overlap.papers.reproduce.figures import (
    CLUSTERS,
    convergence_figure,
    gains_figure,
    hidden_figure,
    measurements_figure,
    patterns_figure,
    scaling_figure,
    surface_figure,
    sweep_figure,
    trade_figure,
    verdicts_figure,
)
from lagom_overlap.papers.reproduce.result import SIMULATOR, Line, Region, ReproducedVerdict, ReproduceReport
from lagom_overlap.report.render import EmbeddedFigure, embedded, render
from lagom_overlap.units import format_percent, format_seconds

TITLES: Final = {
    "fig3": "Figure 3: an FFN during a 32 MB all-reduce",
    "fig5": "Figure 5: two collectives, two prices",
    "fig7": "Figure 7: iteration time of Table 2",
    "fig8": "Figure 8: two patterns of Phi-2 under FSDP",
    "convergence": "Figure 8c: iterations to converge",
    "equations": "Equations 4 to 6 as printed, optimality",
    "hidden": "What is hidden: the Megatron notes' percentages",
    "scaling": "How it scales: the Megatron notes' efficiencies and speedups",
}
_FOOTER: Final = (
    "Every number of ours is simulated. Hidden: communication with computation at the same time, under NCCL's default."
)
TONES: Final = {
    ReproducedVerdict.REPRODUCED: "better",
    ReproducedVerdict.DIRECTION: "quiet",
    ReproducedVerdict.BUILT_IN: "quiet",
    ReproducedVerdict.NOT: "worse",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chapter:
    title: str
    lines: tuple[tuple[Line, str, Region | None], ...]
    figures: tuple[EmbeddedFigure, ...]
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    title: str
    meta: str
    footer: str
    headline: str
    profiles: tuple[str, ...]
    overview: EmbeddedFigure
    chapters: tuple[_Chapter, ...]


def render_reproduction(report: ReproduceReport) -> str:
    """The reproduction as one HTML page; the same report gives the same page."""
    return render("reproduce.html.j2", page=_page(report))


def headline(report: ReproduceReport) -> str:
    """How many lines got which verdict, in one sentence."""
    counts = ", ".join(f"{report.count(verdict)} {verdict.value}" for verdict in ReproducedVerdict)
    sentence = f"{len(report.lines)} lines of the papers against {report.ground}: {counts}."
    if not report.regions:
        return sentence
    somewhere = sum(region.best is ReproducedVerdict.REPRODUCED for region in report.regions)
    return f"{sentence} Over what the paper leaves open, {somewhere} of {len(report.regions)} are reproduced somewhere."


def _page(report: ReproduceReport) -> _Page:
    is_simulated = report.ground == SIMULATOR
    source = "simulated, nothing measured" if is_simulated else f"measured on {report.ground}"
    return _Page(
        title="Reproduction of the Lagom paper's evaluation",
        footer=_FOOTER if is_simulated else "",
        meta=f"{source}; seed {report.seed}, {report.date}",
        headline=headline(report),
        profiles=tuple(report.profile_labels.values()),
        overview=embedded(verdicts_figure(report.lines), "Verdicts by figure. Rules: lagom docs reproduce"),
        chapters=tuple(_chapter(report, chapter) for chapter in report.chapters),
    )


def _chapter(report: ReproduceReport, chapter: str) -> _Chapter:
    makers: dict[str, Callable[[ReproduceReport], list[EmbeddedFigure]]] = {
        "fig3": _figures_of_3,
        "fig5": lambda r: [
            embedded(trade_figure(r.curves), "One collective's channels go from 1 to 16, the other keeps one.")
        ],
        "fig7": _figures_of_7,
        "fig8": lambda r: [
            embedded(patterns_figure(r.bars), "Grey diamonds: the paper. Its configurations set by hand, then ours.")
        ],
        "convergence": lambda r: [
            embedded(
                convergence_figure(r.curves), "Pattern 2, two collectives; the paper reports 16 and 33 iterations."
            ),
            embedded(
                measurements_figure(r.curves),
                "Pattern 2 with more of its collectives: measurements until a search ends.",
            ),
        ],
        "equations": lambda _: [],
        "hidden": lambda r: [
            embedded(
                hidden_figure(r.curves), "Bands: the notes' ranges, in the colours of gradients, parameters, tensor."
            )
        ],
        "scaling": lambda r: [
            embedded(scaling_figure(r.curves), "Throughput per GPU over that of 16 GPUs; dots: the notes' 90 and 80 %.")
        ],
    }
    swept = {(region.profile, region.what): region for region in report.regions if region.figure == chapter}
    return _Chapter(
        title=TITLES[chapter],
        lines=tuple(
            (line, TONES[line.verdict], swept.get((line.profile, line.what)))
            for line in report.lines
            if line.figure == chapter
        ),
        figures=tuple(makers[chapter](report)),
        heads=("Workload", "profile", "default", "AutoCCL", "Lagom", "best found", "hidden", "measurements"),
        rows=_case_rows(report) if chapter == "fig7" else (),
    )


def _figures_of_3(report: ReproduceReport) -> list[EmbeddedFigure]:
    return [
        embedded(surface_figure(report.surfaces), "3a: Phi-2's FFN at 4096 tokens, covered by all-reduces of 32 MB."),
        embedded(sweep_figure(report.curves, "3b", "channels, C = 16 KB"), "3b: channels, NT = 128."),
        embedded(sweep_figure(report.curves, "3c", "slice (KiB), NC = 4"), "3c: chunk, NT = 128."),
    ]


def _figures_of_7(report: ReproduceReport) -> list[EmbeddedFigure]:
    return [
        embedded(
            gains_figure(report.cases, profile),
            f"Profile {profile}. Clusters A (NVLink) and B (PCIe); blue bands: the paper's ranges for Lagom.",
        )
        for profile in dict.fromkeys(case.profile for case in report.cases)
    ]


def _case_rows(report: ReproduceReport) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (
            f"{CLUSTERS.get(case.cluster, case.cluster)}: {case.workload}",
            case.profile,
            format_seconds(case.default_s),
            f"{case.autoccl:.3f}×",
            f"{case.lagom:.3f}×",
            f"{case.best:.3f}×",
            format_percent(case.hidden_share, 0),
            f"{case.autoccl_measurements} / {case.lagom_measurements}",
        )
        for case in report.cases
    )
