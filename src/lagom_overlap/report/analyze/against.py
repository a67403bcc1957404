"""Two analyses compared, in words and cells: the same in the page and in the terminal."""

from lagom_overlap.analysis.against import AgainstRun, CallChange, CallTimes
from lagom_overlap.units import format_bytes, format_seconds

_NONE = "–"
HEADS = ("calls", "total", "Δ total", "Δ exposed", "Δ stretch", "channels")
"""Columns of `change_cells` after the name."""


def difference_text(before_s: float, after_s: float) -> str:
    """A signed difference."""
    if after_s == before_s:
        return "0"
    return f"{'+' if after_s > before_s else '−'}{format_seconds(abs(after_s - before_s))}"


def against_headline(compared: AgainstRun) -> str:
    """What changed in a step, in one or two sentences."""
    low, high = compared.step_ratio_low, compared.step_ratio_high
    if not compared.step_ratio:
        return "One of the runs has no timeline: only its collectives compare."
    if low is None or high is None:
        sure = f"too few steps for an interval ({compared.num_steps_after} against {compared.num_steps_before})"
    else:
        within = "" if compared.is_proven else "within the steps' scatter: "
        sure = f"{within}95 % interval {100 * (low - 1):+.1f} to {100 * (high - 1):+.1f} %"
    was, became = format_seconds(compared.before.step_s), format_seconds(compared.after.step_s)
    percent = f"{100 * (compared.step_ratio - 1):+.1f} %"
    return f"Against the other run a step takes {became} instead of {was} ({percent}; {sure})."


def step_cells(compared: AgainstRun) -> list[tuple[str, ...]]:
    """(part of a step, before, after, difference, per cent)."""
    rows: list[tuple[str, ...]] = []
    for name, was, became in (
        ("step", compared.before.step_s, compared.after.step_s),
        ("compute", compared.before.compute_s, compared.after.compute_s),
        ("communication", compared.before.comm_s, compared.after.comm_s),
        ("exposed communication", compared.before.exposed_comm_s, compared.after.exposed_comm_s),
        ("stretched compute", compared.before.stretched_compute_s, compared.after.stretched_compute_s),
        ("idle", compared.before.idle_s, compared.after.idle_s),
    ):
        percent = f"{100 * (became / was - 1):+.1f} %" if was > 0 else _NONE
        rows.append((name, format_seconds(was), format_seconds(became), difference_text(was, became), percent))
    return rows


def _name(change: CallChange, only: str | None) -> str:
    communicator = None if change.communicator == only else change.communicator
    parts = (change.kind, None if not change.bytes else format_bytes(change.bytes), communicator)
    return " ".join(part for part in parts if part)


def _channels(share: CallTimes) -> str:
    return "/".join(str(number) for number in share.channels if number) or _NONE


def _cells(change: CallChange, only: str | None) -> tuple[str, ...]:
    was, became = change.before, change.after
    calls = f"{became.count:.3g}" if became.count == was.count else f"{was.count:.3g}→{became.count:.3g}"
    channels = _channels(became)
    if _channels(was) != channels:
        channels = f"{_channels(was)}→{channels}"
    return (
        _name(change, only),
        calls,
        format_seconds(became.total_s),
        difference_text(was.total_s, became.total_s),
        difference_text(was.exposed_s, became.exposed_s),
        difference_text(was.stretched_s, became.stretched_s),
        channels,
    )


def change_cells(changes: tuple[CallChange, ...], only: str | None = None) -> list[tuple[str, ...]]:
    """One row per group of collectives; times per step; the communicator `only` is not named."""
    return [_cells(change, only) for change in changes]


def only_communicator_of(compared: AgainstRun) -> str | None:
    """The communicator of both runs' collectives; None where there are several, or none."""
    names = {change.communicator for change in compared.collectives}
    return names.pop() if len(names) == 1 else None
