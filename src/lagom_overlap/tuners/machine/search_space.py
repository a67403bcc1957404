"""What a group offers to choose from, and its measurements in those terms.

The configurations of one collective as arrays, thinned where a space is huge.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from typing import Final

import numpy as np
import numpy.typing as npt

from lagom_overlap.collective import Algorithm, CommConfig, ConfigSpace, Protocol, Subspace, Transport
from lagom_overlap.tuners.problem import Assignment, GroupProblem, Measurement

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]
Implementation = tuple[Algorithm | None, Protocol | None, Transport | None]
"""The knobs that say how a collective is done, not with how much."""

MAX_CHANNEL_VALUES: Final = 32
"""Values per axis that are kept of a huge space, as `MAX_CHUNK_VALUES`. Bounds the computation."""
MAX_CHUNK_VALUES: Final = 12
"""Values of the chunk that are kept of a huge space. Bounds the computation."""
LATE: Final = 0.15
"""A time more than this share above the lower median of its arm counts as delayed by a late rank."""
USUAL_NUM_THREADS: Final = 512
"""Where the default leaves threads alone: NCCL's choice on fast links (tuning.cc)."""


def implementation(of: Subspace | CommConfig) -> Implementation:
    """Of a subspace or of a configuration."""
    return of.algorithm, of.protocol, of.transport


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lattice:
    """One place per configuration; where a knob is lacking `channels` is 1 and `chunk_bytes` the largest of the others.

    `kind[p]` is the index of the place's implementation in `kinds`.
    """

    configs: tuple[CommConfig, ...]
    channels: Floats
    chunk_bytes: Floats
    kind: Ints
    kinds: tuple[Implementation, ...]
    place: dict[CommConfig, int] = field(repr=False)

    def __len__(self) -> int:
        return len(self.configs)


def _thinned(axis: Sequence[int | None], most: int, keep: int | None) -> list[int]:
    """Indices of at most about `most` values: even in the logarithm, the ends and `keep` among them."""
    if len(axis) <= most:
        return list(range(len(axis)))
    logs = np.log([value or 1 for value in axis])
    wanted = np.linspace(logs[0], logs[-1], most)
    chosen = {int(np.argmin(np.abs(logs - want))) for want in wanted}
    if keep in axis:
        chosen.add(axis.index(keep))
    return sorted(chosen)


def _places(subspace: Subspace, default: CommConfig) -> list[CommConfig]:
    """Threads stay where the default has them: their effect is negligible (Lagom, section 3.2)."""
    _, thread, _ = subspace.nearest(CommConfig(num_threads=default.num_threads or USUAL_NUM_THREADS))
    channels = _thinned(subspace.num_channels, MAX_CHANNEL_VALUES, default.num_channels)
    chunks = _thinned(subspace.chunk_bytes, MAX_CHUNK_VALUES, default.chunk_bytes)
    return [subspace.at((channel, thread, chunk)) for channel in channels for chunk in chunks]


def lattice_of(space: ConfigSpace, default: CommConfig, kinds: Sequence[Implementation]) -> Lattice:
    """The places of a space; `kinds` lists the implementations of all collectives of the group."""
    configs = dict.fromkeys(config for subspace in space.subspaces for config in _places(subspace, default))
    if default in space:
        configs[default] = None
    most_bytes = max(config.chunk_bytes or 1 for config in configs)
    return Lattice(
        configs=tuple(configs),
        channels=np.array([float(config.num_channels or 1) for config in configs]),
        chunk_bytes=np.array([float(config.chunk_bytes or most_bytes) for config in configs]),
        kind=np.array([kinds.index(implementation(config)) for config in configs], dtype=np.intp),
        kinds=tuple(kinds),
        place={config: index for index, config in enumerate(configs)},
    )


def distances(lattice: Lattice) -> Floats:
    """Squared distances between all places; twice the channels, or three times the chunk, are one apart.

    Another implementation is far. All three were chosen.
    """
    channels, chunks = np.log(lattice.channels) / log(2.0), np.log(lattice.chunk_bytes) / log(3.0)
    apart = np.subtract.outer(channels, channels) ** 2 + np.subtract.outer(chunks, chunks) ** 2
    return np.asarray(apart + 4.0 * (lattice.kind[:, None] != lattice.kind[None, :]))


def step_likeness(lattice: Lattice) -> Floats:
    """How alike computations with unknown waves are at two places: exp(-distance in channels / 5). The 5 was chosen."""
    return np.asarray(np.exp(-np.abs(np.subtract.outer(lattice.channels, lattice.channels)) / 5.0))


def is_made_by_host(lattice: Lattice) -> bool:
    """Whether processor threads make the collectives: an engine of slices that, unlike NCCL, has no algorithms."""
    return lattice.kinds[0][0] is None and bool(lattice.chunk_bytes.max() > 1)


Places = tuple[int, ...]
"""One place per collective of a group."""
LEAST_S = 1e-9
"""Shorter times are taken as this: a logarithm needs a positive number."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Surface:
    """A lattice and how alike its places are: `near` to a smooth curve, `steps` to one of whole waves."""

    lattice: Lattice
    near: Floats
    steps: Floats


class Surfaces:
    """The surfaces of an iteration: collectives of equal spaces and defaults share theirs."""

    def __init__(self) -> None:
        self._surfaces: dict[object, Surface] = {}

    def of(self, space: ConfigSpace, default: CommConfig, kinds: tuple[Implementation, ...]) -> Surface:
        """The surface of one collective."""
        key = space, default, kinds
        if key not in self._surfaces:
            lattice = lattice_of(space, default, kinds)
            near = np.exp(-0.5 * distances(lattice))
            self._surfaces[key] = Surface(lattice=lattice, near=near, steps=step_likeness(lattice))
        return self._surfaces[key]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchSpace:
    """The surfaces of a group's collectives: `surfaces[surface_of[j]]` is collective j's; their bytes on the wire."""

    surfaces: tuple[Surface, ...]
    surface_of: Ints
    lattices: tuple[Lattice, ...]
    wire_bytes: Floats

    def places_of(self, assignment: Assignment) -> Places | None:
        """Where an assignment lies; None if a configuration is on no lattice (an engine's own, untouched)."""
        pairs = zip(self.lattices, assignment, strict=True)
        places = tuple(lattice.place.get(config, -1) for lattice, config in pairs)
        return None if -1 in places else places

    def assignment_at(self, places: Sequence[int]) -> Assignment:
        """The configurations at one place per collective."""
        return tuple(lattice.configs[place] for lattice, place in zip(self.lattices, places, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Record:
    """Usual times of D assignments of N collectives: places (D, N), x (D, N), Y (D,), numbers of runs (D,)."""

    places: Ints
    comm_s: Floats
    comp_s: Floats
    num: Floats


def search_space_of(problem: GroupProblem, surfaces: Surfaces) -> SearchSpace:
    """The lattices of a group's collectives; the default's implementation is the first kind where it is allowed."""
    pairs = list(zip(problem.spaces, problem.default, strict=True))
    kinds = dict.fromkeys(implementation(space.subspace_of(default)) for space, default in pairs)
    kinds |= dict.fromkeys(implementation(subspace) for space in problem.spaces for subspace in space.subspaces)
    surfaces_of = [surfaces.of(space, default, tuple(kinds)) for space, default in pairs]
    different = list(dict.fromkeys(map(id, surfaces_of)))
    return SearchSpace(
        surfaces=tuple(next(surface for surface in surfaces_of if id(surface) == each) for each in different),
        surface_of=np.array([different.index(id(surface)) for surface in surfaces_of], dtype=np.intp),
        lattices=tuple(surface.lattice for surface in surfaces_of),
        wire_bytes=np.array([float(comm.collective.wire_bytes) for comm in problem.group.comms]),
    )


def usual(times_s: Sequence[float]) -> float:
    """An arm's usual time: the mean of its repeats without those that are far longer than the others.

    A late rank makes a time longer, and nothing makes one shorter; so the lower median is typical, and times more than
    `LATE` above it are left out.
    """
    if len(times_s) == 1:
        return times_s[0]
    ordered = sorted(times_s)
    middle_s = ordered[(len(ordered) - 1) // 2]
    kept = [time_s for time_s in ordered if time_s <= (1 + LATE) * middle_s]
    return sum(kept) / len(kept)


def record_of(runs: Mapping[Places, Sequence[Measurement]]) -> Record:
    """What the measurements at each place usually took."""
    comm_s = [[usual(column) for column in zip(*(run.comm_s for run in done), strict=True)] for done in runs.values()]
    return Record(
        places=np.array(list(runs), dtype=np.intp),
        comm_s=np.maximum(np.array(comm_s, dtype=np.float64), LEAST_S),
        comp_s=np.maximum([usual([run.comp_s for run in done]) for done in runs.values()], LEAST_S),
        num=np.array([float(sum(run.num_repeats for run in done)) for done in runs.values()]),
    )
