"""The tables of `paired_tuners.py`: an arm's row, a tuner's row, a job's table, as Markdown and as JSON."""

from collections.abc import Sequence
from math import isfinite
from statistics import median

import msgspec

from lagom_overlap.record import describe_machine, package_versions, utc_now
from lagom_overlap.tuners.problem import Assignment
from lagom_overlap.tuners.verdict import PairedRatio, compared
from lagom_overlap.units import MS
from lagom_overlap.verbs.compare import IterationTimes
from paired_surface import is_fixed


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """An arm: medians over the rounds, the ratio of the default to it with its 95 % interval (None: too few rounds)."""

    arm: str
    setting: str
    makespan_s: float
    comp_s: float
    comm_s: float
    over_default: float
    q25: float
    q75: float
    interval: tuple[float, float] | None
    verdict: str
    num_wins: int
    runs: list[IterationTimes]


class TunerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A tuner over its searches: their results' ratios over the default, what they cost, Y and X as shares of Z."""

    tuner: str
    num_searches: int
    num_kept_default: int
    median_over_default: float
    worst_over_default: float
    best_over_default: float
    mean_measurements: float
    comp_share: float
    comm_share: float
    regret_on_surface: float | None
    arms: list[str]


class JobTable(msgspec.Struct, frozen=True, kw_only=True):
    """One job's arms and tuners; `oracle_over_default` is the best of the surface, `loads` before and after."""

    job: str
    backend: str
    guarded: bool
    num_assignments: int
    num_passes: int
    num_pairs: int
    num_lost_ranks: int
    ended_by: str
    oracle_over_default: float
    loads: tuple[float, float]
    rows: list[Row]
    tuners: list[TunerRow]


def words(assignment: Assignment) -> str:
    """Channels x KiB per collective."""
    if is_fixed(assignment):
        assignment = assignment[:1]
    parts = []
    for config in assignment:
        chunk = "whole" if config.chunk_bytes is None else f"{config.chunk_bytes >> 10}K"
        protocol = f" {config.protocol.value}" if config.protocol else ""
        parts.append("untouched" if config.num_channels is None else f"{config.num_channels}x{chunk}{protocol}")
    return ", ".join(parts)


def row_of(arm: str, assignment: Assignment, runs: list[IterationTimes], default: Sequence[IterationTimes]) -> Row:
    """Medians and paired ratios."""
    pair = [run.makespan_s for run in default], [run.makespan_s for run in runs]
    ratio, interval = PairedRatio.of(*pair), compared(*pair)
    return Row(
        arm=arm,
        setting=words(assignment),
        makespan_s=median(run.makespan_s for run in runs),
        comp_s=median(run.comp_s for run in runs),
        comm_s=median(run.comm_s for run in runs),
        over_default=ratio.median_ratio,
        q25=ratio.q25,
        q75=ratio.q75,
        interval=(interval.low, interval.high) if isfinite(interval.high) else None,
        verdict="itself" if arm == "default" else interval.verdict,
        num_wins=ratio.num_wins,
        runs=runs,
    )


def print_table(table: JobTable) -> None:
    """Markdown."""
    before, after = table.loads
    ended = f", ended by {table.ended_by}" if table.ended_by else ""
    print(f"\n### {table.job} ({table.backend}{', tuners guarded' if table.guarded else ''})\n")
    print(
        f"{table.num_assignments} assignments in {table.num_passes} passes, {table.num_pairs} rounds{ended}; load "
        f"{before:.1f} before, {after:.1f} after; {table.num_lost_ranks} ranks lost; of those measured first the "
        f"default takes {table.oracle_over_default:.2f} times the best.\n"
    )
    print("| tuner | searches | kept default | default / this: median | worst | meas. | Y of Z | X of Z | replayed |")
    print("|---|---|---|---|---|---|---|---|---|")
    for each in table.tuners:
        regret = "" if each.regret_on_surface is None else f"{100 * each.regret_on_surface:.1f} %"
        print(
            f"| {each.tuner} | {each.num_searches} | {each.num_kept_default} | {each.median_over_default:.3f} | "
            f"{each.worst_over_default:.3f} | {each.mean_measurements:.1f} | {100 * each.comp_share:.0f} % | "
            f"{100 * each.comm_share:.0f} % | {regret} |"
        )
    print("\n| arm | setting | Z ms | Y ms | X ms | default / this [quartiles] | 95 % interval | wins |")
    print("|---|---|---|---|---|---|---|---|")
    for row in table.rows:
        interval = "{:.3f} to {:.3f}".format(*row.interval) if row.interval else "too few rounds"
        times = " | ".join(f"{time_s / MS:.1f}" for time_s in (row.makespan_s, row.comp_s, row.comm_s))
        print(
            f"| {row.arm} | {row.setting} | {times} | {row.over_default:.3f} [{row.q25:.3f}, {row.q75:.3f}] | "
            f"{interval}, {row.verdict} | {row.num_wins}/{table.num_pairs} |",
            flush=True,
        )


def encoded(tables: Sequence[JobTable]) -> bytes:
    """One JSON object: the tables, when, on what."""
    found = {"date": utc_now(), "machine": describe_machine(), "versions": package_versions(), "jobs": tables}
    return msgspec.json.format(msgspec.json.encode(found)) + b"\n"
