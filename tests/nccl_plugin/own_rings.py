"""Rings of the plug-in in this process, read as its own readers do: once what is in memory is in the file."""

from functools import partial
from pathlib import Path

from lagom_overlap.nccl_plugin import profile_log, record_log
from lagom_overlap.nccl_plugin.library import TunerPlugin
from lagom_overlap.nccl_plugin.profile_log import ProfileLog
from lagom_overlap.nccl_plugin.record_log import RecordLog

LIBRARY: list[Path] = []
"""The plug-in of the test that runs."""


def flushed(path: Path) -> Path:
    """The file, up to date."""
    plugin = TunerPlugin(LIBRARY[-1])
    plugin.flush_record()
    plugin.flush_profile()
    return path


def read_profile(path: Path) -> ProfileLog:
    return profile_log.read_profile(flushed(path))


def read_record(path: Path) -> RecordLog:
    return record_log.read_record(flushed(path))


def profile_ring(path: Path) -> profile_log.ProfileRing:
    return profile_log.ProfileRing(path, partial(flushed, path))


def record_ring(path: Path) -> record_log.RecordRing:
    return record_log.RecordRing(path, partial(flushed, path))
