"""What an analysis found as tables of plain types: rows that pandas and polars take as they are.

    found = run_analyze(AnalyzeRequest(traces=(Path("traces"),)))
    pandas.DataFrame(found.tables()["collectives"])
    polars.DataFrame(found.tables()["calls"], infer_schema_length=None)

Every row of a table has the same keys; values are text, whole numbers, floats, truth values or None. Times are seconds
(`_s`), sizes bytes. A call's `start_s` counts from its rank's first GPU event.
"""

import msgspec

from lagom_overlap.analysis.findings import Findings
from lagom_overlap.job.analyze_result import AnalyzeJson
from lagom_overlap.trace.gpu_trace import NS_PER_S, UNKNOWN

Record = dict[str, str | int | float | bool | None]


def _flat(row: msgspec.Struct, **more: str | int | float | None) -> Record:
    """A row without the fields that are tables themselves."""
    held = msgspec.to_builtins(row)
    return more | {name: value for name, value in held.items() if not isinstance(value, list | dict)}


def _calls(findings: Findings) -> list[Record]:
    rows: list[Record] = []
    for rank in findings.ranks:
        events = rank.trace.events
        first = int(events.start_ns[0]) if len(events) else 0
        for call, exposed, waiting in zip(rank.trace.calls, rank.exposed_ns.tolist(), rank.waiting_ns, strict=True):
            timed = call.event != UNKNOWN
            rows.append(
                {
                    "file": rank.trace.file,
                    "rank": rank.trace.rank,
                    "kind": call.op,
                    "communicator": call.communicator,
                    "bytes": call.num_bytes,
                    "channels": call.num_channels,
                    "threads": call.num_threads,
                    "num_ranks": call.num_ranks,
                    "sequence": call.sequence,
                    "start_s": (int(events.start_ns[call.event]) - first) / NS_PER_S if timed else None,
                    "duration_s": call.duration_ns / NS_PER_S,
                    "exposed_s": exposed / NS_PER_S if timed else None,
                    "waiting_s": None if waiting is None else waiting / NS_PER_S,
                    "reach": call.reach.value,
                }
            )
    return rows


def _kernels(findings: Findings) -> list[Record]:
    return [
        {
            "kernel": row.name,
            "kernel_class": row.kernel_class.value,
            "grid_x": row.grid[0],
            "grid_y": row.grid[1],
            "grid_z": row.grid[2],
            "num_beside": row.found.num_beside,
            "num_alone": row.found.num_alone,
            "slowdown": row.found.slowdown,
            "low": row.found.low,
            "high": row.found.high,
            "stretched_s": row.found.stretched_ns / NS_PER_S,
        }
        for row in findings.contention.kernels
    ]


def tables_of(result: AnalyzeJson, findings: Findings) -> dict[str, list[Record]]:
    """The tables `ranks`, `steps`, `collectives`, `calls`, `contention`, `kernels`, `groups` and `advice`.

    `calls` holds every single collective of every rank, `kernels` those that lost most beside collectives.
    """
    return {
        "ranks": [_flat(rank) for rank in result.ranks],
        "steps": [_flat(step, file=rank.file, rank=rank.rank) for rank in result.ranks for step in rank.per_step],
        "collectives": [_flat(row) for row in result.collectives],
        "calls": _calls(findings),
        "contention": [_flat(row) for row in result.contention.classes],
        "kernels": _kernels(findings),
        "groups": [_flat(group) for group in result.groups],
        "advice": [_flat(advice) for advice in result.advice],
    }
