"""A self-test of NCCL for a terminal: asked, ran and time by call and implementation; the contention by channels."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from rich.table import Table
from rich.text import Text

from lagom_overlap.cost.measured_surface import Point
from lagom_overlap.nccl_plugin.capability import Knobs, MapRow, SettingOutcome
from lagom_overlap.report.fitted_table import Fitted
from lagom_overlap.results.selftest import SelfTestResult
from lagom_overlap.units import format_bytes, format_seconds


def settings_table(rows: Sequence[MapRow]) -> Fitted:
    """One line per call and implementation."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("call", no_wrap=True)
    table.add_column("asked", overflow="fold")
    table.add_column("ran", overflow="fold")
    table.add_column("time", no_wrap=True, justify="right")
    groups: dict[tuple[str, int, str], list[MapRow]] = defaultdict(list)
    for row in rows:
        groups[row.kind, row.num_bytes, _way(row.asked)].append(row)
    before = None
    for (kind, num_bytes, way), mine in sorted(groups.items()):
        is_wrong = any(row.outcome is SettingOutcome.WRONG for row in mine)
        call = f"{kind}\n{format_bytes(num_bytes)}"
        table.add_row(
            Text("" if call == before else call),
            Text(f"{way}: {_asked_words(mine)}"),
            Text(_ran_words(mine), style="bold red" if is_wrong else ""),
            Text(_times(mine)),
        )
        before = call
    return Fitted(table)


MAX_NAMED: Final = 12
"""Wrong settings that are named one by one; the file has all."""
LEGEND: Final = (
    "Asked: 6 ch., 3 chunks: six numbers of channels, three sizes; settings.csv has each. Ran: by NCCL's log, the "
    "kernels' grids and the plug-in's record. Time: the fastest and the slowest."
)


def contention_table(points: Sequence[Point]) -> Fitted:
    """How much longer a GEMM takes during each collective, by channels."""
    kinds = list(dict.fromkeys(point.injector for point in points))
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("channels", no_wrap=True, justify="right")
    for kind in kinds:
        table.add_column(kind, no_wrap=True, justify="right")
    by_place = {(point.num_channels, point.injector): point for point in points}
    for channels in dict.fromkeys(point.num_channels for point in points):
        cells = [_slowdown(by_place.get((channels, kind))) for kind in kinds]
        table.add_row(Text(str(channels)), *map(Text, cells))
    return Fitted(table)


def closing_words(result: SelfTestResult) -> list[str]:
    """What is to be said below the tables, a line each."""
    lines = [result.summary()]
    if (limits := result.facts.limits) is not None:
        lines.append(f"The communicator has {limits.num_channels} channels.")
    if (overhead := result.overhead) is not None:
        lines.append(
            f"Host time of a grouped call: {format_seconds(overhead.on_s)} with the plug-in, "
            f"{format_seconds(overhead.off_s)} without; the median of {overhead.num_pairs} differences is "
            f"{overhead.difference_s * 1e6:+.2f} us, their quartiles are {overhead.spread_s * 1e6:.2f} us apart."
        )
    if (swaps := result.swaps) is not None:
        lines.append(f"{swaps.num_swaps} tables swapped under traffic: {swaps.num_wrong or 'no'} wrong results.")
    if result.stopped:
        lines.append(f"Not the whole grid: {result.num_called} of {result.num_planned_calls} calls; {result.stopped}.")
    lines += result.notes
    if result.map_path is not None:
        lines.append(f"Capability map: {result.map_path}")
    if result.files:
        lines.append(f"Files: {result.files[0].parent}")
    lines += _wrong_words(result.wrong, result.rows)
    return lines


def _wrong_words(wrong: Sequence[MapRow], rows: Sequence[MapRow]) -> list[str]:
    """The settings with wrong results, those of a collective that is always wrong in one line."""
    if not wrong:
        return []
    lines = [f"WRONG RESULTS: {len(wrong)} settings. Do not train with these:"]
    right = {row.kind for row in rows if row.outcome is not SettingOutcome.WRONG}
    for kind in dict.fromkeys(row.kind for row in wrong if row.kind not in right):
        lines.append(f"  {kind}: every setting, NCCL's own choice too; a library built without it does nothing")
    some = [row for row in wrong if row.kind in right]
    lines += [
        f"  {row.kind} of {row.num_bytes} bytes, {_way(row.asked)}: {_one(row.asked)}" for row in some[:MAX_NAMED]
    ]
    if len(some) > MAX_NAMED:
        lines.append(f"  and {len(some) - MAX_NAMED} more: settings.csv")
    return lines


def _way(knobs: Knobs) -> str:
    if knobs.algorithm is None and knobs.protocol is None:
        return "NCCL's own"
    return f"{knobs.algorithm or 'own'}/{knobs.protocol or 'own'}"


def _one(knobs: Knobs) -> str:
    """The resource knobs of one setting."""
    parts = [f"{knobs.num_channels} channels"] if knobs.num_channels else []
    parts += [f"chunk {format_bytes(knobs.chunk_bytes)}"] if knobs.chunk_bytes else []
    return ", ".join(parts) or "untouched"


def _asked_words(rows: Iterable[MapRow]) -> str:
    asked = [row.asked for row in rows]
    channels = sorted({knobs.num_channels for knobs in asked if knobs.num_channels and not knobs.chunk_bytes})
    chunks = sorted({knobs.chunk_bytes for knobs in asked if knobs.chunk_bytes})
    parts = ["untouched"] if any(knobs == Knobs() for knobs in asked) else []
    if channels:
        parts.append(f"{len(channels)} ch." if len(channels) > 1 else f"ch. {channels[0]}")
    if chunks:
        parts.append(f"{len(chunks)} chunks" if len(chunks) > 1 else f"chunk {format_bytes(chunks[0])}")
    return ", ".join(parts)


def _span(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"{values[0]} to {values[-1]} ({len(values)})"


def _ran_words(rows: Sequence[MapRow]) -> str:
    """What did not run as asked, put together by what it became; NCCL's own choice where nothing was asked."""
    wrong = [row.asked for row in rows if row.outcome is SettingOutcome.WRONG]
    if len(wrong) == len(rows):
        return f"WRONG RESULTS, all {len(rows)}" if len(rows) > 1 else "WRONG RESULT"
    parts = [
        f"{_way(row.ran)} on {row.ran.num_channels or '?'} ch."
        for row in rows
        if row.asked == Knobs() and row.outcome is not SettingOutcome.WRONG
    ]
    became: dict[tuple[bool, str], list[int]] = defaultdict(list)
    for row in rows:
        if row.outcome not in (SettingOutcome.AS_ASKED, SettingOutcome.WRONG):
            is_chunk, asked, ran = _difference(row)
            became[is_chunk, ran].append(asked)
    parts += [f"{_values(asked, is_chunk=is_chunk)} ran {ran}" for (is_chunk, ran), asked in sorted(became.items())]
    num_as_asked = sum(row.outcome is SettingOutcome.AS_ASKED and row.asked != Knobs() for row in rows)
    if num_as_asked:
        parts.insert(0, "as asked" if num_as_asked == len(rows) else f"{num_as_asked} as asked")
    parts += [f"WRONG RESULT with {_one(asked)}" for asked in wrong]
    return "; ".join(parts)


def _difference(row: MapRow) -> tuple[bool, int, str]:
    """Whether it is of the chunk, the value asked, and what ran in its place."""
    asked, ran = row.asked, row.ran
    if row.outcome is SettingOutcome.NOT_APPLIED:
        return bool(asked.chunk_bytes), asked.chunk_bytes or asked.num_channels or 0, f"as {_way(ran)}"
    if asked.num_channels and ran.num_channels and asked.num_channels != ran.num_channels:
        return False, asked.num_channels, f"{ran.num_channels} ch."
    return True, asked.chunk_bytes or 0, format_bytes(ran.chunk_bytes or 0)


def _values(asked: Sequence[int], *, is_chunk: bool) -> str:
    values = sorted(set(asked))
    return _span([format_bytes(value) for value in values]) if is_chunk else f"ch. {_span([str(v) for v in values])}"


def _times(rows: Iterable[MapRow]) -> str:
    times = [row.time_s for row in rows if row.time_s is not None]
    if not times:
        return "-"
    if len(times) == 1:
        return format_seconds(times[0])
    return f"{format_seconds(min(times))} - {format_seconds(max(times))}"


def _slowdown(point: Point | None) -> str:
    if point is None or point.slowdown is None:
        return "-"
    return f"{point.slowdown:.2f}×" + ("" if point.covered else " ?")
