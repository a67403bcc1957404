"""What stands in for a job file's groups and backend: a trace's, or an earlier run's."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from lagom_overlap.backends.base import Backend
from lagom_overlap.workload import OverlapGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """Groups and a backend made ready elsewhere, in place of the job file's; `record` is kept in run.json."""

    groups: tuple[OverlapGroup, ...]
    backend: Backend
    backend_name: str
    notes: tuple[str, ...]
    arm_words: Mapping[str, str]
    record: msgspec.Struct
