"""The CSV file of NVIDIA's example tuner plug-in (`NCCL_TUNER_CONFIG_FILE`; facts from plugins/tuner/example, 2.30.7).

    collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks

A row holds for its size's range (`nccl_plugin.size_ranges`). The first row that matches wins; -1 is any number of nodes
or ranks. An unknown word means ring or simple there, so a row always names both. 0 channels leaves NCCL's own; -1 does
not: the example answers 1 channel then, as it does for every call without a row. That is said in the file. RCCL's
example tuner (ext-tuner/example) reads the same file by the same variable.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from lagom_overlap.collective import CollectiveKind, CommConfig, class_range
from lagom_overlap.export.deployment import Deployment, Exported, site_words
from lagom_overlap.nccl_plugin.size_ranges import CallSite, size_ranges

FILE_NAME: Final = "nccl_tuner.conf"
KIND_WORDS: Final = {
    CollectiveKind.BROADCAST: "broadcast",
    CollectiveKind.REDUCE: "reduce",
    CollectiveKind.ALL_GATHER: "allgather",
    CollectiveKind.REDUCE_SCATTER: "reducescatter",
    CollectiveKind.ALL_REDUCE: "allreduce",
}
_WARNING: Final = "NVIDIA's example plug-in answers 1 channel for every call that has no row here"


class _Columns(NamedTuple):
    """What such a file tells communicators apart by, and the kind."""

    kind: str
    num_nodes: int
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRow:
    """A row of a file that goes by sizes: calls of `kind` from `first_bytes` to `last_bytes` run under `config`.

    `num_nodes` is -1 where nobody knows it; `config` names algorithm and protocol, and channels where they are safe.
    """

    kind: str
    first_bytes: int
    last_bytes: int
    num_nodes: int
    num_ranks: int
    config: CommConfig


_NO_CHANNELS: Final = (
    "its channels are NCCL's: NCCL 2.29 and 2.30 crash if an uneven all-gather, which asks the same, is given more "
    "than its communicator has"
)
_HEADER: Final = (
    "# Written by lagom export for NVIDIA's example tuner plug-in (NCCL_TUNER_CONFIG_FILE).\n"
    f"# {_WARNING};\n"
    "# liblagom_tuner.so with lagom_table.bin leaves those calls to NCCL.\n"
    "# collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks\n"
)


def nvidia_csv(deployment: Deployment) -> Exported:
    """The file: a row per call site whose calls all share one configuration with algorithm and protocol."""
    rows, left_out = range_rows(deployment, lost=("chunk_bytes", "num_threads", "transport"))
    text = _HEADER
    for row in rows:
        config = row.config
        text += f"{row.kind},{row.first_bytes},{row.last_bytes},{config.algorithm},{config.protocol},"
        text += f"{config.num_channels or 0},{row.num_nodes},{row.num_ranks}\n"
    content = text.encode()
    left_out = [f"{_WARNING}, also where NCCL's own choice was kept", *left_out]
    return Exported(name=FILE_NAME, content=content, not_carried=tuple(left_out), is_empty=not rows)


def range_rows(deployment: Deployment, *, lost: tuple[str, ...]) -> tuple[list[RangeRow], list[str]]:
    """The rows of a file by kind, size, nodes and ranks that has no column for the knobs `lost`, and what it lacks.

    Where two call sites that the file cannot tell apart want different rows, neither has one.
    """
    rows: dict[_Columns, dict[int, tuple[CallSite, CommConfig]]] = defaultdict(dict)
    clashing: dict[_Columns, set[int]] = defaultdict(set)
    left_out: list[str] = []
    for site, configs in deployment.sites():
        config = deployment.uniform(site, configs)
        if (why := _refusal(site, config)) is not None:
            left_out.append(f"{site_words(site)}: {why}")
            continue
        assert config is not None, "refused above"
        left_out += [f"{site_words(site)}: {knob} has no column" for knob in lost if getattr(config, knob) is not None]
        channels = deployment.safe_channels(site, config.num_channels)
        if config.num_channels is not None and channels is None:
            left_out.append(f"{site_words(site)}: {_NO_CHANNELS}")
        columns, num_bytes = _columns(deployment, site), site[2]
        row = replace(config, num_channels=channels, **dict.fromkeys(lost))
        if num_bytes in rows[columns] and rows[columns][num_bytes][1] != row:
            other = rows[columns][num_bytes][0]
            left_out.append(f"{site_words(site)} and {site_words(other)} differ, and the file cannot tell them")
            clashing[columns].add(num_bytes)
        rows[columns].setdefault(num_bytes, (site, row))
    sizes: dict[_Columns, set[int]] = defaultdict(set)
    for site in {*deployment.calls_per_step, *(site for site, _ in deployment.sites())}:
        if site[1] in KIND_WORDS:
            sizes[_columns(deployment, site)].add(site[2])
    row_list = []
    for columns, by_size in rows.items():
        kept = {size: row for size, (_, row) in by_size.items() if size not in clashing[columns]}
        octaves = deployment.table.size_octaves
        ranges = size_ranges(kept, sizes[columns] - kept.keys())
        for size, (first, last) in ({size: class_range(size, octaves) for size in kept} if octaves else ranges).items():
            row_list.append(
                RangeRow(
                    kind=columns.kind,
                    first_bytes=first,
                    last_bytes=last,
                    num_nodes=columns.num_nodes,
                    num_ranks=columns.num_ranks,
                    config=kept[size],
                )
            )
    return row_list, left_out


def _columns(deployment: Deployment, site: CallSite) -> _Columns:
    communicator, kind, _ = site
    return _Columns(KIND_WORDS[kind], deployment.num_nodes(communicator) or -1, len(communicator.ranks))


def _refusal(site: CallSite, config: CommConfig | None) -> str | None:
    if site[1] not in KIND_WORDS:
        return "never reaches a tuner"
    if config is None:
        return "its calls in a step differ, and a row holds for all calls of a size"
    if config.algorithm is None or config.protocol is None:
        return "a row must name algorithm and protocol, and one of them was left to NCCL"
    return None
