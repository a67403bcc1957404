"""What may be tried for one collective: subspaces by (algorithm, protocol, transport), a lattice inside each.

The division is AutoCCL's divide and conquer: implementation knobs choose a subspace, resource knobs (channels, threads,
chunk) span a lattice inside it.

Also the keys that stay the same from run to run, and the table that tuning produces and deployment ships. NCCL's own
communicator id is random per run, so it is never part of a key; the engine maps it at start-up.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from types import MappingProxyType

from lagom_overlap.collective.call import CollectiveKind
from lagom_overlap.collective.config import UNTOUCHED, Algorithm, CommConfig, Protocol, Transport
from lagom_overlap.collective.launch import LaunchConfig, LaunchSpace
from lagom_overlap.collective.size_class import WIDTHS
from lagom_overlap.errors import SpaceError


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorId:
    """A communicator, named by what is the same in every run of a job.

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

    `launches` says how the computation during a call is launched; a call without an entry leaves it untouched. Where
    `size_octaves` is not 0, a key's size stands for its class (`size_class`), and its occurrence counts the calls of
    the class.

    `cycles` are the calls of one step on a communicator in the order of issue, without those below `LEAST_BYTES`; a
    running job uses them to find each call's place in the step (`CallCycle`). On a communicator without a cycle
    occurrences cannot be told apart, so rows of single occurrences do not apply. With `lease_steps` the table expires
    on each communicator after that many cycles.
    """

    rows: Mapping[ConfigKey, CommConfig]
    launches: Mapping[ConfigKey, LaunchConfig] = field(default_factory=lambda: MappingProxyType({}))
    size_octaves: int = 0
    cycles: Mapping[CommunicatorId, tuple[ConfigKey, ...]] = field(default_factory=lambda: MappingProxyType({}))
    lease_steps: int | None = None

    def __post_init__(self) -> None:
        if self.size_octaves not in WIDTHS:
            raise ValueError(f"size_octaves is {self.size_octaves}, must be one of {', '.join(map(str, WIDTHS))}")
        if self.lease_steps is not None and self.lease_steps < 1:
            raise ValueError(f"lease_steps is {self.lease_steps}, must be at least 1, or None for good")
        object.__setattr__(self, "rows", MappingProxyType(dict(self.rows)))
        object.__setattr__(self, "launches", MappingProxyType(dict(self.launches)))
        object.__setattr__(self, "cycles", MappingProxyType(dict(self.cycles)))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[tuple[ConfigKey, CommConfig]]:
        return iter(self.rows.items())

    def get(self, key: ConfigKey) -> CommConfig | None:
        """The configuration of that call site, or None: touch nothing."""
        return self.rows.get(key)


RESOURCE_KNOBS = ("num_channels", "num_threads", "chunk_bytes")
"""The knobs that span the lattice of a subspace, in AutoCCL's descent order."""


MAX_CONFIGS = 1 << 22
"""Settings of one subspace at most: random search lists them all. The largest engine's, 64 x 20 x 64, has 1/50 of
it."""


def _check_axis(name: str, values: tuple[int | None, ...]) -> None:
    if not values:
        raise SpaceError(f"{name} allows no value")
    if values == (None,):
        return
    numbers = [value for value in values if value is not None]
    if len(numbers) != len(values) or any(a >= b for a, b in pairwise(numbers)) or numbers[0] < 1:
        raise SpaceError(f"{name} is {list(values)}, must be increasing whole numbers of at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subspace:
    """One choice of algorithm, protocol and transport, and the allowed values of each resource knob, increasing.

    A knob that the engine lacks is the single value None.
    """

    algorithm: Algorithm | None = None
    protocol: Protocol | None = None
    transport: Transport | None = None
    num_channels: tuple[int | None, ...] = (None,)
    num_threads: tuple[int | None, ...] = (None,)
    chunk_bytes: tuple[int | None, ...] = (None,)

    def __post_init__(self) -> None:
        for knob in RESOURCE_KNOBS:
            _check_axis(knob, getattr(self, knob))
        if len(self) > MAX_CONFIGS:
            sizes = " x ".join(str(len(axis)) for axis in self.axes)
            raise SpaceError(
                f"num_channels, num_threads and chunk_bytes allow {sizes} = {len(self)} settings, "
                f"at most {MAX_CONFIGS} may be: name fewer values"
            )

    @property
    def axes(self) -> tuple[tuple[int | None, ...], ...]:
        """The values of (num_channels, num_threads, chunk_bytes)."""
        return self.num_channels, self.num_threads, self.chunk_bytes

    def __len__(self) -> int:
        return len(self.num_channels) * len(self.num_threads) * len(self.chunk_bytes)

    def __iter__(self) -> Iterator[CommConfig]:
        for indices in product(*(range(len(axis)) for axis in self.axes)):
            yield self.at(indices)

    def __contains__(self, config: object) -> bool:
        return isinstance(config, CommConfig) and self.has_way_of(config) and self._find(config) is not None

    def at(self, indices: tuple[int, ...]) -> CommConfig:
        """The configuration at lattice position (channel index, thread index, chunk index)."""
        num_channels, num_threads, chunk_bytes = (axis[index] for axis, index in zip(self.axes, indices, strict=True))
        return CommConfig(
            algorithm=self.algorithm,
            protocol=self.protocol,
            transport=self.transport,
            num_channels=num_channels,
            num_threads=num_threads,
            chunk_bytes=chunk_bytes,
        )

    def at_number(self, number: int) -> CommConfig:
        """The configuration at a place of the subspace's own order, in which chunks vary fastest."""
        rest, chunk = divmod(number, len(self.chunk_bytes))
        return self.at((*divmod(rest, len(self.num_threads)), chunk))

    def nearest(self, config: CommConfig) -> tuple[int, int, int]:
        """The lattice position nearest to a configuration in each knob; the largest value where the knob is None."""
        position = []
        for knob, axis in zip(RESOURCE_KNOBS, self.axes, strict=True):
            wanted = getattr(config, knob)
            if wanted is None or axis == (None,):
                position.append(len(axis) - 1)
            else:
                position.append(min(range(len(axis)), key=lambda i: (abs((axis[i] or 0) - wanted), i)))
        return position[0], position[1], position[2]

    def has_way_of(self, config: CommConfig) -> bool:
        """Whether algorithm, protocol and transport are the configuration's."""
        mine = (self.algorithm, self.protocol, self.transport)
        return mine == (config.algorithm, config.protocol, config.transport)

    @property
    def minimum(self) -> CommConfig:
        """The fewest channels and threads, the smallest chunk."""
        return self.at((0, 0, 0))

    @property
    def maximum(self) -> CommConfig:
        """The most channels and threads, the largest chunk."""
        return self.at((len(self.num_channels) - 1, len(self.num_threads) - 1, len(self.chunk_bytes) - 1))

    def _find(self, config: CommConfig) -> tuple[int, int, int] | None:
        try:
            channel, thread, chunk = (
                axis.index(getattr(config, knob)) for knob, axis in zip(RESOURCE_KNOBS, self.axes, strict=True)
            )
        except ValueError:
            return None
        return channel, thread, chunk


@dataclass(frozen=True, slots=True)
class ConfigSpace:
    """All configurations that may be tried for one collective: the union of its subspaces.

    `default` is what an untouched call runs with, inside the subspaces or not; a knob is None where that is not known.
    It is never set explicitly: a call runs with it by being left untouched.
    """

    subspaces: tuple[Subspace, ...]
    default: CommConfig = UNTOUCHED

    def __post_init__(self) -> None:
        if not self.subspaces:
            raise SpaceError("a configuration space needs at least one subspace")

    def __len__(self) -> int:
        return sum(len(subspace) for subspace in self.subspaces)

    def __iter__(self) -> Iterator[CommConfig]:
        for subspace in self.subspaces:
            yield from subspace

    def __contains__(self, config: object) -> bool:
        return any(config in subspace for subspace in self.subspaces)

    def subspace_of(self, config: CommConfig) -> Subspace:
        """The subspace that shares the configuration's algorithm, protocol and transport, else the first."""
        for subspace in self.subspaces:
            if (subspace.algorithm, subspace.protocol, subspace.transport) == (
                config.algorithm,
                config.protocol,
                config.transport,
            ):
                return subspace
        return self.subspaces[0]


def common_space(spaces: Sequence[ConfigSpace | None]) -> ConfigSpace | None:
    """The settings that all the spaces allow; None if there are none, or one of the spaces is None.

    Where the defaults differ in a resource knob, its default is the smallest of theirs.
    """
    first, *others = dict.fromkeys(spaces)
    if first is None or None in others:
        return None
    kept, default = list(first.subspaces), first.default
    for other in others:
        assert other is not None, "looked at above"
        by_way = {(each.algorithm, each.protocol, each.transport): each for each in other.subspaces}
        kept = [
            within
            for each in kept
            if (twin := by_way.get((each.algorithm, each.protocol, each.transport))) is not None
            and (within := _common(each, twin)) is not None
        ]
        default = _smaller(default, other.default)
    return ConfigSpace(tuple(kept), default) if kept else None


def _smaller(one: CommConfig, other: CommConfig) -> CommConfig:
    both = {knob: (getattr(one, knob), getattr(other, knob)) for knob in RESOURCE_KNOBS}
    return CommConfig(**{knob: None if None in values else min(values) for knob, values in both.items()})


def _common(one: Subspace, other: Subspace) -> Subspace | None:
    channels, threads, chunks = (
        tuple(value for value in mine if value in theirs) for mine, theirs in zip(one.axes, other.axes, strict=True)
    )
    if not (channels and threads and chunks):
        return None
    return replace(one, num_channels=channels, num_threads=threads, chunk_bytes=chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceLimits:
    """The values that a job allows for each knob; None leaves the engine's own.

    Sizes are chunks on the wire in bytes. An engine refuses (`SpaceError`) what it cannot set. `launches` are the
    values of the computation's side; None leaves it alone.
    """

    algorithms: tuple[Algorithm, ...] | None = None
    protocols: tuple[Protocol, ...] | None = None
    transports: tuple[Transport, ...] | None = None
    num_channels: tuple[int, ...] | None = None
    num_threads: tuple[int, ...] | None = None
    chunk_bytes: tuple[int, ...] | None = None
    launches: LaunchSpace | None = None
