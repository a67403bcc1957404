"""`ConfigTable` -> the table that `liblagom_tuner.so` decides by: one file per process.

The plug-in knows a communicator by its ranks, its nodes and its place among this process's communicators with equal
ranks and nodes, so the writer needs *all* communicators of the process in the order they are made, tuned or not.
"""

import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lagom_overlap.collective import CommConfig, CommunicatorId, ConfigKey, ConfigTable, class_range
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

    Without `communicators`, those of the rows are taken to be all, made in the order of the rows. `calls_per_step` says
    how often a call site is called in a step; where it is missing, the rows are taken to name every call; 0 says that
    it is not known. A site whose calls all share one configuration becomes one row that needs no counting. Of others
    the configuration that more than half of the calls have is written, too: it decides while no step is marked, and for
    calls beyond those that are known.

    With `known_sites`, all that the process calls, tuned or not, a row stands for its neighbours' sizes, too
    (`size_ranges`). Without, and where it is not known how often a site is called, it stands for its very size: a call
    that nobody knows of would be counted as another. Where the table's sizes are classes, a row stands for its class.

    Raises:
        TableError: if the table does not fit: too many rows, a knob outside the plug-in's range, a bad description.
        ValueError: if a row's communicator is not among `communicators`, or the generation is not from 1 to 2**64 - 1.
    """
    if not 0 < generation < 1 << 64:
        raise ValueError(f"generation is {generation}, must be from 1 to 2**64 - 1")
    if communicators is None:
        communicators = [ProcessCommunicator(name) for name in dict.fromkeys(key.communicator for key, _ in table)]
    places = {communicator.id: i for i, communicator in enumerate(communicators)}
    if len(places) != len(communicators):
        raise ValueError("a communicator is listed twice")
    left_out: list[LeftOut] = []
    sites: dict[CallSite, dict[int, CommConfig]] = defaultdict(dict)
    for key, config in table:
        if key.communicator not in places:
            raise ValueError(f"{key.communicator} is not among the process's communicators")
        carried = _carried(key, config, left_out)
        if carried is not None:
            sites[key.communicator, key.kind, key.num_bytes][key.occurrence] = carried
    ranges = {site: class_range(site[2], table.size_octaves) for site in sites}
    if known_sites is not None and not table.size_octaves:
        found = site_ranges({site: frozenset(rows.items()) for site, rows in sites.items()}, known_sites)
        ranges |= {site: found[site] for site in sites if (calls_per_step or {}).get(site) != 0}
    rows = [
        row
        for site, configs in sites.items()
        for row in _site_rows(site, configs, ranges[site], places[site[0]], (calls_per_step or {}).get(site))
    ]
    return EncodedTable(_assemble(generation, _communicator_records(communicators), rows), tuple(left_out))


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
    if key.num_bytes > layout.MAX_BYTES:
        raise TableError(f"{key}: {key.num_bytes} bytes, at most {layout.MAX_BYTES}")
    if config.num_channels is not None and config.num_channels > layout.MAX_CHANNELS:
        raise TableError(f"{key}: num_channels is {config.num_channels}, at most {layout.MAX_CHANNELS}")
    if config.chunk_bytes is not None:
        least = layout.GRAIN_BYTES[config.protocol] if config.protocol else min(layout.GRAIN_BYTES.values())
        if not least <= config.chunk_bytes <= layout.MAX_CHUNK_BYTES:
            raise TableError(
                f"{key}: chunk_bytes is {config.chunk_bytes}, must be from {least} to {layout.MAX_CHUNK_BYTES}"
            )


def _site_rows(
    site: CallSite, configs: Mapping[int, CommConfig], sizes: tuple[int, int], place: int, num_calls: int | None
) -> list[tuple[int, ...]]:
    """The decision records of one call site; untouched calls have none, unless the others are most."""
    num_occurrences = max(configs) + 1 if num_calls is None else num_calls
    if num_occurrences and max(configs) >= num_occurrences:
        raise TableError(f"{site}: a row for occurrence {max(configs)}, but {num_occurrences} calls per step")
    counts = Counter(configs.get(n, CommConfig()) for n in range(num_occurrences))
    rows = dict(configs)
    if counts:
        [(common, count)] = counts.most_common(1)
        if count == num_occurrences:
            rows = {} if common.is_untouched else {layout.ANY_OCCURRENCE: common}
        elif 2 * count > num_occurrences and not common.is_untouched:
            # Untouched calls need rows of their own: they are not to have what most have.
            rows = {n: configs.get(n, CommConfig()) for n in range(num_occurrences)} | {layout.ANY_OCCURRENCE: common}
    return [
        (
            *sizes,
            place,
            layout.KINDS.index(site[1]),
            occurrence,
            -1 if config.algorithm is None else layout.ALGORITHMS.index(config.algorithm),
            -1 if config.protocol is None else layout.PROTOCOLS.index(config.protocol),
            config.num_channels or 0,
            config.chunk_bytes or 0,
        )
        for occurrence, config in sorted(rows.items())
        if layout.ANY_OCCURRENCE in rows or not config.is_untouched
    ]


def _communicator_records(communicators: Iterable[ProcessCommunicator]) -> list[tuple[bytes, int, int, int, int]]:
    """One record each, with its place among the communicators that the plug-in cannot tell from it otherwise."""
    made: Counter[tuple[int, int]] = Counter()
    records = []
    for communicator in communicators:
        description = communicator.id.description
        encoded = description.encode()
        if len(encoded) > layout.MAX_DESCRIPTION_BYTES or not all(c.isprintable() for c in description):
            raise TableError(
                f"description {description!r}: must be printable and at most {layout.MAX_DESCRIPTION_BYTES} bytes"
            )
        num_ranks, num_nodes = len(communicator.id.ranks), communicator.num_nodes or 0
        records.append((encoded, num_ranks, num_nodes, made[num_ranks, num_nodes], communicator.max_channels or 0))
        made[num_ranks, 0] += 1
        if num_nodes:
            made[num_ranks, num_nodes] += 1
    return records


def _assemble(
    generation: int, communicators: list[tuple[bytes, int, int, int, int]], rows: list[tuple[int, ...]]
) -> bytes:
    if len(communicators) > layout.MAX_COMMUNICATORS or len(rows) > layout.MAX_DECISIONS:
        raise TableError(
            f"{len(communicators)} communicators and {len(rows)} rows; the plug-in holds at most"
            f" {layout.MAX_COMMUNICATORS} and {layout.MAX_DECISIONS}"
        )
    highest = Counter[tuple[int, ...]]()
    for first_bytes, _, place, kind, occurrence, *_ in rows:
        if occurrence != layout.ANY_OCCURRENCE:
            highest[first_bytes, place, kind] = max(highest[first_bytes, place, kind], occurrence + 1)
    if highest.total() > layout.MAX_ROWS:
        raise TableError(f"{highest.total()} occurrences to tell apart; the plug-in holds at most {layout.MAX_ROWS}")
    body = np.array(communicators, layout.COMMUNICATOR).tobytes() + np.array(rows, layout.DECISION).tobytes()
    header = np.zeros((), layout.HEADER)
    header["magic"] = layout.TABLE_MAGIC
    header["version"] = layout.TABLE_VERSION
    header["header_bytes"] = layout.HEADER.itemsize
    header["file_bytes"] = layout.HEADER.itemsize + len(body)
    header["generation"] = generation
    header["communicator_bytes"] = layout.COMMUNICATOR.itemsize
    header["decision_bytes"] = layout.DECISION.itemsize
    header["num_communicators"] = len(communicators)
    header["num_decisions"] = len(rows)
    header["checksum"] = table_checksum(header.tobytes() + body)
    return header.tobytes() + body
