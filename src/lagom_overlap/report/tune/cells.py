"""What the page says, ready to print: every text and number of `report.html` as strings, in the order of the page."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lagom_overlap.collective import Collective
from lagom_overlap.report.style import colour_of
from lagom_overlap.report.tune.probes import GroupHistory, ProbePoint
from lagom_overlap.report.tune.verdict_words import (
    KNOB_WORDS,
    busy_sentence,
    change_text,
    comm_time,
    config_text,
    failure_sentences,
    fixed_sentence,
    knob_text,
    launch_lines,
    median_text,
    quartiles_text,
    share_sentence,
)
from lagom_overlap.results.tune import ENGINE_DEFAULT, TuneResult
from lagom_overlap.tuners.journal import StepKind
from lagom_overlap.tuners.problem import Failure, Measurement
from lagom_overlap.tuners.verdict import DEFAULT_ARM, PairedRatio
from lagom_overlap.units import format_bytes, format_seconds

MAX_LISTED_PROBES = 300
"""Probes of one group in the page's table; all are in measurements.jsonl."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One big number with its name, what it compares and how it spreads."""

    name: str
    number: str
    what: str
    quartiles: str
    wins: str


@dataclass(frozen=True, slots=True)
class KnobCell:
    """One knob before and after."""

    before: str
    after: str

    @property
    def same(self) -> bool:
        """Whether nothing changes."""
        return self.before == self.after


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRow:
    """A time before and after; `tone` is the style of the change, `css` that of the row."""

    name: str
    before: str
    after: str
    change: str
    tone: str
    css: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommRow:
    """One collective of the table."""

    name: str
    call: str
    colour: str
    knobs: tuple[KnobCell, ...]
    before: str
    after: str
    change: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRow:
    """One measurement of the search; `failure` is None where it ran."""

    number: int
    configs: tuple[str, ...]
    reason: str
    x: str
    y: str
    z: str
    failure: str | None


def time_row(name: str, before_s: float | None, after_s: float | None, css: str = "") -> TimeRow:
    """A row of the table from two times, either of which may be missing."""
    change = change_text(before_s, after_s)
    tone = ""
    if before_s and after_s is not None and abs(after_s - before_s) > 0.005 * before_s:
        tone = "better" if after_s < before_s else "worse"
    return TimeRow(name=name, before=_time(before_s), after=_time(after_s), change=change, tone=tone, css=css)


def _time(seconds: float | None) -> str:
    return "not measured" if seconds is None else format_seconds(seconds)


def call_text(collective: Collective) -> str:
    """A call in words: `"all-gather, 32 MiB, 8 ranks"`."""
    name = collective.kind.value.replace("_", "-")
    return f"{name}, {format_bytes(collective.num_bytes)}, {collective.num_ranks} ranks"


def shown_knobs(result: TuneResult) -> tuple[str, ...]:
    """The knobs that the default or the tuned assignment sets anywhere."""
    configs = [
        config for problem in result.search.problems for config in (*problem.default, *result.search.tuned_of(problem))
    ]
    return tuple(knob for knob in KNOB_WORDS if any(getattr(config, knob) is not None for config in configs))


def comm_rows(result: TuneResult, history: GroupHistory) -> Iterator[CommRow]:
    """One row per collective of a group."""
    problem = history.problem
    knobs = shown_knobs(result)
    for index, comm in enumerate(problem.group.comms):
        default, tuned = problem.default[index], result.search.tuned_of(problem)[index]
        times = time_row(comm.name, comm_time(history.default, index), comm_time(history.tuned, index))
        if problem.default == result.search.tuned_of(problem):
            times = replace(times, after="", change="")
        elif default == tuned:
            times = replace(times, change="")
        yield CommRow(
            name=comm.name,
            call=call_text(comm.collective),
            colour=colour_of(index),
            knobs=tuple(KnobCell(knob_text(default, knob), knob_text(tuned, knob)) for knob in knobs),
            before=times.before,
            after=times.after,
            change=times.change,
        )


def sum_rows(history: GroupHistory, *, changed: bool) -> tuple[TimeRow, ...]:
    """X, Y and Z of a group before and after; one column where nothing changed: what two runs differ by is noise."""

    def pair(read: str) -> tuple[float | None, float | None]:
        both: list[Measurement | None] = [history.default, history.tuned]
        before, after = (None if m is None else float(getattr(m, read)) for m in both)
        return before, after

    rows = (
        time_row("all collectives (X)", *pair("total_comm_s")),
        time_row("computation (Y)", *pair("comp_s")),
        time_row("whole group (Z)", *pair("makespan_s"), css="makespan"),
    )
    return rows if changed else tuple(replace(row, after="", change="", tone="") for row in rows)


def tiles(result: TuneResult) -> tuple[Tile, ...]:
    """The verdict's numbers; none without a verdict or where nothing changes."""
    share, verdict = result.engine_share, result.verdict
    if share is None or verdict is None or result.changes_nothing:
        return ()
    if result.is_prediction:
        than = f"tuned over {result.words_for(DEFAULT_ARM)}"
        return (Tile("The whole gain", median_text(share.whole), than, "predicted", "nothing was run"),)
    default, engine = result.words_for(DEFAULT_ARM), result.words_for(ENGINE_DEFAULT)
    shares = [_tile("The whole gain", f"tuned over {default}", share.whole)]
    if share.engine is not None:
        shares.append(_tile("Of which engine", f"{engine} over {default}", share.engine))
    if share.tuning is not None:
        shares.append(_tile("Of which tuning", f"tuned over {engine}", share.tuning))
    fixed = verdict.over_baselines.get(verdict.best_fixed) if verdict.best_fixed else None
    if verdict.best_fixed and fixed is not None:
        shares.append(
            _tile("Over the best setting without a search", f"tuned over {result.words_for(verdict.best_fixed)}", fixed)
        )
    return tuple(shares)


def _tile(name: str, what: str, ratio: PairedRatio) -> Tile:
    quartiles, wins = f"quartiles {quartiles_text(ratio)}", f"{ratio.num_wins}/{ratio.num_pairs} wins"
    return Tile(name, median_text(ratio), what, quartiles, wins)


def sentences(result: TuneResult) -> tuple[str, ...]:
    """What part is engine, what part is tuning, how far a fixed setting would have come, what failed and disturbed."""
    if result.changes_nothing:
        return ()
    if result.is_prediction:
        return failure_sentences(result)
    texts = (share_sentence(result), fixed_sentence(result), *failure_sentences(result), busy_sentence(result))
    return tuple(text for text in texts if text)


def probe_rows(history: GroupHistory) -> tuple[ProbeRow, ...]:
    """The search's probes, at most `MAX_LISTED_PROBES`."""
    names = history.problem.group.comm_names
    return tuple(_probe_row(probe, names) for probe in history.probes[:MAX_LISTED_PROBES])


def _probe_row(probe: ProbePoint, names: tuple[str, ...]) -> ProbeRow:
    failed = isinstance(probe.outcome, Failure)
    m = probe.measurement
    configs = (f"{name}: {config_text(config)}" for name, config in zip(names, probe.assignment, strict=True))
    return ProbeRow(
        number=probe.number,
        configs=tuple(configs) + launch_lines(probe.assignment),
        reason=probe.reason,
        x=_time(m.total_comm_s if m else None),
        y=_time(m.comp_s if m else None),
        z=_time(m.makespan_s if m else None),
        failure=probe.outcome.reason if isinstance(probe.outcome, Failure) and failed else None,
    )


def facts(result: TuneResult) -> tuple[tuple[str, str], ...]:
    """The table of how it was measured."""
    failures = sum(
        isinstance(outcome, Failure)
        for entry in result.search.entries
        if entry.step.kind is StepKind.SEARCH
        for outcome in entry.outcomes.values()
    )
    rounds = {entry.step.round for entry in result.search.entries} - {None}
    guard = "guarded: the default stays the incumbent" if result.guarded else "unguarded, as published"
    runs = "one run" if result.repeats == 1 else f"median of {result.repeats} runs, each the maximum over ranks"
    facts_shown = [
        ("what ran", result.backend_description),
        ("tuner", f"{result.tuner} ({guard})"),
        ("seed", str(result.seed)),
        ("measurements of the search", str(result.num_measurements)),
        ("one measurement", runs),
        ("configurations that could not run", str(failures)),
        ("rounds of the A/B", f"{len(rounds)}, contenders in shuffled order in each, counted apart from the search"),
        ("date", result.date),
        ("duration", format_seconds(result.duration_s)),
    ]
    return (*facts_shown, *result.machine.items(), *result.versions.items())
