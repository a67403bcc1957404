"""`[tune] warm_start` and `lagom tune --warm-start`: a run folder where the search may begin, read for a job.

It gives all that was measured of groups with the names and collectives of this job's, and what it ended with if that
was adopted. None of it is believed without measurements of this run (`tuners/machine/posterior.py`).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from lagom_overlap.errors import BundleError, JobError
from lagom_overlap.record import read_regular
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.bundle import parse_header
from lagom_overlap.tuners.journal import entries_from_json
from lagom_overlap.tuners.warm_start import WarmStart, earlier_of

MEASUREMENTS: Final = "measurements.jsonl"
MAX_BYTES: Final = 1 << 30
"""Chosen: the journal of a long search has some MB."""


def check_run(run: str) -> None:
    """Refuses what is no run, before anything is started.

    Raises:
        JobError: if it is no folder with measurements.
    """
    if not (Path(run) / MEASUREMENTS).is_file():  # a run that was killed has them, too
        raise JobError(f"warm start {run!r} is no run folder of lagom tune: there is no {MEASUREMENTS} in it")


def warm_start_of(run: str, problems: Problems) -> WarmStart:
    """What a run says of the groups that are to be tuned; it may be nothing of some of them.

    Raises:
        JobError: if it is no run folder, or says nothing of any group.
        BundleError: if it cannot be read, or is damaged.
    """
    check_run(run)
    where = f"warm start {run!r}"
    try:
        lines = read_regular(Path(run) / MEASUREMENTS, MAX_BYTES).decode().splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{where} cannot be read: {error}") from None
    if lines and not lines[-1].endswith("\n"):  # cut off by whatever ended the run
        lines.pop()
    header = parse_header(lines[0] if lines else "", where)
    recorded = []
    for problem in problems:
        group = header.groups.get(problem.group.name)
        if group is not None and group.comms == problem.group.comm_names:
            recorded.append(replace(problem, spaces=group.spaces, default=group.default, baselines=group.baselines))
    if not recorded:
        raise JobError(f"the {where} says nothing of this job's groups: their collectives differ")
    entries = entries_from_json(_only(lines[1:], {problem.group.name for problem in recorded}), tuple(recorded))
    earlier = tuple(earlier_of(problem, entries) for problem in recorded)
    count = sum(len(done) for group in earlier for done in group.runs.values())
    return WarmStart(source=f"{count} measurements of {len(earlier)} groups in {run!r}", earlier=earlier)


def _only(lines: list[str], names: set[str]) -> list[str]:
    """The steps without the groups that this job does not have."""
    kept = []
    for number, line in enumerate(lines, start=2):
        try:
            row: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
            row["groups"] = {name: group for name, group in row["groups"].items() if name in names}
        except (msgspec.MsgspecError, KeyError, AttributeError) as error:
            raise BundleError(f"line {number} of the measurements is damaged: {error}") from None
        kept.append(msgspec.json.encode(row).decode())
    return kept
