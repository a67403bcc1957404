"""What a job was tuned to, as a file with which the next run starts.

    {"format": "lagom-online", "version": 2, "world_size": 2, "route": "gloo", "is_adopted": true,
     "settings": [{"site": {"call": {"description": "fsdp", "num_ranks": 2, "creation_order": 0,
                                     "kind": "all_gather", "num_bytes": 8388608}, "occurrence": 1},
                   "config": {"num_channels": 4, "chunk_bytes": 2097152, ...}}],
     "size_octaves": 0, "engine": "ProcessGroupGloo of torch 2.13", "verdict": "...", "date": "..."}

Where `size_octaves` is not 0, a size stands for its class, so many octaves wide (`collective.size_class`).
Communicators stand by their role, so the file fits every rank. It is data: nothing in it is run.
"""

from pathlib import Path
from typing import Final

import msgspec

from lagom_overlap.collective.sites import SiteSetting
from lagom_overlap.collective.size_class import WIDTHS
from lagom_overlap.errors import BundleError, LagomError
from lagom_overlap.record import read_regular, write_private

FORMAT: Final = "lagom-online"
VERSION: Final = 2
_MAX_BYTES: Final = 64 << 20


class _Head(msgspec.Struct, frozen=True):
    format: str = FORMAT
    version: int = VERSION


class SavedSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a job and where they come from; without `is_adopted` there are none: the default was not beaten.

    `verdict` says in words how they were judged, `route` how they reached the collectives, `engine` what made the
    communicators (`engine_in_use`): another one may make them in another order, and settings go by that order.
    """

    format: str = FORMAT
    version: int = VERSION
    world_size: int
    route: str
    is_adopted: bool
    settings: tuple[SiteSetting, ...]
    size_octaves: int = 0
    engine: str = ""
    verdict: str
    date: str


def write_saved(path: Path, saved: SavedSettings) -> None:
    """Writes the file atomically, for its owner alone.

    Raises:
        OutputError: if it cannot be written.
    """
    write_private(path, msgspec.json.format(msgspec.json.encode(saved), indent=1) + b"\n")


def read_saved(path: Path, *, world_size: int | None = None, engine: str | None = None) -> SavedSettings:
    """The settings in a file; `world_size` and `engine`, if given, must be those that they were found with.

    Raises:
        BundleError: if it cannot be read, is damaged, is of another version, number of ranks or engine.
    """
    try:
        data = read_regular(path, _MAX_BYTES)
        head = msgspec.json.decode(data, type=_Head)
        saved = msgspec.json.decode(data, type=SavedSettings) if head == _Head() else None
    except OSError as error:
        raise BundleError(f"cannot read the settings {str(path)!r}: {error.strerror}") from error
    except (msgspec.MsgspecError, LagomError, ValueError, RecursionError) as error:
        raise BundleError(f"the settings {str(path)!r} are damaged: {error}") from None
    if saved is None:
        raise BundleError(
            f"{str(path)!r} is of format {head.format!r} version {head.version}; "
            f"this version reads {FORMAT!r} version {VERSION}"
        )
    if saved.size_octaves not in WIDTHS:
        raise BundleError(f"the settings {str(path)!r} are damaged: size_octaves is {saved.size_octaves}")
    if world_size is not None and saved.world_size != world_size:
        raise BundleError(
            f"the settings {str(path)!r} were found with {saved.world_size} ranks, this job has {world_size}"
        )
    if engine is not None and (refusal := other_engine(str(path), saved.engine, engine)):
        raise BundleError(refusal)
    return saved


def other_engine(path: str, found_under: str, engine: str) -> str:
    """Why settings that were found under one engine are not for a job that runs another; empty where they are."""
    if found_under == engine:
        return ""
    return (
        f"the settings {path!r} were found under {found_under or 'an engine that nobody noted'}, this job "
        f"runs {engine}: its communicators may be made in another order, by which settings go"
    )
