"""A tuning run on one screen: groups with collectives of the same kinds are one entry, with the range of what changes.

What each collective of each group runs with is in `config_table`, in the page and in `configs.toml`.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.text import Text

from lagom_overlap.collective import CommConfig
from lagom_overlap.report.fitted_table import WIDTH
from lagom_overlap.report.tune.probes import GroupHistory, histories
from lagom_overlap.report.tune.verdict_words import KNOB_WORDS, change_text, knob_text, launch_text, printable
from lagom_overlap.results.tune import TuneResult
from lagom_overlap.tuners.problem import Measurement
from lagom_overlap.units import format_seconds
from lagom_overlap.workload import CommOp

MAX_ROWS = 4
"""Kinds of groups that change and are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlikeGroups:
    """Groups whose collectives are of the same kinds on the same communicators: their time in a step, before and after.

    `step_s` is what their settings, each group's alone, change of the whole step; None where the step has no price.
    """

    what: str
    count: int
    before_s: float | None
    after_s: float | None
    step_s: float | None
    changes: tuple[str, ...]


def alike_groups(result: TuneResult) -> tuple[AlikeGroups, ...]:
    """The groups of a run by the kinds of their collectives, those with most gain first."""
    alike: dict[tuple[str, ...], list[GroupHistory]] = defaultdict(list)
    for history in histories(result):
        alike[_kinds(history.problem.group.comms)].append(history)
    rows = [_row(result, kinds, members) for kinds, members in alike.items()]

    def gain_s(row: AlikeGroups) -> float:
        if row.step_s is not None:
            return -row.step_s
        return 0.0 if row.before_s is None or row.after_s is None else row.before_s - row.after_s

    return tuple(sorted(rows, key=gain_s, reverse=True))


def _kinds(comms: Iterable[CommOp]) -> tuple[str, ...]:
    return tuple(sorted({_kind(comm) for comm in comms}))


def _kind(comm: CommOp) -> str:
    """A collective's kind and communicator: `"all-gather (fsdp)"`."""
    where = f" ({comm.communicator})" if comm.communicator else ""
    return f"{comm.collective.kind.value.replace('_', '-')}{where}"


def _row(result: TuneResult, kinds: tuple[str, ...], members: Sequence[GroupHistory]) -> AlikeGroups:
    problems = [member.problem for member in members]
    tuned = {problem.group.name: result.search.tuned_of(problem) for problem in problems}
    is_changed = any(tuned[problem.group.name] != problem.default for problem in problems)
    pairs: dict[str, list[tuple[CommConfig, CommConfig]]] = defaultdict(list)
    for problem in problems:
        for comm, default, config in zip(problem.group.comms, problem.default, tuned[problem.group.name], strict=True):
            pairs[_kind(comm)].append((default, config))
    changes = []
    for kind in kinds:
        words = [
            f"{word} {_range(before, knob)} → {_range(after, knob)}"
            for knob, word in KNOB_WORDS.items()
            for before, after in [_moved(pairs[kind], knob)]
            if after
        ]
        if words:
            changes.append(f"{kind.partition(' ')[0]}: {', '.join(words)}" if len(kinds) > 1 else ", ".join(words))
    launches = dict.fromkeys(launch_text(problem, tuned[problem.group.name]) for problem in problems)
    changes += [f"computation: {text}" for text in launches if "→" in text]
    alone = [
        step_s - result.step_s
        for problem in problems
        if result.step_s is not None and (step_s := result.group_steps_s.get(problem.group.name)) is not None
    ]
    return AlikeGroups(
        what=" + ".join(kinds),
        count=sum(problem.group.count for problem in problems),
        before_s=_sum((member.problem.group.count, member.default) for member in members),
        after_s=_sum((m.problem.group.count, m.tuned) for m in members) if is_changed else None,
        step_s=sum(alone) if alone else None,
        changes=tuple(changes),
    )


def _sum(members: Iterable[tuple[int, Measurement | None]]) -> float | None:
    """Seconds in a step; None where one was not measured."""
    total_s = 0.0
    for count, measured in members:
        if measured is None:
            return None
        total_s += count * measured.makespan_s
    return total_s


def _moved(pairs: Sequence[tuple[CommConfig, CommConfig]], knob: str) -> tuple[list[CommConfig], list[CommConfig]]:
    """The configurations before and after in which a knob changes."""
    moved = [pair for pair in pairs if getattr(pair[0], knob) != getattr(pair[1], knob)]
    return [before for before, _ in moved], [after for _, after in moved]


def _range(configs: Sequence[CommConfig], knob: str) -> str:
    """A knob's values: one, two, or the smallest to the largest."""
    values = sorted({getattr(config, knob) for config in configs}, key=lambda value: (value is not None, value))
    ends = [knob_text(next(c for c in configs if getattr(c, knob) == value), knob) for value in (values[0], values[-1])]
    if len(values) == 1:
        return ends[0]
    if isinstance(values[-1], str):
        return "/".join(map(str, values))
    return f"{ends[0]}–{ends[1]}"


def overview(result: TuneResult) -> Group:
    """What changes, those with most gain first, each over as many lines as it takes; what does not in one line."""
    rows = alike_groups(result)
    changed = [row for row in rows if row.changes]
    parts: list[RenderableType] = []
    for row in changed[:MAX_ROWS]:
        parts.append(Text(f"{row.count} × {printable(row.what)}", style="bold"))
        parts += [_below(text) for text in (times_text(result, row), *row.changes)]
    left = sum(row.count for row in changed[MAX_ROWS:])
    same = sum(row.count for row in rows if not row.changes)
    if left:
        parts.append(Text(f"{left} × others that change less: --details", style="dim"))
    if same:
        parts.append(Text(f"{same} × unchanged: {', '.join(r.what for r in rows if not r.changes)}", style="dim"))
    return Group(*(Constrain(part, WIDTH) for part in parts))


def times_text(result: TuneResult, row: AlikeGroups) -> str:
    """The groups' time before and after, and what that is of the step where it has a price."""
    if row.before_s is None or row.after_s is None:
        return "not measured"
    times = f"{format_seconds(row.before_s)} → {format_seconds(row.after_s)} ({change_text(row.before_s, row.after_s)})"
    if result.step_s is None or row.step_s is None:
        return times
    return f"{times}, {change_text(result.step_s, result.step_s + row.step_s)} of the step"


def _below(text: str) -> Padding:
    return Padding(Text(printable(text)), (0, 0, 0, 4), expand=False)
