"""The file that `OnlineTuner.save` writes, as far as deployment needs it (format: docs/guides/online.md).

The writer is `online.saved`, which this layer must not import: the format is the seam.
"""

from pathlib import Path
from typing import Final

import msgspec

from lagom_overlap.collective import (
    CollectiveKind,
    CommConfig,
    CommunicatorId,
    ConfigKey,
    ConfigTable,
    LaunchConfig,
    one_launch,
)
from lagom_overlap.collective.size_class import WIDTHS
from lagom_overlap.errors import BundleError, JobError, LagomError
from lagom_overlap.export.deployment import Deployment
from lagom_overlap.nccl_plugin import ProcessCommunicator
from lagom_overlap.nccl_plugin.channel_limit import most_channels
from lagom_overlap.record import read_regular

FORMAT: Final = "lagom-online"
VERSION: Final = 2
_MAX_BYTES: Final = 64 << 20


class _Call(msgspec.Struct, frozen=True):
    description: str
    num_ranks: int
    creation_order: int
    kind: CollectiveKind
    num_bytes: int


class _Site(msgspec.Struct, frozen=True):
    call: _Call
    occurrence: int


class _Setting(msgspec.Struct, frozen=True):
    site: _Site
    config: CommConfig
    launch: LaunchConfig | None = None


class _Saved(msgspec.Struct, frozen=True):
    format: str
    version: int
    route: str
    is_adopted: bool
    settings: tuple[_Setting, ...]
    size_octaves: int = 0
    engine: str = ""


def is_online_settings(path: Path) -> bool:
    """Whether a file looks like saved settings: JSON, not a binary table."""
    try:
        with path.open("rb") as file:
            return file.read(1) == b"{"
    except OSError:
        return False


def read_online_deployment(path: Path) -> tuple[Deployment, str]:
    """What the settings deploy, and the engine under which they were found.

    Occurrences start over at each step, so how often a site is called need not be known.

    Raises:
        BundleError: if the file cannot be read, is damaged or of another version.
        JobError: if the settings are not NCCL's.
    """
    try:
        saved = msgspec.json.decode(read_regular(path, _MAX_BYTES), type=_Saved)
    except OSError as error:
        raise BundleError(f"cannot read the settings {str(path)!r}: {error.strerror}") from None
    except (msgspec.MsgspecError, LagomError, ValueError, RecursionError) as error:
        raise BundleError(f"the settings {str(path)!r} are damaged: {error}") from None
    if (saved.format, saved.version) != (FORMAT, VERSION):
        raise BundleError(
            f"{str(path)!r} is of format {saved.format!r} version {saved.version}; "
            f"this version reads {FORMAT!r} version {VERSION}"
        )
    if saved.size_octaves not in WIDTHS:
        raise BundleError(f"the settings {str(path)!r} are damaged: size_octaves is {saved.size_octaves}")
    if saved.route == "gloo":
        raise JobError(
            f"{str(path)!r} was tuned on gloo: its slices mean nothing to NCCL; a job on gloo starts from it "
            "with lagom run --online --config"
        )
    settings = saved.settings if saved.is_adopted else ()
    rows = {_key(setting.site): setting.config for setting in settings if not setting.config.is_untouched}
    names = dict.fromkeys(key.communicator for key in rows)
    calls = {(key.communicator, key.kind, key.num_bytes): 0 for key in rows}
    most = most_channels(rows.items())  # online tuning asked for no more than NCCL's own choice ran with
    deployment = Deployment(
        table=ConfigTable(rows, size_octaves=saved.size_octaves),
        communicators=tuple(ProcessCommunicator(name, max_channels=most.get(name)) for name in names),
        calls_per_step=calls,
        launch=one_launch(setting.launch for setting in settings if setting.launch is not None),
    )
    return deployment, saved.engine


def _key(site: _Site) -> ConfigKey:
    call = site.call
    name = CommunicatorId(
        description=call.description, ranks=tuple(range(call.num_ranks)), creation_order=call.creation_order
    )
    return ConfigKey(communicator=name, kind=call.kind, num_bytes=call.num_bytes, occurrence=site.occurrence)
