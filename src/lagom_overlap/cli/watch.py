"""`lagom watch RUN`: a screen that is drawn anew on a terminal, elsewhere a line whenever something has changed."""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from lagom_overlap.cli.stdout import say
from lagom_overlap.verbs.watch import Watched, look, run_to_watch

EVERY_S: Final = 1.0
"""Between two looks: as often as a person can read."""


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code; Ctrl-C ends the watching, not the run."""
    folder = run_to_watch(arguments.folder)
    if arguments.once:
        say("\n".join(look(folder).lines()))
    elif sys.stdout is not None and sys.stdout.isatty():
        _screen(folder)
    else:
        follow(folder)
    return 0


def follow(folder: Path, wait: Callable[[float], object] = time.sleep) -> None:
    """Says what has changed, until the run is over; `wait(seconds)` is the clock."""
    lines_shown: list[str] = []
    while True:
        watched = look(folder)
        lines = watched.lines()
        if new := [line for line in lines if line not in lines_shown]:
            say("\n".join(new))
        if watched.is_over:
            return
        lines_shown = lines
        wait(EVERY_S)


def _screen(folder: Path) -> None:
    watched = look(folder)
    with Live(_drawn(watched), console=Console(), auto_refresh=False) as live:
        while not watched.is_over:
            time.sleep(EVERY_S)
            watched = look(folder)
            live.update(_drawn(watched), refresh=True)


def _drawn(watched: Watched) -> Group:
    return Group(*(Text(line, style="bold" if not number else "") for number, line in enumerate(watched.lines())))
