"""`lagom VERB ...`: parses, runs the verb, turns a user's mistake into one line and exit code 2."""

import argparse
import errno
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Final

from lagom_overlap import __version__
from lagom_overlap.cli.flags import VERBS, Verbs
from lagom_overlap.cli.stdout import forget, say
from lagom_overlap.errors import LagomError, MissingDependencyError, UnknownNameError, did_you_mean
from lagom_overlap.interrupts import as_interrupts, exit_code, received

EXIT_BUG: Final = 1
"""What Python itself ends with after an exception that nobody caught."""
EXIT_INPUT: Final = 2
"""What argparse ends with, too."""
_ENDED: Final = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "the terminal was closed"}
_REFUSALS: Final = frozenset(
    {
        errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS, errno.ENOSPC, errno.EDQUOT,
        errno.EFBIG, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE,
    }
)  # fmt: skip
"""A file system's or the machine's, of a file that the user named or of where he stands: none of them is our bug."""

VERB_GROUP: Final = "lagom_overlap.verbs"
"""Entry points of other distributions, by the verb's name: what adds its flags, and sets `run`."""
_ELSEWHERE: Final = {"emulate": "pip install ./emulate (in a clone of the repository)"}
"""Verbs of ours in distributions of their own, and what installs them."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]  # argparse exits here too; we keep it to one line
        self.exit(EXIT_INPUT, f"{self.prog}: {message}; see '{self.prog} --help'\n")

    def _print_message(self, message: str, file: object = None) -> None:
        """As argparse, but a stream that cannot be written is no bug of ours."""
        if file is sys.stdout:
            say(message.rstrip("\n"))
        else:
            _write(message)


def full_parser(wanted: str = "") -> tuple[_Parser, Verbs]:
    """The parser and its verbs; of a verb that is named, that alone: importing all may take longer than running one."""
    parser = _Parser(
        prog="lagom",
        description="Give each collective just enough of the machine.",
        epilog="Next: lagom analyze --example",
    )
    parser.add_argument("--version", action="version", version=f"lagom {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    if wanted == "--version":
        return parser, verbs
    installed = {} if wanted in VERBS else _installed(wanted)
    if wanted in installed:
        _add(installed[wanted], verbs)
        return parser, verbs
    for name in (wanted,) if wanted in VERBS else VERBS:
        VERBS[name](verbs)
    for name in sorted(installed.keys() - set(VERBS)):
        try:
            _add(installed[name], verbs)
        except LagomError as error:
            _complain(name, str(error))
    return parser, verbs


def _installed(wanted: str) -> dict[str, str]:
    """Verbs that are registered as entry points, MODULE:FUNCTION by name; `wanted` is looked for everywhere.

    Read from where pip puts them: importlib.metadata, which finds them elsewhere, too (in zip files, by import hooks),
    loads a parser of e-mails first and takes longer than all the rest of --help.
    """
    installed: dict[str, str] = {}
    for folder in sys.path:
        try:
            names = [name for name in os.listdir(folder or ".") if name.endswith(".dist-info")]  # noqa: PTH208
        except OSError:
            continue
        for name in names:
            try:
                text = Path(folder, name, "entry_points.txt").read_text(encoding="utf-8")
            except (OSError, ValueError):
                continue
            for verb, value in _section(text):
                installed.setdefault(verb, value)
    if wanted and wanted not in installed and wanted[:1] != "-":
        from importlib import metadata  # noqa: PLC0415

        installed |= {entry.name: entry.value for entry in metadata.entry_points(group=VERB_GROUP)}
    return installed


def _section(text: str) -> Iterator[tuple[str, str]]:
    """The lines `NAME = MODULE:FUNCTION` below `[lagom_overlap.verbs]`."""
    is_ours = False
    for line in map(str.strip, text.splitlines() if VERB_GROUP in text else ()):
        if line.startswith("["):
            is_ours = line == f"[{VERB_GROUP}]"
        elif is_ours and "=" in line and line[0] not in "#;":
            name, _, value = line.partition("=")
            yield name.strip(), value.strip()


def _add(value: str, verbs: Verbs) -> None:
    """Adds the verb of another distribution.

    Raises:
        MissingDependencyError: if it cannot be loaded.
    """
    module, _, name = value.partition(":")
    try:
        getattr(import_module(module), name)(verbs)
    except Exception as error:
        raise MissingDependencyError(f"{value} cannot be loaded: {type(error).__name__}: {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit code: 0 done, 1 our bug, 2 your input, else 128 plus the signal that ended it."""
    given = sys.argv[1:] if argv is None else list(argv)
    verb, debug = given[0] if given else "", "--debug" in given
    with as_interrupts():
        return _run(given, verb, debug=debug)


def _run(given: Sequence[str], verb: str, *, debug: bool) -> int:
    try:
        parser, verbs = full_parser(verb)
        if not given:  # whoever types the name alone asks what there is
            parser.print_help()
            return 0
        if verb not in verbs.choices and verb[:1] not in ("", "-"):
            if verb in _ELSEWHERE:
                raise MissingDependencyError(f"this verb is not installed; run: {_ELSEWHERE[verb]}")
            parser.error(str(UnknownNameError.among("verb", verb, tuple(verbs.choices))))
        arguments, unknown = parser.parse_known_args(given)
        if unknown:
            _refuse(unknown, verbs.choices[arguments.verb])
        import logging  # noqa: PLC0415 - a fifth of the time that --help takes, and no use to it

        logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="lagom: %(message)s")
        if verb in VERBS:
            return int(import_module(f"lagom_overlap.cli.{verb}").run(arguments))
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        return _end_early(verb)
    except Exception as error:
        if received():  # ranks that got the signal as well may have gone before we knew
            return _end_early(verb)
        return _fail(verb, error, debug=debug)


def _refuse(unknown: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Ends with what the verb does not know, and the flag that was probably meant."""
    known = re.findall(r"(?<!\S)\[?(--[a-z][a-z-]*)", parser.format_usage())
    wrong = next((word for word in unknown if word.startswith("-")), "")
    parser.error(f"unrecognized arguments: {' '.join(unknown)}{did_you_mean(wrong.partition('=')[0], known)}")


def _end_early(verb: str) -> int:
    code = exit_code()
    _complain(verb, _ENDED[signal.Signals(code - 128)])
    return code


def _fail(verb: str, error: Exception, *, debug: bool) -> int:
    if debug:
        raise error
    if isinstance(error, LagomError):
        _complain(verb, str(error))
        return EXIT_INPUT
    if isinstance(error, OSError) and error.errno in _REFUSALS and error.filename is not None:
        _complain(verb, f"{os.fsdecode(error.filename)!r}: {error.strerror}")
        return EXIT_INPUT
    _complain(verb, f"this is our bug: {type(error).__name__}: {error}; run again with --debug")
    return EXIT_BUG


def _complain(verb: str, text: str) -> None:
    """One line on stderr; what cannot be printed is escaped: a file's words may hold what commands a terminal."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))
    _write(f"lagom {verb}: {line}\n")


def _write(text: str) -> None:
    """Writes to stderr; where that is closed or full, nobody is left to tell."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        forget(sys.stderr)
