"""A collective's place in its space, the moves from there, and what a setting counts as.

A knob that has not moved from the default keeps the engine's own value.
"""

from dataclasses import dataclass, replace
from itertools import product
from math import sqrt
from typing import Final

from lagom_overlap.collective import CommConfig, ConfigSpace, Subspace
from lagom_overlap.collective.space import RESOURCE_KNOBS
from lagom_overlap.tuners.curves import Setting, thinned

FARTHEST: Final = (2.05, 4.1)
"""Factors of channels and of chunk that count as near: one step down (half, a quarter), and room for rounding."""
CHUNK_WHERE_NONE: Final = 1 << 20
"""Stands in for the chunk of an engine without chunks; any value will do, since it is the same for all settings."""
Axis = tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A subspace and a position on each of its knobs; None: not moved from the default.

    `default` is the configuration that sets unmoved knobs, `own` what they then run with (None where that is not
    known). Threads never move.
    """

    subspace: Subspace
    default: CommConfig
    own: CommConfig
    channel: int | None
    chunk: int | None
    thread: int | None

    @property
    def config(self) -> CommConfig:
        """What to ask for."""
        way, default = self.subspace, self.default
        return CommConfig(
            algorithm=way.algorithm,
            protocol=way.protocol,
            transport=way.transport,
            num_channels=default.num_channels if self.channel is None else way.num_channels[self.channel],
            num_threads=default.num_threads if self.thread is None else way.num_threads[self.thread],
            chunk_bytes=default.chunk_bytes if self.chunk is None else way.chunk_bytes[self.chunk],
        )

    @property
    def is_in_one_piece(self) -> bool:
        """Whether the default is known to send the message as one piece, larger than any slice, on one channel."""
        return self.chunk is None and self.default.chunk_bytes is None and self.own.chunk_bytes is not None

    def channels_times(self, factor: float) -> "Place":
        """The place nearest to a multiple of the channels, at least one position away."""
        if self.is_in_one_piece:
            return self
        moved = _moved(self.subspace.num_channels, self.channel, self.own.num_channels, factor)
        return replace(self, channel=moved)

    def chunk_times(self, factor: float) -> "Place":
        """The place nearest to a multiple of the chunk, at least one position away."""
        return replace(self, chunk=_moved(self.subspace.chunk_bytes, self.chunk, self.own.chunk_bytes, factor))

    def most_channels(self) -> "Place":
        """The most channels, unless those of the default are known."""
        return replace(self, channel=_top(self.subspace.num_channels, self.channel, self.own.num_channels))

    def largest_chunk(self) -> "Place":
        """The largest chunk, unless that of the default is known."""
        return replace(self, chunk=_top(self.subspace.chunk_bytes, self.chunk, self.own.chunk_bytes))

    def sliced(self) -> "Place":
        """A message that goes in one piece cut into slices of a quarter, on twice the channels; others unchanged."""
        return self.chunk_times(1 / 4).channels_times(2) if self.is_in_one_piece else self

    def as_default(self, space: ConfigSpace, config: CommConfig) -> CommConfig:
        """The configuration with those knobs left to the engine that the default leaves and that equal its own."""
        if space.subspace_of(config) != self.subspace:
            return config
        left = {
            knob: None
            for knob in RESOURCE_KNOBS
            if getattr(self.default, knob) is None and getattr(config, knob) == getattr(self.own, knob)
        }
        moved = replace(config, **left)
        return self.default if all(getattr(moved, k) == getattr(self.default, k) for k in RESOURCE_KNOBS) else moved

    def is_counted_from_the_most(self, moved: "Place") -> bool:
        """Whether a move to another place started from the largest value because the default's is not known."""
        ends = (
            (self.channel, self.own.num_channels, moved.channel, self.subspace.num_channels),
            (self.chunk, self.own.chunk_bytes, moved.chunk, self.subspace.chunk_bytes),
        )
        return any(at is None and own is None and to not in {None, len(axis) - 1} for at, own, to, axis in ends)


def _moved(axis: Axis, at: int | None, own: int | None, factor: float) -> int | None:
    """The position of the value nearest to a multiple, at least one further; `at` if there is none.

    An unknown value counts as the largest.
    """
    now = own if at is None else axis[at]
    if now is None:
        now = axis[-1]
    if now is None:
        return at
    beyond = [index for index, value in enumerate(axis) if value and (value < now if factor < 1 else value > now)]
    return min(beyond, key=lambda index: abs((axis[index] or 1) / (now * factor) - 1), default=at)


def _top(axis: Axis, at: int | None, own: int | None) -> int | None:
    return len(axis) - 1 if at is None and own is None and axis[-1] is not None else at


def start_of(space: ConfigSpace, default: CommConfig) -> Place:
    """The place of the default."""
    subspace = space.subspace_of(default)
    # `space.default` describes an untouched call only.
    own = space.default if default.is_untouched else default
    at = [_position(axis, getattr(own, knob)) for knob, axis in zip(RESOURCE_KNOBS, subspace.axes, strict=True)]
    if not subspace.has_way_of(default):  # its knobs are those of another algorithm
        at = _nearest(subspace, default)
    return Place(subspace=subspace, default=default, own=own, channel=at[0], thread=at[1], chunk=at[2])


def _position(axis: Axis, value: int | None) -> int | None:
    return axis.index(value) if value is not None and value in axis else None


def _nearest(subspace: Subspace, config: CommConfig) -> list[int | None]:
    """The positions nearest to a configuration; None for a knob that it leaves to the engine."""
    indices = zip(RESOURCE_KNOBS, subspace.nearest(config), strict=True)
    return [None if getattr(config, knob) is None else index for knob, index in indices]


def in_way(space: ConfigSpace, index: int, place: Place) -> Place:
    """The place in subspace `index` with about the same resources; unchanged if the collective has fewer subspaces."""
    if index >= len(space.subspaces) or space.subspaces[index] == place.subspace:
        return place
    subspace = space.subspaces[index]
    channel, thread, chunk = _nearest(subspace, place.config)
    return replace(place, subspace=subspace, channel=channel, thread=thread, chunk=chunk)


def settings_of(way: Subspace, start: Place) -> list[Setting]:
    """A lattice in half octaves of channels and octaves of chunk, with the engine's own values as in the default."""
    is_own = way == start.subspace
    channels: list[int | None] = list(thinned(way.num_channels, sqrt(2)))
    chunks: list[int | None] = list(thinned(way.chunk_bytes, 2))
    if is_own and start.default.num_channels is None:
        channels = [None, *(each for each in channels if each != start.own.num_channels)]
    if is_own and start.default.chunk_bytes is None:
        chunks = [None, *(each for each in chunks if each != start.own.chunk_bytes)]
    configs = []
    for num_channels, chunk_bytes in product(channels or [None], chunks or [None]):
        if is_own and (num_channels, chunk_bytes) == (start.default.num_channels, start.default.chunk_bytes):
            configs.append(start.default)
        elif not (chunk_bytes is None and num_channels is not None and start.is_in_one_piece):
            threads = start.config.num_threads
            configs.append(
                replace(_of_way(way), num_channels=num_channels, num_threads=threads, chunk_bytes=chunk_bytes)
            )
    return [setting_of(config, way, start) for config in configs]


def between(space: ConfigSpace, share: float) -> CommConfig:
    """The configuration at a share of each knob's values, of the first algorithm and protocol."""
    first = space.subspaces[0]
    return first.at(tuple(round(share * (len(axis) - 1)) for axis in first.axes))


def _of_way(way: Subspace) -> CommConfig:
    return CommConfig(algorithm=way.algorithm, protocol=way.protocol, transport=way.transport)


def setting_of(config: CommConfig, way: Subspace, start: Place) -> Setting:
    """The setting of a configuration; a knob left to the engine counts as its known value, else as the largest."""
    knobs = zip((config.num_channels, config.chunk_bytes), (start.own.num_channels, start.own.chunk_bytes), strict=True)
    tops = way.num_channels[-1], way.chunk_bytes[-1]
    return Setting(
        config,
        num_channels=config.num_channels or start.own.num_channels or way.num_channels[-1] or 1,
        chunk_bytes=config.chunk_bytes or start.own.chunk_bytes or way.chunk_bytes[-1] or CHUNK_WHERE_NONE,
        is_known=all(value or own or not top for (value, own), top in zip(knobs, tops, strict=True)),
    )
