"""Command lines to type next: the job and flags of the one that ran, for a shell."""

import argparse
import shlex
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Final

_SPELLED: Final = {"carrier": "for", "sets": "set"}
"""Flags whose name in the parsed arguments is another."""


def typed(arguments: argparse.Namespace, names: Iterable[str]) -> str:
    """The job, and those of the named flags that were given."""
    words = [str(arguments.job)]
    for name in names:
        value, flag = getattr(arguments, name), f"--{_SPELLED.get(name, name).replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            for one in value if isinstance(value, list) else (value,):
                words += [flag, f"{one:g}" if isinstance(one, float) else str(one)]
    return shlex.join(words)


def new_folder(name: str) -> str:
    """A name for `--out` that no file has."""
    numbers = (f"-{number}" if number > 1 else "" for number in count(1))
    return next(f"{name}{number}" for number in numbers if not Path(f"{name}{number}").exists())
