"""`ConfigTable` -> the table that `liblagom_tuner.so` decides by: one file per process.

The plug-in knows a communicator by its ranks, its nodes and its place among this process's communicators with equal
ranks and nodes, so the writer needs *all* communicators of the process in the order they are made, tuned or not.
"""

import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from lagom_overlap.collective import CollectiveKind, CommConfig, CommunicatorId, ConfigKey, ConfigTable, class_range
from lagom_overlap.collective.size_class import is_small
from lagom_overlap.errors import TableError
from lagom_overlap.nccl_plugin import table_layout as layout
from lagom_overlap.nccl_plugin.size_ranges import CallSite, site_ranges
from lagom_overlap.record import write_private


@dataclass(frozen=True, slots=True)
class ProcessCommunicator:
    """A communicator of one process; `num_nodes` None: the plug-in goes by its ranks and creation order alone.

    `max_channels` is the most that NCCL may be asked for on it: the largest grid that was seen there under NCCL's own
    choice. None: not known.
    """

    id: CommunicatorId
    num_nodes: int | None = None
    max_channels: int | None = None

    def __post_init__(self) -> None:
        if self.max_channels is not None and not 1 <= self.max_channels <= layout.MAX_CHANNELS:
            raise ValueError(f"max_channels is {self.max_channels}, must be from 1 to {layout.MAX_CHANNELS}")
        if self.num_nodes is not None and not 1 <= self.num_nodes <= len(self.id.ranks):
            raise ValueError(f"num_nodes is {self.num_nodes}, must be between 1 and the {len(self.id.ranks)} ranks")


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What of a row the plug-in's table cannot carry, and why."""

    key: ConfigKey
    what: str


@dataclass(frozen=True, slots=True)
class EncodedTable:
    """The bytes of a table, and what of the `ConfigTable` is not in them."""

    data: bytes
    left_out: tuple[LeftOut, ...]


def encode_table(
    table: ConfigTable,
    *,
    generation: int,
    communicators: Sequence[ProcessCommunicator] | None = None,
    calls_per_step: Mapping[CallSite, int] | None = None,
    known_sites: Collection[CallSite] | None = None,
) -> EncodedTable:
    """The plug-in's table for one process.

    Without `communicators`, those of the rows are taken to be all, made in the order of the rows. The table's cycles
    say how often and in which order a communicator's sites are called in a step. Of one without a cycle,
    `calls_per_step` says how often; where that is missing, the rows are taken to name every call; 0 says that it is not
    known. A site whose calls all share one configuration becomes one row for whichever call. Others need the cycle to
    tell their calls apart, and so does a lease, which is counted in its calls: what lacks one is left out.

    With `known_sites`, all that the process calls, tuned or not, a row stands for its neighbours' sizes, too
    (`size_ranges`). Without, and where `calls_per_step` is 0, it stands for its very size: a call that nobody knows of
    would be counted as another. Where the table's sizes are classes, a row stands for its class.

    Raises:
        TableError: if the table does not fit: too many rows, a knob outside the plug-in's range, a bad description.
        ValueError: if a row's communicator is not among `communicators`, or the generation is not from 1 to 2**64 - 1.
    """
    if not 0 < generation < 1 << 64:
        raise ValueError(f"generation is {generation}, must be from 1 to 2**64 - 1")
    if communicators is None:
        names = dict.fromkeys((*(key.communicator for key, _ in table), *table.cycles))
        communicators = [ProcessCommunicator(name) for name in names]
    places = {communicator.id: i for i, communicator in enumerate(communicators)}
    if len(places) != len(communicators):
        raise ValueError("a communicator is listed twice")
    left_out: list[LeftOut] = []
    cycles = {name: keys for name in places if (keys := _followed(table.cycles.get(name, ())))}
    followed = Counter((key.communicator, key.kind, key.num_bytes) for keys in cycles.values() for key in keys)
    sites: dict[CallSite, dict[int, CommConfig]] = defaultdict(dict)
    for key, config in table:
        if key.communicator not in places:
            raise ValueError(f"{key.communicator} is not among the process's communicators")
        carried = _carried(key, config, left_out)
        if carried is None:
            continue
        if table.lease_steps is not None and key.communicator not in cycles:
            left_out.append(LeftOut(key, "it is to hold for some steps, and what a step calls there is not known"))
        else:
            sites[key.communicator, key.kind, key.num_bytes][key.occurrence] = carried
    calls = {
        site: followed[site] if site[0] in cycles and not is_small(site[2]) else (calls_per_step or {}).get(site)
        for site in sites
    }
    ranges = {site: class_range(site[2], table.size_octaves) for site in (*sites, *followed)}
    if known_sites is not None and not table.size_octaves:
        covered = site_ranges(
            {site: frozenset(rows.items()) for site, rows in sites.items()}, {*known_sites, *followed}
        )
        ranges |= {site: covered[site] for site in sites if (calls_per_step or {}).get(site) != 0}
    rows = {
        site: _site_rows(site, configs, calls[site], left_out, is_followed=site in followed)
        for site, configs in sites.items()
    }
    # A call that nothing is set for has its place in the step, too.
    rows |= {site: {layout.ANY_OCCURRENCE: CommConfig()} for site in followed if not rows.get(site)}
    decisions = [
        _decision_record(ranges[site], places[site[0]], site[1], occurrence, config)
        for site, configs in rows.items()
        for occurrence, config in sorted(configs.items())
    ]
    leases = {name: len(keys) * (table.lease_steps or 0) for name, keys in cycles.items()}
    records = _communicator_records(communicators, leases)
    steps = [
        (key.num_bytes, places[name], layout.KINDS.index(key.kind)) for name, keys in cycles.items() for key in keys
    ]
    return EncodedTable(_assemble(generation, records, decisions, steps), tuple(left_out))


def write_table(path: Path, data: bytes) -> None:
    """Puts a table in place atomically, readable and writable by this user alone, as the plug-in demands.

    Raises:
        OutputError: if the file cannot be written.
    """
    write_private(path, data)


def table_checksum(data: bytes) -> int:
    """CRC-32 of a whole table with its checksum field zero."""
    _, at = layout.HEADER.fields["checksum"][:2]  # type: ignore[index]  # a structured dtype has fields
    return zlib.crc32(data[at + 4 :], zlib.crc32(bytes(4), zlib.crc32(data[:at])))


def _followed(keys: Iterable[ConfigKey]) -> tuple[ConfigKey, ...]:
    """The calls of a step that the plug-in follows: large ones that NCCL asks a tuner about."""
    return tuple(key for key in keys if key.kind in layout.KINDS and not is_small(key.num_bytes))


def _carried(key: ConfigKey, config: CommConfig, left_out: list[LeftOut]) -> CommConfig | None:
    """The part of a configuration that the plug-in can set, None if there is none; notes the rest."""
    if key.kind not in layout.KINDS:
        left_out.append(LeftOut(key, f"{key.kind} never reaches a tuner"))
        return None
    for knob in ("transport", "num_threads"):
        if getattr(config, knob) is not None:
            left_out.append(LeftOut(key, f"{knob} cannot be set by a tuner"))
    carried = CommConfig(
        algorithm=config.algorithm,
        protocol=config.protocol,
        num_channels=config.num_channels,
        chunk_bytes=config.chunk_bytes,
    )
    _check_knobs(key, carried)
    return carried


def _check_knobs(key: ConfigKey, config: CommConfig) -> None:
    where = f"{key.kind} of {key.num_bytes} bytes on {key.communicator.description!r}"
    if key.num_bytes > layout.MAX_BYTES:
        raise TableError(f"{where}: at most {layout.MAX_BYTES} bytes fit a row")
    if config.num_channels is not None and config.num_channels > layout.MAX_CHANNELS:
        raise TableError(f"{where}: num_channels is {config.num_channels}, at most {layout.MAX_CHANNELS}")
    if config.chunk_bytes is not None:
        least = layout.GRAIN_BYTES[config.protocol] if config.protocol else min(layout.GRAIN_BYTES.values())
        if not least <= config.chunk_bytes <= layout.MAX_CHUNK_BYTES:
            raise TableError(
                f"{where}: chunk_bytes is {config.chunk_bytes}, must be from {least} to {layout.MAX_CHUNK_BYTES}"
            )


def _site_rows(
    site: CallSite,
    configs: Mapping[int, CommConfig],
    num_calls: int | None,
    left_out: list[LeftOut],
    *,
    is_followed: bool,
) -> dict[int, CommConfig]:
    """The configurations of one call site by occurrence; untouched calls have none."""
    if not is_followed and num_calls and max(configs) >= num_calls:
        raise TableError(f"{site}: a row for occurrence {max(configs)}, but {num_calls} calls per step")
    num_occurrences = max(configs) + 1 if num_calls is None else num_calls
    common = {configs.get(n, CommConfig()) for n in range(num_occurrences)}
    num_told = num_occurrences if is_followed or len(common) == 1 else 0
    rows = {n: config for n, config in configs.items() if n < num_told and not config.is_untouched}
    if rows and len(common) == 1:
        rows = {layout.ANY_OCCURRENCE: common.pop()}
    communicator, kind, num_bytes = site
    for occurrence, config in configs.items():
        if occurrence >= num_told and not config.is_untouched:
            key = ConfigKey(communicator=communicator, kind=kind, num_bytes=num_bytes, occurrence=occurrence)
            left_out.append(LeftOut(key, "no step is known that tells it from the site's other calls"))
    return rows


def _decision_record(
    sizes: tuple[int, int], place: int, kind: CollectiveKind, occurrence: int, config: CommConfig
) -> tuple[int, ...]:
    return (
        *sizes,
        place,
        layout.KINDS.index(kind),
        occurrence,
        -1 if config.algorithm is None else layout.ALGORITHMS.index(config.algorithm),
        -1 if config.protocol is None else layout.PROTOCOLS.index(config.protocol),
        config.num_channels or 0,
        config.chunk_bytes or 0,
    )


_CommunicatorRecord: TypeAlias = tuple[bytes, int, int, int, int, int]


def _communicator_records(
    communicators: Iterable[ProcessCommunicator], leases: Mapping[CommunicatorId, int]
) -> list[_CommunicatorRecord]:
    """One record each, with its place among the communicators that the plug-in cannot tell from it otherwise."""
    num_of_role: Counter[tuple[int, int]] = Counter()
    records = []
    for communicator in communicators:
        description = communicator.id.description
        encoded = description.encode()
        if len(encoded) > layout.MAX_DESCRIPTION_BYTES or not all(c.isprintable() for c in description):
            raise TableError(
                f"description {description!r}: must be printable and at most {layout.MAX_DESCRIPTION_BYTES} bytes"
            )
        num_ranks, num_nodes = len(communicator.id.ranks), communicator.num_nodes or 0
        order, most = num_of_role[num_ranks, num_nodes], communicator.max_channels or 0
        records.append((encoded, num_ranks, num_nodes, order, most, leases.get(communicator.id, 0)))
        num_of_role[num_ranks, 0] += 1
        if num_nodes:
            num_of_role[num_ranks, num_nodes] += 1
    return records


def _assemble(
    generation: int,
    communicators: list[_CommunicatorRecord],
    decisions: list[tuple[int, ...]],
    calls: list[tuple[int, int, int]],
) -> bytes:
    if (
        len(communicators) > layout.MAX_COMMUNICATORS
        or len(decisions) > layout.MAX_DECISIONS
        or len(calls) > layout.MAX_CALLS
    ):
        raise TableError(
            f"{len(communicators)} communicators, {len(decisions)} rows and {len(calls)} calls; the plug-in holds at"
            f" most {layout.MAX_COMMUNICATORS}, {layout.MAX_DECISIONS} and {layout.MAX_CALLS}"
        )
    body = (
        np.array(communicators, layout.COMMUNICATOR).tobytes()
        + np.array(decisions, layout.DECISION).tobytes()
        + np.array(calls, layout.CYCLE_CALL).tobytes()
    )
    header = np.zeros((), layout.HEADER)
    header["magic"] = layout.TABLE_MAGIC
    header["version"] = layout.TABLE_VERSION
    header["header_bytes"] = layout.HEADER.itemsize
    header["file_bytes"] = layout.HEADER.itemsize + len(body)
    header["generation"] = generation
    header["communicator_bytes"] = layout.COMMUNICATOR.itemsize
    header["decision_bytes"] = layout.DECISION.itemsize
    header["call_bytes"] = layout.CYCLE_CALL.itemsize
    header["num_communicators"] = len(communicators)
    header["num_decisions"] = len(decisions)
    header["num_calls"] = len(calls)
    header["checksum"] = table_checksum(header.tobytes() + body)
    return header.tobytes() + body
