"""The settings that a job was tuned to, as a file with which the next run starts.

    {"format": "lagom-online", "version": 3, "world_size": 2, "route": "gloo", "is_adopted": true,
     "settings": [{"site": {"call": {"description": "fsdp", "num_ranks": 2, "creation_order": 0,
                                     "kind": "all_gather", "num_bytes": 8388608}, "occurrence": 1},
                   "config": {"num_channels": 4, "chunk_bytes": 2097152, ...}}],
     "cycles": [{"description": "fsdp", "num_ranks": 2, "creation_order": 0,
                 "calls": [["all_gather", 8388608], ["all_gather", 8388608], ["reduce_scatter", 8388608]]}],
     "size_octaves": 0, "adapters": [], "engine": "ProcessGroupGloo of torch 2.13", "verdict": "...", "date": "..."}

Where `size_octaves` is not 0, a size stands for its class, so many octaves wide (`collective.size_class`).
Communicators stand by their role, so the file fits every rank. Its cycles are the calls of a step in their order, by
which a job that has the settings finds which of its calls is which. It is data: nothing in it is run.
"""

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from lagom_overlap.collective.sites import RoleCycle, SiteSetting
from lagom_overlap.collective.size_class import WIDTHS
from lagom_overlap.errors import BundleError, JobError, LagomError, UnknownNameError
from lagom_overlap.nccl_plugin.table_layout import (
    GRAIN_BYTES,
    MAX_BYTES,
    MAX_CALLS,
    MAX_CHANNELS,
    MAX_CHUNK_BYTES,
    MAX_RANKS,
)
from lagom_overlap.record import read_regular, write_private

FORMAT: Final = "lagom-online"
VERSION: Final = 3
"""Of the file's format; a file of another version is refused."""
GLOO_ROUTE: Final = "gloo"
"""The route of settings that are slices of gloo's engine, which mean nothing to NCCL."""
NCCL_ROUTES: Final = ("plugin", "sibling")
GLOO_ADAPTERS: Final = ("fsdp2", "ddp", "calls")
"""What brings collectives to the route of gloo: a framework's, or those that the job itself calls."""
SETTINGS_NAME: Final = "settings.json"
"""In the folder of a `lagom run --online`."""
_MAX_BYTES: Final = 64 << 20
"""Chosen, far above the settings of any job that is known."""
MAX_WORLD: Final = 1 << 20
"""Ranks of a job at most: chosen far above any job that is known, so that a damaged file cannot allocate more."""
MAX_LISTED_RANKS: Final = 1 << 25
"""Total length of the rank lists that a file may ask for: 2,000 communicators of 16,384 ranks, which take 2 s to
build."""
_SITE_RANGES: Final = {
    "num_bytes": (1, MAX_BYTES),
    "creation_order": (0, MAX_RANKS),
    "occurrence": (0, MAX_CALLS),
}
_KNOB_RANGES: Final = {
    "num_channels": (1, MAX_CHANNELS),
    "num_threads": (1, 1024),  # of a block, on every GPU there is
    "chunk_bytes": (min(GRAIN_BYTES.values()), MAX_CHUNK_BYTES),
    "sm_carveout": (0, 4096),
}
"""The allowed range of each number: they decide how much is allocated and how often loops run."""


class _Head(msgspec.Struct, frozen=True):
    format: str = FORMAT
    version: int = VERSION


class SavedSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a job and where they come from; without `is_adopted` there are none: the default was not beaten.

    `verdict` says in words how they were judged, `route` how they reached the collectives, `engine` what made the
    communicators (`engine_in_use`): another one may make them in another order, and settings go by that order.
    `adapters` are those that were named, by which settings reach their calls on gloo; none: those that fit the model.
    """

    format: str = FORMAT
    version: int = VERSION
    world_size: int
    route: str
    is_adopted: bool
    settings: tuple[SiteSetting, ...]
    cycles: tuple[RoleCycle, ...] = ()
    size_octaves: int = 0
    adapters: tuple[str, ...] = ()
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
    try:
        _check_numbers(saved)
    except (ValueError, LagomError) as error:
        raise BundleError(f"the settings {str(path)!r} are damaged: {error}") from None
    if world_size is not None and (refusal := other_world(str(path), saved.world_size, world_size)):
        raise BundleError(refusal)
    if engine is not None and (refusal := other_engine(str(path), saved.engine, engine)):
        raise BundleError(refusal)
    return saved


def check_adapters(names: Sequence[str]) -> None:
    """Refuses an adapter that does not exist, or is named twice.

    Raises:
        UnknownNameError: if there is none of a name.
        JobError: if one is named twice.
    """
    for name in names:
        if name not in GLOO_ADAPTERS:
            raise UnknownNameError.among("adapter", name, GLOO_ADAPTERS)
    if len(set(names)) < len(names):
        raise JobError(f"adapters are {', '.join(names)}; allowed: each once")


def _check_numbers(saved: SavedSettings) -> None:
    if saved.size_octaves not in WIDTHS:
        raise ValueError(f"size_octaves is {saved.size_octaves}, must be one of {', '.join(map(str, WIDTHS))}")
    _check_range("world_size", saved.world_size, 1, MAX_WORLD)
    if saved.is_adopted is not bool(saved.settings):
        raise ValueError(f"is_adopted is {str(saved.is_adopted).lower()}, but it has {len(saved.settings)} settings")
    check_adapters(saved.adapters)
    _check_once("settings", [setting.site for setting in saved.settings], "call")
    _check_once("cycles", [(c.description, c.num_ranks, c.creation_order) for c in saved.cycles], "communicator")
    num_listed, roles = 0, set()
    for place, setting in enumerate(saved.settings):
        where, site = f"settings[{place}]", setting.site
        _check_range(f"{where}: num_ranks", site.call.num_ranks, 2, max(2, saved.world_size))
        for name, (least, most) in _SITE_RANGES.items():
            _check_range(f"{where}: {name}", getattr(site if name == "occurrence" else site.call, name), least, most)
        for name, (least, most) in _KNOB_RANGES.items():
            value = getattr(setting.launch if name == "sm_carveout" else setting.config, name, None)
            if value is not None:
                _check_range(f"{where}: {name}", value, least, most)
        num_listed += site.call.num_ranks
        roles.add((site.call.description, site.call.num_ranks, site.call.creation_order))
    for place, cycle in enumerate(saved.cycles):
        where = f"cycles[{place}]"
        _check_range(f"{where}: num_ranks", cycle.num_ranks, 2, max(2, saved.world_size))
        _check_range(f"{where}: creation_order", cycle.creation_order, 0, MAX_RANKS)
        for _, num_bytes in cycle.calls:
            _check_range(f"{where}: num_bytes", num_bytes, 1, MAX_BYTES)
        num_listed += len(cycle.calls) * cycle.num_ranks
        roles.add((cycle.description, cycle.num_ranks, cycle.creation_order))
    num_listed += sum(num_ranks * (order + 1) for _, num_ranks, order in roles)  # those made before it, too
    if num_listed > MAX_LISTED_RANKS:
        raise ValueError(f"its communicators have {num_listed} ranks in all, at most {MAX_LISTED_RANKS} are read")


def _check_once(name: str, keys: Sequence[Hashable], what: str) -> None:
    first: dict[Hashable, int] = {}
    for place, key in enumerate(keys):
        if (earlier := first.setdefault(key, place)) != place:
            raise ValueError(f"{name}[{place}] is for the same {what} as {name}[{earlier}]")


def _check_range(what: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ValueError(f"{what} is {value}, must be {least} to {most}")


def other_world(path: str, found_with: int, world_size: int) -> str:
    """Why settings that were found with some ranks are not for a job of others; empty where they are."""
    if found_with == world_size:
        return ""
    return f"the settings {path!r} were found with {found_with} ranks, this job has {world_size}"


def other_engine(path: str, found_under: str, engine: str) -> str:
    """Why settings that were found under one engine are not for a job that runs another; empty where they are."""
    if found_under == engine:
        return ""
    return (
        f"the settings {path!r} were found under {found_under or 'an engine that nobody noted'}, this job "
        f"runs {engine}: its communicators may be made in another order, by which settings go"
    )
