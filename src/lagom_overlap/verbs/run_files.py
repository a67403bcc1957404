"""The files that a run leaves while it goes on: rank 0's events of `lagom run`, and the journal of a search.

All are lines that are appended whole; the last may be torn by a kill, and is passed over.
"""

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from lagom_overlap.collective import CommConfig
from lagom_overlap.errors import BundleError, LagomError
from lagom_overlap.export.run_variables import RunMode
from lagom_overlap.export.saved import SETTINGS_NAME, read_saved
from lagom_overlap.jobfile.run_folder import SavedRun
from lagom_overlap.record import read_regular
from lagom_overlap.results.conclusion import Conclusion, command_line, online_line
from lagom_overlap.results.run import RunResult, StateChange, Tried
from lagom_overlap.results.step_times import read_step_times
from lagom_overlap.tuners.bundle import MAX_BUNDLE_BYTES, parse_header
from lagom_overlap.tuners.journal import EntryRow, rows_from_json

JOURNALS: Final = ("measurements.jsonl", "journal.0.jsonl")
"""Of `lagom tune`, and of a job that is tuned while it runs."""
EVENTS: Final = "events.0.jsonl"
METRICS: Final = "metrics.0.prom"
_SETTLED: Final = ("watch", "done")
"""States in which a search was over, by their names in the events."""
_MAX_TEXT_BYTES: Final = 256 << 20
"""Chosen, far above the events of any job."""


def whole_lines(path: Path, most_bytes: int = _MAX_TEXT_BYTES) -> tuple[str, ...]:
    """The lines of a file without one that was torn at the end; none where there is no file.

    Raises:
        BundleError: if it cannot be read.
    """
    try:
        text = read_regular(path, most_bytes).decode(errors="replace")
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise BundleError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    return tuple(text[: text.rfind("\n") + 1].splitlines())


def events_of(folder: Path) -> tuple[Mapping[str, Any], ...]:
    """Rank 0's events of a job under `lagom run`.

    Raises:
        BundleError: if the file cannot be read or is damaged.
    """
    events = []
    for number, line in enumerate(whole_lines(folder / EVENTS), start=1):
        try:
            events.append(msgspec.json.decode(line, type=dict[str, Any]))
        except msgspec.MsgspecError as error:
            raise BundleError(f"{str(folder / EVENTS)!r}: line {number} is damaged: {error}") from None
    return tuple(events)


def tried_in(folder: Path) -> tuple[Tried, ...]:
    """What a search has measured so far, in order.

    Raises:
        BundleError: if the journal cannot be read or is damaged.
    """
    return tuple(_tried(rows_from_json(_journal(folder)[1:], first_line=2)))


def num_contenders(folder: Path) -> int:
    """How many arms the verdict of a search compares: the default, what was found, and the baselines.

    Raises:
        BundleError: as `tried_in`.
    """
    lines = _journal(folder)
    groups = parse_header(lines[0], repr(str(folder))).groups.values() if lines else ()
    return 2 + len({name for group in groups for name in group.baselines})


def _journal(folder: Path) -> tuple[str, ...]:
    path = next((path for name in JOURNALS if (path := folder / name).exists()), None)
    return () if path is None else whole_lines(path, MAX_BUNDLE_BYTES)


def _tried(rows: Iterable[EntryRow]) -> Iterable[Tried]:
    for row in rows:
        for group, ran in row.groups.items():
            try:
                configs = {name: CommConfig(**msgspec.structs.asdict(config)) for name, config in ran.configs.items()}
            except LagomError as error:
                raise BundleError(f"step {row.number} of the measurements is damaged: {error}") from None
            yield Tried(
                number=row.number,
                arm=row.arm,
                group=group,
                configs=configs,
                makespan_s=None if ran.measured is None else ran.measured.makespan_s,
                metric_h=ran.priorities,
                reason=ran.reason or "",
                failure=ran.failure,
            )


def read_run(saved: SavedRun) -> RunResult:
    """What a job under `lagom run` has left so far.

    Raises:
        BundleError: if a file cannot be read or is damaged.
    """
    folder, asked = saved.path, saved.record.request if isinstance(saved.record.request, dict) else {}
    events = events_of(folder)
    begun = next((event for event in events if event.get("event") == "begin"), {})
    ended = next((event for event in reversed(events) if event.get("event") == "end"), None)
    times = read_step_times(folder)
    kept = read_saved(folder / SETTINGS_NAME) if SETTINGS_NAME in saved.files else None
    raw = {
        "mode": asked.get("mode", begun.get("mode")),
        "command": asked.get("command", ()),
        "world_size": begun.get("world_size"),
        "backend": begun.get("backend"),
        "model": next((event.get("type") for event in events if event.get("event") == "model"), None),
        "states": [
            {
                "date": event.get("time"),
                "state": event.get("state"),
                "reason": event.get("reason"),
                "num_settings": event.get("settings"),
                "num_steps_left": event.get("steps_left"),
            }
            for event in events
            if event.get("event") == "state"
        ],
        "num_steps": None if ended is None else ended.get("steps"),
    }
    try:
        plain = msgspec.convert(raw, _Plain)
        ending = None if ended is None or "result" not in ended else msgspec.convert(ended, _Ending)
    except msgspec.ValidationError as error:
        raise BundleError(f"{str(folder / EVENTS)!r} is damaged: {error}") from None
    return RunResult(
        mode=plain.mode,
        command=plain.command,
        world_size=plain.world_size,
        backend=plain.backend,
        model=plain.model,
        states=plain.states,
        tried=tried_in(folder),
        num_steps=plain.num_steps,
        steps_s=() if times is None else times.settled_s,
        settings=() if kept is None else kept.settings,
        verdict=None if kept is None else kept.verdict,
        conclusion=_cut_off(saved, plain, 0 if kept is None else len(kept.settings))
        if ending is None
        else Conclusion(ending.result, ending.why, ending.next),
    )


def _cut_off(saved: SavedRun, plain: "_Plain", num_settings: int) -> Conclusion | None:
    """What is known of a search that was killed before it could say so; None of a run that may go on."""
    if plain.mode != RunMode.ONLINE or not saved.has_no_process:
        return None
    command = command_line(plain.command)
    last = plain.states[-1] if plain.states else None
    why = "the job was cut off" + ("" if last is None else f"; its last state: {last.state}, {last.reason}")
    if num_settings:
        found = f"the saved settings set {num_settings} call site{'s' if num_settings > 1 else ''}"
        return Conclusion(found, why, f"lagom run --prove {shlex.quote(str(saved.path))} -- {command}")
    if last is not None and last.state in _SETTLED:
        return Conclusion("nothing is set", why, f"{command}    # as it is: there is nothing to set")
    asked = saved.record.request if isinstance(saved.record.request, dict) else {}
    flags = {f"--{name}": _joined(asked.get(name)) for name in ("tuner", "compare", "adapters", "config")}
    line = online_line(command, flags)
    return Conclusion("nothing is decided, nothing was saved", why, f"{line}    # to its end")


def _joined(value: object) -> str | None:
    """A flag's value as it is typed: names by comma."""
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return ",".join(value)
    return value if isinstance(value, str) else None


class _Plain(msgspec.Struct, kw_only=True):
    """What the events say of a run, checked."""

    mode: str
    command: tuple[str, ...]
    world_size: int | None
    backend: str | None
    model: str | None
    states: tuple[StateChange, ...]
    num_steps: int | None


class _Ending(msgspec.Struct):
    """The event `end`."""

    result: str
    why: str
    next: str
