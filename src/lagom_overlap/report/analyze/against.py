"""Two analyses compared, in words and cells: the same in the page and in the terminal."""

from lagom_overlap.analysis.against import Against, CallKey, CallShare, Change
from lagom_overlap.report.analyze.words import time_text
from lagom_overlap.units import format_bytes

_NONE = "–"
HEADS = ("calls", "total", "Δ total", "Δ exposed", "Δ stretch", "channels")
"""Columns of `change_cells` after the name."""


def difference_text(before_ns: float, after_ns: float) -> str:
    """A signed difference."""
    if after_ns == before_ns:
        return "0"
    return f"{'+' if after_ns > before_ns else ''}{time_text(after_ns - before_ns)}"


def against_headline(found: Against) -> str:
    """What changed in a step, in one or two sentences."""
    was, became = found.before, found.after
    if not was.span_ns or not became.span_ns:
        return "One of the runs has no timeline: only its collectives compare."
    percent = 100 * (became.span_ns / was.span_ns - 1)
    if found.low is None or found.high is None:
        sure = f"too few steps for an interval ({found.num_steps[1]} against {found.num_steps[0]})"
    elif found.is_proven:
        sure = f"95 % interval {100 * (found.low - 1):+.1f} to {100 * (found.high - 1):+.1f} %"
    else:
        sure = (
            f"within the steps' scatter: 95 % interval {100 * (found.low - 1):+.1f} to {100 * (found.high - 1):+.1f} %"
        )
    return (
        f"Against the other run a step takes {time_text(became.span_ns)} instead of {time_text(was.span_ns)} "
        f"({percent:+.1f} %; {sure})."
    )


def step_cells(found: Against) -> list[tuple[str, ...]]:
    """(part of a step, before, after, difference, per cent)."""
    rows: list[tuple[str, ...]] = []
    for name, was, became in (
        ("step", found.before.span_ns, found.after.span_ns),
        ("compute", found.before.compute_ns, found.after.compute_ns),
        ("communication", found.before.comm_ns, found.after.comm_ns),
        ("exposed communication", found.before.exposed_comm_ns, found.after.exposed_comm_ns),
        ("stretched compute", found.before.stretched_ns, found.after.stretched_ns),
        ("idle", found.before.idle_ns, found.after.idle_ns),
    ):
        percent = f"{100 * (became / was - 1):+.1f} %" if was > 0 else _NONE
        rows.append((name, time_text(was), time_text(became), difference_text(was, became), percent))
    return rows


def _name(key: CallKey, only: str | None) -> str:
    communicator = None if key.communicator == only else key.communicator
    parts = (key.op, None if not key.num_bytes else format_bytes(key.num_bytes), communicator)
    return " ".join(part for part in parts if part)


def _channels(share: CallShare) -> str:
    return "/".join(str(number) for number in share.channels if number) or _NONE


def _cells(change: Change, only: str | None) -> tuple[str, ...]:
    was, became = change.before, change.after
    calls = f"{became.count:.3g}" if became.count == was.count else f"{was.count:.3g}→{became.count:.3g}"
    channels = _channels(became)
    if _channels(was) != channels:
        channels = f"{_channels(was)}→{channels}"
    return (
        _name(change.key, only),
        calls,
        time_text(became.total_ns),
        difference_text(was.total_ns, became.total_ns),
        difference_text(was.exposed_ns, became.exposed_ns),
        difference_text(was.stretched_ns, became.stretched_ns),
        channels,
    )


def change_cells(changes: tuple[Change, ...], only: str | None = None) -> list[tuple[str, ...]]:
    """One row per group of collectives; times per step; the communicator `only` is not named."""
    return [_cells(change, only) for change in changes]


def only_communicator_of(found: Against) -> str | None:
    """The communicator of both runs' collectives; None where there are several, or none."""
    names = {change.key.communicator for change in found.collectives}
    return names.pop() if len(names) == 1 else None
