"""Rings of the plug-in in this process, read as its own readers do: once what is in memory is in the file."""

from functools import partial
from pathlib import Path

from lagom_overlap import nccl_plugin
from lagom_overlap.nccl_plugin import ProfileLog, RecordLog
from lagom_overlap.nccl_plugin.library import TunerPlugin

LIBRARY: list[Path] = []
"""The plug-in of the test that runs."""


def flushed(path: Path) -> Path:
    """The file, up to date."""
    plugin = TunerPlugin(LIBRARY[-1])
    plugin.flush_record()
    plugin.flush_profile()
    return path


def read_profile(path: Path) -> ProfileLog:
    return nccl_plugin.read_profile(flushed(path))


def read_record(path: Path) -> RecordLog:
    return nccl_plugin.read_record(flushed(path))


def profile_ring(path: Path) -> nccl_plugin.ProfileRing:
    return nccl_plugin.ProfileRing(path, partial(flushed, path))


def record_ring(path: Path) -> nccl_plugin.RecordRing:
    return nccl_plugin.RecordRing(path, partial(flushed, path))
