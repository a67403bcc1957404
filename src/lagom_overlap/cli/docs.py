"""`lagom docs [PAGE]`: the documentation of this version in the terminal. The wheel holds its pages."""

import argparse
import pydoc
import sys
from pathlib import Path

import lagom_overlap
from lagom_overlap.cli.stdout import say
from lagom_overlap.errors import MissingDependencyError, UnknownNameError


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    folder = _folder()
    pages = {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.md"))}
    if arguments.page is None:
        width = max(map(len, pages))
        say("\n".join(f"{name:{width}}  {_title(path)}" for name, path in pages.items()))
        say(f"\nThe files: {folder}\nNext: lagom docs {next(iter(pages))}")
        return 0
    text = _named(arguments.page, pages).read_text(encoding="utf-8")
    if sys.stdout is not None and sys.stdout.isatty():
        pydoc.pager(text)
    else:
        say(text.rstrip("\n"))
    return 0


def _folder() -> Path:
    """Where the pages lie: a checkout's own, which an editable install leaves there, else the wheel's.

    Raises:
        MissingDependencyError: if this installation has none.
    """
    checkout = Path(lagom_overlap.__file__).parents[2] / "docs"
    for folder in (checkout, *(Path(path) / "docs" for path in lagom_overlap.__path__)):
        if (folder / "glossary.md").is_file():
            return folder
    raise MissingDependencyError("the documentation is not installed; run: pip install lagom-overlap")


def _named(name: str, pages: dict[str, Path]) -> Path:
    """The page of a name, whose folder may be left out where no other has its last part.

    Raises:
        UnknownNameError: if there is none.
    """
    fitting = [path for page, path in pages.items() if name in (page, page.rpartition("/")[2])]
    if len(fitting) != 1:
        raise UnknownNameError.among("page", name, pages)
    return fitting[0]


def _title(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
