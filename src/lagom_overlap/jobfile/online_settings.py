"""What `OnlineTuner.save` wrote (`export.saved`), as a deployment that the tuner plug-in reads."""

import shlex
from dataclasses import replace
from pathlib import Path

from lagom_overlap.collective import CommunicatorId, ConfigTable, LaunchConfig, one_launch
from lagom_overlap.collective.sites import cycles_for, key_of, standing_for
from lagom_overlap.errors import JobError
from lagom_overlap.export.deployment import Deployment
from lagom_overlap.export.saved import GLOO_ROUTE, SETTINGS_NAME, SavedSettings, read_saved
from lagom_overlap.jobfile.run_folder import job_command
from lagom_overlap.nccl_plugin.channel_limit import most_channels
from lagom_overlap.nccl_plugin.table_layout import MAX_COMMUNICATORS
from lagom_overlap.nccl_plugin.table_writer import ProcessCommunicator
from lagom_overlap.record import starts_with


def online_settings(path: Path) -> Path | None:
    """The file of saved settings: the path itself, or in a folder of `lagom run --online`; None if it is neither.

    A file counts by what it begins with: JSON, not a binary table.
    """
    file = path / SETTINGS_NAME if path.is_dir() else path
    return file if starts_with(file, b"{") else None


def read_online_deployment(path: Path) -> tuple[Deployment, SavedSettings]:
    """What the settings deploy, and the settings, which say under which engine and in which world they were found.

    The settings go by the cycles that were saved with them. Sizes are not stretched to their neighbours: the cycles are
    those of one rank, and others may call more.

    Raises:
        BundleError: if the file cannot be read, is damaged or of another version.
        JobError: if the settings are not NCCL's, are for calls that their cycles lack, or name more communicators than
            a table holds.
    """
    saved = read_saved(path)
    if saved.route == GLOO_ROUTE and not saved.settings:
        raise JobError(f"{str(path)!r} was tuned on gloo and sets nothing: the default was not beaten there")
    if saved.route == GLOO_ROUTE:
        raise JobError(
            f"{str(path)!r} was tuned on gloo: its slices mean nothing to NCCL; a job on gloo starts from it: "
            f"lagom run --config {shlex.quote(str(path))} -- {job_command(path)}"
        )
    rows = {key_of(setting.site): setting.config for setting in saved.settings if not setting.config.is_untouched}
    roles = [key.communicator for key in rows]
    roles += [standing_for(role.description, role.num_ranks, role.creation_order) for role in saved.cycles]
    last: dict[CommunicatorId, int] = {}  # by the first of a kind
    for name in roles:
        first = replace(name, creation_order=0)
        last[first] = max(last.get(first, 0), name.creation_order)
    if sum(last.values()) + len(last) > MAX_COMMUNICATORS:
        raise JobError(f"{str(path)!r} names more than the {MAX_COMMUNICATORS} communicators that a table holds")
    # The plug-in goes by places, so those before a communicator of the file have theirs, too.
    names = [replace(first, creation_order=n) for first, most in last.items() for n in range(most + 1)]
    cycles = cycles_for(saved.cycles, names)
    for key in rows:
        if key not in cycles.get(key.communicator, ()):
            raise JobError(
                f"{str(path)!r} sets call {key.occurrence} of {key.kind}, {key.num_bytes} bytes, on "
                f"{key.communicator.description!r}, but its cycles have no such call: no call would be found by it"
            )
    calls = {(key.communicator, key.kind, key.num_bytes): 0 for key in rows}
    most = most_channels(rows.items())  # online tuning asked for no more than NCCL's own choice ran with
    deployment = Deployment(
        table=ConfigTable(rows, size_octaves=saved.size_octaves, cycles=cycles),
        communicators=tuple(ProcessCommunicator(name, max_channels=most.get(name)) for name in names),
        calls_per_step=calls,
        launch=one_launch(setting.launch for setting in saved.settings if isinstance(setting.launch, LaunchConfig)),
    )
    return deployment, saved
