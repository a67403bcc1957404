"""The job file of a trace, for `lagom tune --from-trace`: what the trace shows stands in its comments."""

import shlex
from pathlib import Path
from typing import Final

from lagom_overlap.analysis.findings import analyse
from lagom_overlap.analysis.trace_gpu import cluster_of_trace
from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.spec import ClusterTable
from lagom_overlap.jobfile.step import stated_cluster
from lagom_overlap.trace.files import distinct_files
from lagom_overlap.trace.reader import read_traces
from lagom_overlap.units import NS, format_bytes, format_seconds
from lagom_overlap.verbs.init_config import safe_name
from lagom_overlap.verbs.init_file import (
    InitRequest,
    InitResult,
    known_line,
    safe_words,
    seen_from_job,
    toml_line,
    written,
)

_MOST: Final = 12
"""Groups, and kinds of calls, that are listed of a trace."""


def job_of_trace(request: InitRequest) -> InitResult:
    """A job for `lagom tune --from-trace`, with what the trace shows as comments."""
    findings = analyse(read_traces(distinct_files((Path(request.source),))[0]))
    seen = next((found for rank in findings.ranks if (found := cluster_of_trace(rank.trace)) is not None), None)
    gpu = next((rank.trace.gpu_name for rank in findings.ranks if rank.trace.gpu_name), "a GPU that it does not name")
    most = max((row.key.num_ranks for row in findings.rows), default=1)
    preset = request.cluster or (None if seen is None else seen.name)
    if preset is None:
        raise JobError(f"no preset has the trace's GPU ({gpu}): give --cluster NAME (lagom list clusters)")
    cluster = stated_cluster(ClusterTable(preset=preset))
    groups: dict[str, int] = {}
    for row in findings.rows:
        groups[row.key.communicator] = max(groups.get(row.key.communicator, 0), row.key.num_ranks)
    largest = sorted(findings.rows, key=lambda row: -row.total_ns)
    told = [
        f"{len(findings.ranks)} ranks on {gpu}",
        *(f"group {name or '(no name)'}: {number or 'unknown'} ranks" for name, number in list(groups.items())[:_MOST]),
        *(
            f"{row.count} x {row.key.op} of {_size(row.key.num_bytes)} on {row.key.communicator or '(no name)'}, "
            f"median {format_seconds(row.median_ns * NS)}"
            for row in largest[:_MOST]
        ),
    ]
    if len(largest) > _MOST:
        told.append(f"and {len(largest) - _MOST} more kinds of calls (lagom analyze shows them)")
    lines = [
        f"# Written by lagom init from {safe_name(Path(request.source).name)}. All keys: lagom docs formats.",
        *(f"#   {safe_words(line)}" for line in told),
        "# Groups and model come from the trace; of this file [tune], [cluster] and [cost] count.",
        "",
        "[job]",
        toml_line(name=safe_name(Path(request.source).name.partition(".")[0]) or "trace"),
        "",
        "[cluster]",
        known_line(
            "preset",
            seen_from_job("cluster", "preset", preset, request.out),
            f"the trace's GPU: {gpu}" if request.cluster is None else "as given",
            "",
        ),
        f"nodes = {max(1, -(-most // cluster.gpus_per_node))}    # {_ranks(most)}",
        "",
        "[tune]",
        'tuner = "ours"    # lagom list tuners',
        "pairs = 25    # of the verdict, at most",
    ]
    command = f"lagom tune {shlex.quote(str(request.out))} --from-trace {shlex.quote(request.source)}"
    text = "\n".join(lines) + "\n"
    return written(request, {request.out: text.encode()}, told, (f"Next: {command}",))


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "unknown size"


def _ranks(most: int) -> str:
    return (
        f"the largest group has {most} ranks" if most > 0 else "the trace does not say how many ranks its groups have"
    )
