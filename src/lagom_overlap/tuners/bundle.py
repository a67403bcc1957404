"""A measurement bundle, `measurements.jsonl`: a header that says for which job it was measured, then a line per step.

The same rows are a study's journal (tuners/journal.py) and what `--backend recorded` replays. Format: docs/formats.md.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from lagom_overlap.collective import (
    NO_LAUNCHES,
    ConfigSpace,
    LaunchSpace,
    SpaceLimits,
)
from lagom_overlap.errors import BundleError, LagomError
from lagom_overlap.tuners.problem import Assignment, GroupProblem

FORMAT: Final = "lagom-measurements"
VERSION: Final = 1
"""Of the file's format; a file of another version is refused."""
MAX_BUNDLE_BYTES: Final = 1 << 30
"""1 GiB. Chosen far above any real bundle; a larger file is refused before it is read into memory."""


class BundleGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What could be done to one group: collective names, their spaces, the default and the baselines.

    `launches`, what could be tried on the computation's side, is absent where nothing could.
    """

    comms: tuple[str, ...]
    spaces: tuple[ConfigSpace, ...]
    default: Assignment
    baselines: dict[str, Assignment]
    launches: LaunchSpace = NO_LAUNCHES


class BundleHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The first line of a bundle.

    The fields with a default may be absent: what the recording backend said of itself (`description`), the caveats
    that belong with its figures (`notes`), its contenders in words (`arm_words`), and the job's limits on the knobs.
    """

    format: str
    version: int
    job_fingerprint: str
    backend: str
    groups: dict[str, BundleGroup]
    description: str = ""
    notes: tuple[str, ...] = ()
    arm_words: dict[str, str] = msgspec.field(default_factory=dict)
    limits: SpaceLimits | None = None


def header_line(
    job_fingerprint: str,
    backend: str,
    problems: tuple[GroupProblem, ...],
    *,
    description: str = "",
    notes: Sequence[str] = (),
    arm_words: Mapping[str, str] | None = None,
    limits: SpaceLimits | None = None,
) -> str:
    """The header of a run's measurements, one line of JSON; what is not given is left out."""
    groups = {
        problem.group.name: BundleGroup(
            comms=problem.group.comm_names,
            spaces=problem.spaces,
            default=problem.default,
            baselines=dict(problem.baselines),
            launches=problem.launches,
        )
        for problem in problems
    }
    header = BundleHeader(
        format=FORMAT,
        version=VERSION,
        job_fingerprint=job_fingerprint,
        backend=backend,
        groups=groups,
        description=description,
        notes=tuple(notes),
        arm_words=dict(arm_words or {}),
        limits=limits,
    )
    return msgspec.json.encode(header).decode()


def parse_header(line: str, where: str) -> BundleHeader:
    """The header in a bundle's first line; `where` names the bundle in an error.

    Raises:
        BundleError: if it is damaged or of another version.
    """
    try:
        header = msgspec.json.decode(line, type=BundleHeader)
    except (msgspec.DecodeError, ValueError, LagomError, RecursionError) as error:
        raise BundleError(f"{where}: line 1 is no header of a measurement bundle: {error}") from None
    if header.format != FORMAT or header.version != VERSION:
        raise BundleError(
            f"{where}: a bundle of format {header.format!r} version {header.version}; "
            f"this version reads {FORMAT!r} version {VERSION}"
        )
    return header
