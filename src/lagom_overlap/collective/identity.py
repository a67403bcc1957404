"""Names that stay the same in the next run, and the table that tuning finds and deployment ships.

NCCL's own communicator id is random per run, so it is never part of a saved key; the engine maps it at start-up.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from lagom_overlap.collective.call import CollectiveKind
from lagom_overlap.collective.config import CommConfig
from lagom_overlap.collective.launch import LaunchConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorId:
    """A communicator by what is the same in every run of a job.

    `description` is the framework's (`"fsdp"`, `"tp"`), `ranks` its global ranks in order, `creation_order` its place
    among the communicators that share description and ranks (0 for the first).
    """

    description: str
    ranks: tuple[int, ...]
    creation_order: int = 0

    def __post_init__(self) -> None:
        if len(self.ranks) < 2 or len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise ValueError(f"ranks are {self.ranks}, must be at least two different numbers from 0")
        if self.creation_order < 0:
            raise ValueError(f"creation_order is {self.creation_order}, must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigKey:
    """One call site of a step: the `occurrence`-th call of this kind and size on this communicator, from 0."""

    communicator: CommunicatorId
    kind: CollectiveKind
    num_bytes: int
    occurrence: int = 0

    def __post_init__(self) -> None:
        if self.num_bytes < 1:
            raise ValueError(f"num_bytes is {self.num_bytes}, must be at least 1")
        if self.occurrence < 0:
            raise ValueError(f"occurrence is {self.occurrence}, must not be negative")


@dataclass(frozen=True, slots=True)
class ConfigTable:
    """Call site -> configuration; iterates over its rows in insertion order.

    `launches` says how the computation beside a call is launched, for calls beside which it is not untouched.
    """

    rows: Mapping[ConfigKey, CommConfig]
    launches: Mapping[ConfigKey, LaunchConfig] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", MappingProxyType(dict(self.rows)))
        object.__setattr__(self, "launches", MappingProxyType(dict(self.launches)))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[tuple[ConfigKey, CommConfig]]:
        return iter(self.rows.items())

    def get(self, key: ConfigKey) -> CommConfig | None:
        """The configuration of that call site, or None: touch nothing."""
        return self.rows.get(key)
