"""What a user hands to `lagom run` and `lagom export` to be set: which of its forms it is."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.online_settings import online_settings
from lagom_overlap.jobfile.run_folder import RECORD, RunFolder, RunKind
from lagom_overlap.record import read_regular

PLAN_NAME: Final = "plan.toml"
_MAX_ENVIRONMENT_BYTES: Final = 1 << 20
"""Chosen: such a file has some lines."""
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_OURS: Final = ("LAGOM_RUN_", "PYTHONPATH")
"""Variables by which a run finds our hooks; a file that sets them would take the run apart."""


class GivenKind(StrEnum):
    """The forms, in words."""

    SETTINGS = "settings that online tuning saved"
    TUNED = "a run of lagom tune"
    PLAN = "an FSDP2 plan"
    ENVIRONMENT = "an environment file"
    TABLE = "a plug-in table"


FORMS: Final = (
    "a folder of lagom run --online, lagom tune or lagom plan, settings.json, plan.toml, an environment file (.env) "
    "or lagom_table.bin"
)


@dataclass(frozen=True, slots=True)
class Given:
    """What was given: its form, and the file (of a run of `lagom tune`: the folder) to read."""

    kind: GivenKind
    path: Path


def given(path: Path) -> Given:
    """The form of a file or folder, by what it holds; whether it is whole, its reader says.

    Raises:
        JobError: if it is none of the forms, or a run that has left nothing to set.
        BundleError: if a run folder is damaged.
    """
    if (saved := online_settings(path)) is not None:
        return Given(GivenKind.SETTINGS, saved)
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        raise JobError(f"{str(path)!r} does not exist; give {FORMS}")
    kinds = {".toml": GivenKind.PLAN, ".env": GivenKind.ENVIRONMENT}
    return Given(kinds.get(path.suffix, GivenKind.TABLE), path)


def _folder(path: Path) -> Given:
    if not (path / RECORD).is_file() and (path / PLAN_NAME).is_file():
        return Given(GivenKind.PLAN, path / PLAN_NAME)
    kind = RunFolder.read(path).kind if (path / RECORD).is_file() else RunKind.TUNE
    match kind:
        case RunKind.TUNE:
            return Given(GivenKind.TUNED, path)
        case RunKind.PLAN:
            return Given(GivenKind.PLAN, path / PLAN_NAME)
        case RunKind.RUN:
            # Not at the top: a launch that is given settings needs no page.
            from lagom_overlap.report.proof import read_proof  # noqa: PLC0415

            if (proof := read_proof(path)) is not None:
                raise JobError(
                    f"{str(path)!r} is a proof, which sets nothing; give what it proves: {proof.subject} "
                    f"({proof.decision})"
                )
            raise JobError(
                f"{str(path)!r} is a run that saved no settings: it was not tuned, or ended before its verdict; "
                "lagom run --online for more steps saves them"
            )
        case _:
            raise JobError(f"{str(path)!r} is a run of lagom {kind}, which leaves nothing to set; give {FORMS}")


def read_environment(path: Path) -> Mapping[str, str]:
    """The variables of an environment file: a line NAME=value each, taken literally; # begins a comment line.

    Raises:
        JobError: if it cannot be read, holds none, or sets what a run itself needs.
    """
    try:
        text = read_regular(path, _MAX_ENVIRONMENT_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"environment file {str(path)!r} cannot be read: {getattr(error, 'strerror', error)}") from None
    variables: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _ASSIGNMENT.fullmatch(line.strip())
        if match is None:
            raise JobError(f"environment file {str(path)!r}, line {number}: {line.strip()[:80]!r} is not NAME=value")
        if "\0" in line:
            raise JobError(f"environment file {str(path)!r}, line {number}: {match[1]} holds a NUL, which no value can")
        if match[1].startswith(_OURS):
            raise JobError(f"environment file {str(path)!r}, line {number}: {match[1]} is lagom run's own")
        variables[match[1]] = match[2]
    if not variables:
        raise JobError(f"environment file {str(path)!r} sets nothing")
    return variables
