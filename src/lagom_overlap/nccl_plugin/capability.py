"""The capability map that `lagom selftest --nccl` saves: which settings a box's NCCL really ran as asked.

It is data about one NCCL release on one kind of box, kept in the user's cache folder. Everything that offers settings
(a tuner's space, the plug-in's route, the exporters) leaves out what the map refuses; without a map the support matrix
applies.
"""

import contextlib
import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from lagom_overlap.collective import Algorithm, CollectiveKind, CommConfig, Protocol
from lagom_overlap.errors import OutputError, TableError
from lagom_overlap.nccl_plugin.box import Box, this_box
from lagom_overlap.nccl_plugin.support import NcclVersion
from lagom_overlap.nccl_plugin.table_layout import GRAIN_BYTES, MAX_BYTES, MAX_CHANNELS, MAX_CHUNK_BYTES
from lagom_overlap.record import read_regular, write_private

_log = logging.getLogger(__name__)

MAX_FILE_BYTES: Final = 8 << 20
"""A larger file is refused before it is parsed. Chosen, as `MAX_ROWS`."""
MAX_ROWS: Final = 20_000
"""Settings in a map; more are refused. Chosen, far above what a self-test writes."""
MAX_RANKS_PER_GPU: Final = 8
"""The most that a self-test accepts. Chosen, not measured."""
_Channels = Annotated[int, Meta(ge=1, le=MAX_CHANNELS)]
_Chunk = Annotated[int, Meta(ge=1, le=MAX_CHUNK_BYTES)]
_Small = Annotated[int, Meta(ge=1, le=4096)]
_Release = Annotated[int, Meta(ge=0, le=999)]


class SettingOutcome(StrEnum):
    """How NCCL ran a setting."""

    AS_ASKED = "as asked"
    ALIASED = "aliased"
    """It ran like another setting of the same call that ran as asked."""
    CLAMPED = "clamped"
    """Another number of channels, or another chunk."""
    NOT_APPLIED = "not applied"
    """Another implementation ran."""
    WRONG = "wrong"
    """The result differed from the reference."""


class Knobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Knobs as asked (None: left to NCCL) or as they ran (None: not known)."""

    algorithm: Algorithm | None = None
    protocol: Protocol | None = None
    num_channels: _Channels | None = None
    chunk_bytes: _Chunk | None = None

    @classmethod
    def of(cls, config: CommConfig) -> "Knobs":
        """The knobs of a configuration that a tuner plug-in can set."""
        return cls(config.algorithm, config.protocol, config.num_channels, config.chunk_bytes)


class MapRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One setting of one call; `time_s` is the median of a few calls."""

    kind: CollectiveKind
    num_bytes: Annotated[int, Meta(ge=1, le=MAX_BYTES)]
    asked: Knobs
    ran: Knobs
    outcome: SettingOutcome
    time_s: Annotated[float, Meta(gt=0, lt=1e6)] | None = None


class MapKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a map describes. `num_gpus` took part; ranks share a GPU if `ranks_per_gpu` is above 1."""

    nccl: tuple[_Release, _Release, _Release]
    gpu: Annotated[str, Meta(min_length=1, max_length=96)]
    num_gpus: _Small
    ranks_per_gpu: _Small
    topology: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]

    @property
    def num_ranks(self) -> int:
        """Ranks of the communicator that was measured."""
        return self.num_gpus * self.ranks_per_gpu

    @property
    def file_name(self) -> str:
        """A name that no other key has."""
        gpu = re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-")
        shared = "" if self.ranks_per_gpu == 1 else f"x{self.ranks_per_gpu}"
        return f"nccl-{'.'.join(map(str, self.nccl))}_{gpu}_{self.num_gpus}{shared}_{self.topology}.json"


class CapabilityMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """A box's map; `max_channels` is the communicator's limit, None where NCCL did not say."""

    version: Literal[1] = 1
    key: MapKey
    measured_on: Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\d$")]
    max_channels: _Channels | None
    rows: Annotated[tuple[MapRow, ...], Meta(max_length=MAX_ROWS)]

    @cached_property
    def _by_way(self) -> dict[tuple[CollectiveKind, Algorithm | None, Protocol | None], list[MapRow]]:
        rows_by_way = defaultdict(list)
        for row in self.rows:
            rows_by_way[row.kind, row.asked.algorithm, row.asked.protocol].append(row)
        return dict(rows_by_way)

    def refuses(self, kind: CollectiveKind, config: CommConfig) -> str | None:
        """Why this configuration must not be tried for such a call, or None; what was not measured is allowed."""
        asked = Knobs.of(config)
        if asked.num_channels and self.max_channels and asked.num_channels > self.max_channels:
            return f"{asked.num_channels} channels, this box's communicator has {self.max_channels}"
        mine = self._by_way.get((kind, asked.algorithm, asked.protocol), [])
        if not mine:
            return None
        way = f"{asked.algorithm or 'its own algorithm'}/{asked.protocol or 'its own protocol'}"
        if any(row.outcome is SettingOutcome.WRONG for row in mine):
            return f"{way} gave wrong results on this box"
        if all(row.outcome is SettingOutcome.NOT_APPLIED for row in mine):
            return f"{way} was not what ran on this box"
        return _refused_channels(mine, asked) or _refused_chunk(mine, asked)


def _refused_channels(rows: Iterable[MapRow], wanted: Knobs) -> str | None:
    """The reason if this channel count ran at no measured size, else None."""
    of_count = [row for row in rows if wanted.num_channels and row.asked.num_channels == wanted.num_channels]
    ran = {row.ran.num_channels for row in of_count}
    if not of_count or None in ran or wanted.num_channels in ran:
        return None
    return f"{wanted.num_channels} channels ran as {', '.join(str(count) for count in sorted(filter(None, ran)))}"


def _refused_chunk(rows: Iterable[MapRow], wanted: Knobs) -> str | None:
    """The reason if this chunk ran at no measured size, else None."""
    of_chunk = [row for row in rows if wanted.chunk_bytes and row.asked.chunk_bytes == wanted.chunk_bytes]
    ran = {row.ran.chunk_bytes for row in of_chunk}
    if not of_chunk or None in ran or wanted.chunk_bytes is None:
        return None
    if any(is_same_chunk(wanted.chunk_bytes, chunk, wanted.protocol) for chunk in filter(None, ran)):
        return None
    return f"a chunk of {wanted.chunk_bytes} bytes ran as {', '.join(str(size) for size in sorted(filter(None, ran)))}"


def is_same_chunk(asked: int, ran: int, protocol: Protocol | None) -> bool:
    """Whether a chunk is the one asked for, down to the protocol's grain."""
    return ran == max(asked - asked % (grain := GRAIN_BYTES[protocol or Protocol.SIMPLE]), grain)


def judged(asked: Knobs, ran: Knobs, *, is_right: bool) -> SettingOutcome:
    """How NCCL ran a setting; a knob that is not known of the run counts as asked."""
    if not is_right:
        return SettingOutcome.WRONG
    pairs = ((asked.algorithm, ran.algorithm), (asked.protocol, ran.protocol))
    if any(wanted and actual and wanted != actual for wanted, actual in pairs):
        return SettingOutcome.NOT_APPLIED
    if asked.num_channels and ran.num_channels and asked.num_channels != ran.num_channels:
        return SettingOutcome.CLAMPED
    protocol = asked.protocol or ran.protocol
    if asked.chunk_bytes and ran.chunk_bytes and not is_same_chunk(asked.chunk_bytes, ran.chunk_bytes, protocol):
        return SettingOutcome.CLAMPED
    return SettingOutcome.AS_ASKED


def with_aliases(rows: Iterable[MapRow]) -> tuple[MapRow, ...]:
    """The rows, with those marked that ran exactly as a row of the same call that ran as asked."""
    kept = tuple(rows)
    same = {(row.kind, row.num_bytes, row.ran) for row in kept if row.outcome is SettingOutcome.AS_ASKED}
    return tuple(
        msgspec.structs.replace(row, outcome=SettingOutcome.ALIASED)
        if row.outcome is SettingOutcome.CLAMPED and (row.kind, row.num_bytes, row.ran) in same
        else row
        for row in kept
    )


def map_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where maps are kept: `lagom-overlap/capability` in the user's cache folder."""
    home = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "lagom-overlap" / "capability"


def write_map(capability_map: CapabilityMap, folder: Path) -> Path:
    """Puts a map in place atomically, for this user alone; returns its path.

    Raises:
        OutputError: if it cannot be written.
    """
    path = folder / capability_map.key.file_name
    data = msgspec.json.format(msgspec.json.encode(capability_map), indent=1) + b"\n"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot create {str(folder)!r}: {error.strerror}") from error
    write_private(path, data)
    return path


def read_map(path: Path) -> CapabilityMap:
    """The map in a file.

    Raises:
        TableError: if it cannot be read, is too large, or holds anything that a map does not.
    """
    try:
        data = read_regular(path, MAX_FILE_BYTES)
    except OSError as error:
        raise TableError(f"cannot read the capability map {path}: {error.strerror}") from error
    try:
        return msgspec.json.decode(data, type=CapabilityMap)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TableError(f"{path} is no capability map: {error}") from error


def find_map(nccl: NcclVersion, box: Box, *, num_ranks: int, folder: Path | None = None) -> CapabilityMap | None:
    """This box's map for communicators of `num_ranks` ranks under a release, or None.

    Ranks count as sharing GPUs only if the box has fewer GPUs than ranks: a map of shared GPUs applies to no others.

    Raises:
        TableError: if there is one that cannot be read.
    """
    num_gpus = min(num_ranks, box.num_gpus)
    if num_ranks % num_gpus:
        return None
    key = MapKey(nccl=nccl, gpu=box.gpu, num_gpus=num_gpus, ranks_per_gpu=num_ranks // num_gpus, topology=box.topology)
    path = (map_folder() if folder is None else folder) / key.file_name
    if not path.is_file():
        return None
    capability_map = read_map(path)
    return capability_map if capability_map.key == key else None


class BoxMaps:
    """This box's maps of one release of NCCL, by the ranks of a communicator; each file is read once."""

    def __init__(self, nccl: NcclVersion | None, box: Box | None, folder: Path | None = None) -> None:
        self._nccl, self._box, self._folder = nccl, box, folder
        self._found: dict[int, CapabilityMap | None] = {}

    @classmethod
    def here(cls, nccl: NcclVersion | None) -> "BoxMaps":
        """Those in the user's cache folder for the box that this process runs on."""
        return cls(nccl, None if nccl is None else this_box())

    def of(self, *, num_ranks: int, num_nodes: int | None) -> CapabilityMap | None:
        """The map for a communicator; None where there is none, or it spans nodes, which a self-test does not."""
        if self._nccl is None or self._box is None or num_nodes != 1:
            return None
        if num_ranks not in self._found:
            try:
                self._found[num_ranks] = find_map(self._nccl, self._box, num_ranks=num_ranks, folder=self._folder)
            except TableError as error:
                _log.warning("%s; going by the support matrix of this NCCL", error)
                self._found[num_ranks] = None
        return self._found[num_ranks]

    def every(self) -> tuple[CapabilityMap, ...]:
        """All that can be read, whatever the ranks."""
        if self._nccl is None or self._box is None:
            return ()
        folder = map_folder() if self._folder is None else self._folder
        maps = []
        for path in sorted(folder.glob(f"nccl-{'.'.join(map(str, self._nccl))}_*_{self._box.topology}.json")):
            with contextlib.suppress(TableError):
                maps.append(read_map(path))
        return tuple(maps)
