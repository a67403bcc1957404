"""The table of several tuners on a running job, for the terminal: no colours, since a rank's stderr is a log."""

from collections import Counter, defaultdict
from math import isfinite
from typing import Final

from lagom_overlap.report.tune.verdict_words import config_text
from lagom_overlap.results.contest import ContestResult, TunerResult

_HEAD: Final = ("tuner", "over the default", "interval", "decision", "trials", "steps")
_MOST_SETTINGS: Final = 4
"""Different settings that are named, for each tuner; compare.json has all."""


def contest_lines(result: ContestResult) -> list[str]:
    """The table, what each tuner set, and who was best."""
    rows = [_HEAD, *(_cells(each) for each in result.tuners)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [
        "tuners compared on this job, by whole steps:",
        *(f"  {line}" for line in table),
        *(f"  {each.name} sets {_settings(each)}" for each in result.tuners if each.settings),
        f"  {result.summary()}",
        *_next(result),
    ]


def _cells(each: TunerResult) -> tuple[str, ...]:
    spent = (str(each.num_measurements), str(each.num_steps))
    judgement = each.judgement
    if judgement is None:
        words = f"failed: {each.failed}" if each.failed else "is the default" if not each.settings else "not compared"
        return (each.name, "-", "-", words if each.num_measurements else "did not search: out of steps", *spent)
    high = f"{judgement.high:.3f}" if isfinite(judgement.high) else "any"
    return (each.name, f"{judgement.ratio:.3f}x", f"{judgement.low:.3f} to {high}", str(judgement.decision), *spent)


def _settings(each: TunerResult) -> str:
    """The settings, each with the kinds of collectives that have it: `"8 channels: 2 all_gather, 1 all_reduce"`."""
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for configs in each.settings.values():
        for comm, config in configs.items():
            kinds[config_text(config)][comm.rpartition(":")[2]] += 1
    named = [
        f"{config}: {', '.join(f'{count} {kind}' for kind, count in kinds_of.items())}"
        for config, kinds_of in kinds.items()
    ]
    more = len(named) - _MOST_SETTINGS
    words = "; ".join(named[:_MOST_SETTINGS]) or "nothing"
    return f"{words}; and {more} more" if more > 0 else words


def _next(result: ContestResult) -> list[str]:
    if result.best is None or result.best.name == result.adopted:
        return []
    return [f"  set it: lagom run --online --tuner {result.best.name} -- COMMAND"]
