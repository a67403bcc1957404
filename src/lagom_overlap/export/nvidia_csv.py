"""The CSV file of NVIDIA's example tuner plug-in (`NCCL_TUNER_CONFIG_FILE`; facts from plugins/tuner/example, 2.30.7).

    collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks

The first row that matches wins; -1 is any number of nodes or ranks. An unknown word means ring or simple there, so a
row always names both. 0 channels leaves NCCL's own; -1 does not: the example answers 1 channel then, as it does for
every call without a row. That is said in the file.
"""

from typing import Final

from lagom_overlap.collective import CollectiveKind, CommConfig
from lagom_overlap.export.deployment import CallSite, Deployment, Exported, site_words

FILE_NAME: Final = "nccl_tuner.conf"
KIND_WORDS: Final = {
    CollectiveKind.BROADCAST: "broadcast",
    CollectiveKind.REDUCE: "reduce",
    CollectiveKind.ALL_GATHER: "allgather",
    CollectiveKind.REDUCE_SCATTER: "reducescatter",
    CollectiveKind.ALL_REDUCE: "allreduce",
}
_WARNING: Final = "NVIDIA's example plug-in answers 1 channel for every call that has no row here"
_HEADER: Final = (
    "# Written by lagom export for NVIDIA's example tuner plug-in (NCCL_TUNER_CONFIG_FILE).\n"
    f"# {_WARNING};\n"
    "# liblagom_tuner.so with lagom_table.bin leaves those calls to NCCL.\n"
    "# collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks\n"
)


def nvidia_csv(deployment: Deployment) -> Exported:
    """The file: a row per call site whose calls all share one configuration with algorithm and protocol."""
    rows: dict[tuple[str, int, int, int], tuple[CallSite, str]] = {}
    left_out = [f"{_WARNING}, also where NCCL's own choice was kept"]
    clashing = set()
    for site, configs in deployment.sites():
        config = deployment.uniform(site, configs)
        if (why := _refusal(site, config)) is not None:
            left_out.append(f"{site_words(site)}: {why}")
            continue
        assert config is not None, "refused above"
        left_out += [f"{site_words(site)}: {knob} has no column" for knob in _lost_knobs(config)]
        communicator, kind, num_bytes = site
        num_nodes, num_ranks = deployment.num_nodes(communicator) or -1, len(communicator.ranks)
        key = (KIND_WORDS[kind], num_bytes, num_nodes, num_ranks)
        row = (
            f"{key[0]},{num_bytes},{num_bytes},{config.algorithm},{config.protocol},"
            f"{config.num_channels or 0},{num_nodes},{num_ranks}"
        )
        if key in rows and rows[key][1] != row:
            left_out.append(f"{site_words(site)} and {site_words(rows[key][0])} differ, and the file cannot tell them")
            clashing.add(key)
        rows.setdefault(key, (site, row))
    text = _HEADER + "".join(f"{row}\n" for key, (_, row) in rows.items() if key not in clashing)
    return Exported(name=FILE_NAME, content=text.encode(), not_carried=tuple(left_out))


def _refusal(site: CallSite, config: CommConfig | None) -> str | None:
    if site[1] not in KIND_WORDS:
        return "never reaches a tuner"
    if config is None:
        return "its calls in a step differ, and a row holds for all calls of a size"
    if config.algorithm is None or config.protocol is None:
        return "a row must name algorithm and protocol, and one of them was left to NCCL"
    return None


def _lost_knobs(config: CommConfig) -> list[str]:
    return [knob for knob in ("chunk_bytes", "num_threads", "transport") if getattr(config, knob) is not None]
