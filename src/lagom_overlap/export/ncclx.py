"""The file of NCCLX's built-in tuner (`NCCLX_TUNER_CONFIG_FILE`), as CSV and as JSON.

Facts from torchcomms, comms/ncclx/meta/tuner/README.md (read 2026-11-28):

    collective,bytesPerRank,algorithm,protocol,channels,nNodes,nLocalRanks,chunkSize

The first row that matches wins, and a call without a row keeps NCCL's choice. `bytesPerRank` is what NCCL asks the
tuner about (an all-gather's whole result, an all-reduce's buffer) over the ranks; `nLocalRanks` are the ranks over the
nodes. Sizes are intervals `[a,b]`. -1 channels and chunk size 0 leave NCCL's own; the chunk size counts from NCCL 2.30
on. JSON has the same as `rules` of `filter` and `config`, and is read by builds with folly alone. A damaged file ends
the job.
"""

from typing import Final

import msgspec

from lagom_overlap.export.deployment import Deployment, Exported
from lagom_overlap.export.nvidia_csv import RangeRow, range_rows

CSV_NAME: Final = "ncclx_tuner.csv"
JSON_NAME: Final = "ncclx_tuner.json"
_NO_COLUMN: Final = ("num_threads", "transport")
_HEADER: Final = (
    "# Written by lagom export for NCCLX's built-in tuner (NCCLX_TUNER_CONFIG_FILE).\n"
    "# collective,bytesPerRank,algorithm,protocol,channels,nNodes,nLocalRanks,chunkSize\n"
)


def ncclx_csv(deployment: Deployment) -> Exported:
    """The CSV file."""
    rows, left_out = _rows(deployment)
    text = _HEADER
    for row in rows:
        config, (first, last) = row.config, _per_rank(row)
        text += f"{row.kind},[{first},{last}],{config.algorithm},{config.protocol},{config.num_channels or -1},"
        text += f"{row.num_nodes},{row.num_ranks // row.num_nodes},{config.chunk_bytes or 0}\n"
    return Exported(name=CSV_NAME, content=text.encode(), not_carried=tuple(left_out), is_empty=not rows)


def ncclx_json(deployment: Deployment) -> Exported:
    """The JSON file, of the same rows."""
    rows, left_out = _rows(deployment)
    rules = []
    for row in rows:
        first, last = _per_rank(row)
        where = {
            "collective": row.kind,
            "bytesPerRank": f"[{first},{last}]",
            "nNodes": row.num_nodes,
            "nLocalRanks": row.num_ranks // row.num_nodes,
        }
        config: dict[str, str | int] = {"algorithm": str(row.config.algorithm), "protocol": str(row.config.protocol)}
        if row.config.num_channels is not None:
            config["channels"] = row.config.num_channels
        if row.config.chunk_bytes is not None:
            config["chunkSize"] = row.config.chunk_bytes
        rules.append({"filter": where, "config": config})
    content = msgspec.json.format(msgspec.json.encode({"rules": rules}), indent=2) + b"\n"
    return Exported(name=JSON_NAME, content=content, not_carried=tuple(left_out), is_empty=not rows)


def _rows(deployment: Deployment) -> tuple[list[RangeRow], list[str]]:
    """The rows whose nodes are known: without them a row would hold for communicators of any size."""
    rows, left_out = range_rows(deployment, lost=_NO_COLUMN)
    known = [row for row in rows if row.num_nodes > 0 and row.num_ranks % row.num_nodes == 0 and _is_some(row)]
    for row in rows:
        if row not in known:
            left_out.append(
                f"{row.kind} of {row.first_bytes} to {row.last_bytes} bytes on {row.num_ranks} ranks: a row needs the "
                "ranks per node, and the run does not say them; a job file with [cluster] does"
            )
    if any(row.config.chunk_bytes is not None for row in known):
        left_out.append("the chunk size counts under NCCLX of NCCL 2.30 on; before that it is passed over")
    return known, left_out


def _per_rank(row: RangeRow) -> tuple[int, int]:
    """The range of whole bytes a rank that NCCLX, which divides and drops the rest, finds in the row's."""
    return -(-row.first_bytes // row.num_ranks), row.last_bytes // row.num_ranks


def _is_some(row: RangeRow) -> bool:
    first, last = _per_rank(row)
    return first <= last
