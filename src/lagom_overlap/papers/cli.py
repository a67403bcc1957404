"""`lagom reproduce FIGURE`: the Lagom paper's evaluation on the simulator, each line with a verdict.

`lagom reproduce data` lists the third-party data behind docs/accuracy.md, and fetches what is missing with --fetch.
"""

import argparse
import shlex
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lagom_overlap.cli.output import show
from lagom_overlap.cli.progress import PlainLines, is_terminal
from lagom_overlap.cli.stdout import say
from lagom_overlap.cli.typed import new_folder
from lagom_overlap.errors import DataError, JobError, UnknownNameError
from lagom_overlap.interrupts import exit_code, held_back
from lagom_overlap.jobfile.run_folder import RunFolder, RunKind, RunRecord
from lagom_overlap.jobfile.spec import link_bytes_per_s
from lagom_overlap.papers.flags import ALL_CHAPTERS, CHAPTERS, DATA, WORKERS_LINK
from lagom_overlap.papers.reproduce import run_reproduce
from lagom_overlap.papers.reproduce.datasets import (
    DatasetState,
    FoundDataset,
    cache_root,
    data_roots,
    datasets,
    fetch,
    look_up,
)
from lagom_overlap.papers.reproduce.page import headline, render_reproduction
from lagom_overlap.papers.reproduce.result import Line, Region, ReproducedVerdict, ReproduceReport
from lagom_overlap.papers.reproduce.unknowns import SWEPT
from lagom_overlap.report.fitted_table import WIDTH, Fitted
from lagom_overlap.results.base import encoded
from lagom_overlap.stderr import write_lines


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    if arguments.figure == DATA:
        if arguments.unknowns:
            raise JobError("--unknowns goes with a figure of the paper, not with data")
        return _data(arguments)
    if arguments.figure not in (*CHAPTERS, ALL_CHAPTERS):
        raise UnknownNameError.among("figure", arguments.figure, (*CHAPTERS, ALL_CHAPTERS, DATA))
    if arguments.fetch:
        raise DataError(f"--fetch goes with `lagom reproduce {DATA}`, not with {arguments.figure!r}")
    if arguments.backend == "workers" and arguments.figure != "fig3":
        raise JobError(f"--backend workers measures fig3, not {arguments.figure}; leave it out for the simulator")
    if arguments.backend != "workers" and arguments.link is not None:
        raise JobError(f"--link {arguments.link!r} has no meaning without --backend workers")
    if arguments.unknowns and arguments.backend == "workers":
        raise JobError("--unknowns sweeps the simulator and does not go with --backend workers")
    folder = None if arguments.out is None else RunFolder.create(arguments.out, arguments.figure)
    log = Console(stderr=True)
    with PlainLines("reproduce", "starting") as lines:
        note = log.print if is_terminal() else lines.update
        if arguments.backend == "workers":
            report = _on_workers(arguments, note)
        else:
            report = run_reproduce(arguments.figure, seed=arguments.seed, unknowns=arguments.unknowns, note=note)
    return _finish(arguments, folder, report)


def _finish(arguments: argparse.Namespace, folder: RunFolder | None, report: ReproduceReport) -> int:
    """Prints and writes a report, also one that the user ended; the exit code."""
    encoded = msgspec.json.encode(report)
    with held_back():
        if arguments.json:
            say(encoded.decode())
        else:
            show(lines_table(report))
            show(f"\n{headline(report)}")
        if folder is not None:
            asked = {
                "figure": arguments.figure,
                "backend": arguments.backend,
                "link": arguments.link,
                "unknowns": arguments.unknowns,
            }
            folder.write(
                RunRecord.now(RunKind.REPRODUCE, seed=report.seed, request=asked, date=report.date),
                report,
                {
                    "reproduce.json": encoded + b"\n",
                    "report.html": lambda: render_reproduction(report).encode(),
                },
            )
            if not arguments.json:
                say(f"Report: {arguments.out / 'report.html'}")
    if not arguments.json:
        say(f"\nNext: {_again(arguments) if report.is_interrupted else _following(arguments, report)}")
    if not report.is_interrupted:
        return 0
    write_lines(f"lagom reproduce: interrupted; {', '.join(report.chapters)} were done and are kept")
    return exit_code()


def _typed(arguments: argparse.Namespace) -> str:
    """What was asked for, but for what is written where."""
    given = {"backend": arguments.backend, "link": arguments.link, "seed": arguments.seed}
    flags = "".join(f" --{name} {shlex.quote(str(value))}" for name, value in given.items() if value is not None)
    return f"lagom reproduce {shlex.quote(arguments.figure)}{flags}"


def _again(arguments: argparse.Namespace) -> str:
    """After an interrupt: the same once more, into a folder that is not there yet."""
    unknowns = " --unknowns" if arguments.unknowns else ""
    out = "" if arguments.out is None else f" --out {shlex.quote(new_folder(str(arguments.out)))}"
    return f"{_typed(arguments)}{unknowns}{out}    # from the start: nothing of an interrupted run is taken up again"


def _following(arguments: argparse.Namespace, report: ReproduceReport) -> str:
    if arguments.out is not None:
        return f"lagom open {shlex.quote(str(arguments.out))}"
    again = _typed(arguments)
    if arguments.unknowns:
        return f"{again} --unknowns --out {new_folder('reproduced')}    # writes the page"
    if set(report.chapters) & set(SWEPT) and arguments.backend == "simulated":
        return f"{again} --unknowns    # where each line holds over what the paper leaves open"
    return f"{again} --out {new_folder('reproduced')}    # writes the page"


def _on_workers(arguments: argparse.Namespace, note: Callable[[str], None]) -> ReproduceReport:
    from lagom_overlap.papers.reproduce.figure3_workers import figure3_on_workers  # noqa: PLC0415  torch is an extra

    link = WORKERS_LINK if arguments.link is None else arguments.link
    return figure3_on_workers(seed=arguments.seed, link_bytes_per_s=link_bytes_per_s(link, "--link"), note=note)


def _data(arguments: argparse.Namespace) -> int:
    if arguments.out is not None:
        raise DataError(f"--out has no meaning with `lagom reproduce {DATA}`: files go to {cache_root()}")
    log = Console(stderr=True)
    known = datasets()
    looked_up = (
        fetch(known, note=lambda line: log.print(line, soft_wrap=True)) if arguments.fetch else map(look_up, known)
    )
    rows = tuple(looked_up)
    if arguments.json:
        say(encoded({"datasets": rows}).decode())
        return 0
    show(_data_table(rows))
    missing = sum(row.state == DatasetState.ABSENT for row in rows)
    say(f"\nLooked in: {', '.join(str(root) for root in data_roots())}")
    if missing:
        say(f"{missing} absent.\nNext: lagom reproduce {DATA} --fetch")
    return 0


def _data_table(rows: Sequence[FoundDataset]) -> Fitted:
    """Name, state, licence and source."""
    table = Table(title="Third-party data (not part of the project)", title_justify="left")
    for name in ("dataset", "state", "licence", "source"):
        table.add_column(name, overflow="fold", no_wrap=name == "dataset")
    for row in rows:
        dataset = row.dataset
        source = dataset.source.partition("://")[2] + (f" @{dataset.commit[:7]}" if dataset.commit else "")
        table.add_row(dataset.name, row.state, dataset.licence, source)
    return Fitted(table)


_STYLES: Final = {
    ReproducedVerdict.REPRODUCED: "green",
    ReproducedVerdict.DIRECTION: "yellow",
    ReproducedVerdict.BUILT_IN: "dim",
    ReproducedVerdict.NOT: "red",
}


def lines_table(report: ReproduceReport) -> Group:
    """Every line by chapter and profile with its verdict, the reasons by number, and where the lines hold."""
    parts: list[RenderableType] = []
    for chapter in report.chapters:
        for profile in dict.fromkeys(line.profile for line in report.lines if line.figure == chapter):
            words = chapter if profile == "none" else f"{chapter}, {profile}"
            lines = [line for line in report.lines if (line.figure, line.profile) == (chapter, profile)]
            parts += [Fitted(_verdicts(words, lines)), *_reasons(lines)]
            swept = [region for region in report.regions if (region.figure, region.profile) == (chapter, profile)]
            if swept:
                parts.append(Fitted(_regions(f"{words}, over what the paper leaves open", swept)))
    return Group(*parts)


def _verdicts(title: str, lines: list[Line]) -> Table:
    table = Table(box=None, width=WIDTH, pad_edge=False, header_style="dim", title=title, title_justify="left")
    for name, ratio in (("published", 4), ("paper", 2), ("ours", 4)):
        table.add_column(name, ratio=ratio, overflow="fold")
    table.add_column("verdict", min_width=10, overflow="fold")
    for number, line in enumerate(lines, start=1):
        verdict = Text(line.verdict.value, style=_STYLES[line.verdict])
        table.add_row(Text(f"{number}. {line.what}"), Text(line.published), Text(line.ours), verdict)
    return table


def _regions(title: str, swept: list[Region]) -> Table:
    table = Table(box=None, width=WIDTH, pad_edge=False, header_style="dim", title=title, title_justify="left")
    for name, ratio in (("published", 4), ("paper", 2), ("where it holds", 7)):
        table.add_column(name, ratio=ratio, overflow="fold")
    for number, region in enumerate(swept, start=1):
        where = "; ".join(filter(None, (region.where, region.needed)))
        table.add_row(Text(f"{number}. {region.what}"), Text(region.published), Text(where))
    return table


def _reasons(lines: list[Line]) -> list[RenderableType]:
    """Why each line came out so, and what of the paper went into it; lines that share a sentence share its place."""
    whys, taken = [line.why for line in lines], [line.taken for line in lines]
    sentences = [f"{_numbers(why, whys)}: {why}" for why in dict.fromkeys(whys)]
    sentences += [f"Taken from the paper ({_numbers(what, taken)}): {what}." for what in dict.fromkeys(taken)]
    return [
        Constrain(Padding(Text(sentence, style="dim"), (0, 0, 0, 2), expand=False), WIDTH) for sentence in sentences
    ]


def _numbers(wanted: str, texts: list[str]) -> str:
    return ", ".join(str(number) for number, text in enumerate(texts, start=1) if text == wanted)
